"""How a tiny model runs on a CPU, so that the scripts are known to run before they take a GPU's time."""

from __future__ import annotations

from typing import Any

TINY_ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 32,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "gpu_memory_utilization": 0.1,
    "enforce_eager": True,
    "max_model_len": 2048,
}
TINY_TIER: dict[str, Any] = {
    "chunk_tokens": 64,
    "min_load_tokens": 64,
    "segment_bytes": "16MiB",
    "capacity_bytes": "1GiB",
    "host": {"arena_bytes": "64MiB"},
}
TINY_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
