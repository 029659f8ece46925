"""Digests of the engine's blocks at the moment they are saved and at the moment a load is answered.

Everything is launched on the engine's current stream and nothing waits for it, so that the watch orders no work that
is otherwise unordered: a load that is answered before its bytes have arrived shows as another digest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from kvtier.kernels.paged import PagedKV

WEIGHTS_SEED = 176


class SeenBlocks(NamedTuple):
    """Digests of consecutive blocks of one chunk: (n_blocks, n_heads) int64, on the engine's device."""

    key: bytes
    first_block: int
    digests: torch.Tensor


class BlockDigests:
    """Sums of all words of a block and head, each word times its own odd number, modulo 2**64.

    Words have 8 bytes, or fewer where a token's KV of a head is no whole number of them (turboquant's slots). Any one
    changed word changes the sum. Another tensor-parallel size gives the same digests for the same heads.
    """

    def __init__(self, pages: PagedKV) -> None:
        self._pages = pages
        self._device = pages.layers[0].k.device
        random = torch.Generator().manual_seed(WEIGHTS_SEED)
        self._weights: list[torch.Tensor] = []
        for layer in pages.layers:
            for plane in layer.planes:
                words = plane.shape[-1] * plane.element_size() // _word(plane).itemsize
                weights = torch.randint(-(1 << 62), 1 << 62, (pages.block_tokens, 1, words), generator=random)
                self._weights.append((weights * 2 + 1).to(self._device))

    def of(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Return (n_blocks, heads) int64; runs on the current stream and waits for nothing."""
        host = torch.tensor(block_ids, dtype=torch.long)
        if self._device.type == "cuda":
            host = host.pin_memory()
        ids = host.to(self._device, non_blocking=True)
        planes = [plane for layer in self._pages.layers for plane in layer.planes]
        total: torch.Tensor | None = None
        for plane, weights in zip(planes, self._weights, strict=True):
            words = plane[ids].contiguous().view(_word(plane))
            part = (words * weights).sum((1, 3))
            total = part if total is None else total + part
        assert total is not None
        return total


def _word(plane: torch.Tensor) -> torch.dtype:
    """Return the widest integer type whose size divides a row of the plane."""
    row_bytes = plane.shape[-1] * plane.element_size()
    return next(kind for kind in (torch.int64, torch.int32, torch.int16, torch.uint8) if row_bytes % kind.itemsize == 0)


class Watch:
    """Record of the blocks that pass through one worker's Transfer; `saved` and `loaded` grow until `take`.

    share: of so many chunks one is digested, the same ones in every process.
    """

    def __init__(self, worker_half: Any, share: int = 1) -> None:
        self._share = share
        transfer, pages = worker_half._bridge._transfer, worker_half._pages.pages
        self._digests = BlockDigests(pages)
        self._block_tokens = pages.block_tokens
        self._first_head = transfer._worker.share.reads.first_head
        self.saved: list[SeenBlocks] = []
        self.loaded: list[SeenBlocks] = []
        self.failed_loads = 0
        self._plans: dict[str, Any] = {}
        self._attach(transfer)

    def take(self) -> dict[str, Any]:
        """Return and clear lists of {key, first_block, first_head, digests}; waits for the device."""
        saved, self.saved, loaded, self.loaded = self.saved, [], self.loaded, []
        failed, self.failed_loads = self.failed_loads, 0
        return {"saved": self._plain(saved), "loaded": self._plain(loaded), "failed_loads": failed}

    def _plain(self, seen: list[SeenBlocks]) -> list[dict[str, Any]]:
        return [
            {"key": key.hex(), "first_block": first, "first_head": self._first_head, "digests": digests.tolist()}
            for key, first, digests in seen
        ]

    def _attach(self, transfer: Any) -> None:
        save, load, poll = transfer.save, transfer.load, transfer.poll

        def watched_save(plan: Any) -> None:
            self._note(self.saved, [(chunk, 0) for chunk in plan.chunks])
            save(plan)

        def watched_load(plan: Any) -> None:
            self._plans[plan.request_id] = plan
            load(plan)

        def watched_poll(timeout_s: float = 0.0) -> Any:
            progress = poll(timeout_s)
            for done in progress.loads:
                plan = self._plans.pop(done.request_id)
                self.failed_loads += bool(done.failed_blocks)
                good = [c for c in plan.chunks if done.failed_blocks.isdisjoint(c.block_ids)]
                self._note(self.loaded, [(c, c.first_token // self._block_tokens) for c in good])
            return progress

        transfer.save, transfer.load, transfer.poll = watched_save, watched_load, watched_poll

    def _note(self, where: list[SeenBlocks], chunks: list[tuple[Any, int]]) -> None:
        """Digest the blocks of all chunks in one pass; blocks of a chunk before `first` belong to other requests."""
        chunks = [(chunk, first) for chunk, first in chunks if chunk.key[0] % self._share == 0]
        if not chunks:
            return
        digests = self._digests.of([block for chunk, first in chunks for block in chunk.block_ids[first:]])
        start = 0
        for chunk, first in chunks:
            end = start + len(chunk.block_ids) - first
            where.append(SeenBlocks(chunk.key, first, digests[start:end]))
            start = end


def compare(saved: Sequence[dict[str, Any]], loaded: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Count the loaded blocks (a block and head) that equal what some writer saved under that key, and the others.

    unknown: no save was seen under that key.
    """
    known: dict[tuple[str, int, int], set[int]] = {}
    for place, digest in _digests(saved):
        known.setdefault(place, set()).add(digest)
    counts = {"equal": 0, "wrong": 0, "unknown": 0}
    for place, digest in _digests(loaded):
        expected = known.get(place)
        counts["unknown" if expected is None else "equal" if digest in expected else "wrong"] += 1
    return counts


def _digests(seen: Sequence[dict[str, Any]]) -> Iterator[tuple[tuple[str, int, int], int]]:
    """Yield ((key, block, head), digest)."""
    for one in seen:
        for block, row in enumerate(one["digests"], start=one["first_block"]):
            for head, digest in enumerate(row, start=one["first_head"]):
                yield (one["key"], block, head), digest
