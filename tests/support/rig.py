"""A small engine without a model: paged KV of random bytes, ranks, and the real Store and Transfer over them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from kvtier.build import make_codec, open_store, open_transfer
from kvtier.config.settings import Settings
from kvtier.format.geometry import Geometry, RankShare, share_of_rank
from kvtier.format.namespace import CodecId, Namespace, chunk_keys
from kvtier.kernels.paged import PagedKV, PagedLayer
from kvtier.plan import LoadDone, LoadPlan, SaveDone, SavePlan
from kvtier.scheduler.store import Store, WantedChunk
from kvtier.worker.transfer import Transfer
from tests.waiting import TIMEOUT_S, wait_until

BLOCK_TOKENS = 16
# A prompt of five chunks, the blocks that it is computed in, and those that it is loaded into.
TOKENS = list(range(1000, 1000 + 64 * 5))
BLOCKS = list(range(20))
TARGET = list(range(100, 120))
_open: list[Engine] | None = None  # engines of the running test; None: tests of this folder end engines themselves


@contextmanager
def all_ended() -> Iterator[None]:
    """Close engines that the test left open. (Fixture engines_end of tests.support.ends.)"""
    global _open
    _open = []
    yield
    while _open:
        _open[0].close()
    _open = None


def geometry(**changes: object) -> Geometry:
    values = {
        "layers": 4,
        "kv_heads": 4,
        "k_head_size": 32,
        "v_head_size": 32,
        "dtype": "float32",
        "element_bytes": 4,
        "attention": "heads",
        "chunk_tokens": 64,
    }
    return Geometry(**(values | changes))  # type: ignore[arg-type]


def namespace(shape: Geometry, weights: str = "test", epoch: str = "0") -> Namespace:
    return Namespace("test", weights, shape, "float32", "", "", "", CodecId("raw", 1, 0), "", epoch)


def settings(root: Path, **changes: object) -> Settings:
    values: dict[str, object] = {
        "root": str(root),
        "capacity_bytes": 64 << 20,
        "segment_bytes": 4 << 20,
        "chunk_tokens": 64,
        "host": {"arena_bytes": 8 << 20},
        "io": {"threads": 4, "timeout_s": 10.0},
        "writer_lease_s": 10.0,
        "touch_interval_s": 0.2,
    }
    return Settings.load(values | changes)


def shares(shape: Geometry, tensor_size: int = 1, stages: Sequence[range] | None = None) -> list[RankShare]:
    stages = stages or [range(shape.layers)]
    return [
        share_of_rank(shape, tensor_rank, tensor_size, number * tensor_size + tensor_rank, stage)
        for number, stage in enumerate(stages)
        for tensor_rank in range(tensor_size)
    ]


def make_pages(share: RankShare, shape: Geometry, n_blocks: int, device: str = "cpu") -> PagedKV:
    """Zeroed pages of one rank: a K and a V tensor a layer, (n_blocks, block, heads, size). Of a format that torch does
    not know: bytes."""

    def layer(number: int) -> PagedLayer:
        form = shape.form_of(number)
        dtype = getattr(torch, form.dtype, torch.uint8)
        k, v = (
            torch.zeros(n_blocks, BLOCK_TOKENS, share.reads.n_heads, size, dtype=dtype, device=device)
            for size in (form.k_head_size, form.v_head_size)
        )
        return PagedLayer(k, v if form.v_head_size else None)

    layers = tuple(layer(number) for number in range(share.reads.first_layer, share.reads.end_layer))
    return PagedKV(layers, BLOCK_TOKENS)


def fill(pages: PagedKV, share: RankShare, block_id: int, seed: int) -> None:
    """Writes values into a block that depend on `seed`, layer and head alone: equal on ranks that hold the same."""
    for number, layer in enumerate(pages.layers):
        for which, plane in enumerate(layer.planes):
            for head in range(plane.shape[2]):
                cell = (seed, share.reads.first_layer + number, which, share.reads.first_head + head)
                noise = torch.Generator().manual_seed(hash(cell) & 0x7FFFFFFF)
                values = torch.randn(plane.shape[1], plane.shape[3], generator=noise)
                plane[block_id, :, head].copy_(values if plane.is_floating_point() else values * 1000 % 256)


def is_equal(one: Sequence[torch.Tensor], two: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@dataclass
class Engine:
    """One engine of one or more ranks on a root; blocks are handed out by the caller."""

    root: Path
    shape: Geometry = field(default_factory=geometry)
    tensor_size: int = 1
    stages: Sequence[range] | None = None
    n_blocks: int = 256
    weights: str = "test"
    changes: dict[str, object] = field(default_factory=dict)
    device: str = "cpu"
    is_closed: bool = False

    def __post_init__(self) -> None:
        self.settings = settings(self.root, **({"chunk_tokens": self.shape.chunk_tokens} | self.changes))
        signer = self.settings.signing.signer()
        codec = make_codec(self.settings)
        self.namespace = replace(
            namespace(self.shape, self.weights),
            signing=signer.fingerprint if signer else "",
            codec=CodecId(codec.name, codec.version, codec.seed),
        )
        self.shares = shares(self.shape, self.tensor_size, self.stages)
        self.store: Store = open_store(self.settings, self.namespace, self.shares)
        self.pages = [make_pages(share, self.shape, self.n_blocks, self.device) for share in self.shares]
        self.transfers: list[Transfer] = []
        try:
            for share, pages in zip(self.shares, self.pages, strict=True):
                self.transfers.append(open_transfer(self.settings, self.namespace, share, pages))
        except BaseException:
            self.close()
            raise
        if _open is not None:
            _open.append(self)

    @property
    def chunk_blocks(self) -> int:
        return self.shape.chunk_tokens // BLOCK_TOKENS

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        return chunk_keys(self.store.namespace_id, tokens, self.shape.chunk_tokens, {})

    def prefill(self, tokens: Sequence[int], block_ids: Sequence[int]) -> None:
        """Puts into the blocks what this prefix's KV is; every engine computes the same."""
        for number, block_id in enumerate(block_ids):
            seed = hash(tuple(tokens[: (number + 1) * BLOCK_TOKENS]))
            for share, pages in zip(self.shares, self.pages, strict=True):
                fill(pages, share, block_id, seed)

    def wait_for_set(self, timeout_s: float = TIMEOUT_S) -> None:
        """Waits until the keeper has a segment set ready."""
        allocator = self.store._keeper.allocators.common
        wait_until(lambda: not allocator.wants_set(), "a segment set", timeout_s)

    def plan_if_new(self, tokens: Sequence[int], block_ids: Sequence[int]) -> SavePlan | None:
        """Plan a save of all whole chunks. None: all of them are saved."""
        keys, per = self.keys(tokens), self.chunk_blocks
        parents = [self.store.namespace_id, *keys]
        return self.store.plan_save(
            [
                WantedChunk(key, parents[i], tuple(block_ids[i * per : (i + 1) * per]), number=i)
                for i, key in enumerate(keys)
            ]
        )

    def plan(self, tokens: Sequence[int], block_ids: Sequence[int]) -> SavePlan:
        plan = self.plan_if_new(tokens, block_ids)
        assert plan is not None
        return plan

    def save(self, tokens: Sequence[int], block_ids: Sequence[int]) -> list[SaveDone]:
        """Prefills, saves all whole chunks and waits; the answers of all ranks."""
        self.wait_for_set()
        self.prefill(tokens, block_ids)
        plan = self.plan_if_new(tokens, block_ids)
        if plan is None:
            return []
        return self.run_save(plan)

    def run_save(self, plan: SavePlan) -> list[SaveDone]:
        """Have all ranks save, one after the other, and wait. Return their answers."""
        done: list[SaveDone] = []
        for transfer in self.transfers:
            with torch.inference_mode():  # as vLLM calls the connector; the loop's thread is outside of it
                transfer.save(plan)
                assert transfer.drain(20)
                done += transfer.poll().saves
        self.store.saved(done)
        return done

    def begin_save(self, tokens: Sequence[int], block_ids: Sequence[int]) -> None:
        """Prefill the blocks, and have all ranks save the whole chunks that are not saved."""
        self.prefill(tokens, block_ids)
        plan = self.plan(tokens, block_ids)
        for transfer in self.transfers:
            transfer.save(plan)

    def plan_load(
        self, name: str, tokens: Sequence[int], block_ids: Sequence[int], computed: int = 0
    ) -> LoadPlan | None:
        """Plan a load of what is stored of `tokens` beyond `computed` into the blocks. None: nothing is stored."""
        size = self.shape.chunk_tokens
        first = computed // size
        keys = self.keys(tokens)[first:]
        while (entries := self.store.lookup(keys)) is None:  # a remote index, asked beside this thread
            time.sleep(0.001)
        n = len(entries)
        if not n:
            return None
        blocks = block_ids[first * self.chunk_blocks : (first + n) * self.chunk_blocks]
        return self.store.plan_load(name, keys[:n], entries, blocks, computed - first * size)

    def begin_load(self, name: str, tokens: Sequence[int], block_ids: Sequence[int]) -> None:
        """Have all ranks load the prompt, of which all whole chunks are stored."""
        plan = self.plan_load(name, tokens, block_ids)
        assert plan is not None and len(plan.chunks) == len(self.keys(tokens))
        for transfer in self.transfers:
            transfer.load(plan)

    def load(self, tokens: Sequence[int], block_ids: Sequence[int], computed: int = 0) -> tuple[int, list[LoadDone]]:
        """Load what is stored of `tokens` beyond `computed` into the blocks. Return (chunks planned, answers)."""
        plan = self.plan_load(f"r{random.random()}", tokens, block_ids, computed)
        return (len(plan.chunks), self.run_load(plan)) if plan is not None else (0, [])

    def run_load(self, plan: LoadPlan) -> list[LoadDone]:
        """Have all ranks load, one after the other, and wait. Return their answers."""
        done: list[LoadDone] = []
        for transfer in self.transfers:
            with torch.inference_mode():
                transfer.load(plan)
                assert transfer.drain(20)
                done += transfer.poll().loads
        return done

    def blocks(self, block_ids: Sequence[int]) -> list[torch.Tensor]:
        """Copies of the blocks' content, a tensor for each rank, layer and plane."""
        index = torch.tensor(list(block_ids), dtype=torch.int64, device=self.device)
        return [plane[index].cpu() for pages in self.pages for layer in pages.layers for plane in layer.planes]

    def holds(self, tokens: Sequence[int], block_ids: Sequence[int]) -> bool:
        """Return True if the blocks hold the beginning of this prompt, bit for bit. Afterwards they do."""
        found = self.blocks(block_ids)
        self.prefill(tokens, block_ids)
        return is_equal(found, self.blocks(block_ids))

    def has_all_slots(self) -> bool:
        """Return True if every slot of the arenas is free."""
        for transfer in self.transfers:
            transfer.tidy()
        arenas = [transfer._worker.arena for transfer in self.transfers]
        return all(arena.available == arena.n_slots for arena in arenas)

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        if _open is not None:
            _open[:] = [one for one in _open if one is not self]
        for transfer in self.transfers:
            transfer.drain(5)
            transfer.close()
        self.store.close()


def saved_by_another(root: Path, tokens: Sequence[int], block_ids: Sequence[int], **engine: Any) -> list[bytes]:
    """Save a prompt by an engine that ends then. Return the keys of its chunks."""
    writer = Engine(root, **engine)
    writer.save(tokens, block_ids)
    writer.close()
    return writer.keys(tokens)


def reader_of_saved(root: Path, tokens: Sequence[int], block_ids: Sequence[int]) -> Engine:
    """Return an engine that reads from files, each time, what another one saved there."""
    saved_by_another(root, tokens, block_ids)
    return Engine(root, changes={"host": {"arena_bytes": 8 << 20, "admit": "never"}})
