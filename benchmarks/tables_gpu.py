"""The README's tables of what ran on a GPU, from benchmarks/results/gpu/*.json; written by benchmarks/tables.py.

A table holds one run: rows of different runs are never side by side, for machine and code were others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results" / "gpu"
CHUNK_TOKENS = 256
TTFT_GOALS_S = {8192: 0.05, 32768: 0.13, 100_000: 0.36}
ARENA_GOAL_S = 0.34
TRANSFER_GOAL_PERCENT = 85.0
TTFT_LOSS_GOAL_PERCENT, DECODE_LOSS_GOAL_PERCENT, DURABLE_GOAL_PERCENT = 1.5, 3.0, 85.0
DISK_GOAL_TIMES = 1.15
ARENA = "kvtier, host arena"
NAMES = {"computed": "computed", "floor": "floor", "kvtier": "kvtier", "native": "vLLM's own tiering",
         "lmcache": "LMCache's GDS backend"}  # fmt: skip
PEERS = ("native", "lmcache")
KERNEL_CASES = ("NHD bfloat16 d=128", "NHD float8_e4m3fn d=128", "LBHNC bfloat16 d=128", "LBHNC float8_e4m3fn d=128",
                "MLA bfloat16 d=576", "MLA float8_e4m3fn d=576")  # fmt: skip


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(columns: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *rows)]


def verdict(is_met: bool) -> str:
    return "met" if is_met else "**missed**"


def span(values: list[float], digits: int = 0) -> str:
    return f"{min(values):,.{digits}f} to {max(values):,.{digits}f}"


def milliseconds(row: dict[str, Any]) -> str:
    """The median; beside it the span, or every value where a prompt was not hit whole."""
    times = [1000 * seconds for seconds in row["all_s"]]
    text = f"{1000 * row['ttft_s']:,.0f}"
    if row["system"] != "computed" and row["hit_tokens"] <= row["tokens"] - CHUNK_TOKENS:
        every = ", ".join(f"{value:,.0f}" for value in times)
        return f"{text} ({every}: hits of {row['hit_tokens']:,} tokens and more)"
    return text if len(times) == 1 else f"{text} ({min(times):,.0f}-{max(times):,.0f})"


def by_length(result: dict[str, Any]) -> dict[int, dict[str, dict[str, Any]]]:
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        found.setdefault(row["tokens"], {})[row["system"]] = row
    return found


def ceiling_of(result: dict[str, Any], ceilings: dict[str, Any]) -> float:
    """Bytes a second; the smaller of PCIe and the folder's reads. Raises when the ceilings are of another run."""
    limit = min(ceilings["copies"]["h2d_bytes_s"], ceilings["folders"][result["folder"]]["reads"]["bytes_s"])
    if limit != result["limit_bytes_s"]:
        raise ValueError(f"{result['folder']}: measured beside {result['limit_bytes_s']}, not {limit}")
    return float(limit)


def machine() -> list[str]:
    result = read("ttft_tmpfs")
    gpu, versions = result["machine"]["gpus"][0].split(",")[0], result["versions"]
    what = f"{result['machine']['cores']} cores, vLLM {versions['vllm']}, torch {versions['torch']}"
    return [
        f"One {gpu} in a virtual machine ({what}), {result['date']}. Times to the first token: Llama-3.1-8B's "
        "dimensions, bf16, eager, one request at a time, a fresh process that reloads what another one saved; "
        "milliseconds, the median and in brackets the fastest and the slowest. A table holds one run; runs differ in "
        "the machine lent and in the code, so compare within a table only."
    ]


def ttft() -> list[str]:
    result, ceilings = read("ttft_tmpfs"), read("ceilings_host")
    limit = ceiling_of(result, ceilings)
    arena = [row["counted"] for row in result["results"]["arena"]["from_arena"][1:]]
    arena_rate = median([row["load_bytes"] / row["load_seconds"] for row in arena])
    rows, judged = [], []
    for tokens, of in by_length(result).items():
        percent = of["kvtier"]["load_percent_of_limit"]
        transfer = f"{of['kvtier']['load_bytes_s'] / 1e9:.1f} GB/s, {percent:.0f}%"
        goals = [(of["kvtier"], TTFT_GOALS_S[tokens], "from tmpfs")]
        if ARENA in of:
            goals.append((of[ARENA], ARENA_GOAL_S, "from the host arena"))
            transfer += f"; arena {arena_rate / 1e9:.1f} GB/s, {100 * arena_rate / limit:.0f}%"
        rows.append([f"{tokens:,}", *(milliseconds(of[name]) for name in ("computed", "floor", "kvtier")),
                     milliseconds(of[ARENA]) if ARENA in of else "not measured", transfer])  # fmt: skip
        judged += [(row["ttft_s"] <= goal, f"{tokens:,} tokens {place} {1000 * row['ttft_s']:,.0f} ms "
                    f"(goal {1000 * goal:,.0f})") for row, goal, place in goals]  # fmt: skip
        judged.append((percent >= TRANSFER_GOAL_PERCENT, f"the transfer of {tokens:,} tokens {percent:.0f}% of the "
                       f"ceiling (goal {TRANSFER_GOAL_PERCENT:.0f}%)"))  # fmt: skip
    first = next(row for row in result["rows"] if row["system"] == ARENA)["first_s"]
    n = len(result["rows"][0]["all_s"])
    reads = ceilings["folders"][result["folder"]]["reads"]["bytes_s"]
    return [
        f"**Reloads from tmpfs and from the host arena** ({result['note']}; {n} prompts of each length; ceilings of "
        f"the run: pinned copies to the GPU {limit / 1e9:.1f} GB/s, direct reads of tmpfs {reads / 1e9:.1f} GB/s):",
        "",
        *table(["tokens", "computed", "floor: hit in vLLM's prefix cache", "kvtier from tmpfs",
                "kvtier from the host arena", "transfer, and share of pinned copies"], rows),
        "",
        f"**Missed: {'; '.join(text for is_met, text in judged if not is_met)}.** "
        f"Met: {'; '.join(text for is_met, text in judged if is_met)}. The transfer is timed from the start of "
        "a load's job to its verified blocks. The arena (16 GiB, `host.admit: always`) is that of the "
        f"process that saved, vLLM's prefix cache emptied; its first reload took {1000 * first:,.0f} ms and is not in "
        "the median.",
    ]  # fmt: skip


def peers(name: str, title: str) -> list[str]:
    result = read(name)
    lengths = by_length(result)
    systems = [system for system in NAMES if system in lengths[min(lengths)]]
    counts = ", ".join(f"{NAMES[s]} {len(lengths[min(lengths)][s]['all_s'])}" for s in systems)
    rows = [[f"{tokens:,}", *(milliseconds(of[s]) for s in systems)] for tokens, of in lengths.items()]
    slower = [f"{tokens:,}" for tokens, of in lengths.items()
              if any(of["kvtier"]["ttft_s"] > of[s]["ttft_s"] for s in systems if s in PEERS)]  # fmt: skip
    text = [
        f"**{title}** ({result['note']}; from tmpfs; prompts of each length: {counts}):",
        "",
        *table(["tokens", *(NAMES[s] for s in systems)], rows),
    ]
    return text + (["", f"Here kvtier was slower than another system at {', '.join(slower)} tokens."] if slower else [])


def disk() -> list[str]:
    result, ceilings = read("ttft_disk"), read("ceilings")
    limit = ceiling_of(result, ceilings)
    rows, times = [], []
    for row in result["rows"]:
        times.append(row["ttft_s"] * limit / row["bytes"])
        rows.append([f"{row['tokens']:,}", milliseconds(row), f"{row['load_bytes_s'] / 1e9:.2f} GB/s",
                     f"{row['load_percent_of_limit']:.0f}%", f"{times[-1]:.2f}"])  # fmt: skip
    ring = max(row["bytes_s"] for row in ceilings["folders"][result["folder"]]["device_reads"])
    other = read("ceilings_host")["folders"][result["folder"]]["reads"]["bytes_s"]
    above = [f"{row['tokens']:,}" for row, value in zip(result["rows"], times, strict=True) if value > DISK_GOAL_TIMES]
    return [
        f"**Reloads from the disk** ({len(result['rows'][0]['all_s'])} prompt of each length; direct reads of that run "
        f"{limit / 1e9:.2f} GB/s):",
        "",
        *table(["tokens", "kvtier", "transfer", "share of direct reads", "time / (bytes at the direct rate)"], rows),
        "",
        f"The goal is {DISK_GOAL_TIMES} in the last column once the floor is taken off. The floor is not in that run, "
        f"and nothing is taken off here; above it: {', '.join(above) or 'none'}. The disk is no firm ceiling: the ring "
        f"read it at {ring / 1e9:.2f} GB/s in that run's own ceilings, and on another machine lent that day direct "
        f"reads gave {other / 1e9:.2f} GB/s. First tokens were not compared with computed ones here.",
    ]  # fmt: skip


def kernels() -> list[str]:
    result = read("kernels")
    goal, sums = result["targets"]["percent_of_copy"], result["targets"]["checksum_gb_s"]
    cells = {(row["case"], row["kernel"]): row for row in result["rows"]}

    def cell(case: str, kernel: str) -> str:
        row = cells[case, kernel]
        return f"{row['gb_s']:,.0f} GB/s, {row['percent_of_copy']:.0f}%"

    moves = [row for row in result["rows"] if row["kernel"] in ("gather", "scatter")]
    below = [row for row in moves if row["percent_of_copy"] < goal]
    lowest = min(moves, key=lambda row: row["percent_of_copy"])
    lowest_sum = min((row for row in result["rows"] if row["kernel"] == "checksum"), key=lambda row: row["gb_s"])
    wrong = sum(len(row.get("faults", [])) for row in result["rows"])
    where = f"`benchmarks/gpu/kernels.py`; device copy {result['copy_gb_s']:,.0f} GB/s"
    return [
        f"**Kernels** ({where}; gather, scatter and copy count bytes read and written, the checksum those read):",
        "",
        *table(["pages", "gather", "scatter", "checksum"],
               [[case, *(cell(case, kernel) for kernel in ("gather", "scatter", "checksum"))]
                for case in KERNEL_CASES]),
        "",
        f"The goals, {goal:.0f}% of the copy and {sums:,.0f} GB/s, are {verdict(result['targets_met'])} for the first "
        f"row. Of all {len(moves)} gathers and scatters measured, {len(below)} are below {goal:.0f}%, the lowest "
        f"{lowest['percent_of_copy']:.0f}% ({lowest['case']}); the slowest checksum is {lowest_sum['gb_s']:,.0f} GB/s "
        f"({lowest_sum['case']}). Wrong bytes: {wrong or 'none'}.",
    ]  # fmt: skip


def saving() -> list[str]:
    result = read("save_cost")
    found, windows = result["summary"], result["results"]["decode_windows"]

    def rates(name: str, is_on: bool) -> list[float]:
        return [row[name] for row in windows if row["saving"] is is_on]

    on, off = (median(rates("tokens_s_during", is_on)) for is_on in (True, False))
    loss, durable = 100 * (1 - on / off), found["durable_percent_of_direct"]
    ttft_loss = found["ttft_loss_percent"]
    after_on, after_off = (span(rates("tokens_s_after", is_on)) for is_on in (True, False))
    settle = span(rates("settle_s", True), 1)
    pairs, tokens = len(found["ttft_all"]["on"]), f"{result['length']:,}"
    return [
        f"**What saving costs** (`benchmarks/gpu/save_cost.py`, on the disk, medians of {pairs}, in turn):",
        "",
        *table(["", "without", "with saving", "", "goal"], [
            [f"cold time to the first token, {tokens} tokens", f"{1000 * found['ttft_off_s']:,.0f} ms",
             f"{1000 * found['ttft_on_s']:,.0f} ms", f"{ttft_loss:+.1f}%",
             f"{TTFT_LOSS_GOAL_PERCENT}%: {verdict(ttft_loss <= TTFT_LOSS_GOAL_PERCENT)}"],
            [f"32 requests that decode while {tokens} tokens are computed", f"{off:.2f} tokens/s",
             f"{on:.2f} tokens/s", f"{-loss:+.1f}%",
             f"-{DECODE_LOSS_GOAL_PERCENT:.0f}%: {verdict(loss <= DECODE_LOSS_GOAL_PERCENT)}, in this part"],
            ["durable writes, more offered than the disk takes",
             f"{found['direct_write_bytes_s'] / 1e9:.2f} GB/s, bare direct writes",
             f"{found['durable_bytes_s'] / 1e9:.2f} GB/s", f"{durable:.0f}%",
             f"{DURABLE_GOAL_PERCENT:.0f}%: {verdict(durable >= DURABLE_GOAL_PERCENT)}"],
        ]),
        "",
        f"Decoding is counted while the prompt is computed. In the 2 s after that, when saving still goes on (it ended "
        f"{settle} s after the window), the rate changed too much from window to window, with saving {after_on} and "
        f"without {after_off} tokens/s, so no figure is taken from it: what saving costs decoding there is not known. "
        f"The script's own summary, of both parts, says {found['decode_on_tokens_s']:,.0f} with and "
        f"{found['decode_off_tokens_s']:,.0f} without: faster with saving, which saving cannot explain.",
    ]  # fmt: skip


def equality() -> list[str]:
    result = read("equality")
    texts: dict[str, list[str]] = {}
    for name, found in result["results"].items():
        cases, blocks = found["cases"], found["blocks"]
        hits = sum(case["hit_tokens"] > 0 for case in cases)
        good = sum(case["is_hit"] and case["same_tokens"] for case in cases)
        text = (
            f"{good} of {len(cases)} cases hit what they should ({hits} something, {len(cases) - hits} nothing) and "
            f"answered as after vLLM's own prefix hit; {blocks['equal']:,} loaded blocks (a block and KV head) are "
            f"bit-equal to what was saved, {blocks['wrong'] + blocks['unknown']} are not"
        )
        texts.setdefault(text, []).append(name)
    what = "; ".join(f"{text} ({' / '.join(names)}, each)" for text, names in texts.items())
    graphs = "on" if result["cuda_graphs"] else "off"
    return [f"**Equality** (`benchmarks/gpu/equality.py`, random weights, CUDA graphs {graphs}): {what}."]


def load_mix() -> list[str]:
    result = read("load_mix")
    found, shape = result["result"], result["shape"]
    blocks, counted = found["blocks"], found["counted"]
    loaded = counted.get("load_tokens", 0)
    rounds = (
        f"**the tier was not asked once in the {result['rounds']} mixed rounds** (no lookup, no load: their "
        f"{found['hit_tokens']:,} hit tokens are vLLM's own), so loads among evictions are not shown by this run"
        if not loaded and not counted.get("lookups")
        else f"the mixed rounds loaded {loaded:,.0f} tokens"
    )
    return [
        f"**{shape['requests']} requests at once on a tier that is full and evicts** (`benchmarks/gpu/load_mix.py`): "
        f"{found['same_answers']} of {found['answers']} answers of the rounds and {found['same_shared_answers']} of "
        f"{found['shared_answers']} of the part before them are those of an engine without the tier, "
        f"{blocks['equal']:,} loaded blocks bit-equal and {blocks['wrong'] + blocks['unknown']} not, at most "
        f"{found['most_on_disk'] / 2**20:,.0f} of {found['capacity_bytes'] / 2**20:,.0f} MiB on disk, "
        f"{found['evicted_bytes'] / 1e9:.1f} GB evicted; {found['shared_answers']} requests on one prefix read it "
        f"{found['copies_read']:.1f} times, though only {max(found['shared_hit_tokens']):,} of its "
        f"{found['shared_tokens']:,} tokens were still there. All those loads are of that part: {rounds}."
    ]


def native() -> list[str]:
    return peers("ttft_tmpfs_native", "Beside vLLM's own tiering, an earlier run")


def all_peers() -> list[str]:
    return peers("ttft_tmpfs_peers", "Beside vLLM's own tiering and LMCache, a still earlier run")


SECTIONS: tuple[Callable[[], list[str]], ...] = (
    machine, ttft, native, all_peers, disk, kernels, saving, equality, load_mix,
)  # fmt: skip
