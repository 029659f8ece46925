"""The tables of benchmarks/README.md: what ran on a GPU, from benchmarks/results/gpu/*.json; see benchmarks/tables.py.

A table holds one run, or calls on one machine minutes apart, of the same code: else rows are never side by side.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from benchmarks import tables_gpu_checks
from benchmarks.tables_common import (
    NAMES,
    PEERS,
    RESULTS,
    by_length,
    forwards,
    has,
    judged,
    made,
    milliseconds,
    read,
    table,
)

TTFT_GOALS_S = {8192: 0.05, 32768: 0.13, 100_000: 0.36}
ARENA_GOAL_S = 0.34
TRANSFER_GOAL_PERCENT = 85.0
DISK_GOAL_TIMES = 1.15
ARENA, HBM_ARENA = "kvtier, host arena", "kvtier, hbm arena"
CEILINGS = ("ceilings", "ceilings_again")
OTHER_HOSTS = ("ttft_tmpfs_first_host", "ttft_tmpfs_third_host", "ttft_tmpfs_fourth_host", "ttft_tmpfs_fifth_host")
DISK_RUNS = ("ttft_disk", "ttft_disk_short")
Rows = dict[int, dict[str, dict[str, Any]]]


def ceiling_of(result: dict[str, Any], ceilings: dict[str, Any]) -> float:
    """Bytes a second; the smaller of PCIe and the folder's reads. Raises when the ceilings are of another run."""
    limit = min(ceilings["copies"]["h2d_bytes_s"], ceilings["folders"][result["folder"]]["reads"]["bytes_s"])
    if limit != result["limit_bytes_s"]:
        raise ValueError(f"{result['folder']}: measured beside {result['limit_bytes_s']}, not {limit}")
    return float(limit)


def ceilings_beside(result: dict[str, Any]) -> dict[str, Any]:
    """The ceilings of the same run. Raises ValueError where there are none."""
    for ceilings in (read(name) for name in CEILINGS if has(name)):
        try:
            ceiling_of(result, ceilings)
        except (KeyError, ValueError):
            continue
        return dict(ceilings)
    raise ValueError(f"{result['folder']}: no ceilings of {result['limit_bytes_s']} bytes a second")


def same_code() -> str | None:
    """The commit that all results are of; None where they differ, or one does not say."""
    commits = {read(path.stem).get("commit") for path in RESULTS.glob("*.json")}
    return commits.pop() if len(commits) == 1 else None


def machine() -> list[str]:
    result, commit = read("ttft_tmpfs"), same_code()
    gpu, versions = result["machine"]["gpus"][0].split(",")[0], result["versions"]
    what = f"{result['machine']['cores']} cores, vLLM {versions['vllm']}, torch {versions['torch']}"
    differ = "the machine lent and in the code" if commit is None else "the machine lent"
    code = "" if commit is None else f" All with kvtier at {commit}."
    return [
        f"One {gpu} in a virtual machine ({what}); the reloads from tmpfs on {result['date']}. "
        f"Times to the first token: Llama-3.1-8B's dimensions, bf16, {forwards(result.get('llm', {}))}, one request at "
        "a time, a fresh process that reloads what another one saved; "
        "milliseconds, the median and in brackets the fastest and the slowest. A table holds one run; runs differ in "
        f"{differ}, so compare within a table only.{code}"
    ]


def tmpfs_rows(result: dict[str, Any]) -> tuple[Rows, str]:
    """Rows by length, and what is to be said of them: other systems may be in a second call on the same machine."""
    rows = by_length(result)
    if not has("ttft_tmpfs_peers"):
        return rows, ""
    peers = read("ttft_tmpfs_peers")
    boots = {found["machine"].get("boot") for found in (result, peers)}
    if len(boots) > 1 or None in boots:
        return rows, ""
    for tokens, of in by_length(peers).items():
        rows.get(tokens, {}).update(of)
    systems = " and ".join(NAMES[name] for name in PEERS if name in rows[min(rows)])
    return rows, f"; {systems} in a second call on the same machine, minutes apart"


def ttft() -> list[str]:
    result = read("ttft_tmpfs")
    ceilings = ceilings_beside(result)
    limit = ceiling_of(result, ceilings)
    lengths, apart = tmpfs_rows(result)
    arena = [row["counted"] for row in result["results"]["arena"]["from_arena"][1:]]
    arena_rate = median([row["load_bytes"] / row["load_seconds"] for row in arena])
    others = [name for name in PEERS if name in lengths[min(lengths)]]
    arenas = [ARENA] + [HBM_ARENA] * any(HBM_ARENA in of for of in lengths.values())
    rows = []
    for tokens, of in lengths.items():
        transfer = f"{of['kvtier']['load_bytes_s'] / 1e9:.1f} GB/s, {of['kvtier']['load_percent_of_limit']:.0f}%"
        if ARENA in of:
            transfer += f"; arena {arena_rate / 1e9:.1f} GB/s, {100 * arena_rate / limit:.0f}%"
        rows.append([f"{tokens:,}", *(milliseconds(of[name]) for name in ("computed", "floor", "kvtier")),
                     *(milliseconds(of[name]) if name in of else "not measured" for name in arenas),
                     *(milliseconds(of[name]) if name in of else "not measured" for name in others),
                     transfer])  # fmt: skip
    first = next(row for row in result["rows"] if row["system"] == ARENA)["first_s"]
    reads = ceilings["folders"][result["folder"]]["reads"]["bytes_s"]
    return [
        f"**Reloads from tmpfs and from the host arena** ({made(result)}; {counts(lengths, others)}; ceilings of "
        f"the run: pinned copies to the GPU {limit / 1e9:.1f} GB/s, direct reads of tmpfs {reads / 1e9:.1f} "
        f"GB/s{apart}):",
        "",
        *table(["tokens", "computed", "floor: hit in vLLM's prefix cache", "kvtier from tmpfs",
                *(name.replace("kvtier,", "kvtier from the") for name in arenas), *(NAMES[name] for name in others),
                "transfer, and share of pinned copies"], rows),
        "",
        f"{judged(goals_of(lengths))} The transfer is timed from the start of "
        "a load's job to its verified blocks. The arena (16 GiB, `host.admit: always`) is that of the "
        f"process that saved, vLLM's prefix cache emptied; its first reload took {1000 * first:,.0f} ms and is not in "
        f"the median.{_slower(lengths, others)}",
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
    titles = [
        "code and day",
        "forwards",
        "computed",
        "floor",
        "kvtier from tmpfs",
        "host arena",
        "transfer, of pinned copies",
    ]
    tokens = " / ".join(f"{tokens:,}" for tokens in by_length(read(OTHER_HOSTS[0])))
    return ["", f"The same on {len(rows)} other machines lent ({tokens} tokens, ms):", "", *table(titles, rows)]


def goals_of(lengths: Rows) -> list[tuple[bool, str]]:
    """Of reloads from tmpfs: whether each was met, and which it is."""
    goals = []
    for tokens, of in lengths.items():
        timed = [(of["kvtier"], TTFT_GOALS_S[tokens], "from tmpfs")]
        if ARENA in of:
            timed.append((of[ARENA], ARENA_GOAL_S, "from the host arena"))
        goals += [(row["ttft_s"] <= goal, f"{tokens:,} tokens {place} {1000 * row['ttft_s']:,.0f} ms "
                   f"(goal {1000 * goal:,.0f})") for row, goal, place in timed]  # fmt: skip
        percent = of["kvtier"]["load_percent_of_limit"]
        goals.append((percent >= TRANSFER_GOAL_PERCENT, f"the transfer of {tokens:,} tokens {percent:.0f}% of the "
                      f"ceiling (goal {TRANSFER_GOAL_PERCENT:.0f}%)"))  # fmt: skip
    return goals


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
            rows.append([f"{tokens:,}", *cells, times, f"{of['kvtier']['load_bytes_s'] / 1e9:.1f} GB/s"])
        last = lengths[max(lengths)]
        if "computed" in last:
            ratio = last["computed"]["ttft_s"] / last["kvtier"]["ttft_s"]
            judgements.append((ratio >= goal, f"{max(lengths):,} tokens {codec} {ratio:.1f}x (goal {goal:.0f}x)"))
        way = "one process computed, saved and reloaded from the folder" if result.get("one_process") else (
            "a fresh process reloaded what another one saved")  # fmt: skip
        text += [
            f"**Two GPUs, times to the first token at TP=2, {codec}** ({made(result)}; Llama-3.1-70B's dimensions, "
            f"from tmpfs; {way}; {counts(lengths, [])}):",
            "",
            *table(["tokens", "computed", "floor", "kvtier from tmpfs", "computed / kvtier",
                    "transfer of each GPU"], rows),
            "",
        ]  # fmt: skip
    note = (
        f"DDN's table of a 405B model with LMCache on its Lustre has {DDN_TIMES}x at 100K tokens, on another machine."
    )
    return [*text, f"{judged(judgements)} {note}"]


SECTIONS: tuple[Callable[[], list[str]], ...] = (
    machine, ttft, disk, two_ttft, tables_gpu_checks.kernels, tables_gpu_checks.verification, tables_gpu_checks.saving,
    tables_gpu_checks.equality, tables_gpu_checks.two_gpus, tables_gpu_checks.load_mix, tables_gpu_checks.loads_alone,
    tables_gpu_checks.demo,
)  # fmt: skip
