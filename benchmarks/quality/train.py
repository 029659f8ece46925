"""Training of the model for so many seconds on text and synthetic tasks; short rows and few pairs first.

Induction (attention to what followed the same token earlier) is learned suddenly or, within minutes, not at all. It is
learned with many questions over short distances at first, and a loss over only the tokens that can be known.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.quality import tasks
from benchmarks.quality.model import SmallLlama
from benchmarks.quality.tasks import TaskRows, TaskSource

# (share of the time from which on, (text, copy)): shares of the rows of a step; recall has the others. With a tenth of
# text and longer rows induction was not learned in five minutes on an H200, with these within one.
SHARES = ((0.0, (0.05, 0.57)), (0.3, (0.42, 0.25)))
PERIOD_MIN, PAIRS_MIN = 8, 4
PAIRS_SHARE_MAX = 0.42  # pairs a token of the row; a sixth of the row is left for questions then
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
GRADIENT_NORM_MAX = 1.0
REPORT_S = 15.0
SYNC_STEPS = 8  # the GPU is waited for this often, so that the schedule's clock is the GPU's too
IGNORED = -100

T = TypeVar("T")
Stages = tuple[tuple[float, T], ...]  # (share of the time from which on, value)


def at(stages: Stages[T], progress: float) -> T:
    return [value for start, value in stages if progress >= start][-1]


@dataclass(frozen=True)
class Recipe:
    """sizes: (rows, tokens of a row) of a step. Small steps come first, because induction takes many."""

    seconds: float
    rate: float
    warmup_steps: int
    sizes: Stages[tuple[int, int]]

    def rate_at(self, step: int, progress: float) -> float:
        """Return the rate: it grows for `warmup_steps`, and falls linearly to a twentieth."""
        return self.rate * min(1.0, (step + 1) / self.warmup_steps) * (1 - 0.95 * min(1.0, progress))


def batch(source: TaskSource, draw: random.Random, progress: float, size: tuple[int, int]) -> TaskRows:
    """Return rows of all tasks, `size` of (rows, tokens a row).

    Distances and numbers of pairs are log-uniform, so that easy ones stay common; all of them from half way on.
    """
    rows, length = size
    n_text, n_copy = (max(1, round(rows * share)) for share in at(SHARES, progress))
    reach = min(1.0, 0.25 + 1.5 * progress)
    period_max = max(PERIOD_MIN, round(reach * (length // 2 - 2)))
    pairs_max = max(PAIRS_MIN, round(reach * min(length * PAIRS_SHARE_MAX, tasks.SYMBOLS)))
    n_pairs = round(PAIRS_MIN * (pairs_max / PAIRS_MIN) ** draw.random())
    parts = (
        tasks.text(source, n_text, length),
        tasks.copy(source, n_copy, length, (PERIOD_MIN, period_max)),
        tasks.recall(source, max(1, rows - n_text - n_copy), length, n_pairs, (length - 3 - 2 * n_pairs) // 2),
    )
    return TaskRows(torch.cat([part.tokens for part in parts]), torch.cat([part.is_judged for part in parts]))


def loss_of(model: SmallLlama, rows: TaskRows) -> Tensor:
    """Return the mean cross-entropy of the judged tokens, in nats."""
    targets = rows.tokens[:, 1:].masked_fill(~rows.is_judged[:, 1:], IGNORED)
    with torch.autocast(rows.tokens.device.type, torch.bfloat16, enabled=rows.tokens.is_cuda):
        logits = model(rows.tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def optimizer_of(model: SmallLlama, recipe: Recipe) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.rate, betas=BETAS, fused=True)


def train(model: SmallLlama, source: TaskSource, recipe: Recipe) -> dict[str, Any]:
    """Train for `recipe.seconds` and return the curve of the loss."""
    optimizer = optimizer_of(model, recipe)
    draw = random.Random(0)
    started = reported = time.monotonic()
    step, tokens, curve = 0, 0, []
    while (seconds := time.monotonic() - started) < recipe.seconds:
        progress = seconds / recipe.seconds
        rows, length = at(recipe.sizes, progress)
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate_at(step, progress)
        loss = loss_of(model, batch(source, draw, progress, (rows, length)))
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM_MAX)
        optimizer.step()
        optimizer.zero_grad()
        step, tokens = step + 1, tokens + rows * length
        if step % SYNC_STEPS == 0:
            loss.item()
        if time.monotonic() - reported > min(REPORT_S, recipe.seconds / 8):
            reported = time.monotonic()
            row = {"seconds": reported - started, "step": step, "tokens": tokens, "row_tokens": length}
            curve.append(row | {"loss": loss.item()})
            print("  " + ", ".join(f"{name} {value:,.4g}" for name, value in curve[-1].items()), flush=True)
    return {"steps": step, "tokens": tokens, "seconds": time.monotonic() - started, "curve": curve}
