"""What moves bytes between segments and memory, and how it is sized. Two engines, one surface for reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

from kvtier.format.signing import Signer
from kvtier.io.kvikio import KvikioReader, KvikioSizes
from kvtier.io.ring import DeviceRing, OpResult, ReadOp, Ring, sizes_for

EngineName = Literal["ring", "kvikio"]


class Reads(Protocol):
    """Operations submitted together; see `ring.Batch`."""

    def wait(self, timeout_s: float) -> bool: ...
    def cancel(self) -> None: ...
    def results(self) -> list[OpResult]: ...


class Reader(Protocol):
    """What a load reads through; see `ring.Ring`."""

    def submit(self, ops: Sequence[ReadOp]) -> Reads: ...
    def close(self, timeout_s: float = 1.0) -> bool: ...


class Engines(NamedTuple):
    """reader: of loads. ring: of saves, and of loads too where it is the engine of both. signer: of what passes; None
    where nothing is signed. Signed loads go through the ring: into host memory, to be looked at there."""

    reader: Reader
    ring: Ring
    signer: Signer | None = None

    def reopen(self, fd: int) -> None:
        """Read the file of this descriptor, which was just opened, through no handle that was opened before."""
        if isinstance(self.reader, KvikioReader):
            self.reader.reopen(fd)

    def forget(self, fd: int) -> None:
        """Note that the caller is about to close `fd`: unpin its file, and close what else was opened of it. Does not
        wait."""
        self.ring.forget(fd)
        if isinstance(self.reader, KvikioReader):
            self.reader.forget(fd)

    def close_unused(self) -> None:
        """Close files that the caller has closed, and those that were not read lately."""
        if isinstance(self.reader, KvikioReader):
            self.reader.close_unused()

    def close(self) -> bool:
        """False: something hangs in the kernel and was left behind."""
        closed = [engine.close() for engine in {id(engine): engine for engine in (self.reader, self.ring)}.values()]
        return all(closed)


class EngineChoice(NamedTuple):
    """An engine and its sizes. slots: pinned pieces of a thread, where it reads into device memory; else 1."""

    engine: EngineName
    threads: int
    piece_bytes: int
    slots: int = 1

    @property
    def held_bytes(self) -> int:
        """Memory that bytes pass through on their way."""
        return self.threads * self.slots * self.piece_bytes

    def __str__(self) -> str:
        size = f"{self.piece_bytes >> 20} MiB" if self.piece_bytes >= 1 << 20 else f"{self.piece_bytes >> 10} KiB"
        return f"{self.engine} of {self.threads} threads x {self.slots} x {size}"


class Target(NamedTuple):
    """Memory that reads land in. ordinal: of the CUDA device it is on; None: host memory."""

    address: int
    n_bytes: int
    ordinal: int | None = None


def open_engine(choice: EngineChoice, target: Target, direct: bool, in_memory: bool) -> Reader:
    """The engine, started. Raises TierUnavailable when this machine has not what it needs.

    direct: whether files are read past the page cache. in_memory: whether the file system lies in memory, which the
    ring's pieces between files and host memory follow.
    """
    if choice.engine == "kvikio":
        sizes = KvikioSizes(choice.threads, choice.piece_bytes)
        return KvikioReader((target.address, target.n_bytes), sizes, direct=direct)
    if target.ordinal is None:
        return Ring(choice.threads, choice.piece_bytes, touch_written=in_memory)
    host = sizes_for(in_memory)
    device = DeviceRing(target.ordinal, choice.piece_bytes, choice.slots)
    return Ring(
        choice.threads,
        host.piece_bytes,
        write_piece_bytes=host.write_piece_bytes,
        device=device,
        touch_written=in_memory,
    )
