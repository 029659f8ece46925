"""The codecs on a GPU, in benchmarks/README.md: their kernels, and reloads with them, once they were run."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.tables_common import RESULTS, by_length, has, made, milliseconds, read, table, verdict
from benchmarks.tables_gpu import ARENA, HBM_ARENA, counts

GOAL_TB_S = 2.0
GOAL_CASES = ("k4v4 NHD bfloat16 d=128", "k4v3 NHD bfloat16 d=128")
GOAL_KERNELS = ("encode", "verify+decode")
KERNELS = ("encode", "verify", "decode", "verify+decode")


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
    """A table a run."""
    text: list[str] = []
    for run in codec_runs():
        result = read(run)
        lengths = by_length(result)
        shown = [name for name in ("computed", "floor", "kvtier", ARENA, HBM_ARENA)
                 if any(name in of for of in lengths.values())]  # fmt: skip
        rows = [[f"{tokens:,}", *(milliseconds(of[name]) if name in of else "not measured" for name in shown),
                 f"{of['kvtier']['load_bytes_s'] / 1e9:.1f} GB/s"] for tokens, of in lengths.items()]  # fmt: skip
        what = f"{made(result)}; {counts(lengths, [])}; the transfer counts encoded bytes"
        text += [
            *([""] if text else []),
            f"**Reloads with codec {result['extra']['codec']}** ({what}):",
            "",
            *table(["tokens", *(name.replace("kvtier,", "kvtier from the") for name in shown), "transfer"], rows),
        ]
    return text


SECTIONS: tuple[Callable[[], list[str]], ...] = (reloads, kernels)
