"""The codecs on a GPU, in benchmarks/README.md: their kernels, and reloads with them, once they were run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.tables_common import (
    MARK,
    RESULTS,
    by_length,
    has,
    judged,
    made,
    mark,
    milliseconds,
    read,
    table,
    verdict,
)
from benchmarks.tables_gpu import HBM_ARENA
from benchmarks.tables_tmpfs import ARENA

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
        f"{': ' + '; '.join(missed) if missed else ''}. On the device alone, without waiting for the host's "
        f"next launch: {_on_device(rows)}. Wrong bytes and errors beyond theory: {'; '.join(wrong) or 'none'}.",
        *_tilings(),
    ]  # fmt: skip


def _on_device(rows: dict[tuple[str, str], dict[str, Any]]) -> str:
    return "; ".join(
        f"{kernel} " + ", ".join(f"{case.split()[0]} {rows[case, kernel]['device_tb_s']:.2f}" for case in GOAL_CASES)
        for kernel in GOAL_KERNELS
    )


def _tilings() -> list[str]:
    """Of encode: what was tried, by both clocks."""
    if not has("encode_variants"):
        return []
    result = read("encode_variants")
    rows: dict[str, list[str]] = {}
    for row in result["rows"]:
        rows.setdefault(row["variant"], [row["variant"]]).append(f"{row['tb_s']:.2f} ({row['device_tb_s']:.2f})")
    return [
        "",
        f"Ways of encoding (`benchmarks/gpu/encode_variants.py`, {made(result)}; TB/s, in brackets on the device "
        'alone; "whole" is the encoding by whole programs; the bytes of all are the same):',
        "",
        *table(["", "k4v4", "k4v3"], list(rows.values())),
    ]


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
        said = [(row["ttft_s"] <= goal_s, f"{GOAL_TOKENS:,} tokens {place} {1000 * row['ttft_s']:,.0f} ms "
                 f"(goal {1000 * goal_s:,.0f})") for row, goal_s, place in _goals(of)]  # fmt: skip
        counts = ", ".join(f"{'disk' if 'disk' in name else 'tmpfs'} {_prompts(name)}" for name in runs)
        whose = "; ".join(f"{'disk' if 'disk' in name else 'tmpfs'}: {made(read(name))}" for name in runs)
        how = f"{whose}; of each length {counts}"
        text += [
            *([""] if text else []),
            f"**Reloads with codec {codec}** ({how}; time to the first token in ms, and GB/s of encoded bytes):",
            "",
            *table(["tokens", *of], cells),
            *(["", judged(said)] if said else []),
        ]
    return text


def in_short() -> list[str]:
    """A line a codec that was run in an engine, and one on the kernels."""
    lines = []
    for run in codec_runs():
        codec = read(run)["extra"]["codec"]
        of, marks = _places(run, "from tmpfs"), mark(run)
        if has(f"ttft_disk_{codec}"):
            of |= _places(f"ttft_disk_{codec}", "from the disk")
            marks = marks or mark(f"ttft_disk_{codec}").replace(MARK, f"{MARK} (the disk)")
        times = [f"{1000 * row['ttft_s']:,.0f} ms {place} (goal {1000 * goal_s:,.0f}: "
                 f"{verdict(row['ttft_s'] <= goal_s)})" for row, goal_s, place in _goals(of)]  # fmt: skip
        if times:
            lines.append(f"**Codec {codec}**{marks}, {GOAL_TOKENS:,} tokens: {', '.join(times)}.")
    if has("codec_kernels"):
        rows = {(row["case"], row["kernel"]): row for row in read("codec_kernels")["rows"]}
        rates = {kernel: [rows[case, kernel]["tb_s"] for case in GOAL_CASES] for kernel in GOAL_KERNELS}
        said = [f"{kernel} {' and '.join(f'{rate:.2f}' for rate in of)} TB/s (goal {GOAL_TB_S:.0f}: "
                f"{verdict(min(of) >= GOAL_TB_S)})" for kernel, of in rates.items()]  # fmt: skip
        lines.append(
            f"**Codecs' kernels**{mark('codec_kernels')}, k4v4 and k4v3, of the engine's bytes: {', '.join(said)}."
        )
    return lines


def _goals(of: dict[str, dict[int, dict[str, Any]]]) -> list[tuple[dict[str, Any], float, str]]:
    return [(of[place][GOAL_TOKENS], goal_s, place) for place, goal_s in GOALS_S.items()
            if GOAL_TOKENS in of.get(place, {})]  # fmt: skip


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
    return f"{n} prompt{'s' * (n > 1)}"


def _cell(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    rate = row.get("load_bytes_s")
    return milliseconds(row) + (f", {rate / 1e9:.1f} GB/s" if rate else "")


SECTIONS: tuple[Callable[[], list[str]], ...] = (reloads, kernels)
