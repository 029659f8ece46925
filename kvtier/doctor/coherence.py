"""Coherence of two mounts of one file system: stale reads after a write through the other, and delays of growth and new
names. The measuring runs in a process of its own (`kvtier.doctor.probe`), for a mount may hang."""

from __future__ import annotations

import errno
import json
import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from kvtier.doctor.host import Diagnosis, Host, ProbeFailed, ProbeNotRun
from kvtier.format.geometry import PAGE_BYTES
from kvtier.io.ring import AlignedBuffer
from kvtier.storage.filesystem import FileSystem

PIECES, PIECE_BYTES = 16, 1 << 20  # pieces written and read back in a trial, and bytes of each
SETTLE_S = 1.2  # pause after the file has its size, so that the other mount sees it, seconds
APPEAR_S = 5.0  # longest wait for the other mount to show the scratch file at all, seconds
GROWTH_S, NAME_S = 12.0, 35.0  # longest waits for growth and for a name that was looked for before, seconds
POLL_S = 0.005  # interval between two looks, seconds
TIMEOUT_S = 120.0  # deadline of the whole measurement, seconds
PREFIX = ".coherence-"  # begins the names of scratch files


class Coherence(NamedTuple):
    """Stale reads of `pieces`, by (written, and read through a descriptor that was open before; after opening again);
    the same after fdatasync. Seconds until growth and a new name were seen; None: not within the longest wait."""

    pieces: int
    plain: tuple[int, int]
    synced: tuple[int, int]
    sync_s: float
    growth_s: float | None
    name_s: float | None


def measure(folder: Path, peer: Path, direct: bool) -> dict[str, Any]:
    """Write through `folder` and read through `peer`, which shows the same folder. Raises OSError."""
    flags = os.O_DIRECT if direct else 0
    name = f"{PREFIX}{os.getpid()}-{uuid.uuid4().hex}"
    if not peer.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "there is no such folder")
    try:
        ours = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | flags, 0o600)
        try:
            if _waited(lambda: os.path.exists(peer / name), APPEAR_S) is None:
                raise FileNotFoundError(errno.ENOENT, f"{peer} does not show what is written to {folder}")
            if _is_one_mount(ours, peer / name):
                raise OSError(errno.EXDEV, f"{peer} and {folder} share one cache: they are one mount")
            with _Trial(ours, peer / name, flags) as trial:
                plain = (trial.stale(False, False)[0], trial.stale(False, True)[0])
                (open_stale, sync_s), (reopened, _) = trial.stale(True, False), trial.stale(True, True)
                growth_s = trial.growth_s()
        finally:
            os.close(ours)
        name_s = _name_s(folder, peer, f"{name}-new")
    finally:
        with suppress(FileNotFoundError):
            os.unlink(folder / name)
    return Coherence(PIECES, plain, (open_stale, reopened), sync_s, growth_s, name_s)._asdict()


def _is_one_mount(ours: int, theirs: Path) -> bool:
    """Tell whether both names lead through one mount; two mounts of one network file system have two device numbers,
    but NFS shares one cache between mounts of an export unless they are made with nosharecache."""
    return os.fstat(ours).st_dev == os.stat(theirs).st_dev


class _Trial:
    """One scratch file of its whole size, open through both mounts. Each trial writes other bytes."""

    def __init__(self, ours: int, theirs: Path, flags: int) -> None:
        self._ours = ours
        self._path = theirs
        self._flags = os.O_RDONLY | os.O_CLOEXEC | flags
        self._value = 0
        self._out, self._in = AlignedBuffer(PIECE_BYTES), AlignedBuffer(PIECE_BYTES)
        os.ftruncate(ours, PIECES * PIECE_BYTES)
        self._write(PIECES - 1)
        os.fsync(ours)
        time.sleep(SETTLE_S)
        self._theirs = os.open(theirs, self._flags)

    def __enter__(self) -> _Trial:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # MooseFS and JuiceFS may refuse to close a file that was replaced
            os.close(self._theirs)

    def stale(self, syncs: bool, reopens: bool) -> tuple[int, float]:
        """Return the stale pieces, and the median time of fdatasync. Every second piece was read before it is
        written: a client may have it in its cache."""
        n_stale, taken = 0, []
        for number in range(PIECES):
            if number % 2:
                self._read(number)
            written = self._write(number)
            started_s = time.perf_counter()
            if syncs:
                os.fdatasync(self._ours)
            taken.append(time.perf_counter() - started_s)
            if reopens:
                with suppress(OSError):
                    os.close(self._theirs)
                self._theirs = os.open(self._path, self._flags)
            n_stale += self._read(number) != written
        return n_stale, sorted(taken)[len(taken) // 2]

    def growth_s(self) -> float | None:
        """Return the seconds until the open descriptor shows that the file has grown."""
        size = os.fstat(self._theirs).st_size
        self._write(size // PIECE_BYTES)
        os.fdatasync(self._ours)
        return _waited(lambda: os.fstat(self._theirs).st_size > size, GROWTH_S)

    def _write(self, number: int) -> bytes:
        self._value = self._value % 255 + 1
        data = bytes([self._value]) * PIECE_BYTES
        self._out.view[:] = data
        if os.pwritev(self._ours, [self._out.view], number * PIECE_BYTES) != PIECE_BYTES:
            raise OSError(errno.EIO, "fewer bytes were written than asked for")
        return data

    def _read(self, number: int) -> bytes:
        self._in.view[:PAGE_BYTES] = bytes(PAGE_BYTES)
        n_read = os.preadv(self._theirs, [self._in.view], number * PIECE_BYTES)
        return bytes(self._in.view[:n_read])


def _name_s(folder: Path, peer: Path, name: str) -> float | None:
    """Return the seconds until the other mount finds a name that it has looked for before."""
    os.path.exists(peer / name)
    os.close(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    try:
        return _waited(lambda: os.path.exists(peer / name), NAME_S)
    finally:
        os.unlink(folder / name)


def _waited(is_there: Callable[[], bool], limit_s: float) -> float | None:
    started_s = time.monotonic()
    while not is_there():
        if time.monotonic() - started_s > limit_s:
            return None
        time.sleep(POLL_S)
    return time.monotonic() - started_s


# --- the verdicts ---


def peer_folder(place: Path, kind: FileSystem, peer: Path) -> Path:
    """Return the folder that shows `place` through the other mount: `peer` itself, or as far below it as `place` is
    below its own mount point."""
    with suppress(ValueError):
        below = peer / place.resolve().relative_to(kind.mount_point)
        if below.is_dir():
            return below
    return peer


def examine_peer(host: Host, place: Path, kind: FileSystem, peer: Path, direct: bool) -> Iterator[Diagnosis]:
    """Measure the coherence of two mounts. `place`: a folder of the root's file system; `peer`: the other mount."""
    asked = {"folder": str(place), "peer": str(peer_folder(place, kind, peer)), "direct": direct}
    try:
        answer = host.probe("kvtier.doctor.probe", "peer", json.dumps(asked), timeout_s=TIMEOUT_S)
        found = Coherence(**answer)
    except ProbeNotRun as fault:
        yield fault.diagnosis("coherence")
        return
    except (ProbeFailed, TypeError) as fault:
        fix = "name the folder of the root, or the mount point, as another client mounts it (of another node, or here)"
        yield Diagnosis("bad", "coherence", f"{peer} cannot be measured: {fault}", fix)
        return
    yield _stale(found, kind)
    yield _delay("growth of a file", found.growth_s, GROWTH_S)
    yield _delay("a new name, looked for before", found.name_s, NAME_S)


def _stale(found: Coherence, kind: FileSystem) -> Diagnosis:
    value = (
        f"of {found.pieces} reads through the other mount stale: {found.plain[0]} by an open descriptor and "
        f"{found.plain[1]} after opening again; once the writer has called fdatasync "
        f"({1e3 * found.sync_s:.1f} ms a MiB): {found.synced[0]} and {found.synced[1]}"
    )
    if not any((*found.plain, *found.synced)):
        return Diagnosis("ok", "coherence", f"{value}. Coherent: what is written is read by others at once")
    if found.synced[1]:
        fix = (
            f"{kind.kind} may answer others with old bytes even after fdatasync: fresh records are misses there until "
            "its cache expires; mount it without client caches, or use another file system for a shared root"
        )
        return Diagnosis("bad", "coherence", value, fix)
    if found.synced[0]:
        fix = "a fresh record is read again after its file was opened anew: expect slower first hits on other nodes"
        return Diagnosis("warn", "coherence", value, fix)
    return Diagnosis(
        "ok", "coherence", f"{value}. Others read it right after fdatasync, before which nothing is published"
    )


def _delay(what: str, seconds: float | None, limit_s: float) -> Diagnosis:
    seen = f"not seen within {limit_s:g} s" if seconds is None else f"seen after {max(seconds, 0.001):.3g} s"
    return Diagnosis("ok", "coherence", f"{what}: {seen}")
