"""The codec: how KV is laid out in a slab. Fixed-rate, and fixed for a namespace.

A slab is one KV head of a record's layers, encoded, padded with zeros to whole pages. Encoding is fused with the gather
from the engine's blocks and decoding with the scatter into them, because on a GPU either is one launch.

A codec may treat layers and heads differently, by their numbers within the whole model. Pages and slabs count from
starts of their own, so `prepare` gets the part of the model that the pages are: a move's layers begin at
held.first_layer + patch.page_layer, its heads at held.first_head + patch.page_head, and the record that its slabs are
of begins patch.slab_layer layers before the move does.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvtier.format.geometry import Extent, Geometry, padded
from kvtier.kernels.paged import Move, PagedKV


class EncodeResult(NamedTuple):
    """Result of encoding one move.

    is_refused: the blocks hold what the codec cannot keep; the slabs mean nothing and must not be stored.
    sums: checksums of the slabs (kvtier.format.checksum), where the same launch took them.
    """

    is_refused: bool
    sums: tuple[int, ...] | None


class Encoded(Protocol):
    """Verdicts on their way."""

    def wait(self) -> list[EncodeResult]:
        """Return one for each move. Call it once `encode` is done on its stream (worker.cuda_events)."""


class Mover(Protocol):
    """A codec's work on one engine's pages. Thread-safe.

    On CUDA: launched on the caller's current stream, and not waited for; blocks and slabs must stay until it ran.
    """

    def encode(self, moves: Sequence[Move]) -> Encoded | None:
        """Blocks -> slabs; padding, which was blanked (worker.saving), is left as it is. None: nothing is ever refused,
        and no sums were taken."""

    def decode(self, moves: Sequence[Move]) -> None:
        """Slabs -> blocks, but for those before each move's `first_block`."""


class Codec(Protocol):
    """name, version and seed fix the bytes, and are part of the namespace."""

    name: str
    version: int
    seed: int

    def check(self, geometry: Geometry) -> None:
        """Raises ConfigError for a model that the codec cannot encode."""

    def layers_bytes(self, geometry: Geometry, layers: range) -> int:
        """Encoded bytes of these layers (numbers within the model) of one head of one chunk, without padding."""

    def prepare(self, pages: PagedKV, geometry: Geometry, held: Extent) -> None:
        """Once, before anything is moved: tables of these pages, and whatever else must not be made in a step.

        held: the layers and heads of the model that the pages are.
        """

    def encode(self, pages: PagedKV, moves: Sequence[Move]) -> Encoded | None:
        """See Mover."""

    def decode(self, pages: PagedKV, moves: Sequence[Move]) -> None:
        """See Mover."""


def slab_bytes(codec: Codec, geometry: Geometry, extent: Extent) -> int:
    """Bytes of each slab of a record of `extent`."""
    return padded(codec.layers_bytes(geometry, range(extent.first_layer, extent.end_layer)))


class BaseCodec:
    """Base of the codecs: keeps a mover for each PagedKV, found by the object's id.

    A mover holds a reference to its PagedKV, so no other object gets the same id.
    """

    version = 1
    seed = 0

    def __init__(self) -> None:
        self._movers: dict[int, Mover] = {}

    def encode(self, pages: PagedKV, moves: Sequence[Move]) -> Encoded | None:
        return self._movers[id(pages)].encode(moves)

    def decode(self, pages: PagedKV, moves: Sequence[Move]) -> None:
        self._movers[id(pages)].decode(moves)
