"""Figures of the table from what was measured, with 95% intervals.

Means over text are of rows (their tokens are not independent), with 1.96 standard errors; shares of right answers have
Wilson's interval, which is not empty at 100%; a 99th percentile has no interval but its value for each seed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from benchmarks.quality.cases import Plan
from benchmarks.quality.measure import REFUSED, Tally

Z = 1.96
SEEN_TIMES = 2.0
"""A loss is seen when the low end of its KL is above so many times the high end of what it stands beside."""
PAIRS = (
    ("k4v4", "raw"),
    ("k2v2", "k4v4"),
    ("paper QJL k4v4", "k4v4"),
    ("paper QJL k4v4", "paper mse k4v4"),
    ("paper QJL k3v3", "k3v3"),
)
"""What must be worse than what: the codec above the noise floor, and the controls beside what has the same bits."""

Figure = dict[str, Any]


def mean(values: list[Tensor]) -> Figure:
    """values: by seed, (rows, tokens)."""
    rows = torch.cat(values).double().mean(dim=1)
    half = Z * rows.std().item() / math.sqrt(len(rows)) if len(rows) > 1 else math.nan
    value = rows.mean().item()
    return {"value": value, "low": value - half, "high": value + half, "rows": len(rows)}


def share(values: list[Tensor]) -> Figure:
    """Of right answers: values as in `mean`, 0 or 1."""
    n = sum(value.numel() for value in values)
    p = sum(value.sum().item() for value in values) / n
    middle = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
    return {"value": p, "low": min(p, middle - half), "high": max(p, middle + half), "answers": n}


def percentile_99(values: list[Tensor]) -> Figure:
    by_seed = [value.flatten().quantile(0.99).item() for value in values]
    return {"value": torch.cat([value.flatten() for value in values]).quantile(0.99).item(), "by_seed": by_seed}


def row(tally: Tally, condition: str, method: str, plan: Plan) -> dict[str, Any]:
    """All figures of a method under a condition; only what was measured is in it."""
    found = {
        key.measure: values for key, values in tally.found.items() if (key.condition, key.method) == (condition, method)
    }
    figures: dict[str, Any] = {"condition": condition, "method": method}
    if "kl" in found:
        figures |= {
            "kl_mean": mean(found["kl"]),
            "kl_p99": percentile_99(found["kl"]),
            "top1": mean(found["top1"]),
            "nll_change": mean(found["nll_change"]),
            "greedy_tokens": mean(found["greedy"]),
            "greedy_whole": share([value == plan.greedy_tokens for value in found["greedy"]]),
        }
    if REFUSED in found:
        figures["refused_chunks"] = int(sum(value.sum().item() for value in found[REFUSED]))
    if "nll" in found:
        figures["nll"] = mean(found["nll"])
    for task in ("copy", "recall"):
        figures[task] = {name.split()[1]: share(values) for name, values in found.items() if name.startswith(task)}
    figures["needle"] = {
        name.split()[1]: grid(values, plan) for name, values in found.items() if name.startswith("needle")
    }
    for task in ("recall", "needle"):
        every = [value for name, values in found.items() if name.startswith(task) for value in values]
        figures[f"{task}_all"] = share([value.flatten() for value in every]) if every else None
    return figures


def grid(values: list[Tensor], plan: Plan) -> dict[str, Figure]:
    """By depth: rows lie depth after depth."""
    by_depth = [value.view(len(plan.needle_depths), -1) for value in values]
    return {f"{depth:g}": share([value[n] for value in by_depth]) for n, depth in enumerate(plan.needle_depths)}


def rows(tally: Tally, plan: Plan) -> list[dict[str, Any]]:
    seen = dict.fromkeys((key.condition, key.method) for key in tally.found)
    return [row(tally, condition, method, plan) for condition, method in seen]


def power(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Whether the benchmark sees what it must see (PAIRS), under each condition."""
    by_name = {(figures["condition"], figures["method"]): figures for figures in found}
    conditions = dict.fromkeys(figures["condition"] for figures in found)
    pairs = [((condition, worse), (condition, better)) for condition in conditions for worse, better in PAIRS]
    return [_beside(by_name[worse], by_name[better]) for worse, better in pairs if {worse, better} <= by_name.keys()]


def _beside(worse: dict[str, Any], better: dict[str, Any]) -> dict[str, Any]:
    kl, other = worse["kl_mean"], better["kl_mean"]
    return {
        "condition": worse["condition"],
        "method": worse["method"],
        "beside": better["method"],
        "kl_times": kl["value"] / max(other["value"], 1e-12),
        "is_seen": kl["low"] > SEEN_TIMES * other["high"],
        "recall_lost": better["recall_all"]["value"] - worse["recall_all"]["value"],
        "needles_lost": better["needle_all"]["value"] - worse["needle_all"]["value"],
    }
