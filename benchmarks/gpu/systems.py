"""Systems under comparison as settings of one engine: kvtier, vLLM's own tiering, LMCache in two ways, and no tier.

LMCache: its GDS backend within the engine's process, and its server, which lmcache_server.py starts. Peers have what
their own documents advise for one request at a time on this machine; defaults elsewhere.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

NATIVE_CPU_BYTES = 24 << 30  # host memory of vLLM's own tiering; the largest prompt of the 8B model has 13.1 GB
LMCACHE_BUFFER_MIB = 14336  # HBM that a 100,000-token prompt of an 8B model fits into; else LMCache drops the hit
LMCACHE_IO_THREADS = 16  # one a core; LMCache's default is 4
# These variables give the engine's core a process of its own, which is vLLM's default, and let the benchmark call
# functions there. environment_of keeps the core in the benchmark's process.
OWN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}


def transfer_of(system: str, folder: Path, extra: dict[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of vLLM's KVTransferConfig; None without a tier. extra: the system's own settings."""
    if system == "none":
        return None
    if system == "kvtier":
        return kvtier_transfer({"root": str(folder / "kvtier"), **extra})
    if system == "native":
        return native_transfer(folder / "native", extra)
    if system == "lmcache":
        return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
    assert system == "lmcache-mp", system
    # Without the module's path vLLM takes its own, older copy.
    module = "lmcache.integration.vllm.lmcache_mp_connector"
    return _transfer("LMCacheMPConnector", extra, kv_connector_module_path=module)


def kvtier_transfer(settings: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's KVTransferConfig with kvtier's own settings."""
    found = _transfer("KVTierConnector", settings, kv_connector_module_path="kvtier.connectors.vllm")
    return found | {"kv_load_failure_policy": "recompute"}


def native_transfer(root: Path, extra: dict[str, Any]) -> dict[str, Any]:
    """Return vLLM's KVTransferConfig with its own tiering: host memory, and below it files in `root`."""
    settings = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": NATIVE_CPU_BYTES,
        "block_size": 256,
        "secondary_tiers": [{"type": "fs", "root_dir": str(root)}],
        **extra,
    }
    return _transfer("OffloadingConnector", settings) | {"kv_load_failure_policy": "recompute"}


def _transfer(connector: str, settings: dict[str, Any], kv_connector_module_path: str | None = None) -> dict[str, Any]:
    found = {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": settings}
    return found if kv_connector_module_path is None else found | {"kv_connector_module_path": kv_connector_module_path}


def environment_of(system: str, folder: Path) -> dict[str, str]:
    """Return the environment of an engine's process."""
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
    if system.startswith("lmcache"):
        peers = os.environ.get("BUNDLE_PEERS", "/tmp/bundle/peers")  # LMCache's folder, before all others
        variables |= {"PYTHONPATH": f"{peers}:{os.environ.get('PYTHONPATH', '')}", "LMCACHE_TRACK_USAGE": "false"}
    if system == "lmcache":
        variables["LMCACHE_CONFIG_FILE"] = str(folder / "lmcache.yaml")
    return variables


def lmcache_settings(data: Path) -> dict[str, Any]:
    """Return the content of lmcache.yaml, which is written as JSON."""
    return {
        "chunk_size": 256,
        "local_cpu": False,
        "gds_path": str(data),
        "gds_buffer_size": LMCACHE_BUFFER_MIB,
        "extra_config": {"disk_io_threads": LMCACHE_IO_THREADS},
    }


def prepare(system: str, folder: Path) -> Path:
    """Make what the system expects to find, and return the folder for its data."""
    data = folder / system
    data.mkdir(parents=True, exist_ok=True)
    if system == "lmcache":
        (folder / "lmcache.yaml").write_text(json.dumps(lmcache_settings(data)))
    return data


def stored_bytes(folder: Path, ending: str = "") -> int:
    """Return the bytes on disk of all files below a folder whose names end so."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in (name for name in names if name.endswith(ending)):
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except FileNotFoundError:  # evicted or renamed during the walk
                continue
    return total
