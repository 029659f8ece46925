"""The tables of benchmarks/README.md: what ran on a GPU, from benchmarks/results/gpu/*.json; see benchmarks/tables.py.

A table holds one run, or calls on one machine minutes apart, of the same code: else rows are never side by side.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks import tables_gpu_checks, tables_tmpfs
from benchmarks.tables_common import (
    CHUNK_TOKENS,
    NAMES,
    PEERS,
    RESULTS,
    Rows,
    by_length,
    forwards,
    has,
    judged,
    made,
    milliseconds,
    read,
    table,
)

DISK_GOAL_TIMES = 1.15
HBM_ARENA = "kvtier, hbm arena"
DISK_RUNS = ("ttft_disk", "ttft_disk_earlier", "ttft_disk_short")


def same_code() -> str | None:
    """The commit that all results are of; None where they differ, or one does not say."""
    commits = {read(path.stem).get("commit") for path in RESULTS.glob("*.json")}
    return commits.pop() if len(commits) == 1 else None


def machine() -> list[str]:
    result, commit = read("versus"), same_code()
    gpu, versions = result["machine"]["gpus"][0].split(",")[0], result["versions"]
    what = f"{result['machine']['cores']} cores, vLLM {versions['vllm']}, torch {versions['torch']}"
    differ = "the machine lent and in the code" if commit is None else "the machine lent"
    code = "" if commit is None else f" All with kvtier at {commit}."
    return [
        f"One {gpu} in a virtual machine ({what}); the reloads from tmpfs on {result['date']}. "
        f"Times to the first token: Llama-3.1-8B's dimensions, bf16, {forwards(result['settings']['llm'])}, one "
        "request at a time, a fresh process that reloads what another one saved; "
        "milliseconds, the median and in brackets the fastest and the slowest. A table holds one run; runs differ in "
        f"{differ}, so compare within a table only.{code}"
    ]


def counts(lengths: Rows, others: list[str]) -> str:
    of = lengths[min(lengths)]
    n = len(of["kvtier"]["all_s"])
    text = f"{n} prompt{'s' * (n > 1)} of each length"
    return text + "".join(f", {NAMES[name]} {len(of[name]['all_s'])}" for name in others)


def _slower(lengths: Rows, others: list[str]) -> str:
    """Where another system was quicker, said in words."""
    found = [f"{NAMES[name]} at {tokens:,} tokens" for tokens, of in lengths.items() for name in others
             if name in of and of[name]["ttft_s"] < of["kvtier"]["ttft_s"]]  # fmt: skip
    return f" **kvtier was slower than {', '.join(found)}.**" if found else ""


def disk_rows() -> Rows:
    """Of each length the run that asked for most prompts: a disk's rate wanders, and one prompt says little."""
    best: Rows = {}
    for name in DISK_RUNS:
        for tokens, of in by_length(read(name)).items() if has(name) else ():
            if tokens not in best or len(of["kvtier"]["all_s"]) > len(best[tokens]["kvtier"]["all_s"]):
                best[tokens] = of
    return dict(sorted(best.items()))


def disk() -> list[str]:
    found = [_disk_run(read(name)) for name in DISK_RUNS if has(name)]
    goals = [(of["kvtier"]["times_limit"] <= DISK_GOAL_TIMES,
              f"{tokens:,} tokens {of['kvtier']['times_limit']:.2f} (goal {DISK_GOAL_TIMES}; median of "
              f"{len(of['kvtier']['all_s'])})") for tokens, of in disk_rows().items()]  # fmt: skip
    return [
        *(line for lines in found for line in [*lines, ""]),
        f"Of each length the run of most prompts: {judged(goals)}",
    ]


def _disk_run(result: dict[str, Any]) -> list[str]:
    lengths = by_length(result)
    others = [name for name in PEERS if name in lengths[min(lengths)]]
    rows, again = [], []
    for tokens, of in lengths.items():
        row = of["kvtier"]
        reads = [value / 1e9 for value in row["all_read_bytes_s"]]
        times = ", ".join(f"{value:.2f}" for value in row["all_times_limit"])
        rows.append([f"{tokens:,}", *(milliseconds(of[name]) for name in ("computed", "floor", "kvtier", *others)),
                     f"{row['load_bytes_s'] / 1e9:.2f} GB/s, {row['load_percent_of_limit']:.0f}%",
                     f"{row['read_bytes_s'] / 1e9:.2f} ({min(reads):.2f}-{max(reads):.2f}) GB/s",
                     f"{row['times_limit']:.2f} ({times})"])  # fmt: skip
    for row in result["results"]["kvtier"]["reload"]["first_tokens"]:
        again += [read_["again_bytes_s"] / read_["bytes_s"] for read_ in row["reads"]]
    return [
        f"**Reloads from the disk** ({made(result)}; {counts(lengths, others)}):",
        "",
        *table(["tokens", "computed", "floor", "kvtier", *(NAMES[name] for name in others),
                "transfer, and share of direct reads", "direct reads around the reload",
                "time over the floor / (bytes at the direct rate), each"], rows),
        "",
        f"The disk's rate wanders, so it is taken right before and right after each reload, and the "
        f"mean of both counts: direct reads of {result['probe_tokens']:,} tokens' records each, which kvtier wrote to "
        "the same disk for prompts that nobody asks for (16 threads, 1 MiB a read). The same bytes read once more came "
        f"{median(again):.2f} times as fast.{_slower(lengths, others)}",
    ]  # fmt: skip


TWO_GOALS = {"two_gpus_ttft": ("raw", 50.0), "two_gpus_ttft_k4v4": ("k4v4", 100.0)}
"""Times as fast as computing, at the largest length."""
DDN_TIMES = 43.7
"""Of DDN's table (LMCache on its Lustre, 100K tokens, 44,384 ms and 1,015 ms), on another machine."""


def two_ttft() -> list[str]:
    """Times at TP=2, of each codec that was run."""
    runs = {name: read(name) for name in TWO_GOALS if has(name)}
    if not runs:
        return []
    text, judgements = [], []
    for name, result in runs.items():
        codec, goal = TWO_GOALS[name]
        lengths = by_length(result)
        rows = []
        for tokens, of in lengths.items():
            cells = [milliseconds(of[kind]) if kind in of else "" for kind in ("computed", "floor", "kvtier")]
            times = f"{of['computed']['ttft_s'] / of['kvtier']['ttft_s']:.1f}x" if "computed" in of else ""
            rows.append([f"{tokens:,}", *cells, times, _transfer(of["kvtier"]["load_bytes_s"], result)])
        last = lengths[max(lengths)]
        if "computed" in last:
            ratio = last["computed"]["ttft_s"] / last["kvtier"]["ttft_s"]
            judgements.append((ratio >= goal, f"{max(lengths):,} tokens {codec} {ratio:.1f}x (goal {goal:.0f}x)"))
        way = "one process computed, saved and reloaded from the folder" if result.get("one_process") else (
            "a fresh process reloaded what another one saved")  # fmt: skip
        text += [
            f"**Two GPUs, times to the first token at TP=2, {codec}** ({made(result)}; Llama-3.1-70B's dimensions, "
            f"{forwards(result.get('llm', {}))}; from tmpfs; {way}; {_machine(result)}; {_reloads(lengths)}, each "
            f"computed once{_chunks(result['extra'])}):",
            "",
            *table(["tokens", "computed", "floor", "kvtier from tmpfs", "computed / kvtier",
                    "transfer of each GPU" + ", and share of copies at once" * ("%" in rows[-1][-1])], rows),
            "",
        ]  # fmt: skip
    note = (
        f"DDN's slides have {DDN_TIMES}x at 100K tokens, of a 405B model with LMCache on their Lustre: other machines, "
        "and figures of theirs."
    )
    return [*text, f"{judged(judgements)} {note}"]


def _reloads(lengths: Rows) -> str:
    n_times = len(lengths[min(lengths)]["kvtier"]["all_s"])
    return f"{n_times} reload{'s' * (n_times > 1)} of each length"


def _machine(result: dict[str, Any]) -> str:
    gpus = result["machine"]["gpus"]
    return f"{len(gpus)} {gpus[0].split(',')[0]}, {result['machine']['cores']} cores"


def _transfer(bytes_s: float, result: dict[str, Any]) -> str:
    """The ceiling is what each GPU copies while the other does too, if that was measured on the same machine."""
    text = f"{bytes_s / 1e9:.1f} GB/s"
    beside = read("at_once") if has("at_once") else None
    if beside is None or beside["machine"]["boot"] != result["machine"]["boot"]:
        return text
    copies = next(row for row in beside["rows"] if row["what"] == "copies" and len(row["gpus"]) > 1)
    return f"{text}, {100 * bytes_s / min(copies['each_bytes_s']):.0f}%"


def _chunks(extra: dict[str, Any]) -> str:
    """What is not as it is by default."""
    tokens = extra.get("chunk_tokens", CHUNK_TOKENS)
    return "" if tokens == CHUNK_TOKENS else f"; chunks of {tokens} tokens"


def at_once() -> list[str]:
    """What each GPU loses by the other."""
    if not has("at_once"):
        return []
    result = read("at_once")
    rows: dict[str, list[str]] = {}
    for row in result["rows"]:
        name = f"`{json.dumps(row['extra'])}`" if row["extra"] else "as calibrated"
        each = " and ".join(f"{rate / 1e9:.1f}" for rate in row["each_bytes_s"])
        rows.setdefault(name, [name]).append(each)
    first = result["rows"][0]["extra"]
    what = [f"{row['what']}: {'GPU ' + str(row['gpus'][0]) + ' alone' if len(row['gpus']) == 1 else 'at once'}"
            for row in result["rows"] if row["extra"] == first]  # fmt: skip
    return [
        f"**Two GPUs at once, without an engine** (`benchmarks/gpu/at_once.py`, {made(result)}; {result['chunks']} "
        "chunks of 32 MiB for each GPU, from tmpfs, verified; GB/s):",
        "",
        *table(["settings", *what], list(rows.values())),
    ]


SECTIONS: tuple[Callable[[], list[str]], ...] = (
    machine, tables_tmpfs.ttft, disk, two_ttft, at_once, tables_gpu_checks.kernels, tables_gpu_checks.verification,
    tables_gpu_checks.saving, tables_gpu_checks.equality, tables_gpu_checks.two_gpus, tables_gpu_checks.load_mix,
    tables_gpu_checks.loads_alone, tables_gpu_checks.demo,
)  # fmt: skip
