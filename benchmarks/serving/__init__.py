"""Benchmarks that ask a server over HTTP, and the command that starts and stops vLLM for them."""
