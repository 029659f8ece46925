"""I/O setup of one worker: calibrates the root's mount, opens the I/O engines and estimates the cost of a load."""

import logging

import torch

from kvtier.codecs.base import Codec, slab_bytes
from kvtier.config.settings import Settings
from kvtier.errors import ConfigError, TierUnavailable
from kvtier.format.geometry import Geometry, RankShare
from kvtier.io.calibrate import calibrate
from kvtier.io.calibration import Ask, Calibration, cache_share, calibrated, default_choice, engines_for
from kvtier.io.engines import EngineChoice, Engines, Target, open_engine
from kvtier.io.ring import Ring, sizes_for
from kvtier.scheduler.load_threshold import LoadCost
from kvtier.storage.filesystem import IN_MEMORY, file_system_of
from kvtier.storage.root import Root
from kvtier.worker.context import ChunkArena

log = logging.getLogger("kvtier")

# Fixed time of a load beside its bytes, seconds: planning, and the engine's steps. Used until loads were measured.
LOAD_FIXED_S = 0.003

_abandoned: list[ChunkArena] = []


def open_io(
    settings: Settings, root: Root, direct: bool, arena: ChunkArena, device: torch.device, ranks: int = 1
) -> tuple[Engines, Calibration | None]:
    """Measure the mount (with a GPU only, and unless io.calibrate is off) and open the engines. Return them and the
    calibration by which they were chosen. ranks: ranks of this machine, which read at the same time. Raises
    ConfigError."""
    in_memory = file_system_of(root.folder).kind in IN_MEMORY
    if not arena.is_device:
        sizes = sizes_for(in_memory, settings.io.threads, settings.io.piece_bytes)
        log.info(
            "%s: ring of %d threads, writes of %d KiB, reads of %d KiB",
            root.path,
            sizes.threads,
            sizes.write_piece_bytes >> 10,
            sizes.piece_bytes >> 10,
        )
        ring = sizes.ring()
        return Engines(ring, ring), None
    ordinal = torch.cuda.current_device() if device.index is None else device.index
    if torch.cuda.is_available():
        torch.cuda.set_device(ordinal)  # the start runs this on a thread of its own, whose device is number 0 at first
    target = Target(arena.address(0), arena.n_slots * arena.slot_bytes, ordinal)
    ask = Ask(
        root.folder,
        target,
        direct,
        in_memory,
        engines_for(settings.io.engine, target),
        torch.cuda.get_device_name(device),
        settings.io.threads,
        settings.io.piece_bytes,
        ranks,
    )
    measured = _measure(settings, root, ask, arena)
    usual = default_choice(ask, cache_share(ask))
    if measured is None:
        log.info("I/O under %s: the default, %s, because io.calibrate is off", root.path, usual)
        return _open(settings, usual, ask), None
    try:
        return _open(settings, measured.choice, ask), measured
    except ConfigError as fault:
        if settings.io.engine != "auto" or measured.choice == usual:
            raise
        log.warning(
            "I/O under %s: the default, %s, because the measured choice cannot be opened: %s",
            root.path,
            usual,
            fault.fix,
        )
        return _open(settings, usual, ask), None


def _measure(settings: Settings, root: Root, ask: Ask, arena: ChunkArena) -> Calibration | None:
    if not settings.io.calibrate:
        return None
    measured = calibrated(root.path, ask, calibrate)
    if measured.is_target_busy:
        _abandoned.append(arena)  # late bytes may still land there
        fix = "its storage hangs: " + "; ".join(measured.reasons)
        raise ConfigError("root", str(root.path), fix)
    return measured


def _open(settings: Settings, choice: EngineChoice, ask: Ask) -> Engines:
    try:
        reader = open_engine(choice, ask.target, ask.direct, ask.in_memory)
    except (TierUnavailable, ValueError) as fault:
        raise ConfigError("io.engine", settings.io.engine, str(fault)) from fault
    if isinstance(reader, Ring):
        return Engines(reader, reader)
    return Engines(reader, sizes_for(ask.in_memory).ring())


def load_cost(measured: Calibration | None, codec: Codec, geometry: Geometry, share: RankShare) -> LoadCost | None:
    """Return the cost of a load, by its whole tokens, of which this rank loads a share; None: not measured."""
    if measured is None or measured.read_bytes_s is None:
        return None
    chunk_bytes = share.reads.n_heads * slab_bytes(codec, geometry, share.reads)
    token_s = chunk_bytes / geometry.chunk_tokens / measured.read_bytes_s
    return LoadCost((measured.latency_s or 0.0) + LOAD_FIXED_S, token_s)
