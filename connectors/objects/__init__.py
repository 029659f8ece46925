"""Opaque objects of other hosts (LMCache, SGLang, vLLM's OffloadingConnector), stored like an engine's chunks."""
