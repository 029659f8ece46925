"""Reloads of raw KV from tmpfs and from the host arena against their goals: results/gpu/versus, ttft_arena.

Both are of machines alike, but of two; what others gave stands below them.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.tables_common import Rows, by_length, forwards, judged, made, milliseconds, read, table
from benchmarks.versus.judge import OURS, PEERS, Entries

RUN = "versus"
"""The latest comparison with all other systems, whose runs of kvtier these are."""
SECOND = "versus_32"
"""The same without LMCache, on a machine of twice as many processors."""
TTFT_GOALS_S = {8192: 0.05, 32768: 0.13, 100_000: 0.36}
ARENA_GOAL_S = 0.34
TRANSFER_GOAL_PERCENT = 85.0
PLACE = "tmpfs"
ARENA = "kvtier, host arena"
OTHER_HOSTS = tuple(f"ttft_tmpfs_{number}_host" for number in ("first", "second", "third", "fourth", "fifth"))


def reloads() -> Rows:
    """By length and system, in the form of benchmarks.gpu.ttft; peers that loaded nothing are left out.

    kvtier's rows have the bytes a second of their transfers (medians), and the percentage of the ceiling.
    """
    result = read(RUN)
    entries = Entries(result["runs"], result["settings"]["token_bytes"])
    cells = entries.cells()
    rows: Rows = {}
    for tokens in entries.lengths(PLACE):
        computed, own = entries.bare_times(tokens)
        of = {"computed": _row("computed", tokens, 0, computed), "floor": _row("floor", tokens, tokens, own)}
        for name in (*OURS, *PEERS):
            cell = cells.get((PLACE, tokens, name))
            if cell is not None and cell.has_loaded:
                of[name] = _row(name, tokens, cell.hit_tokens, cell.times)
        cell = cells[PLACE, tokens, "kvtier"]
        assert cell.ceiling is not None, "the ceilings are of the same run"
        of["kvtier"]["load_bytes_s"] = median(entries.transfers(PLACE, tokens, "kvtier"))
        of["kvtier"]["load_percent_of_limit"] = 100 * of["kvtier"]["load_bytes_s"] / cell.ceiling
        rows[tokens] = of
    return rows | _arena(rows)


def _row(system: str, tokens: int, hit_tokens: int, seconds: list[float]) -> dict[str, Any]:
    return {"system": system, "tokens": tokens, "hit_tokens": hit_tokens, "ttft_s": median(seconds), "all_s": seconds}


def _arena(rows: Rows) -> Rows:
    """The largest length with the arena's row, where that is of a machine alike."""
    tokens, arena = max(rows), read("ttft_arena")
    if any(arena["machine"][what] != read(RUN)["machine"][what] for what in ("gpus", "cores")):
        return {}
    return {tokens: rows[tokens] | {ARENA: by_length(arena)[tokens][ARENA]}}


def arena_of() -> str:
    """Which machine and code its row is of, where not those of the others."""
    arena = read("ttft_arena")
    return "" if arena["machine"]["boot"] == read(RUN)["machine"]["boot"] else f", on a machine alike ({made(arena)})"


def goals_of(rows: Rows) -> list[tuple[bool, str]]:
    """Of reloads from tmpfs: whether each was met, and which it is."""
    goals = []
    for tokens, of in rows.items():
        timed = [
            (of["kvtier"], TTFT_GOALS_S.get(tokens), "from tmpfs"),
            (of.get(ARENA), ARENA_GOAL_S, "from the host arena"),
        ]
        goals += [(row["ttft_s"] <= goal, f"{tokens:,} tokens {place} {1000 * row['ttft_s']:,.0f} ms "
                   f"(goal {1000 * goal:,.0f})") for row, goal, place in timed if row and goal]  # fmt: skip
        percent = of["kvtier"]["load_percent_of_limit"]
        goals.append((percent >= TRANSFER_GOAL_PERCENT, f"the transfer of {tokens:,} tokens {percent:.0f}% of the "
                      f"ceiling (goal {TRANSFER_GOAL_PERCENT:.0f}%)"))  # fmt: skip
    return goals


def ttft() -> list[str]:
    result, rows = read(RUN), reloads()
    n_times = len(rows[min(rows)]["kvtier"]["all_s"])
    lines = []
    for tokens, of in rows.items():
        transfer = f"{of['kvtier']['load_bytes_s'] / 1e9:.1f} GB/s, {of['kvtier']['load_percent_of_limit']:.0f}%"
        times = (milliseconds(of[name]) if name in of else "" for name in ("computed", "floor", "kvtier", ARENA))
        lines.append([f"{tokens:,}", *times, transfer])
    return [
        f"**Reloads from tmpfs and from the host arena** ({made(result)}; raw KV, {n_times} fresh processes; the runs "
        "of the comparison above, and its ceilings):",
        "",
        *table(["tokens", "computed", "floor: hit in vLLM's prefix cache", "kvtier from tmpfs",
                "kvtier from the host arena", "transfer, and share of the ceiling"], lines),
        "",
        f"{judged(goals_of(rows))} The transfer is timed from the start of a load's job to its verified blocks; what "
        "it lacks is said [at the end](#what-no-table-has). The arena (16 GiB, `host.admit: always`) is that of the "
        f"process that saved, vLLM's prefix cache emptied{arena_of()}.",
        *_other_hosts(),
    ]  # fmt: skip


def _other_hosts() -> list[str]:
    """The same asked on other machines lent, so that one lucky or unlucky host is not taken for the truth."""
    rows = []
    for name in OTHER_HOSTS:
        result = read(name)
        lengths = by_length(result)
        columns = [
            " / ".join(f"{1000 * of[system]['ttft_s']:,.0f}" for of in lengths.values() if system in of)
            for system in ("computed", "floor", "kvtier", ARENA)
        ]
        shares = " / ".join(f"{of['kvtier']['load_percent_of_limit']:.0f}%" for of in lengths.values())
        rows.append([made(result), forwards(result.get("llm", {})), *columns, shares])
    titles = ["code and day", "forwards", "computed", "floor", "kvtier from tmpfs", "host arena",
              "transfer, of pinned copies"]  # fmt: skip
    tokens = " / ".join(f"{tokens:,}" for tokens in by_length(read(OTHER_HOSTS[0])))
    return ["", f"The same on {len(rows)} other machines lent before ({tokens} tokens, ms):", "", *table(titles, rows)]
