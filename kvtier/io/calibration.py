"""Calibration of a mount: engines and sizes to try, the choice among measured rates, and the result stored for a day.

    <root>/calibration-<machine>.json    {"key": {...}, "made_s": 1.7e9, "calibration": {...}}

A restarted engine must not wait for a measurement, and ranks of one host must not disturb each other's: one measures,
under a lock of the node, and the others read its result.
"""

from __future__ import annotations

import fcntl
import importlib.util
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from blake3 import blake3

from kvtier.errors import ConfigError, Corrupt
from kvtier.format.namespace import canonical_text
from kvtier.io.engines import EngineChoice, EngineName, Target
from kvtier.io.ring import sizes_for
from kvtier.runtime.file_descriptors import close_file
from kvtier.runtime.versions import installed
from kvtier.storage.atomic_files import read_small, replace_small
from kvtier.storage.filesystem import file_system_of
from kvtier.storage.root_owner import host_key, private_folder

log = logging.getLogger("kvtier")

VALID_S = 86400.0  # age up to which a stored calibration is used, seconds
LOCK_TIMEOUT_S = 15.0  # wait for another rank's measurement, seconds
SIMPLER_WITHIN = 0.97  # share of the best rate at which a simpler choice is taken: runs differ by 3 % (H200, tmpfs)
USUAL_WITHIN = 0.95  # the same for the default choice, which has been measured for longer than 0.1 s
# The ring's threads are native, while each of KvikIO's reads takes the interpreter lock, which an engine that decodes
# holds. H100, tmpfs: 43.7 GB/s alone, 19 GB/s beside 16 requests that decode.
RING_WITHIN = 0.75  # share of KvikIO's rate at which the ring is taken

PROCESSORS = Path("/sys/devices/system/cpu")
CACHE_BYTES_UNKNOWN = 32 << 20  # last-level cache assumed where sysfs does not show it, bytes
# H200 of 16 processors, tmpfs: 51.7 GB/s with 16 threads, 50.4 with 12, 45.9 with 8; 40 with 12 x 4 slots, which exceed
# half the last-level cache.
DEVICE_THREADS_MAX, DEVICE_PIECE_BYTES, DEVICE_SLOTS = 16, 4 << 20, 2
PROCESSORS_LEFT = 2  # processors without an I/O thread: the engine waits long for one that copies


@dataclass(frozen=True, slots=True)
class Ask:
    """Mount, target and limits of a calibration."""

    folder: Path  # on the mount
    target: Target
    direct: bool
    in_memory: bool
    engines: tuple[EngineName, ...] = ("ring",)  # that may be chosen
    device: str = "cpu"  # that `target` is on, such as "NVIDIA H200"
    threads: int | None = None  # if fixed by the settings
    piece_bytes: int | None = None  # if fixed by the settings
    ranks: int = 1  # workers of the machine that read at once, with this one: they share its processors and cache


@dataclass(frozen=True, slots=True)
class Calibration:
    """Chosen engine and its measured rates in bytes a second; None: not measured."""

    choice: EngineChoice
    read_bytes_s: float | None
    write_bytes_s: float | None
    latency_s: float | None  # of one direct read of 4 KiB
    seconds: float  # duration of the measurement
    reasons: tuple[str, ...]  # rates of the choices tried, then the reason for this one
    is_target_busy: bool = False  # the storage hangs, and late bytes may still land in the target: use other memory

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        del values["is_target_busy"]
        return values | {"choice": self.choice._asdict(), "reasons": list(self.reasons)}

    @classmethod
    def from_json(cls, values: Any) -> Calibration:
        """Rebuild a calibration. Raises Corrupt when `values` is not the result of `to_json`."""
        try:
            choice = EngineChoice(**values["choice"])
            are_sizes = all(type(size) is int and size > 0 for size in choice[1:])
            if choice.engine not in get_args(EngineName) or not are_sizes:
                raise ValueError(f"unknown engine or wrong sizes in {choice}")
            read, write, latency = (_rate(values[name]) for name in ("read_bytes_s", "write_bytes_s", "latency_s"))
            reasons = tuple(str(reason) for reason in values["reasons"])
            return cls(choice, read, write, latency, float(values["seconds"]), reasons)
        except (KeyError, TypeError, ValueError, OverflowError) as fault:
            raise Corrupt(f"not a calibration: {fault}") from None

    def describe(self) -> str:
        """Return one line with engine, sizes, rates and reason."""
        rates = (("reads", self.read_bytes_s), ("writes", self.write_bytes_s))
        measured = ", ".join(f"{name} {rate / 1e9:.2f} GB/s" for name, rate in rates if rate is not None)
        return f"{self.choice}: {measured or 'not measured'}; {self.reasons[-1] if self.reasons else 'by default'}"


def _rate(value: Any) -> float | None:
    if value is None:
        return None
    rate = float(value)
    if not rate > 0:
        raise ValueError(f"a rate of {value}")
    return rate


# --- engines and sizes to try ---


def engines_for(setting: Literal["auto", "ring", "kvikio"], target: Target) -> tuple[EngineName, ...]:
    """Return the engines that `io.engine` permits. `auto`: those installed. KvikIO reads into device memory only."""
    if target.ordinal is None:
        return ("ring",)
    if setting != "auto":
        return (setting,)
    return ("ring", "kvikio") if importlib.util.find_spec("kvikio") else ("ring",)


def last_level_cache_bytes(processors: Path = PROCESSORS) -> int:
    """Return the sum over all dies: processors of a die share a cache, and a ring's threads spread over the dies."""
    caches: dict[str, int] = {}
    for folder in processors.glob("cpu[0-9]*/cache/index3"):
        try:
            match = re.fullmatch(r"(\d+)([KMG]?)", (folder / "size").read_text(encoding="ascii").strip())
            sharers = (folder / "shared_cpu_list").read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if match:
            caches[sharers] = int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]
    return sum(caches.values()) or CACHE_BYTES_UNKNOWN


def cache_share(ask: Ask) -> int:
    """Return the bytes of last-level cache for this rank."""
    # Two H200 of one host (300 MiB), tmpfs, both at once, 12 threads: 69 GB/s together with pieces of 4 MiB and 81 with
    # 2 MiB, which alone are slower (45 GB/s instead of 48).
    return last_level_cache_bytes() // ask.ranks


def device_threads(ranks: int = 1) -> int:
    """Return the default number of threads of a rank's ring that reads into device memory."""
    return max(4, min(DEVICE_THREADS_MAX, (os.cpu_count() or 1) // ranks - PROCESSORS_LEFT))


def default_choice(ask: Ask, cache_bytes: int) -> EngineChoice:
    """Return the choice where nothing could be measured."""
    if ask.target.ordinal is None:
        sizes = sizes_for(ask.in_memory, ask.threads, ask.piece_bytes)
        return EngineChoice("ring", sizes.threads, sizes.piece_bytes)
    threads, piece_bytes = ask.threads or device_threads(ask.ranks), ask.piece_bytes or DEVICE_PIECE_BYTES
    choice = EngineChoice("ring", threads, piece_bytes, DEVICE_SLOTS)
    while not fits(choice, cache_bytes) and choice.piece_bytes > 128 << 10 and ask.piece_bytes is None:
        choice = choice._replace(piece_bytes=choice.piece_bytes // 2)
    if ask.engines == ("kvikio",):
        return choice._replace(engine="kvikio", slots=1)
    return choice


def fits(choice: EngineChoice, cache_bytes: int) -> bool:
    """Return whether the ring's buffers fit half the last-level cache: larger ones are written to memory and back."""
    return choice.engine != "ring" or choice.held_bytes <= cache_bytes // 2


def first_round(ask: Ask, cache_bytes: int) -> tuple[EngineChoice, ...]:
    """Return what to try of each engine: the ring's default first, then other sizes of its pieces."""
    usual = default_choice(ask, cache_bytes)
    pieces: tuple[tuple[int, int], ...]
    if ask.target.ordinal is not None:
        # The processor's cache holds a part of a file in memory that is read repeatedly, and a larger part beside small
        # pieces. On H100 four of five calibrations preferred 2 MiB. But 16 GB load in 11 % less time with 4 MiB (H200,
        # results/gpu/weights_sizes.json). So only the default is tried: the largest size that fits the cache.
        pieces = () if ask.in_memory else ((4 << 20, 2), (2 << 20, 2), (1 << 20, 4))
    else:
        pieces = ((256 << 10, 1), (512 << 10, 1)) if ask.in_memory else ((1 << 20, 1), (4 << 20, 1))
    found = [usual, *(usual._replace(piece_bytes=piece, slots=slots) for piece, slots in pieces)]
    rings = [choice for choice in found if "ring" in ask.engines and choice.engine == "ring"]
    kvikio = [EngineChoice("kvikio", 16, 4 << 20)] if "kvikio" in ask.engines and ask.target.ordinal is not None else []
    return _worth_trying([*rings, *kvikio], ask, cache_bytes)


def second_round(best: EngineChoice, ask: Ask, cache_bytes: int) -> tuple[EngineChoice, ...]:
    """Return numbers of threads to try at the best piece size."""
    processors = os.cpu_count() or 1
    on_host = ask.in_memory and ask.target.ordinal is None
    threads: tuple[int, ...] = (2, processors, 2 * processors) if on_host else (8, 16, 24, 32)
    if ask.in_memory and not on_host:  # its threads copy: one on each processor would leave the engine none
        threads = tuple(n for n in threads if n <= device_threads(ask.ranks))
    elif ask.ranks > 1:  # one rank measures alone, but all read at once
        threads = tuple(n for n in threads if n <= max(device_threads(ask.ranks), processors // ask.ranks))
    tried = [best._replace(threads=min(n, 256)) for n in threads if n != best.threads]
    return _worth_trying(tried, ask, cache_bytes)


def _worth_trying(choices: Sequence[EngineChoice], ask: Ask, cache_bytes: int) -> tuple[EngineChoice, ...]:
    fixed = [
        choice._replace(threads=ask.threads or choice.threads, piece_bytes=ask.piece_bytes or choice.piece_bytes)
        for choice in choices
    ]
    unique = list(dict.fromkeys(fixed))
    fitting = [choice for choice in unique if ask.target.ordinal is None or fits(choice, cache_bytes)]
    return tuple(fitting or unique[:1])


def pick(rates: dict[EngineChoice, float], usual: EngineChoice) -> EngineChoice:
    """Return `usual` if it is nearly as fast as the fastest, else the one with the smallest buffers that is. KvikIO is
    only compared where no ring reaches RING_WITHIN of its rate."""
    rings = {choice: rate for choice, rate in rates.items() if choice.engine == "ring"}
    if max(rings.values(), default=0.0) >= RING_WITHIN * max(rates.values()):
        rates = rings
    fastest = max(rates.values())
    if rates.get(usual, 0.0) >= USUAL_WITHIN * fastest:
        return usual
    near = [choice for choice, rate in rates.items() if rate >= SIMPLER_WITHIN * fastest]
    return min(near, key=lambda choice: (choice.held_bytes, choice.threads))


# --- stored for a day ---


def calibrated(root: Path, ask: Ask, measure: Callable[[Ask], Calibration], now_s: float | None = None) -> Calibration:
    """Return the calibration stored under `root`, or measure and store one. Logs the engine and why. Never raises."""
    path = root / f"calibration-{blake3(host_key().encode()).hexdigest()[:16]}.json"
    key = _key(ask)
    wall_s = time.time() if now_s is None else now_s
    found = _read(path, key, wall_s)
    if found is None:
        with _alone_on_this_node():
            found = _read(path, key, wall_s)  # another rank may have measured during the wait
            if found is None:
                found = measure(ask)
                if found.read_bytes_s is not None and not found.is_target_busy:
                    _write(path, key, wall_s, found)
    log.info("I/O under %s: %s", root, found.describe())
    return found


def _key(ask: Ask) -> dict[str, Any]:
    """Return everything that a calibration depends on."""
    mount = file_system_of(ask.folder)
    return {
        "host": host_key(),
        "version": installed("kvtier", "?"),
        "file_system": mount.kind,
        "mount": mount.mount_point,
        "device": ask.device,
        "on_device": ask.target.ordinal is not None,
        "direct": ask.direct,
        "engines": list(ask.engines),
        "threads": ask.threads,
        "piece_bytes": ask.piece_bytes,
        "processors": os.cpu_count(),
        "ranks": ask.ranks,
    }


def _read(path: Path, key: dict[str, Any], now_s: float) -> Calibration | None:
    try:
        values = json.loads(read_small(path)) if path.exists() else None
        if not values or values["key"] != key or not 0 <= now_s - float(values["made_s"]) < VALID_S:
            return None
        return Calibration.from_json(values["calibration"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, Corrupt) as fault:
        log.info("%s cannot be used (%s): measuring again", path, fault)
        return None


def _write(path: Path, key: dict[str, Any], now_s: float, calibration: Calibration) -> None:
    values = {"key": key, "made_s": now_s, "calibration": calibration.to_json()}
    try:
        replace_small(path, canonical_text(values).encode())
    except OSError as fault:
        log.info("%s cannot be written (%s): the next start measures again", path, fault)


@contextmanager
def _alone_on_this_node() -> Iterator[None]:
    """Exclude other processes of this user and node while measuring; after LOCK_TIMEOUT_S both measure."""
    descriptor = -1
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with suppress(OSError, ConfigError):
        descriptor = os.open(private_folder() / "calibrate.lock", flags, 0o600)
    try:
        deadline_s = time.monotonic() + LOCK_TIMEOUT_S
        while descriptor >= 0:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= deadline_s:
                    break
                time.sleep(0.05)
        yield
    finally:
        if descriptor >= 0:
            close_file(descriptor)
