"""KVTierSecondaryTier: a secondary tier of vLLM's OffloadingConnector. vLLM imports this module by its path."""

from kvtier.connectors.vllm_tiering.tier import KVTierSecondaryTier as KVTierSecondaryTier
