"""The README's tables of what ran on a GPU, and for benchmarks/README.md a line for each other question."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks import tables_codecs, tables_gpu, tables_gpu_checks, tables_tmpfs
from benchmarks.gpu.report import ms
from benchmarks.tables_common import (
    MARK,
    Rows,
    by_length,
    forwards,
    has,
    judged,
    made,
    mark,
    read,
    span,
    table,
    verdict,
)
from benchmarks.tables_gpu import HBM_ARENA
from benchmarks.tables_tmpfs import ARENA, ARENA_GOAL_S, TTFT_GOALS_S
from benchmarks.versus.contestants import CONTESTANTS
from benchmarks.versus.judge import OURS, PEERS, Entries

K4V4 = OURS[1]


def reloads() -> list[str]:
    result, lengths = read(tables_tmpfs.RUN), tables_tmpfs.reloads()
    beside = [name for name in (K4V4, *PEERS) if any(name in of for of in lengths.values())]
    rows = []
    for tokens, of in lengths.items():
        row = [f"{tokens:,}", *(short(of[name]) for name in ("computed", "floor")),
               goal(of["kvtier"], TTFT_GOALS_S.get(tokens)), goal(of.get(ARENA), ARENA_GOAL_S)]  # fmt: skip
        row += [short(of.get(name)) for name in beside]
        rows.append(row)
    gpu = result["machine"]["gpus"][0].split(",")[0]
    return [
        f"**Time to the first token of a stored prompt, ms** (one {gpu}, {result['machine']['cores']} processors, "
        f"vLLM {result['versions']['vllm']}, Llama-3.1-8B's dimensions in bf16, {forwards(result['settings']['llm'])}, "
        "one request at a time; from tmpfs a fresh process reloads what another one saved, from the arena the one that "
        f"saved{tables_tmpfs.arena_of()}; medians, of {_counts(lengths)}; {made(result)}; -: not run):",
        "",
        *table(["tokens", "computed", "floor: hit in vLLM's own cache", "kvtier from tmpfs",
                "kvtier from the host arena", *(_title(name) for name in beside)], rows),
        "",
        f"{_judged(tables_tmpfs.goals_of(lengths))} {_elsewhere()}",
        "",
        _on_the_second(),
        "",
        "![Time to the first token over tokens, of each system](benchmarks/results/gpu/versus.svg)",
    ]  # fmt: skip


def _title(system: str) -> str:
    return CONTESTANTS[system].title + (" (lossy)" if system == K4V4 else "")


def _on_the_second() -> str:
    """Where vLLM's own tiering has more processors, kvtier is less far ahead of it."""
    result = read(tables_tmpfs.SECOND)
    entries = Entries(result["runs"], result["settings"]["token_bytes"])
    cells, lengths = entries.cells(), entries.lengths(tables_tmpfs.PLACE)
    times = []
    for name in (*OURS, "native"):
        shown = " / ".join(ms(cells[tables_tmpfs.PLACE, tokens, name].ttft) for tokens in lengths)
        times.append(f"{CONTESTANTS[name].title} {shown}")
    return (
        f"On a machine with {result['machine']['cores']} processors ({made(result)}), from tmpfs, "
        f"{' / '.join(f'{tokens:,}' for tokens in lengths)} tokens: {'; '.join(times)} ms. "
        "[Both tables whole, and from a disk](benchmarks/README.md#beside-its-peers)."
    )


def _counts(lengths: Rows) -> str:
    of = lengths[min(lengths)]
    return f"{len(of['kvtier']['all_s'])} (computed and floor {len(of['computed']['all_s'])})"


def _elsewhere() -> str:
    """One host is no truth."""
    others = [by_length(read(name)) for name in tables_tmpfs.OTHER_HOSTS]
    spans = [span([1000 * of[tokens]["kvtier"]["ttft_s"] for of in others]) for tokens in others[0]]
    return (
        f"On {len(others)} other machines lent, with earlier code and mostly eager: {' / '.join(spans)} ms for "
        f"{' / '.join(f'{tokens:,}' for tokens in others[0])} tokens."
    )


def from_disk() -> list[str]:
    """The same from a disk, where bytes and not kvtier decide whether a reload is worth it."""
    result = read("ttft_disk")
    lengths = by_length(result)
    rates = [rate / 1e9 for of in lengths.values() for rate in of["kvtier"]["all_read_bytes_s"]]
    times = {name: " / ".join(short(of[name]) for of in lengths.values()) for name in ("kvtier", "computed")}
    slower = sum(of["kvtier"]["ttft_s"] > of["computed"]["ttft_s"] for of in lengths.values())
    return [
        f"**From a disk** that reads {span(rates, 1)} GB/s ({made(result)}), {' / '.join(f'{n:,}' for n in lengths)} "
        f"tokens took {times['kvtier']} ms, where computing took {times['computed']}: slower in {slower} of "
        f"{len(lengths)}. The benchmark forces these loads; by itself (`min_load_tokens: auto`) an engine leaves "
        "such hits to be computed, from its first request on if one like it has computed before."
    ]


def rows_of(run: str) -> Rows:
    return by_length(read(run))


def short(row: dict[str, Any] | None) -> str:
    return "-" if row is None else f"{1000 * row['ttft_s']:,.0f}"


def goal(row: dict[str, Any] | None, goal_s: float | None) -> str:
    """A time, and whether it is what it has to be."""
    if row is None or goal_s is None:
        return short(row)
    return f"{short(row)} (goal {1000 * goal_s:,.0f}: {verdict(row['ttft_s'] <= goal_s)})"


def _judged(goals: list[tuple[bool, str]]) -> str:
    """What was missed by name; of the others only how many."""
    missed = [found for found in goals if not found[0]]
    n_met = len(goals) - len(missed)
    return f"{judged(missed)} Met: {n_met} of {len(goals)} goals, those of the transfer's rate among them.".strip()


def others() -> list[str]:
    """A line for each question, and what has no answer yet."""
    lines = [_disk(), _saving(), _kernels(), _equality(), _load_mix(), *_two_gpus()]
    lines += [*tables_codecs.in_short(), *_quality()]
    runs = tables_codecs.codec_runs()
    measured = {
        "two GPUs": has("two_gpus_equal"),
        "the codecs' kernels": has("codec_kernels"),
        "an engine with a codec": bool(runs),
        "what the codecs cost in quality": has("quality"),
        "the hbm arena": any(HBM_ARENA in of for run in runs for of in rows_of(run).values()),
    }
    lacking = [what for what, is_there in measured.items() if not is_there]
    return [
        "**In short**; each question stands further down with its run, its ceiling and its spread:",
        "",
        *(f"- {line}" for line in lines),
        *([f"- In no result of a GPU yet: {', '.join(lacking)}."] if lacking else []),
        *(
            [f"- {MARK} on a machine of four GPUs while other experiments ran on the other ones."]
            if any(MARK in line for line in lines)
            else []
        ),
    ]


def _quality() -> list[str]:
    if not has("quality"):
        return []
    result = read("quality")
    rows = {row["method"]: row for row in result["rows"] if row["condition"] == "as trained"}
    shown = "; ".join(
        f"{name} {rows[name]['kl_mean']['value']:.1e} and {rows[name]['top1']['value']:.1%}"
        for name in ("raw", "fp8", "k4v4", "k4v3", "k2v2")
    )
    return [
        f"**Quality**{mark('quality')}, one small Llama trained for it, KL to bf16 KV in nats and same top token: "
        f"{shown}. Nothing is said of other models ([plot](results/gpu/quality.svg))."
    ]


def _disk() -> str:
    rows = [of["kvtier"] for of in tables_gpu.disk_rows().values()]
    shares = [row["load_percent_of_limit"] for row in rows]
    times, goal_times = [row["times_limit"] for row in rows], tables_gpu.DISK_GOAL_TIMES
    runs = [rows_of(name) for name in tables_gpu.DISK_RUNS]
    worst = max(time for run in runs for of in run.values() for time in of["kvtier"]["all_times_limit"])
    return (
        f"**From the disk**{mark('ttft_disk')} a reload moves at {span(shares)}% of direct reads and takes over the "
        f"floor {span(times, 2)} times what its bytes take at that rate (goal {goal_times}: "
        f"{verdict(max(times) <= goal_times)}; in single reloads of other runs up to {worst:.2f})."
    )


def _saving() -> str:
    found = read("save_cost")["summary"]
    row = tables_gpu_checks.decoding(read("save_cost"))[0]
    return (
        f"**Saving**{mark('save_cost')} changes the cold time to the first token by "
        f"{found['ttft_loss_percent']:+.1f}% and writes at {found['durable_percent_of_direct']:.0f}% of bare direct "
        f"writes; {row[0]}: {row[3]} (goal {row[4]})."
    )


def _kernels() -> str:
    result = read("kernels")
    least = result["targets"]["percent_of_copy"]
    moves = [row for row in result["rows"] if row["kernel"] in ("gather", "scatter")]
    usual = [f"{row['percent_of_copy']:.0f}%" for row in moves if row["case"] == tables_gpu_checks.KERNEL_CASES[0]]
    below = sum(row["percent_of_copy"] < least for row in moves)
    return (
        f"**Kernels**: gather and scatter of vLLM's usual pages reach {' and '.join(usual)} of a device copy (goal "
        f"{least:.0f}%); of all {len(moves)} measured, {below} are below the goal."
    )


def _equality() -> str:
    names = [name for name in tables_gpu_checks.EQUALITY_MODELS if has(name)]
    runs = [found for name in names for found in read(name)["results"].values()]
    cases = [case for found in runs for case in found["cases"]]
    good = sum(case["is_hit"] and case["same_tokens"] for case in cases)
    blocks = [found["blocks"] for found in runs]
    wrong = sum(of["wrong"] + of["unknown"] for of in blocks)
    return (
        f"**Equality**: {good} of {len(cases)} cases hit what they should and answer as after vLLM's own prefix hit; "
        f"{sum(of['equal'] for of in blocks):,} loaded blocks are bit-equal to what was saved, {wrong} are not."
    )


def _load_mix() -> str:
    result = read("load_mix")
    found, requests = result["result"], result["shape"]["requests"]
    text = (
        f"**{requests} requests at once on a tier that evicts**: {found['same_answers']} of {found['answers']} answers "
        f"are those of an engine without the tier{_control(found)}; of the loaded blocks "
        f"{found['blocks']['equal']:,} are bit-equal, "
        f"{found['blocks']['wrong'] + found['blocks']['unknown']} are not; failed loads, computed instead: "
        f"{found['failed_loads']}."
    )
    return text + ("" if result["good"] else " **Not all of it is as it must be.**")


def _control(found: dict[str, Any]) -> str:
    """How many of its own answers that engine gives when it is asked again."""
    if "control" not in found:
        return " (no control in this run)"
    again = [control["same_answers"] for control in found["control"].values()]
    return f", which gives {' and '.join(map(str, again))} of its own when it is asked again (the control)"


def _two_gpus() -> list[str]:
    if not has("two_gpus_equal"):
        return []
    found = read("two_gpus_equal")["equal"]
    ways = ", ".join(f"TP={way['stored_at']} to TP={way['loaded_at']}" for way in found)
    wrong = sum(way["blocks"]["wrong"] + way["blocks"]["unknown"] for way in found)
    return [
        f"**Two GPUs**, {ways}: {sum(way['blocks']['equal'] for way in found):,} loaded blocks are bit-equal to what "
        f"was saved, {wrong} are not; failed loads: {sum(way['failed_loads'] for way in found)}."
    ]


SECTIONS: tuple[Callable[[], list[str]], ...] = (reloads, from_disk)
