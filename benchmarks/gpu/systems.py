"""What is compared: kvtier, vLLM's own tiering, LMCache in two ways, and no tier; as settings of one engine.

LMCache: its GDS backend within the engine's process, and its server, which lmcache_server.py starts. Peers have what
their own documents advise for one request at a time on this machine; defaults elsewhere.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

SYSTEMS = ("none", "kvtier", "native", "lmcache", "lmcache-mp")
OF_LMCACHE = ("lmcache", "lmcache-mp")
NATIVE_CPU_BYTES = 32 << 30
LMCACHE_BUFFER_MIB = 14336
"""HBM that a 100,000-token prompt of an 8B model (13.1 GB) fits into: LMCache drops the hit when it does not."""
LMCACHE_IO_THREADS = 16
"""One a core; its default is 4."""


def transfer_of(system: str, folder: Path, extra: dict[str, Any]) -> dict[str, Any] | None:
    """Arguments of vLLM's KVTransferConfig; None without a tier. `extra`: further settings of the system's own."""
    if system == "none":
        return None
    if system == "kvtier":
        return kvtier_transfer({"root": str(folder / "kvtier"), **extra})
    if system == "native":
        return native_transfer(folder / "native", extra)
    if system == "lmcache":
        return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    if system == "lmcache-mp":
        # Without the module's path vLLM takes a copy of its own, which is older.
        return {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        }
    raise SystemExit(f"no system {system!r}; there are {', '.join(SYSTEMS)}")


def kvtier_transfer(settings: dict[str, Any]) -> dict[str, Any]:
    """vLLM's KVTransferConfig with kvtier's own settings."""
    return {
        "kv_connector": "KVTierConnector",
        "kv_connector_module_path": "kvtier.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings,
    }


def native_transfer(root: Path, extra: dict[str, Any]) -> dict[str, Any]:
    """vLLM's KVTransferConfig with its own tiering: host memory, and below it files in `root`."""
    settings = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": NATIVE_CPU_BYTES,
        "block_size": 256,
        "secondary_tiers": [{"type": "fs", "root_dir": str(root)}],
        **extra,
    }
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": settings}


def environment_of(system: str, folder: Path) -> dict[str, str]:
    """The environment of its engine's process. LMCache lies in a folder of its own, before all others."""
    variables = {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "INFO"),
        # Multicast over NVLink is kept off: see the device's notes.
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "NCCL_NVLS_ENABLE": "0",
    }
    if system in OF_LMCACHE:
        peers = os.environ.get("BUNDLE_PEERS", "/tmp/bundle/peers")
        variables |= {"PYTHONPATH": f"{peers}:{os.environ.get('PYTHONPATH', '')}", "LMCACHE_TRACK_USAGE": "false"}
    if system == "lmcache":
        variables["LMCACHE_CONFIG_FILE"] = str(folder / "lmcache.yaml")
    return variables


def prepare(system: str, folder: Path) -> Path:
    """Makes what the system wants to find; the folder that its data will lie in."""
    data = folder / system
    data.mkdir(parents=True, exist_ok=True)
    if system == "lmcache":
        lines = (
            "chunk_size: 256",
            "local_cpu: false",
            f"gds_path: {data}",
            f"gds_buffer_size: {LMCACHE_BUFFER_MIB}",
            f"extra_config: {{disk_io_threads: {LMCACHE_IO_THREADS}}}",
        )
        (folder / "lmcache.yaml").write_text("\n".join(lines) + "\n")
    return data


def stored_bytes(folder: Path, ending: str = "") -> int:
    """What the files below a folder, those with such an ending, take on disk."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in (name for name in names if name.endswith(ending)):
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except FileNotFoundError:  # evicted or renamed meanwhile
                continue
    return total
