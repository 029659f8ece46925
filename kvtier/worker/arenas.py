"""Arenas of one worker, made at start (I7). On a GPU: slots in HBM (staging and the hbm arena), and a pinned arena in
host memory. On the CPU: one arena in host memory."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from kvtier.arena.arena import Arena
from kvtier.config.settings import HbmSettings, Settings
from kvtier.errors import ConfigError, TierUnavailable
from kvtier.format.geometry import PAGE_BYTES
from kvtier.io import cuda
from kvtier.io.ring import AlignedBuffer
from kvtier.kernels import host as host_kernels
from kvtier.kernels.paged import SlabRun
from kvtier.runtime.memory_limits import arena_refused, beyond_available, check_host_arena, memory_here
from kvtier.runtime.threads import ThreadJobs
from kvtier.runtime.units import exact
from kvtier.worker.context import ChunkArena
from kvtier.worker.cuda_events import CudaOrder, HostOrder, Order

log = logging.getLogger("kvtier")

ARENA_SLOTS_MIN = 4  # fewer slots have no room for a save and a load at the same time
# Steps whose chunks are in staging at a time: the one that runs, the next one, which engines launch ahead, and the
# previous one, whose chunks are still being copied into host memory.
STEPS_IN_FLIGHT = 3
LOAD_SLOTS = 32  # staging slots for loads, beside those for saves
# Bytes pinned in one call. It takes about 4 ms, in which the driver holds locks that launches and copies need. (H200,
# tmpfs: during pinning, loads ran at 30 GB/s instead of 47, and a step of the model took 29 ms instead of 15.)
PIN_BYTES = 32 << 20
# Longest time for which the engine's start waits for pinning, seconds: 8 GiB take 1.1 s alone, and calls that pin made
# the capture of CUDA graphs beside them take 4 s instead of 1 s (H200).
PIN_START_MAX_S = 2.0
# Pinning pauses while loads are under way: poll interval, and longest pause (saves need the arena too), seconds.
PIN_POLL_S, PIN_YIELD_MAX_S = 0.01, 2.0
HBM_SPARE_BYTES = 512 << 20  # left free for what the engine allocates after its KV cache (CUDA graphs, workspaces)
# Largest share of free memory for staging where the default size does not fit. The rest is for the graphs of an engine
# that was given nearly all memory.
HBM_SHARE = 2 / 3


class Memory(NamedTuple):
    """Arenas of one worker. arena, host, order, sums: see worker.context.WorkerContext. save_slots: slots of the
    arena that saves may hold; held_slots: further slots, of chunks that wait there for their records. pinner: pins the
    host arena."""

    arena: ChunkArena
    host: ChunkArena | None
    order: Order
    sums: Callable[[Sequence[SlabRun]], list[tuple[int, ...]]]
    save_slots: int
    held_slots: int = 0
    pinner: Pinner | None = None


def host_memory(settings: Settings, slot_bytes: int) -> Memory:
    """For pages in host memory. Raises ConfigError."""
    buffer = _host_buffer(settings.host.arena_bytes_on("cpu"), slot_bytes)
    arena: ChunkArena = Arena(buffer, slot_bytes)
    save_slots = max(1, arena.n_slots // 2)  # so that loads go on
    return Memory(arena, None, HostOrder(), host_kernels.checksums, save_slots)


def cuda_memory(settings: Settings, slot_bytes: int, step_chunks: int, device: torch.device) -> Memory:
    """For pages in a GPU's memory. `step_chunks`: what one engine step can complete. Raises ConfigError."""
    from kvtier.kernels import device_checksum  # needs Triton, which hosts without a GPU may lack

    device_checksum.prepare(device)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    wanted = hbm_slots(settings.hbm, slot_bytes, step_chunks)
    slots = wanted.within(settings.hbm, free_bytes)
    slots.check_fits(settings.hbm, free_bytes, total_bytes)
    if slots.staging < wanted.staging:
        log.warning(
            "%d slots in HBM for staging instead of %d: the engine's share leaves %s of GPU memory; with a "
            "gpu_memory_utilization lower by %.2f there is room for all, and bursts are saved sooner",
            slots.staging,
            wanted.staging,
            _gib(free_bytes),
            wanted.lacks_share(free_bytes, total_bytes),
        )
    arena: ChunkArena = Arena(_device_buffer(slots.n_bytes, device), slot_bytes)
    arena.blank([0], n_slabs=1, slab_bytes=PAGE_BYTES, begin=0)  # loads that kernel, for which else a step would wait
    buffer = _host_buffer(settings.host.arena_bytes_on("cuda"), slot_bytes)
    host: ChunkArena = Arena(buffer, slot_bytes, n_ready=0)
    ordinal = torch.cuda.current_device() if device.index is None else device.index
    pinner = Pinner(host, ordinal, ThreadJobs("pin", 1, 1))
    log.info(
        "slots of %d KiB: %d in HBM for staging and %d where chunks stay, %d in host memory, which is pinned in "
        "the background",
        slot_bytes >> 10,
        slots.staging,
        slots.arena,
        host.n_slots,
    )

    def sums(runs: Sequence[SlabRun]) -> list[tuple[int, ...]]:
        return device_checksum.slab_checksums(runs).wait()

    save_slots = max(slots.staging - LOAD_SLOTS, slots.staging // 2)
    return Memory(arena, host, CudaOrder(device), sums, save_slots, slots.arena, pinner)


class Pinner:
    """Pins an arena's slots in the background, so that an engine with a large arena is not late.

    The engine's start waits for a small arena (PIN_START_MAX_S). A larger one is pinned at full speed while the engine
    starts: these calls spoil no capture of a graph (kvtier.io.cuda). Once the engine is at work, pinning takes half of
    the time at most.
    """

    def __init__(self, arena: ChunkArena, ordinal: int, jobs: ThreadJobs) -> None:
        self._arena = arena
        self._ordinal = ordinal
        self._jobs = jobs
        self._is_closed = threading.Event()
        self._has_ended = threading.Event()
        self._makes_way = threading.Event()
        self._pinned: list[int] = []
        self._is_loading: Callable[[], bool] = lambda: False

    def start(self, is_loading: Callable[[], bool]) -> None:
        """Begin to pin, with pauses while loads are under way. Return when all is pinned, or after PIN_START_MAX_S."""
        self._is_loading = is_loading
        self._jobs.submit(self._pin_all)
        self._has_ended.wait(PIN_START_MAX_S)

    def make_way(self) -> None:
        """Pin at most half of the time from now on, because the engine is at work."""
        self._makes_way.set()

    def close(self) -> None:
        """Unpin the arena, which nothing may use any more."""
        self._is_closed.set()
        self._jobs.drain(5.0)
        self._jobs.close()
        for address in self._pinned:
            try:
                cuda.unpin(address)
            except TierUnavailable as fault:  # CUDA is broken and may still use the memory, so it is not freed
                log.warning("%s", fault)
                _still_pinned.append(self._arena)
                return
        self._pinned.clear()

    def _pin_all(self) -> None:
        try:
            self._pin()
        finally:
            self._has_ended.set()

    def _pin(self) -> None:
        # Each call pins whole slots, because a copy must not span two registrations.
        step = max(1, PIN_BYTES // self._arena.slot_bytes)
        took_s = 0.0
        for first in range(0, self._arena.n_slots, step):
            end = min(first + step, self._arena.n_slots)
            self._pause_for_others(took_s)
            if self._is_closed.is_set():
                return
            started_s = time.monotonic()
            try:
                cuda.pin(self._arena.address(first), (end - first) * self._arena.slot_bytes, self._ordinal)
            except TierUnavailable as fault:
                log.warning(
                    "host arena: %d of %d slots are pinned, the rest stays unused: %s",
                    first,
                    self._arena.n_slots,
                    fault,
                )
                return
            self._pinned.append(self._arena.address(first))
            self._arena.grow(end)
            took_s = time.monotonic() - started_s

    def _pause_for_others(self, took_s: float) -> None:
        if self._makes_way.is_set():
            self._is_closed.wait(took_s)
        for _ in range(round(PIN_YIELD_MAX_S / PIN_POLL_S)):
            if not self._is_loading() or self._is_closed.wait(PIN_POLL_S):
                return


def host_slots(n_bytes: int, slot_bytes: int) -> int:
    """Return the slots of a host arena of `n_bytes`. Raises ConfigError for too few."""
    if n_bytes < ARENA_SLOTS_MIN * slot_bytes:
        fix = f"a chunk takes {exact(slot_bytes)} on this rank; at least {ARENA_SLOTS_MIN} of them must fit"
        raise ConfigError("host.arena_bytes", n_bytes, fix)
    return n_bytes // slot_bytes


def _host_buffer(n_bytes: int, slot_bytes: int) -> torch.Tensor:
    n_slots = host_slots(n_bytes, slot_bytes)
    found = memory_here()
    check_host_arena(n_bytes, found)
    if warning := beyond_available(n_bytes, found):
        log.warning("%s", warning)
    try:
        return torch.frombuffer(AlignedBuffer(n_slots * slot_bytes).view, dtype=torch.uint8)
    except OSError as fault:
        raise arena_refused(n_bytes, f"cannot be had: {fault.strerror}", found) from None


@dataclass(frozen=True, slots=True)
class HbmSlots:
    """Numbers of slots in a GPU's memory. staging: for chunks in transit. arena: for cached chunks (the hbm arena)."""

    staging: int
    arena: int
    slot_bytes: int

    @property
    def n_bytes(self) -> int:
        return (self.staging + self.arena) * self.slot_bytes

    def within(self, hbm: HbmSettings, free_bytes: int) -> HbmSlots:
        """Return fewer slots for staging if they do not fit beside the engine (HBM_SHARE) and the setting does not give
        their size, but no fewer than ARENA_SLOTS_MIN."""
        if hbm.staging_bytes is not None or self.n_bytes + HBM_SPARE_BYTES <= free_bytes:
            return self
        fits = min(int(HBM_SHARE * free_bytes), free_bytes - HBM_SPARE_BYTES) // self.slot_bytes - self.arena
        return replace(self, staging=max(ARENA_SLOTS_MIN, min(self.staging, fits)))

    def lacks_share(self, free_bytes: int, total_bytes: int) -> float:
        """Return the share of all GPU memory that the engine must give up for these slots, rounded up to 0.01."""
        return math.ceil(100 * (self.n_bytes + HBM_SPARE_BYTES - free_bytes) / total_bytes) / 100

    def check_fits(self, hbm: HbmSettings, free_bytes: int, total_bytes: int) -> None:
        """Raise ConfigError, with the arithmetic, if the slots do not fit beside the engine."""
        needed_bytes = self.n_bytes + HBM_SPARE_BYTES
        if needed_bytes <= free_bytes:
            return
        share = self.lacks_share(free_bytes, total_bytes)
        less = f"gpu_memory_utilization lower by {share:.2f}, or " if share < 0.8 else ""  # else no model fits it
        fix = (
            f"{self.staging} slots for staging and {self.arena} of the hbm arena, each of {_gib(self.slot_bytes, 3)}, "
            f"and {_gib(HBM_SPARE_BYTES)} to spare are {_gib(needed_bytes)}, but the engine's share leaves "
            f"{_gib(free_bytes)} of {_gib(total_bytes)}: set {less}"
        )
        fits = (free_bytes - HBM_SPARE_BYTES) // self.slot_bytes - self.staging
        if fits >= 0:
            raise ConfigError("hbm.arena_bytes", hbm.arena_bytes, f"{fix}it to at most {exact(fits * self.slot_bytes)}")
        least_bytes = ARENA_SLOTS_MIN * self.slot_bytes
        fix += f"it to less (at least {exact(least_bytes)})" + (" and hbm.arena_bytes to 0" if self.arena else "")
        raise ConfigError("hbm.staging_bytes", hbm.staging_bytes, fix)


def hbm_slots(hbm: HbmSettings, slot_bytes: int, step_chunks: int) -> HbmSlots:
    """Return the slots that the settings ask for. Raises ConfigError for sizes with too few slots."""
    given = hbm.staging_bytes
    staging = STEPS_IN_FLIGHT * step_chunks + LOAD_SLOTS if given is None else given // slot_bytes
    if staging < ARENA_SLOTS_MIN:
        fix = f"a chunk takes {exact(slot_bytes)} on this rank; at least {ARENA_SLOTS_MIN} of them must fit"
        raise ConfigError("hbm.staging_bytes", given, fix)
    if 0 < hbm.arena_bytes < slot_bytes:
        fix = f"a chunk takes {exact(slot_bytes)} on this rank; set it to a multiple of that, or to 0"
        raise ConfigError("hbm.arena_bytes", hbm.arena_bytes, fix)
    return HbmSlots(staging, hbm.arena_bytes // slot_bytes, slot_bytes)


def _gib(n_bytes: int, digits: int = 1) -> str:
    return f"{n_bytes / (1 << 30):.{digits}f} GiB"


def _device_buffer(n_bytes: int, device: torch.device) -> torch.Tensor:
    buffer = torch.empty(n_bytes + PAGE_BYTES, dtype=torch.uint8, device=device)
    skip = -buffer.data_ptr() % PAGE_BYTES
    return buffer[skip : skip + n_bytes]


_still_pinned: list[ChunkArena] = []
