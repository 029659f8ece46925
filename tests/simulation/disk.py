"""A disk that fails on purpose: a folder in memory, the system calls that the tier makes on it, and what is wrong with
them at the moment. Reads and writes of records are `tests.simulation.ring`'s."""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from kvtier.errors import Corrupt, TierUnavailable
from kvtier.format.geometry import PAGE_BYTES
from kvtier.storage.segments import SegmentFiles, fallocate, parse_segment_name
from tests.damage import SegmentDamage, header_of
from tests.simulation.runtime import Runtime

STALE_S = 8.0  # time for which an open descriptor may show what was there before another process's flush
AWAY_S = 20.0  # longest time for which a segment is missing

Segment = tuple[int, int]  # (set id, part)


@dataclass
class Weather:
    """How often an operation is slow (up to so many seconds), hangs (so long), ends with an error, ends too soon or is
    torn: some of its pages are not what they should be, with an error or without a word. hang_calls: of all other
    system calls, such as open. away: how often a segment of a shared disk is missing for a few seconds."""

    slow: float = 0.5
    slow_s: float = 0.01
    hang: float = 0.0
    hang_s: float = 3.0
    hang_calls: float = 0.0
    error: float = 0.0
    short: float = 0.0
    torn: float = 0.0
    away: float = 0.0


class Unflushed(NamedTuple):
    """Bytes that only their writer's process sees yet."""

    segment: Segment
    offset: int
    n_bytes: int
    writer: object

    def overlap(self, segment: Segment | None, offset: int, n_bytes: int) -> range:
        """The bytes that lie in both, counted from `offset`."""
        if segment != self.segment:
            return range(0)
        return range(max(0, self.offset - offset), min(n_bytes, self.offset + self.n_bytes - offset))


@dataclass(eq=False)
class Disk:
    """damaged: segments in which bytes were changed behind the tier's back: nothing is promised of them any more.
    capacity_bytes: of the whole disk. is_shared: each process has a client cache of its own: what it wrote to a segment
    and did not flush, `unflushed`, reads as zeros elsewhere; what was flushed in the last STALE_S, `flushed`, does so
    through descriptors that were open before. away: until when segments are missing."""

    runtime: Runtime
    folder: Path
    capacity_bytes: int
    weather: Weather = field(default_factory=Weather)
    damaged: set[Segment] = field(default_factory=set)
    is_full: bool = False
    descriptors: dict[int, tuple[Any, Segment | None]] = field(default_factory=dict)
    is_shared: bool = False
    unflushed: list[Unflushed] = field(default_factory=list)
    flushed: list[tuple[Unflushed, int, float]] = field(default_factory=list)
    away: dict[Segment, float] = field(default_factory=dict)
    opened: dict[int, int] = field(default_factory=dict)
    n_opened: int = 0

    def meet(self, what: str) -> None:
        """A system call is about to be made: by a process that lives, in its time, and it may fail."""
        runtime, weather = self.runtime, self.weather
        if runtime.process is not None and runtime.process.is_dead:
            runtime.die()
        if not runtime.is_inside:
            return
        runtime.note_call(what)
        runtime.pause()
        if not runtime.is_engine_thread:
            if runtime.tries("a system call hangs", weather.hang_calls):
                runtime.sleep(weather.hang_s)
            elif runtime.tries("a system call is slow", weather.slow / 8):
                runtime.sleep(runtime.rng.random() * weather.slow_s)
        if runtime.tries("a system call fails (EIO)", weather.error / 4):
            raise OSError(errno.EIO, f"the disk fails: {what}")

    def used_bytes(self) -> int:
        return sum(entry.stat().st_blocks * 512 for folder in self.folders() for entry in os.scandir(folder))

    def segments_bytes(self) -> int:
        return sum(path.stat().st_blocks * 512 for path, _ in self.segments())

    def folders(self) -> list[str]:
        return [entry.path for entry in os.scandir(self.folder) if entry.is_dir()]

    def segments(self) -> list[tuple[Path, Segment]]:
        """In order of their names."""
        found = []
        for folder in sorted(self.folders()):
            for name in sorted(os.listdir(folder)):
                segment = parse_segment_name(name)
                if segment is not None:
                    found.append((Path(folder) / name, segment))
        return found

    def close_all_of(self, process: object) -> None:
        """What the kernel does for a process that ended."""
        for fd, (owner, _) in list(self.descriptors.items()):
            if owner is process:
                del self.descriptors[fd]
                os.close(fd)

    def wrote(self, fd: int, offset: int, n_bytes: int) -> None:
        writer, segment = self.descriptors[fd]
        if self.is_shared and segment is not None:
            self.unflushed.append(Unflushed(segment, offset, n_bytes, writer))

    def flush(self, fd: int) -> None:
        writer, segment = self.descriptors[fd]
        ours = [part for part in self.unflushed if (part.segment, part.writer) == (segment, writer)]
        self.unflushed = [part for part in self.unflushed if part not in ours]
        now_s = self.runtime.now_s
        self.flushed = [old for old in self.flushed if old[2] > now_s]
        self.flushed += [(part, self.n_opened, now_s + STALE_S) for part in ours]

    def write_back(self, process: object) -> None:
        """What a client does of itself, some time after its process has ended."""
        self.unflushed = [part for part in self.unflushed if part.writer is not process]

    def hide(self, fd: int, offset: int, target: memoryview) -> None:
        """Zeroes, of what was just read, the bytes that other processes have not flushed."""
        reader, segment = self.descriptors.get(fd, (None, None))
        stale = [
            part
            for part, n_opened, until_s in self.flushed
            if self.opened.get(fd, 0) <= n_opened and self.runtime.now_s < until_s
        ]
        for part in (*self.unflushed, *stale):
            hidden = part.overlap(segment, offset, len(target))
            if hidden and part.writer is not reader:
                self.runtime.tried["a read is stale"] += 1
                target[hidden.start : hidden.stop] = bytes(len(hidden))

    def may_be_stale(self, segment: Segment, offset: int, n_bytes: int) -> bool:
        """Return whether some process may still read other bytes there than were flushed."""
        return any(
            part.overlap(segment, offset, n_bytes) and self.runtime.now_s < until_s for part, _, until_s in self.flushed
        )

    def is_away(self, segment: Segment | None) -> bool:
        """Whether the part of the storage is down that the segment is on."""
        if segment is None or not self.is_shared or not self.runtime.is_inside:
            return False
        if self.runtime.tries("a segment is away for a while", self.weather.away):
            self.away[segment] = self.runtime.now_s + AWAY_S * self.runtime.rng.random()
        return self.runtime.now_s < self.away.get(segment, 0.0)

    def stamp(self, fd: int) -> None:
        """Files are as old as the virtual clock says."""
        os.utime(fd, (self.runtime.now_s, self.runtime.now_s))


class SimOs:
    """What modules under test use of `os`, on a Disk."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str | Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        self._disk.meet("open")
        segment = parse_segment_name(os.path.basename(path))
        if self._disk.is_away(segment):
            fault = errno.EIO if flags & os.O_CREAT else errno.ENOENT
            raise OSError(fault, os.strerror(fault))
        fd = os.open(path, flags, mode, dir_fd=dir_fd)
        self._disk.descriptors[fd] = (self._disk.runtime.process, segment)
        self._disk.n_opened += 1
        self._disk.opened[fd] = self._disk.n_opened
        if flags & os.O_CREAT:
            self._disk.stamp(fd)
        return fd

    def close(self, fd: int) -> None:
        self._disk.descriptors.pop(fd, None)
        os.close(fd)

    def fallocate(self, fd: int, n_bytes: int) -> None:
        """Stands in for `kvtier.storage.segments.fallocate`."""
        disk = self._disk
        disk.meet("fallocate")
        if disk.is_full or disk.used_bytes() + n_bytes > disk.capacity_bytes:
            disk.runtime.tried["no space is left (ENOSPC)"] += 1
            raise OSError(errno.ENOSPC, "No space left on device")
        fallocate(fd, n_bytes)

    def ftruncate(self, fd: int, n_bytes: int) -> None:
        self._disk.meet("ftruncate")
        os.ftruncate(fd, n_bytes)
        self._disk.stamp(fd)

    def pwritev(self, fd: int, buffers: list[Any], offset: int) -> int:
        self._disk.meet("pwritev")
        written = os.pwritev(fd, buffers, offset)
        self._disk.wrote(fd, offset, written)
        self._disk.stamp(fd)
        return written

    def fdatasync(self, fd: int) -> None:
        self._disk.meet("fdatasync")
        self._disk.flush(fd)

    def preadv(self, fd: int, buffers: list[Any], offset: int) -> int:
        self._disk.meet("preadv")
        n_read = os.preadv(fd, buffers, offset)
        self._disk.hide(fd, offset, memoryview(buffers[0]).cast("B")[:n_read])
        return n_read

    def listdir(self, path: str | Path | int) -> list[str]:
        """In an order of the seed's: file systems have one each."""
        self._disk.meet("listdir")
        names = sorted(name for name in os.listdir(path) if not self._disk.is_away(parse_segment_name(name)))
        self._disk.runtime.rng.shuffle(names)
        return names

    def lstat(self, path: Path) -> os.stat_result:
        if self._disk.is_away(parse_segment_name(path.name)):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return os.lstat(path)

    def utime(self, path: str | Path) -> None:
        """Date it by the virtual clock, which is that of all nodes and of the file system."""
        now_s = self._disk.runtime.now_s
        os.utime(path, (now_s, now_s))

    def statvfs(self, path: str | Path) -> SimpleNamespace:
        self._disk.meet("statvfs")
        free_bytes = 0 if self._disk.is_full else max(0, self._disk.capacity_bytes - self._disk.used_bytes())
        n_pages, n_free = self._disk.capacity_bytes // PAGE_BYTES, free_bytes // PAGE_BYTES
        return SimpleNamespace(f_blocks=n_pages, f_bavail=n_free, f_frsize=PAGE_BYTES, f_files=0, f_favail=0)


def meeting(disk: Disk, unlink: Callable[[SegmentFiles, int, int], None]) -> Callable[[SegmentFiles, int, int], None]:
    """`SegmentFiles.unlink` over the disk."""

    def met(files: SegmentFiles, set_id: int, rank: int) -> None:
        try:
            disk.meet("unlink")
        except OSError as fault:
            raise TierUnavailable(str(fault)) from fault
        unlink(files, set_id, rank)

    return met


class Vandal(SegmentDamage):
    """Changes bytes behind the tier's back, one kind of damage at a time."""

    def __init__(self, disk: Disk) -> None:
        super().__init__(disk.runtime.rng)
        self._disk = disk

    def strike(self) -> bool:
        found = self._disk.segments()
        if not found:
            return False
        path, segment = self._rng.choice(found)
        other, other_segment = self._rng.choice(found)
        try:
            header = header_of(path)
        except Corrupt:
            return False
        fault, damage = self._rng.choice(
            [
                ("a bit of a record is flipped on the disk", self.flip),
                ("a bit of a record is flipped on the disk", self.flip),
                ("a record is zeroed on the disk", self.zero_record),
                ("a record lies in another one's slot", self.copy_record),
                ("a segment is cut short", self.shorten),
                ("a segment is unlinked by others", self.unlink),
                ("two segments have each other's names", self.swap),
            ]
        )
        self._disk.runtime.tried[fault] += 1
        self._disk.damaged.add(segment)
        if damage == self.swap:
            self._disk.damaged.add(other_segment)
        damage(path, header, other)
        return True
