"""The table of benchmarks/eviction_policies.py; written by benchmarks/tables.py."""

from __future__ import annotations

from statistics import mean
from typing import Any

from benchmarks.tables_common import made, table
from benchmarks.tables_cpu import RESULTS, read

POLICIES = ("lru", "s3fifo")


def eviction() -> list[str]:
    """Hit ratios of the policies, a row for each trace and capacity, with the ceilings beside them."""
    if not (RESULTS / "eviction_policies.json").exists():
        return []
    result = read("eviction_policies")
    cells = {(cell["trace"], cell["policy"], cell["sets"]): cell for cell in result["cells"]}
    rows = []
    for name, policy, sets in cells:
        if policy != POLICIES[0]:
            continue
        found = [cells[name, each, sets] for each in POLICIES]
        best = max(cell["hit_ratio"] for cell in found)
        belady, infinite = cells[name, "belady", sets]["hit_ratio"], cells[name, "infinite", 0]["hit_ratio"]
        rows.append([
            name, f"{sets}", *(ratio(cell, cell["hit_ratio"] == best) for cell in found), f"{belady:.1%}",
            f"{infinite:.1%}", f"{best / belady:.0%}",
        ])  # fmt: skip
    when = made(result | {"commit": result["machine"]["commit"][:7]})
    return [
        f"**Eviction policies** (`benchmarks/eviction_policies.py`, {when}; {result['engines']} simulated engines with "
        f"the real Store, Keeper and Evictor, sets of {result['slots']} chunks, {result['requests']} requests of each "
        f"generated trace, {len(result['seeds'])} seeds): chunks found of those that were looked up, the median of the "
        "seeds and in brackets the lowest and the highest. Belady's choice knows the future and evicts single chunks: "
        "a bound for any policy over whole segment sets.",
        "",
        *table(["trace", "capacity in sets", *POLICIES, "Belady, single chunks", "infinite", "best of Belady"], rows),
        "",
        f"{training(result['training'])} {verdict(result)}",
    ]  # fmt: skip


def training(found: dict[str, Any]) -> str:
    """How s3fifo came to its parameters."""
    choices = [row for row in found["choices"] if row["policy"] == "s3fifo"]
    best, worst = choices[0], choices[-1]
    (lru,) = (row["mean"] for row in found["choices"] if row["policy"] == "lru")
    return (
        f"s3fifo's parameters were chosen on other seeds than these ({', '.join(map(str, found['seeds']))}), the best "
        f"of {len(choices)} pairs by the mean over all traces and capacities: a small queue of "
        f"{best['small_fraction']:.0%} of the bytes, left after {best['promoted_uses']} use"
        f"{'s' * (best['promoted_uses'] > 1)} ({best['mean']:.1%}; the worst pair {worst['mean']:.1%}, lru {lru:.1%})."
    )


def verdict(result: dict[str, Any]) -> str:
    """Which policy is the default, and why."""
    found, means = result["verdict"], result["means"]
    each = ", ".join(
        f"{policy} {mean(means[policy]):.1%} ({min(means[policy]):.1%}-{max(means[policy]):.1%})" for policy in POLICIES
    )
    lead = (
        f"s3fifo's lead over lru on the same seed is {100 * found['lead']:+.2f} points in the mean, from "
        f"{100 * min(found['leads']):+.2f} to {100 * max(found['leads']):+.2f}"
    )
    because = {
        True: "not more than it varies by, which was the condition, so over this mix they count as equals, and the "
        "default is the simpler one",
        False: "more than it varies by, which was the condition, so the default is the better one",
    }[found["is_tie"]]
    return (
        f"On the {len(result['seeds'])} seeds of the table, which nothing was chosen on: {each}. {lead}: {because}, "
        f"{found['default']}. By trace: {', '.join(by_trace(result['cells']))}."
    )


def by_trace(cells: list[dict[str, Any]]) -> list[str]:
    """s3fifo's lead on each, over all capacities: the mean of the seeds, the lowest and the highest."""
    found = []
    for name in dict.fromkeys(cell["trace"] for cell in cells):
        of_seeds = {
            policy: [
                mean(values)
                for values in zip(
                    *(cell["of_seeds"] for cell in cells if (cell["trace"], cell["policy"]) == (name, policy)),
                    strict=True,
                )
            ]
            for policy in POLICIES
        }
        leads = [100 * (new - old) for old, new in zip(*of_seeds.values(), strict=True)]
        found.append(f"{name} {mean(leads):+.1f} ({min(leads):+.1f} to {max(leads):+.1f})")
    return found


def ratio(cell: dict[str, Any], is_best: bool) -> str:
    text = f"{cell['hit_ratio']:.1%}"
    return f"{f'**{text}**' if is_best else text} ({cell['lowest']:.1%}-{cell['highest']:.1%})"
