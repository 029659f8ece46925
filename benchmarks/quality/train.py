"""Trains the model for so many seconds on text and synthetic tasks; short rows and few pairs first.

Looking back (induction) is learned suddenly or, within minutes, not at all. What brings it: many questions over short
distances at first, and a loss over nothing but tokens that can be known.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.quality import tasks
from benchmarks.quality.model import Model
from benchmarks.quality.tasks import Rows, Source

SHARES = ((0.0, (0.05, 0.55, 0.35)), (0.3, (0.35, 0.20, 0.25)))
"""(share of the time from which on, (text, copy, recall)): of the rows of a step; needles have the rest. Looking back
comes first, and nearly alone: with a tenth of text and longer rows it was not learned in five minutes on an H200, with
these within one. Tied embeddings hindered it at the same rate."""
PERIOD_MIN, PAIRS_MIN = 8, 4
PAIRS_SHARE_MAX = 0.42
"""Pairs a token of the row; a sixth of the row is left for questions then."""
NEEDLES_MAX = 8
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
GRADIENT_NORM_MAX = 1.0
REPORT_S = 15.0
SYNC_STEPS = 8
"""The GPU is waited for this often, so that the schedule's clock is the GPU's too."""
IGNORED = -100
ROWS_MIN = 4
"""One of each task."""


T = TypeVar("T")
Stages = tuple[tuple[float, T], ...]
"""(share of the time from which on, what holds then)"""


def at(stages: Stages[T], progress: float) -> T:
    return [value for start, value in stages if progress >= start][-1]


@dataclass(frozen=True)
class Recipe:
    """sizes: (rows, tokens of a row) of a step. Small steps come first, for it takes many to learn to look back."""

    seconds: float
    rate: float
    warmup_steps: int
    sizes: Stages[tuple[int, int]]

    def rate_at(self, step: int, progress: float) -> float:
        """Up in `warmup_steps`, and down in a line to a twentieth."""
        return self.rate * min(1.0, (step + 1) / self.warmup_steps) * (1 - 0.95 * min(1.0, progress))


def batch(source: Source, draw: random.Random, progress: float, size: tuple[int, int]) -> Rows:
    """Rows of all tasks, `size` of (rows, tokens a row).

    Distances and numbers of pairs are log-uniform, so that easy ones stay common; all of them from half way on.
    """
    rows, length = size
    n_text, n_copy, n_recall = (max(1, round(rows * share)) for share in at(SHARES, progress))
    reach = min(1.0, 0.25 + 1.5 * progress)
    period_max = max(PERIOD_MIN, round(reach * (length // 2 - 2)))
    pairs_max = max(PAIRS_MIN, round(reach * min(length * PAIRS_SHARE_MAX, tasks.SYMBOLS)))
    n_pairs = round(PAIRS_MIN * (pairs_max / PAIRS_MIN) ** draw.random())
    n_needles = draw.randint(1, min(NEEDLES_MAX, length // (tasks.NEEDLE_TOKENS + tasks.SLOT_TOKENS + 1)))
    parts = (
        tasks.text(source, n_text, length),
        tasks.copy(source, n_copy, length, (PERIOD_MIN, period_max)),
        tasks.recall(source, n_recall, length, n_pairs, (length - 3 - 2 * n_pairs) // 2),
        tasks.needles(source, max(1, rows - n_text - n_copy - n_recall), length, (n_needles, n_needles)),
    )
    return Rows(torch.cat([part.tokens for part in parts]), torch.cat([part.is_judged for part in parts]))


def loss_of(model: Model, rows: Rows) -> Tensor:
    """Mean cross-entropy of the judged tokens, in nats."""
    targets = rows.tokens[:, 1:].masked_fill(~rows.is_judged[:, 1:], IGNORED)
    with torch.autocast(rows.tokens.device.type, torch.bfloat16, enabled=rows.tokens.is_cuda):
        logits = model(rows.tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def gradients(model: Model, rows: Rows) -> Tensor | None:
    """The loss, with its gradients in the model; None where there was no memory for so many rows."""
    try:
        loss = loss_of(model, rows)
        loss.backward()
    except torch.OutOfMemoryError:
        if len(rows.tokens) <= ROWS_MIN:
            raise
        return None
    return loss.detach()


def optimizer_of(model: Model, recipe: Recipe) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.rate, betas=BETAS, fused=True)


def train(
    model: Model, source: Source, recipe: Recipe, watch: Callable[[Model, int], dict[str, float]]
) -> dict[str, Any]:
    """Trains for `recipe.seconds`; `watch` judges the model now and then, on rows of so many tokens.

    A step that does not fit into memory is begun again with half as many rows, from then on.
    """
    optimizer = optimizer_of(model, recipe)
    draw = random.Random(0)
    started = reported = time.monotonic()
    step, tokens, share, curve = 0, 0, 1.0, []
    while (seconds := time.monotonic() - started) < recipe.seconds:
        progress = seconds / recipe.seconds
        rows, length = at(recipe.sizes, progress)
        n_rows = max(ROWS_MIN, int(rows * share))
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate_at(step, progress)
        loss = gradients(model, batch(source, draw, progress, (n_rows, length)))
        if loss is None:
            optimizer.zero_grad()
            torch.cuda.empty_cache()
            share /= 2
            continue
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM_MAX)
        optimizer.step()
        optimizer.zero_grad()
        step, tokens = step + 1, tokens + n_rows * length
        if step % SYNC_STEPS == 0:
            loss.item()
        if time.monotonic() - reported > min(REPORT_S, recipe.seconds / 8):
            reported = time.monotonic()
            curve.append(
                {
                    "seconds": reported - started,
                    "step": step,
                    "tokens": tokens,
                    "row_tokens": length,
                    "loss": loss.item(),
                    **watch(model, length),
                }
            )
            print("  " + ", ".join(f"{name} {value:,.4g}" for name, value in curve[-1].items()), flush=True)
    return {
        "steps": step,
        "tokens": tokens,
        "seconds": time.monotonic() - started,
        "curve": curve,
        "rows_halved": round(-math.log2(share)),
        "learning_rate": recipe.rate,
        "sizes": recipe.sizes,
    }
