"""I/O engines of a worker: opens the ring and KvikIO, which share one interface for reads (kvtier.io.base)."""

from __future__ import annotations

from typing import Literal, NamedTuple

from kvtier.errors import TierUnavailable
from kvtier.format.signing import Signer
from kvtier.io.base import Reader
from kvtier.io.kvikio import KvikioReader
from kvtier.io.ring import DeviceRing, Ring, sizes_for
from kvtier.runtime.repeated_log import RepeatedLog

_failures = RepeatedLog()

EngineName = Literal["ring", "kvikio"]


class Engines(NamedTuple):
    reader: Reader  # of loads
    ring: Ring  # of saves, and of signed loads: their MAC is checked in host memory. May be the same object as `reader`
    signer: Signer | None = None  # None: records are not signed

    def reopen(self, fd: int) -> None:
        """Read the file of this descriptor, which was just opened, through no handle that was opened before."""
        if isinstance(self.reader, KvikioReader):
            self.reader.files.reopen(fd)

    def forget(self, fd: int) -> None:
        """Prepare for the caller's close of `fd`: close other handles of its file. Does not wait."""
        if isinstance(self.reader, KvikioReader):
            self.reader.files.forget(fd)

    def close_unused(self) -> None:
        """Close files that the caller has closed, and those that were not read lately."""
        if isinstance(self.reader, KvikioReader):
            self.reader.files.close_unused(0.0)

    def widen(self, hung_after_s: float) -> None:
        """Add threads to rings beside those that hang; see `Ring.widen`. A failure is logged."""
        for engine in self._distinct():
            try:
                if isinstance(engine, Ring):
                    engine.widen(hung_after_s)
            except TierUnavailable as fault:
                _failures.warning("widen", "%s", fault)

    def close(self) -> bool:
        """Close both. Return False if an operation hangs in the kernel: its threads are left running."""
        closed = [engine.close() for engine in self._distinct()]
        return all(closed)

    def _distinct(self) -> tuple[Reader, ...]:
        return (self.ring,) if self.reader is self.ring else (self.reader, self.ring)


class EngineChoice(NamedTuple):
    engine: EngineName
    threads: int
    piece_bytes: int
    slots: int = 1  # pinned pieces of a thread when it reads into device memory, else 1

    @property
    def held_bytes(self) -> int:
        """Bytes of the buffers between storage and target."""
        return self.threads * self.slots * self.piece_bytes

    def __str__(self) -> str:
        size = f"{self.piece_bytes >> 20} MiB" if self.piece_bytes >= 1 << 20 else f"{self.piece_bytes >> 10} KiB"
        return f"{self.engine} of {self.threads} threads x {self.slots} x {size}"


class Target(NamedTuple):
    """Memory that reads land in."""

    address: int
    n_bytes: int
    ordinal: int | None = None  # CUDA device; None: host memory


def open_engine(choice: EngineChoice, target: Target, direct: bool, in_memory: bool) -> Reader:
    """Start the engine. Raises TierUnavailable when this machine lacks what it needs.

    direct: reads bypass the page cache. in_memory: the file system is tmpfs or ramfs.
    """
    if choice.engine == "kvikio":
        return KvikioReader((target.address, target.n_bytes), choice.threads, choice.piece_bytes, direct=direct)
    if target.ordinal is None:
        return Ring(choice.threads, choice.piece_bytes)
    host = sizes_for(in_memory)
    device = DeviceRing(target.ordinal, choice.piece_bytes, choice.slots)
    write_bytes = host.write_piece_bytes
    return Ring(choice.threads, host.piece_bytes, write_piece_bytes=write_bytes, device=device)
