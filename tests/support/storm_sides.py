"""What a storm is about: prompts whose KV is known, and engines with what they have on its way."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvtier.worker.context import WorkerContext
from tests.support.lazy import LazyEngine
from tests.support.rig import BLOCK_TOKENS, Engine, geometry, make_pages, shares

SHAPE = geometry(layers=2, kv_heads=2, k_head_size=16, v_head_size=16, chunk_tokens=32)
CHUNK_BLOCKS = SHAPE.chunk_tokens // BLOCK_TOKENS
CHUNKS_MAX = 10


class Truth:
    """Prompts that share their beginnings, and what the KV of each of their chunks is: the same on every engine."""

    def __init__(self, rng: random.Random) -> None:
        stems = [[1000 * n + t for t in range(SHAPE.chunk_tokens * 5)] for n in range(1, 4)]
        self.prompts = []
        for number in range(14):
            tail = [100_000 * (number + 1) + t for t in range(SHAPE.chunk_tokens * rng.randrange(CHUNKS_MAX - 5 + 1))]
            self.prompts.append(stems[number % 3][: SHAPE.chunk_tokens * rng.randint(1, 5)] + tail)
        (self._share,) = shares(SHAPE)
        self._pages = make_pages(self._share, SHAPE, 14 * CHUNKS_MAX * CHUNK_BLOCKS)
        noise = torch.Generator().manual_seed(rng.randrange(1 << 30))
        for layer in self._pages.layers:
            for plane in layer.planes:
                plane.normal_(generator=noise)
        self._rows: dict[bytes, int] = {}

    def of(self, key: bytes, engine: Engine, rank: int) -> list[torch.Tensor]:
        """The chunk's blocks as a rank of this engine has them: (blocks, tokens, heads, size) a layer and plane."""
        row = self._rows.setdefault(key, len(self._rows) * CHUNK_BLOCKS)
        held = engine.shares[rank].reads
        heads = slice(held.first_head, held.end_head)
        layers = self._pages.layers[held.first_layer : held.end_layer]
        return [plane[row : row + CHUNK_BLOCKS, :, heads] for layer in layers for plane in layer.planes]


@dataclass(eq=False)
class Asked:
    """A load on its way. filled_with: the value that all of its blocks held before; first_block: of the first chunk,
    those before it are the engine's own hits."""

    keys: list[bytes]
    blocks: range
    first_block: int
    filled_with: float
    asked_s: float
    unanswered: set[int]


@dataclass(eq=False)
class Side:
    """One engine, its free ranges of blocks with what they are filled with, and what it has on its way."""

    engine: Engine
    free: list[tuple[range, float]] = field(default_factory=list)
    loads: dict[str, Asked] = field(default_factory=dict)
    stale: list[tuple[list[bytes], list[bytes]]] = field(default_factory=list)
    n_saving: int = 0

    @property
    def workers(self) -> list[WorkerContext]:
        return [transfer._worker for transfer in self.engine.transfers]

    def planes(self, rank: int) -> list[torch.Tensor]:
        return [plane for layer in self.engine.pages[rank].layers for plane in layer.planes]

    def write(self, rank: int, blocks: range, values: Sequence[torch.Tensor | float]) -> None:
        """The engine's own work on its blocks: at once, or launched."""

        def work() -> None:
            for plane, value in zip(self.planes(rank), values, strict=True):
                plane[blocks.start : blocks.stop] = value

        if isinstance(self.engine, LazyEngine):
            self.engine.in_engine(work)
        else:
            work()

    def fill(self, blocks: range, value: float) -> None:
        for rank in range(len(self.workers)):
            self.write(rank, blocks, [value] * len(self.planes(rank)))

    def run(self) -> None:
        """What the engine has launched is done."""
        if isinstance(self.engine, LazyEngine):
            self.engine.order.wait(self.engine.order.record())

    def holds(self, rank: int, blocks: range, values: Sequence[torch.Tensor | float]) -> bool:
        found = [plane[blocks.start : blocks.stop] for plane in self.planes(rank)]
        return all(
            bool((a == b).all()) if isinstance(b, float) else torch.equal(a.view(torch.int32), b.view(torch.int32))
            for a, b in zip(found, values, strict=True)
        )
