"""Storage checks: file system of the root, direct I/O, rates, and the I/O engine that it gets."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kvtier.config.settings import Settings
from kvtier.doctor.coherence import examine_peer
from kvtier.doctor.filesystems import examine_file_system
from kvtier.doctor.host import Diagnosis, Host, ProbeFailed, ProbeNotRun
from kvtier.doctor.lustre import examine_efa, examine_lustre
from kvtier.errors import ConfigError, Corrupt
from kvtier.format.geometry import PAGE_BYTES
from kvtier.format.record import FORMAT_VERSION
from kvtier.io.calibration import Calibration
from kvtier.runtime.units import rate, size
from kvtier.scheduler import capacity_warnings
from kvtier.storage.filesystem import IN_MEMORY, FileSystem, FreeSpace, file_system_of, stripes_for
from kvtier.storage.root import check_mount, nearest, segments_bytes, unwritable, with_default_capacity
from kvtier.storage.root_owner import check_node

STORAGE_TIMEOUT_S = 60.0  # deadline of the storage probe, seconds


def place_of(root: Path) -> Path:
    """Return `root`, or the nearest existing folder above it. Raises ConfigError where an engine could not create the
    root there, OSError where the folder cannot be examined."""
    place = nearest(root)
    if not place.is_dir():
        raise ConfigError("root", str(root), f"{place} is a file, not a folder; choose another root")
    if not os.access(place, os.W_OK | os.X_OK):
        raise unwritable(root, place)
    return place


def examine_storage(host: Host, root: Path, settings: Settings | None, peer: Path | None = None) -> Iterator[Diagnosis]:
    """Examine `root` as configured, and its coherence with `peer`, another mount of the same file system. Writes files
    to `root`, or to the folder in which it would be made, and removes them. settings: None for the defaults."""
    settings = settings or with_capacity(Settings.model_construct(root=root.absolute()))
    try:
        place = place_of(root.absolute())
        check_mount(settings)
        if settings.index.kind != "redis":  # a root with an index in Redis belongs to no node
            check_node(root.absolute() / f"v{FORMAT_VERSION}")
    except ConfigError as fault:
        yield Diagnosis("bad", "root", str(root), fault.fix)
        return
    except OSError as fault:
        yield Diagnosis("bad", "root", f"{root}: {fault.strerror}", "is it mounted, and may this user read it?")
        return
    kind = file_system_of(place, host.text(host.proc / "self/mountinfo"))
    yield _file_system(root, place, kind, settings)
    yield from examine_file_system(kind, settings.io.fdatasync, settings.index.kind == "redis")
    on_lustre = kind.kind == "lustre"
    if on_lustre:
        folder = root / f"v{FORMAT_VERSION}"
        segment_bytes = settings.rank_set_bytes_max // stripes_for(kind.kind, settings.io.stripes)
        yield from examine_lustre(host, folder if folder.is_dir() else place, segment_bytes)
    yield from examine_efa(host, on_lustre)
    yield from _measured(host, place, kind, settings)
    if peer is not None:
        yield from examine_peer(host, place, kind, peer.absolute(), settings.io.direct != "never")


def with_capacity(settings: Settings) -> Settings:
    """Return the settings of a root that is given alone, with an engine's default capacity. They are unchanged if the
    disk is full or does not answer, because other checks report that."""
    with suppress(ConfigError, OSError):
        return with_default_capacity(settings)
    return settings


def _file_system(root: Path, place: Path, kind: FileSystem, settings: Settings) -> Diagnosis:
    try:
        free = FreeSpace.of(os.statvfs(place)).n_bytes
    except OSError as fault:
        return Diagnosis("bad", "root", f"{root}: {fault.strerror}", "is it mounted, and may this user read it?")
    state = "" if place == root.absolute() else f" will be made, in {place}"
    shared = ", shared" if kind.is_network else ""
    value = f"{root}{state} on {kind.kind} ({kind.mount_point}{shared}), {size(free)} free"
    if fix := out_of_inodes(place):
        return Diagnosis("bad", "root", value, fix)
    if free < settings.rank_set_bytes_max:
        needed = size(settings.rank_set_bytes_max)
        fix = f"a segment set takes {needed}: fine only if older ones can be evicted; else free space"
        return Diagnosis("warn", "root", value, fix)
    if fix := beyond_the_disk(place, settings.capacity_bytes):
        return Diagnosis("warn", "root", value, fix)
    return Diagnosis("ok", "root", value)


def beyond_the_disk(place: Path, capacity_bytes: int) -> str:
    """Return the advice for a capacity that the root's disk has no room for; "" when it has. Raises OSError."""
    room = FreeSpace.of(os.statvfs(place)).n_bytes
    if capacity_bytes > room:
        room += segments_bytes(place)  # looked at last: there may be many
    return capacity_warnings.beyond_the_disk(capacity_bytes, room)


def out_of_inodes(place: Path) -> str:
    """Return what to do on a file system without inodes for segments; "" when it has some. Raises OSError."""
    space = FreeSpace.of(os.statvfs(place))
    return "" if space.has_files else f"{space.why_full(0)}: remove files, or make the file system with more inodes"


def _measured(host: Host, root: Path, kind: FileSystem, settings: Settings) -> Iterator[Diagnosis]:
    segment_bytes = settings.rank_set_bytes_max
    asked = {
        "folder": str(root),
        "direct": settings.io.direct != "never",
        "threads": settings.io.threads,
        "piece_bytes": settings.io.piece_bytes,
        "engine": settings.io.engine,
        "segment_bytes": segment_bytes,
    }
    try:
        enlarge = "mount it with a larger size" if kind.kind in IN_MEMORY else "raise the quota"
        answer = host.probe("kvtier.doctor.probe", "storage", json.dumps(asked), timeout_s=STORAGE_TIMEOUT_S)
        if answer["is_full"]:
            why = FreeSpace.of(os.statvfs(root)).why_full(segment_bytes)
            fix = f"engines can save only in the place of older sets: make room, or {enlarge}"
            yield Diagnosis("warn", "room for a segment", why, fix)
        if "calibration" not in answer:
            yield Diagnosis("bad", "storage rates", "not measured: there is no room for it", f"make room, or {enlarge}")
            return
        found = Calibration.from_json(answer["calibration"])
        alignment = answer["alignment"]
    except ProbeNotRun as fault:
        yield fault.diagnosis("storage")
        return
    except (ProbeFailed, Corrupt, KeyError, TypeError) as fault:
        fix = "choose a root on a disk that this user may write to; if it hangs, look at the mount (dmesg)"
        yield Diagnosis("bad", "storage", f"no file can be written and read in {root} ({kind.kind}): {fault}", fix)
        return
    yield _direct_io(alignment, kind, settings.io.direct)
    *tried, why = found.reasons or ("as it comes",)
    why = why.removeprefix(f"{found.choice} is ")
    if found.read_bytes_s is None:
        why, _, stopped = why.partition(": ")  # "the default: REASON"; the reason is shown once, as the rates' fault
        tried = [reason for reason in tried if reason != stopped]
        fix = f"make room, or {enlarge}; else look at the mount (dmesg)"
        yield Diagnosis("bad", "storage rates", f"not measured: {stopped or why}", fix)
    else:
        latency = f", a page in {1e3 * found.latency_s:.2f} ms" if found.latency_s else ""
        rates = f"reads {rate(found.read_bytes_s)} into {answer['device']}"
        synced = ", fdatasync counted" if kind.holds_direct_writes or alignment is None else ""
        writes = f", writes {rate(found.write_bytes_s)}{synced}" if found.write_bytes_s else ""
        yield Diagnosis("ok", "storage rates", f"{rates}{writes}{latency}")
    yield Diagnosis("ok", "I/O engine", f"{found.choice}; {why}")
    own_rate = re.compile(rf"{found.choice.engine} of .*: (again .* GB/s|[0-9.]+ GB/s|not tried, .*)")
    yield from (Diagnosis("ok", "I/O tried", reason) for reason in tried if not own_rate.fullmatch(reason))


def _direct_io(alignment: int | None, kind: FileSystem, setting: str) -> Diagnosis:
    if setting == "never":
        return Diagnosis("ok", "direct I/O", "off by io.direct: never")
    if alignment is None:
        fix = "reads and writes go through the page cache: a mount that takes O_DIRECT is faster"
        return Diagnosis("bad" if setting == "require" else "warn", "direct I/O", f"{kind.kind} refuses O_DIRECT", fix)
    value = f"aligned to {alignment} bytes; kvtier aligns to {PAGE_BYTES}"
    if kind.holds_direct_writes:
        fix = "nothing is to be done: what is written counts as stored after fdatasync only"
        return Diagnosis("ok", "direct I/O", f"accepted, but written bytes may stay in the client; {value}", fix)
    return Diagnosis("ok", "direct I/O", f"works, {value}")
