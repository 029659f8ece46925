"""The codecs on a GPU, in benchmarks/README.md: their kernels, and reloads with them, once they were run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.tables_common import RESULTS, by_length, has, judged, made, milliseconds, read, table, verdict
from benchmarks.tables_gpu import ARENA, HBM_ARENA

GOAL_TB_S = 2.0
GOAL_CASES = ("k4v4 NHD bfloat16 d=128", "k4v3 NHD bfloat16 d=128")
GOAL_KERNELS = ("encode", "verify+decode")
KERNELS = ("encode", "verify", "decode", "verify+decode")
GOAL_TOKENS = 100_000
GOALS_S = {"from tmpfs": 0.18, "from the disk": 1.2, "from the hbm arena": 0.12}


def kernels() -> list[str]:
    if not has("codec_kernels"):
        return []
    result = read("codec_kernels")
    rows = {(row["case"], row["kernel"]): row for row in result["rows"] if "tiling" not in row}

    def cell(case: str, kernel: str) -> str:
        row = rows[case, kernel]
        return f"{row['tb_s']:.2f} TB/s, {row['percent_of_bound']:.0f}%"

    cases = list(dict.fromkeys(case for case, _ in rows))
    goals = [(case, kernel, rows[case, kernel]["tb_s"]) for case in GOAL_CASES for kernel in GOAL_KERNELS]
    missed = [f"{case} {kernel} {rate:.2f}" for case, kernel, rate in goals if rate < GOAL_TB_S]
    wrong = sorted({f"{row['case']}: {fault}" for row in rows.values() for fault in row["faults"]})
    return [
        f"**Codecs' kernels** (`benchmarks/gpu/codec_kernels.py`, {made(result)}; bytes of the engine's KV over time, "
        f"and the share of what their bytes allow at the rate of a device copy, {result['copy_gb_s']:,.0f} GB/s):",
        "",
        *table(["pages", *KERNELS], [[case, *(cell(case, kernel) for kernel in KERNELS)] for case in cases]),
        "",
        f"The goal, {GOAL_TB_S} TB/s for encode and for verify+decode of k4v4 and k4v3, is {verdict(not missed)}"
        f"{': ' + '; '.join(missed) if missed else ''}. Wrong bytes and errors beyond theory: "
        f"{'; '.join(wrong) or 'none'}.",
    ]  # fmt: skip


def codec_runs() -> list[str]:
    """Names of runs from tmpfs with a codec other than raw."""
    names = sorted(path.stem for path in RESULTS.glob("ttft_tmpfs_*.json"))
    return [name for name in names if read(name).get("extra", {}).get("codec", "raw") != "raw"]


def reloads() -> list[str]:
    """A table a codec: what a fresh process reloads from tmpfs and from the disk, and one from its own hbm arena."""
    text: list[str] = []
    for run in codec_runs():
        codec = read(run)["extra"]["codec"]
        runs = [name for name in (run, f"ttft_disk_{codec}") if has(name)]
        places = [_places(name, "from the disk" if "disk" in name else "from tmpfs") for name in runs]
        of = {place: rows for found in places for place, rows in found.items()}
        lengths = sorted({tokens for rows in of.values() for tokens in rows})
        cells = [[f"{tokens:,}", *(_cell(of[place].get(tokens)) for place in of)] for tokens in lengths]
        goals = [(of[place][GOAL_TOKENS], goal_s, place) for place, goal_s in GOALS_S.items()
                 if GOAL_TOKENS in of.get(place, {})]  # fmt: skip
        said = [(row["ttft_s"] <= goal_s, f"{GOAL_TOKENS:,} tokens {place} {1000 * row['ttft_s']:,.0f} ms "
                 f"(goal {1000 * goal_s:,.0f})") for row, goal_s, place in goals]  # fmt: skip
        how = "; ".join(
            f"{'disk' if 'disk' in name else 'tmpfs'}: {made(read(name))}, {_prompts(name)}" for name in runs
        )
        text += [
            *([""] if text else []),
            f"**Reloads with codec {codec}** ({how}; time to the first token in ms, and GB/s of encoded bytes):",
            "",
            *table(["tokens", *of], cells),
            *(["", judged(said)] if said else []),
        ]
    return text


def _places(run: str, place: str) -> dict[str, dict[int, dict[str, Any]]]:
    """Where reloads came from -> tokens -> row."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for tokens, of in by_length(read(run)).items():
        for name, where in (("kvtier", place), (ARENA, "from the host arena"), (HBM_ARENA, "from the hbm arena")):
            if name in of:
                found.setdefault(where, {})[tokens] = of[name]
    return found


def _prompts(run: str) -> str:
    n = max(len(row["all_s"]) for row in read(run)["rows"] if row["system"] == "kvtier")
    return f"{n} prompt{'s' * (n > 1)} of each length"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    rate = row.get("load_bytes_s")
    return milliseconds(row) + (f", {rate / 1e9:.1f} GB/s" if rate else "")


SECTIONS: tuple[Callable[[], list[str]], ...] = (reloads, kernels)
