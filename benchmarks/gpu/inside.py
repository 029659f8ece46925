"""What is asked of each worker from outside (`LLM.collective_rpc`), whichever process it lives in."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.resident import ResidentWatch
from benchmarks.gpu.watch import Watch

_watches: list[Watch] = []
_resident: list[ResidentWatch] = []


def worker_half() -> Any:
    """kvtier's half in this worker, None for another connector or none."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    return getattr(get_kv_transfer_group(), "_worker_half", None) if has_kv_transfer_group() else None


def drain(worker: Any, timeout_s: float) -> bool:
    """Waits until what was handed to the worker is stored."""
    half = worker_half()
    return half is None or half._bridge._transfer.drain(timeout_s)


def counters(worker: Any) -> dict[str, float]:
    """kvtier's counters since the start, and what the process read and wrote (any file, in bytes)."""
    half = worker_half()
    found: dict[str, float] = {} if half is None else dict(half._bridge._transfer.metrics.total())
    for line in Path("/proc/self/io").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("rchar", "wchar"):
            found[name] = float(value)
    return found


def start_watch(worker: Any) -> None:
    _watches[:] = [Watch(worker_half())]


def take_watch(worker: Any) -> dict[str, Any]:
    return _watches[0].take()


def watch_memory(worker: Any) -> None:
    """From now on `memory` knows the most of what the process held."""
    for earlier in _resident:
        earlier.close()
    _resident[:] = [ResidentWatch()]


def memory(worker: Any) -> dict[str, int]:
    """Bytes: of device memory that is in use on the whole GPU; since `watch_memory`, the most that the process had
    resident of its own, and of files on tmpfs that it had mapped (segments that kvtier pins)."""
    free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
    own, mapped = _resident[0].look()
    return {"device_used": total - free, "own_max": own, "mapped_max": mapped}


def arenas(worker: Any) -> dict[str, int]:
    """Bytes of kvtier's arenas, made at start: on the GPU (staging, and the hbm arena) and on the host."""
    half = worker_half()
    if half is None:
        return {"device": 0, "host": 0}
    found = half._bridge._transfer._worker
    upper, lower = (0 if arena is None else arena.n_slots * arena.slot_bytes for arena in (found.arena, found.host))
    return {"device": 0, "host": upper} if found.host is None else {"device": upper, "host": lower}


def contexts(worker: Any) -> list[int]:
    """Ordinals of the GPUs on which this process has an active primary context; none without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, flags, active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found = []
    for ordinal in range(count.value):
        device = ctypes.c_int()
        if driver.cuDeviceGet(ctypes.byref(device), ordinal) == 0 and (
            driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active)) == 0 and active.value
        ):
            found.append(ordinal)
    return found
