"""Calls into each worker (`LLM.collective_rpc`) and into the engine's core, in whichever processes they run."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.sampler import GrowthWatch
from benchmarks.gpu.watch import Watch
from kvtier.format.namespace import chunk_keys

_watches: list[Watch] = []
_growth: list[GrowthWatch] = []


def worker_half() -> Any:
    """Return kvtier's half in this worker, None for another connector or none."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return getattr(get_kv_transfer_group(), "_worker_half", None) if has_kv_transfer_group() else None


def drain(worker: Any, timeout_s: float) -> bool:
    """Wait until what was handed to the worker is stored."""
    half = worker_half()
    return half is None or half._bridge._transfer.drain(timeout_s)


def counters(worker: Any) -> dict[str, float]:
    """Return kvtier's counters since the start, and the bytes that the process read and wrote (rchar, wchar)."""
    half = worker_half()
    found: dict[str, float] = {} if half is None else dict(half._bridge._transfer.metrics.total())
    for line in Path("/proc/self/io").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("rchar", "wchar"):
            found[name] = float(value)
    return found


def idle_step(core: Any) -> None:
    """Run a step of an engine without requests."""
    _, is_executed = core.step_fn()
    core.post_step(is_executed)


def needs_a_step(core: Any) -> bool:
    """Return whether the connector waits for a step without requests, as for chunks that it could not save before."""
    return bool(core.scheduler.connector.has_pending_push_work())


def scheduler_counters(core: Any) -> dict[str, float]:
    """Return kvtier's counters of the scheduler's half since the start."""
    store = _store(core)
    return {} if store is None else store.metrics.total()


def stored_chunks(core: Any, tokens: list[int]) -> tuple[int, int]:
    """Return (chunks of the prompt that the index has, its whole chunks)."""
    store = _store(core)
    keys = chunk_keys(store.namespace_id, tokens, store._chunk_tokens, {})
    return len(store.lookup(keys)), len(keys)


def _store(core: Any) -> Any:
    """Return kvtier's Store, None with another system."""
    half = getattr(core.scheduler.connector, "_scheduler_half", None)
    return None if half is None else half._store


def extend_core() -> None:
    """Add the functions above to vLLM's core, whose methods its client can call from another process."""
    from vllm.v1.engine.core import EngineCore

    for function in (idle_step, needs_a_step, scheduler_counters, stored_chunks):
        setattr(EngineCore, function.__name__, function)


def round_to_bf16(worker: Any) -> None:
    """Round all KV of an engine that keeps it in float32."""
    for cache in worker.model_runner.kv_caches:
        _round(cache)  # if the write were in this function, kvtier would take it for a change of weights


def _round(cache: torch.Tensor) -> None:
    cache[:] = cache.bfloat16()


def start_watch(worker: Any, share: int) -> None:
    _watches.append(Watch(worker_half(), share))


def take_watch(worker: Any) -> dict[str, Any]:
    return _watches[-1].take()


def start_growth(worker: Any) -> None:
    """Watch the bytes that this worker has stored."""
    transfer = worker_half()._bridge._transfer
    _growth.append(GrowthWatch(lambda: transfer.metrics.total().get("save_bytes", 0.0)))


def take_growth(worker: Any) -> list[tuple[float, float]]:
    return _growth.pop().close()


def resident() -> tuple[int, int]:
    """Return this process's resident bytes: its own, and those of memory that it shares (mapped files on tmpfs)."""
    lines = (line.partition(":") for line in Path("/proc/self/status").read_text().splitlines())
    sizes = {name: int(value.split()[0]) * 1024 for name, _, value in lines if name.startswith("Rss")}
    return sizes["RssAnon"] + sizes["RssFile"], sizes["RssShmem"]


def device_used(worker: Any) -> int:
    """Return the bytes of device memory that are in use on the whole GPU."""
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    return total - free


def arenas(worker: Any) -> dict[str, int]:
    """Return the bytes of kvtier's arenas: on the GPU (staging, and the hbm arena) and on the host."""
    half = worker_half()
    if half is None:
        return {"device": 0, "host": 0}
    found = half._bridge._transfer._worker
    upper, lower = (0 if arena is None else arena.n_slots * arena.slot_bytes for arena in (found.arena, found.host))
    return {"device": 0, "host": upper} if found.host is None else {"device": upper, "host": lower}


def contexts(worker: Any) -> list[int]:
    """Return the ordinals of the GPUs on which this process has an active primary context; [] without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, device, flags, active = (ctypes.c_int() for _ in range(4))
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found = []
    for ordinal in range(count.value):
        if driver.cuDeviceGet(ctypes.byref(device), ordinal) == 0:
            failed = driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
            found += [ordinal] if not failed and active.value else []
    return found
