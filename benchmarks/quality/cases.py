"""What is asked of the model: rows whose first whole chunks come from the tier, and what is judged after them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality import tasks
from benchmarks.quality.methods import CHUNK_TOKENS
from benchmarks.quality.tasks import NEEDLE_TOKENS, Rows, Source

TEXT = "text"


@dataclass(frozen=True)
class Plan:
    """How much is asked, a seed. Prefixes are whole chunks."""

    seeds: int = 3
    text_rows: int = 48
    text_prefix_tokens: int = 2048
    text_tokens: int = 256
    greedy_tokens: int = 64
    copy_prefixes: tuple[int, ...] = (512, 1024)
    copy_tokens: int = 64
    pairs: tuple[int, ...] = (64, 256, 512, 768)
    pairs_asked: int = 32
    recall_rows: int = 16
    needle_prefixes: tuple[int, ...] = (512, 1024, 2048)
    needle_depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    needles: int = 6
    needle_rows: int = 16
    """Of each prefix and depth."""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Case:
    """`name` is the text's, or a task and its size: "recall 256". The continuation begins at `prefix_tokens`."""

    name: str
    rows: Rows
    prefix_tokens: int

    @property
    def prefix(self) -> Tensor:
        return self.rows.tokens[:, : self.prefix_tokens]

    @property
    def continuation(self) -> Tensor:
        return self.rows.tokens[:, self.prefix_tokens :]

    @property
    def is_judged(self) -> Tensor:
        """(rows, n - 1) bool: of the continuation's tokens but the first, which the prefix predicts."""
        return self.rows.is_judged[:, self.prefix_tokens + 1 :]


def cases(source: Source, plan: Plan) -> list[Case]:
    """The text first. Everything is drawn from the source's generator."""
    rows = plan.recall_rows
    text = tasks.text(source, plan.text_rows, plan.text_prefix_tokens + plan.text_tokens)
    found = [Case(TEXT, text, plan.text_prefix_tokens)]
    for prefix in plan.copy_prefixes:
        period = prefix - 2  # the block fills the prefix
        copies = tasks.copy(source, rows, prefix + plan.copy_tokens, (period, period))
        found.append(Case(f"copy {prefix}", copies, prefix))
    for n_pairs in plan.pairs:
        prefix = -(-(2 + 2 * n_pairs) // CHUNK_TOKENS) * CHUNK_TOKENS
        pairs = tasks.recall(source, rows, prefix + 1 + 2 * plan.pairs_asked, n_pairs, plan.pairs_asked)
        found.append(Case(f"recall {n_pairs}", pairs, prefix))
    for prefix in plan.needle_prefixes:
        found.append(Case(f"needle {prefix}", needle_grid(source, plan, prefix), prefix))
    return found


def needle_grid(source: Source, plan: Plan, prefix: int) -> Rows:
    """`plan.needle_rows` rows of each depth, depth after depth; one of several needles is asked for."""
    parts = [
        tasks.needles(source, plan.needle_rows, prefix + NEEDLE_TOKENS, (plan.needles, 1), depth)
        for depth in plan.needle_depths
    ]
    return Rows(torch.cat([part.tokens for part in parts]), torch.cat([part.is_judged for part in parts]))
