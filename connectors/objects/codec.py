"""Codec `object`: bytes of another host, unchanged, between the host's memory and slabs.

    slab = the object, zeros, its length (u64, little-endian) in the last 8 bytes; whole pages

The length is under the slab's checksum, so an object of another length is never returned, even if both take equally
many pages. A move's one block id is no block of pages: it is the number under which the codec holds the host's memory
while the move may touch it.
"""

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
    return padded(object_bytes + LENGTH_BYTES)


def object_geometry(slab_bytes: int) -> Geometry:
    """Return the geometry of an object: a chunk of one token, whose only layer has one head of `slab_bytes`."""
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
    """Return pages that only say that the host's memory is on the CPU; the codec reads and writes other memory."""
    return PagedKV((PagedLayer(torch.zeros(1, 1, 1, 1, dtype=torch.uint8), None),), block_tokens=1)


def octets(memory: memoryview) -> Octets:
    """Return the memory as bytes, not copied. Raises ValueError if it is not contiguous."""
    if not memory.contiguous:
        raise ValueError("memory of an object that is not contiguous")
    return np.frombuffer(memory, dtype=np.uint8) if memory.nbytes else np.empty(0, dtype=np.uint8)


@dataclass(slots=True)
class _Held:
    memory: Octets
    is_other: bool = False


class ObjectCodec:
    """Codec of objects. Thread-safe."""

    name, version, seed = CODEC_ID.name, CODEC_ID.version, CODEC_ID.seed

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._held: dict[int, _Held] = {}

    def hold(self, memory: Octets) -> int:
        """Return a number for this memory; release it when no move can touch the memory any more."""
        with self._lock:
            number = next(self._numbers)
            self._held[number] = _Held(memory)
        return number

    def release(self, number: int) -> bool:
        """Release the memory. Return True if the stored object had another length, so that the memory is unchanged."""
        with self._lock:
            return self._held.pop(number).is_other

    def check(self, geometry: Geometry) -> None:
        """Accept any geometry."""

    def layers_bytes(self, geometry: Geometry, layers: range) -> int:
        return geometry.vectors_bytes(layers)

    def prepare(self, pages: PagedKV, geometry: Geometry, held: Extent) -> None:
        """Do nothing."""

    def encode(self, pages: PagedKV, moves: Sequence[Move]) -> None:
        for move in moves:
            memory, slab = self._of(move).memory, move.slabs[0].numpy()
            slab[: memory.size] = memory
            slab[memory.size : -LENGTH_BYTES] = 0  # the slab still has another object's bytes
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
