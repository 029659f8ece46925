"""The README's sections on a GPU that are not times to the first token: kernels, saving, and whether all was right."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.gpu.load_judge import more_memory
from benchmarks.tables_common import has, made, read, span, table, verdict

TTFT_LOSS_GOAL_PERCENT, DECODE_LOSS_GOAL_PERCENT, DURABLE_GOAL_PERCENT = 1.5, 3.0, 85.0
KERNEL_CASES = ("NHD bfloat16 d=128", "NHD float8_e4m3fn d=128", "LBHNC bfloat16 d=128", "LBHNC float8_e4m3fn d=128",
                "MLA bfloat16 d=576", "MLA float8_e4m3fn d=576")  # fmt: skip
EQUALITY_MODELS = {
    "equality_small": "Llama, grouped heads",
    "equality_mla": "DeepSeek-V2's MLA",
    "equality_small_032": "Llama, grouped heads, vLLM's second model runner",
}


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
    where = f"`benchmarks/gpu/kernels.py`, {made(result)}; device copy {result['copy_gb_s']:,.0f} GB/s"
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
    found, tokens = result["summary"], f"{result['length']:,}"
    durable, ttft_loss = found["durable_percent_of_direct"], found["ttft_loss_percent"]
    row, text = decoding(result)
    pairs = len(found["ttft_all"]["on"])
    return [
        f"**What saving costs** (`benchmarks/gpu/save_cost.py`, on the disk, medians of {pairs}, in turn; "
        f"{made(result)}):",
        "",
        *table(["", "without", "with saving", "", "goal"], [
            [f"cold time to the first token, {tokens} tokens", f"{1000 * found['ttft_off_s']:,.0f} ms",
             f"{1000 * found['ttft_on_s']:,.0f} ms", f"{ttft_loss:+.1f}%",
             f"{TTFT_LOSS_GOAL_PERCENT}%: {verdict(ttft_loss <= TTFT_LOSS_GOAL_PERCENT)}"],
            row,
            ["durable writes, more offered than the disk takes",
             f"{found['direct_write_bytes_s'] / 1e9:.2f} GB/s, bare direct writes",
             f"{found['durable_bytes_s'] / 1e9:.2f} GB/s", f"{durable:.0f}%",
             f"{DURABLE_GOAL_PERCENT:.0f}%: {verdict(durable >= DURABLE_GOAL_PERCENT)}"],
        ]),
        "",
        text,
    ]  # fmt: skip


def decoding(result: dict[str, Any]) -> tuple[list[str], str]:
    """The row and the text of what saving costs requests that decode meanwhile."""
    found, goal = result["summary"]["decode"], DECODE_LOSS_GOAL_PERCENT
    losses, loss = found["all_loss_percent"], found["loss_percent"]
    is_whole = found["is_durable_within"]
    end = "until they are durable" if is_whole else "saved"
    what = f"32 requests that decode while {result['length']:,} tokens are computed and {end}"
    is_noise = found["off_spread_percent"] > goal and min(losses) <= goal < max(losses)
    outcome = "**not shown**" if is_noise else verdict(loss <= goal)
    row = [what, f"{found['off_tokens_s']:,.0f} tokens/s", f"{found['on_tokens_s']:,.0f} tokens/s", f"{-loss:+.1f}%",
           f"-{goal:.0f}%: {outcome}"]  # fmt: skip
    how = "decoding by CUDA graphs" if result["decode_graphs"] else "eager"
    text = (
        f"Decoding ({how}) is counted in windows of {found['window_s']:.1f} s from the prompt's arrival, with saving "
        f"and without in turn, in one process; of {len(losses)} pairs the median change is given, of each "
        f"{span([-value for value in losses], 1)}%. Windows without saving differ among themselves by "
        f"{found['off_spread_percent']:.1f}%"
    )
    within = "." if is_whole else (
        "; saving went on after a window's end, so that all of a window lies beside it: the figure is the loss of "
        "tokens a second while saving goes on."
    )  # fmt: skip
    noise = " That is more than the goal, and pairs lie on both sides of it: it is not shown." if is_noise else ""
    return row, text + within + noise


def verification() -> list[str]:
    if not has("verification"):
        return []
    found = read("verification")
    goal, cost = found["goal_percent"], found["cost_percent"]
    return [
        f"**What verification costs** (`benchmarks/gpu/verification.py`, {made(found)}): {found['tokens']:,} tokens "
        f"reloaded from tmpfs, with the look at all checksums and without it, in turns, {found['pairs']} pairs in one "
        f"process: {1000 * found['with_s']:.0f} and {1000 * found['without_s']:.0f} ms to the first token, "
        f"{cost:+.1f}% (median of the pairs; goal {goal:.0f}%: {verdict(cost <= goal)}). There is no "
        "setting that leaves it out; the benchmark replaces a method."
    ]  # fmt: skip


def equality() -> list[str]:
    """One paragraph for each model that was run."""
    names = [name for name in EQUALITY_MODELS if has(name)]
    return [line for number, name in enumerate(names) for line in ([""] * bool(number) + [_equality(name)])]


def _equality(name: str) -> str:
    result = read(name)
    texts: dict[str, list[str]] = {}
    for caching, found in result["results"].items():
        cases, blocks = found["cases"], found["blocks"]
        hits = sum(case["hit_tokens"] > 0 for case in cases)
        good = sum(case["is_hit"] and case["same_tokens"] for case in cases)
        text = (
            f"{good} of {len(cases)} cases hit what they should ({hits} something, {len(cases) - hits} nothing) and "
            f"answered as after vLLM's own prefix hit; {blocks['equal']:,} loaded blocks (a block and KV head) are "
            f"bit-equal to what was saved, {blocks['wrong'] + blocks['unknown']} are not"
        )
        texts.setdefault(text, []).append(caching)
    what = "; ".join(f"{text} ({' / '.join(kinds)}, each)" for text, kinds in texts.items())
    graphs = "on" if result["cuda_graphs"] else "off"
    bad = "" if result["good"] else " **Not all of it is as it must be.**"
    engine = f"vLLM {result['versions']['vllm']}, CUDA graphs {graphs}"
    how = f"{EQUALITY_MODELS[name]}, random weights, {engine}; {made(result)}"
    return f"**Equality** (`benchmarks/gpu/equality.py`, {how}): {what}.{bad}"


def load_mix() -> list[str]:
    result = read("load_mix")
    found, shape = result["result"], result["shape"]
    blocks = found["blocks"]
    hit, whole = max(found["shared_hit_tokens"]), found["shared_tokens"]
    there = (
        f", though only {hit:,} of its {whole:,} tokens were still there" if hit < whole else f" (all {whole:,} tokens)"
    )
    rounds = _rounds(result)
    return [
        f"**{shape['requests']} requests at once on a tier that is full and evicts** (`benchmarks/gpu/load_mix.py`; "
        f"{made(result)}): "
        f"{found['same_answers']} of {found['answers']} answers of the rounds and {found['same_shared_answers']} of "
        f"{found['shared_answers']} of the part before them are those of an engine without the tier, "
        f"{blocks['equal']:,} loaded blocks bit-equal and {blocks['wrong'] + blocks['unknown']} not, at most "
        f"{found['most_on_disk'] / 2**20:,.0f} of {found['capacity_bytes'] / 2**20:,.0f} MiB on disk, "
        f"{found['evicted_bytes'] / 1e9:.1f} GB evicted in the whole run; {found['shared_answers']} requests on one "
        f"prefix were served by {found['copies_read']:.1f} reads of it{there}. {_memory(found)}{rounds}"
        f"{_control(found)}"
    ]


def _memory(found: dict[str, Any]) -> str:
    """What the engine with the tier took at most; older runs looked at it in another way."""
    memory = found["memory"]
    if "own_max" not in memory["bare"][0]:
        return ""
    gpu, host, mapped = (more_memory(memory, kind) >> 20 for kind in ("device_used", "own_max", "mapped_max"))
    gpu_arena, host_arena = (sum(of[bound] for of in memory["arenas"]) >> 20 for bound in ("device", "host"))
    return (
        f"More than without the tier it took at most {gpu:,} MiB on the GPU, where its arena is of {gpu_arena:,}, and "
        f"{host:,} MiB of the host, where it is of {host_arena:,}; {mapped:,} MiB of segments were mapped. "
    )


def _control(found: dict[str, Any]) -> str:
    """What an engine without the tier does to its own answers, beside what the tier does; older runs did not ask."""
    if "control" not in found:
        return (
            f"{_differing(found)} No control in this run: how many of its own answers an engine without the tier "
            "changes when it is asked again is not known."
        )
    order, hits = found["control"]["other_order"], found["control"]["own_hits"]
    return (
        " **The control**: the engine without the tier, asked again in another order, gives "
        f"{_agreement(order)} of its own answers, and with hits in vLLM's own prefix cache where the tier had its hits "
        f"{_agreement(hits)}. The lead of a token over the second best one moves by up to {found['tie_width']:.1e} "
        f"nats in that, which is a tie's width here ({found['tokens_within_tie']:,} of {found['tokens']:,} tokens lead "
        f"by no more), and by up to {found['largest_shift']:.1e} with the tier. Where answers part, it moved by "
        f"{_moved(order, hits)} in the control and by {_moved(found)} with the tier."
    )


def _moved(*compared: dict[str, Any]) -> str:
    return ", ".join(f"{row['moved']:.1e}" for found in compared for row in found["differing"]) or "nothing (none does)"


def _agreement(found: dict[str, Any]) -> str:
    shared = f"{found['same_shared_answers']} of {found['shared_answers']}"
    return f"{found['same_answers']} of {found['answers']} (rounds) and {shared} (before them)"


def _differing(found: dict[str, Any]) -> str:
    """How close the choice of the tokens was with which answers begin to differ; older results do not say."""
    if found["same_answers"] < found["answers"] and "differing" not in found:
        return " Which answer differs, and by how little, was not written down in this run; no loaded byte was wrong."
    leads = [f"{difference['lead']:.1e}" for difference in found.get("differing", ())]
    if not leads:
        return ""
    return f" Where an answer differs, the engine without the tier preferred its token by {', '.join(leads)} nats."


def _rounds(result: dict[str, Any]) -> str:
    counted = result["result"]["rounds_counted"]
    loads = ", ".join(f"{row.get('load_tokens', 0):,.0f}" for row in counted)
    evicted = sum(row.get("evicted_bytes", 0) for row in counted)
    failed = result["result"]["failed_loads"]
    why = f": {'; '.join(result['faults'])}" if result.get("faults") else ""
    bad = "" if result["good"] else f" **Not all of it is as it must be{why}.**"
    return (
        f"The {len(counted)} mixed rounds loaded {loads} tokens from the tier, while {evicted / 1e9:.1f} GB of it were "
        f"evicted; loads that failed, so that their tokens were computed: {failed}. Seconds a round: "
        f"{_seconds(result)}.{bad}"
    )


def _seconds(result: dict[str, Any]) -> str:
    found = result["result"]
    mine, bare = (", ".join(f"{s:.2f}" for s in found[name]) for name in ("round_s", "bare_round_s"))
    return f"{mine}; without the tier, which so small a model does not need, {bare}"


def two_gpus() -> list[str]:
    """Across tensor-parallel sizes, once that was run."""
    if not has("two_gpus_equal"):
        return []
    result = read("two_gpus_equal")
    lines = []
    for found in result["equal"]:
        blocks, loaded, control = found["blocks"], found["loaded_agrees"], found["control_agrees"]
        lines.append(
            f"- stored at TP={found['stored_at']}, loaded at TP={found['loaded_at']}: {blocks['equal']:,} loaded "
            f"blocks (a block and KV head) bit-equal to what was saved, {blocks['wrong'] + blocks['unknown']} not, "
            f"{found['failed_loads']} failed loads; {loaded['same_tokens']} of {loaded['tokens']} tokens as the "
            f"process that stored answered, where computing all at TP={found['loaded_at']} agrees in "
            f"{control['same_tokens']}"
        )
    return ["**Two GPUs, across tensor-parallel sizes** (`benchmarks/gpu/two_gpus.py`, random weights, eager; "
            f"{made(result)}):", "",
            *lines, "", _contexts(result["contexts"])]  # fmt: skip


def loads_alone() -> list[str]:
    """The load path without an engine, once that was run."""
    if not has("load_rate"):
        return []
    result = read("load_rate")
    rows = [
        [str(row["chunks"]), f"{row['pause_s']:g} s", f"{1000 * row['copy_s']:.1f} ms",
         f"{1000 * median(row['all_s']):.1f} ms ({1000 * min(row['all_s']):.1f}-{1000 * max(row['all_s']):.1f})",
         f"{row['bytes_s'] / 1e9:.1f} GB/s, {row['percent']:.0f}%"] for row in result["rows"]
    ]  # fmt: skip
    return [
        f"**Loads from tmpfs without an engine** (`benchmarks/gpu/load_rate.py`, 32 MiB a chunk, verified and "
        f"compared; {made(result)}; pinned copies {result['pinned_bytes_s'] / 1e9:.1f} GB/s):",
        "",
        *table(["chunks", "after a pause of", "a pinned copy of as much", "load", "of pinned copies"], rows),
    ]  # fmt: skip


def _contexts(found: dict[str, Any]) -> str:
    """Whether a worker had a CUDA context on a GPU that is not its own, by the two ways of contexts.py."""
    ways = (
        ("nvidia-smi while they ran", found["listed_is_shown"], found["listed_is_good"]),
        ("the driver, asked in each rank", found["ranks_are_shown"], found["ranks_are_good"]),
    )
    good = [way for way, is_shown, is_good in ways if is_shown and is_good]
    bad = [way for way, is_shown, is_good in ways if is_shown and not is_good]
    blind = [way for way, is_shown, _ in ways if not is_shown]
    parts = [f"Each process has a context on one GPU only, says {' and '.join(good)}."] if good else []
    parts += [f"**A process has a context on more than one GPU, says {' and '.join(bad)}.**"] if bad else []
    parts += [f"Not shown by {' and '.join(blind)}."] if blind else []
    return " ".join(parts)


def demo() -> list[str]:
    """`python -m benchmarks.demo` on the GPU host, once that was run."""
    if not has("demo"):
        return []
    result = read("demo")
    rows = [[row["name"], f"{row['tokens']:,}", f"{row['hit_tokens']:,}", f"{1000 * row['cold_s']:,.0f} ms",
             f"{1000 * row['warm_s']:,.0f} ms", "yes" if row["identical"] else "**NO**"]
            for row in result["rows"]]  # fmt: skip
    return [
        f"**The demo** (what `make demo` runs, with vLLM {result['vllm']}; {result['machine']}, float32, tier on the "
        f"disk; {made(result)}):",
        "",
        *table(["prompt", "tokens", "hit tokens", "computed", "reloaded", "outputs identical"], rows),
    ]
