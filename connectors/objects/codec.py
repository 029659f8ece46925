"""Codec `object`: bytes of another host as they are, between the memory that the host names and slots.

    slab = the object, zeros, its length (u64, little-endian) in the last 8 bytes; whole pages

The length is under the slab's checksum: what was stored shorter or longer than the host asks for is never taken for the
object, also where both take as many pages. A move's one block is no block of pages, but a number under which the codec
holds the host's memory for as long as the move may touch it.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from kvtier.format.geometry import Extent, Geometry, padded
from kvtier.format.namespace import CodecId
from kvtier.kernels.paged import Move, PagedKV, PagedLayer

LENGTH_BYTES = 8
CODEC_ID = CodecId("object", version=1, seed=0)

Octets = npt.NDArray[np.uint8]


def slab_bytes_of(object_bytes: int) -> int:
    """Bytes of the slab that holds an object of so many."""
    return padded(object_bytes + LENGTH_BYTES)


def object_geometry(slab_bytes: int) -> Geometry:
    """An object as a chunk of one token, whose only layer has one head of `slab_bytes`."""
    return Geometry(
        layers=1,
        kv_heads=1,
        k_head_size=slab_bytes,
        v_head_size=0,
        dtype="uint8",
        element_bytes=1,
        attention="heads",
        chunk_tokens=1,
    )


def stand_in_pages() -> PagedKV:
    """Says that the host's memory is this machine's; the codec moves to and from other places than these."""
    return PagedKV((PagedLayer(torch.zeros(1, 1, 1, 1, dtype=torch.uint8), None),), block_tokens=1)


def octets(memory: memoryview) -> Octets:
    """The memory as bytes, not copied. Raises ValueError where it is not contiguous."""
    if not memory.contiguous:
        raise ValueError("memory of an object that is not contiguous")
    return np.frombuffer(memory, dtype=np.uint8) if memory.nbytes else np.empty(0, dtype=np.uint8)


@dataclass(slots=True)
class _Held:
    memory: Octets
    is_other: bool = False


class ObjectCodec:
    """Thread-safe."""

    name, version, seed = CODEC_ID.name, CODEC_ID.version, CODEC_ID.seed

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._held: dict[int, _Held] = {}

    def hold(self, memory: Octets) -> int:
        """A number for this memory, to be let go of when no move can touch it any more."""
        with self._lock:
            number = next(self._numbers)
            self._held[number] = _Held(memory)
        return number

    def let_go(self, number: int) -> bool:
        """Whether what came for this memory was an object of another length, so that it was left as it was."""
        with self._lock:
            return self._held.pop(number).is_other

    def check(self, geometry: Geometry) -> None:
        """Bytes are bytes."""

    def layers_bytes(self, geometry: Geometry, layers: range) -> int:
        return geometry.vectors_bytes(layers)

    def prepare(self, pages: PagedKV, geometry: Geometry, held: Extent) -> None:
        """There is nothing to prepare."""

    def encode(self, pages: PagedKV, moves: Sequence[Move]) -> None:
        for move in moves:
            memory, slab = self._of(move).memory, move.slabs[0].numpy()
            slab[: memory.size] = memory
            slab[memory.size : -LENGTH_BYTES] = 0  # another's bytes lay there before
            slab[-LENGTH_BYTES:].view("<u8")[0] = memory.size

    def decode(self, pages: PagedKV, moves: Sequence[Move]) -> None:
        for move in moves:
            held, slab = self._of(move), move.slabs[0].numpy()
            held.is_other = int(slab[-LENGTH_BYTES:].view("<u8")[0]) != held.memory.size
            if not held.is_other:
                held.memory[:] = slab[: held.memory.size]

    def _of(self, move: Move) -> _Held:
        with self._lock:
            return self._held[move.block_ids[0]]
