"""Times to the first token by aiperf over input lengths: with a cache, without one, and as vLLM's own prefix hit.

    python -m benchmarks.serving aiperf_ttft --out RESULT.json     # starts and stops vLLM itself, for each of the three
    python -m benchmarks.aiperf_ttft --url http://localhost:8000 --system nocache --out RESULT.json
    python -m benchmarks.aiperf_ttft --url http://localhost:8001 --system cache --out RESULT.json   # adds to it

The sweep of DDN's slides: one prefix prompt of 1K ... 100K tokens that all requests share, 100 tokens of answer, 1 and
2 requests at once, four warm-up requests before each, which a cache is filled by. The table has their columns, and
beside them the floor (`prefix`: the prompt is in the GPU's own cache). aiperf itself is run, nothing of it is imitated;
it wants an environment of its own, which `make aiperf` makes in build/aiperf. Written are RESULT.json, RESULT.svg and
aiperf's own files in RESULT-aiperf/.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.gpu.report import table
from benchmarks.serving import arguments, counters, result
from benchmarks.serving.arguments import at_least, numbers
from benchmarks.serving.client import find_model
from benchmarks.serving.progress import Bar

QUESTION = "time to the first token over input length, by aiperf"
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 102400)
CONCURRENCIES = (1, 2)
SLIDES_MS = {
    1: (385.6, 736.8, 1448.2, 2913.0, 5900.9, 12205.9, 26274.6, 44384.3),
    2: (744.9, 1191.8, 2191.4, 4381.6, 10206.9, 19654.2, 39747.3, 63061.3),
}
SLIDES_CACHE_MS = {
    1: (87.7, 101.5, 118.3, 165.4, 233.7, 376.9, 658.8, 1014.5),
    2: (129.5, 134.6, 182.7, 235.8, 356.8, 552.7, 984.6, 1446.7),
}
"""DDN's slides of 2026-04-28: Llama-3.1-405B AWQ on eight H100, LMCache's GDS backend on EXAScaler."""
SETTINGS = ("isl", "concurrency", "osl", "requests", "warmup_requests", "seed", "aiperf_arguments")
EXPORT, SERVER_EXPORT = "profile_export_aiperf.json", "server_metrics_export.json"
STATISTICS = ("avg", "p50", "p90", "p95", "p99", "min", "max", "std")
BUILT = Path(__file__).resolve().parents[1] / "build" / "aiperf" / "bin" / "aiperf"
TIMEOUT_S = 7200.0
PATIENCE = {
    f"AIPERF_SERVICE_{name}": "300" for name in ("START_TIMEOUT", "REGISTRATION_TIMEOUT", "REGISTRATION_MAX_ATTEMPTS")
}
"""For its own processes to start: its 30 s, and ten attempts a second apart, end a run on a machine that is busy."""


class AiperfFailed(Exception):
    """aiperf ended badly, or what it wrote is no whole measurement; the text says what it said."""


@dataclass(frozen=True)
class Cell:
    """One run of aiperf."""

    isl: int
    concurrency: int

    @property
    def name(self) -> str:
        return f"ISL{self.isl}_CON{self.concurrency}"


@dataclass(frozen=True)
class Server:
    """tokenizer: a folder, or a name that aiperf can find."""

    url: str
    model: str
    tokenizer: str


# --- one run ---


def command(program: Path, server: Server, cell: Cell, options: argparse.Namespace, folder: Path) -> list[str]:
    """As the slides show it, but for `nvext`, which is Dynamo's."""
    return [
        str(program),
        "profile",
        "--model",
        server.model,
        "--tokenizer",
        server.tokenizer,
        "--endpoint-type",
        "chat",
        "--url",
        server.url,
        "--streaming",
        "--concurrency",
        str(cell.concurrency),
        "--request-count",
        str(options.requests),
        "--num-prefix-prompts",
        "1",
        "--synthetic-input-tokens-mean",
        "1",
        "--synthetic-input-tokens-stddev",
        "0",
        "--prefix-prompt-length",
        str(cell.isl),
        "--output-tokens-mean",
        str(options.osl),
        "--output-tokens-stddev",
        "0",
        "--random-seed",
        str(options.seed),
        "--dataset-sampling-strategy",
        "shuffle",
        "--warmup-request-count",
        str(options.warmup_requests),
        "--extra-inputs",
        "ignore_eos:true",
        "--ui",
        "none",
        "--artifact-dir",
        str(folder),
        *shlex.split(options.aiperf_arguments),
    ]


def run(words: Sequence[str], folder: Path, requests: int) -> dict[str, Any]:
    """Runs aiperf to its end and reads what it wrote into the folder, of so many requests. Raises AiperfFailed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder / "aiperf.log"
    environment = PATIENCE | {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    with log.open("w") as out:  # with HF_HUB_OFFLINE it does not take a tokenizer from a folder
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            status = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise AiperfFailed(f"{shlex.join(words)}\nis not done after {TIMEOUT_S:.0f} s; {log}") from None
        finally:
            with suppress(ProcessLookupError):  # it starts many processes; none is left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status != 0 or not (folder / EXPORT).exists():
        raise AiperfFailed(f"{shlex.join(words)}\nended with status {status}\n{log.read_text()[-3000:]}")
    try:
        return parse(json.loads((folder / EXPORT).read_text()), requests)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise AiperfFailed(f"{folder / EXPORT} is not as expected: {type(error).__name__}: {error}") from None


def parse(export: dict[str, Any], requests: int) -> dict[str, Any]:
    """What a cell of the table needs of aiperf's export. Raises AiperfFailed where requests failed or are missing."""
    counted = int(export.get("request_count", {}).get("avg", 0))
    failed = export.get("error_request_count", {}).get("avg", 0)
    if counted < requests or failed or export.get("was_cancelled") or export.get("error_summary"):
        raise AiperfFailed(
            f"{counted} of {requests} requests were answered, {failed:.0f} failed: {export.get('error_summary')}"
        )
    first = export["time_to_first_token"]
    if first["unit"] != "ms":
        raise AiperfFailed(f"times in {first['unit']}, not ms")
    if not 0 < first["avg"] < float("inf"):
        raise AiperfFailed(f"the mean time to the first token is {first['avg']}")
    return {
        "aiperf": export["aiperf_version"],
        "requests": counted,
        "ttft_ms": {name: first[name] for name in STATISTICS if name in first},
        "request_latency_ms": export["request_latency"]["avg"],
        "prompt_tokens": export.get("usage_prompt_tokens", export["input_sequence_length"])["avg"],
    }


def sweep(server: Server, options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """All cells, the short ones first. tokens: where those of the prompts came from, warm-up included.

    Raises AiperfFailed.
    """
    program = find_aiperf(options.aiperf)
    cells = [Cell(isl, concurrency) for isl in options.isl for concurrency in options.concurrency]
    bar = Bar(f"aiperf, {options.system}", len(cells))
    for done, cell in enumerate(cells, start=1):
        before = counters.look(server.url)
        row = run(command(program, server, cell, options, folder / cell.name), folder / cell.name, options.requests)
        tokens = counters.since(server.url, before)
        bar.show(done)
        yield {"isl": cell.isl, "concurrency": cell.concurrency, **row, "tokens": tokens}


def find_aiperf(given: Path | None) -> Path:
    on_path = shutil.which("aiperf")
    for place in (given, BUILT, Path(on_path) if on_path else None):
        if place is not None and place.exists():
            return place
    raise SystemExit("there is no aiperf: run `make aiperf`, or give --aiperf PATH")


# --- all systems ---


def cells_of(whole: dict[str, Any]) -> dict[tuple[int, int], dict[str, dict[str, Any]]]:
    """(input length, concurrency) -> system -> its row."""
    found: dict[tuple[int, int], dict[str, dict[str, Any]]] = {}
    for system, measured in whole["systems"].items():
        for row in measured["rows"]:
            found.setdefault((row["isl"], row["concurrency"]), {})[system] = row
    return found


def table_rows(whole: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of the slides' table, one row an input length: mean milliseconds, and the speed-up."""
    cells, systems = cells_of(whole), list(whole["systems"])
    cached = [system for system in systems if system != "nocache"]
    concurrencies = sorted({concurrency for _, concurrency in cells})
    columns = ["ISL"]
    for concurrency in concurrencies:
        columns += [f"{system} CONC={concurrency}" for system in systems]
        columns += [f"nocache/{system}" for system in cached if "nocache" in systems]
    rows = []
    for isl in sorted({isl for isl, _ in cells}):
        row = [plots.short(isl)]
        for concurrency in concurrencies:
            of_cell = {name: one["ttft_ms"]["avg"] for name, one in cells.get((isl, concurrency), {}).items()}
            row += [f"{of_cell[system]:,.1f}" if system in of_cell else "-" for system in systems]
            if "nocache" in systems:
                row += [
                    f"{of_cell['nocache'] / of_cell[system]:.1f}x" if {"nocache", system} <= set(of_cell) else "-"
                    for system in cached
                ]
        rows.append(row)
    return columns, rows


def draw(path: Path, whole: dict[str, Any]) -> None:
    """Draw a colour for each system, a dashed line for more than one request at once; the slides' own beside them."""
    systems = list(whole["systems"])
    points: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for (isl, concurrency), of_cell in cells_of(whole).items():
        for system, row in of_cell.items():
            points.setdefault((system, concurrency), []).append((isl, row["ttft_ms"]["avg"]))
    concurrencies = sorted({concurrency for _, concurrency in points})
    drawn = [
        plots.Line(f"{system}, {concurrency} at once", of_line, systems.index(system), concurrencies.index(concurrency))
        for (system, concurrency), of_line in points.items()
    ]
    plots.lines(path, "Mean time to the first token, by aiperf", "input tokens", "ms", drawn)


def show(whole: dict[str, Any]) -> None:
    print("\nmean TTFT, ms")
    table(*table_rows(whole))
    for (isl, concurrency), of_cell in sorted(cells_of(whole).items()):
        slides, slides_cache = SLIDES_MS.get(concurrency), SLIDES_CACHE_MS.get(concurrency)
        if isl == LENGTHS[-1] and slides and slides_cache and {"nocache", "cache"} <= set(of_cell):
            ours = of_cell["nocache"]["ttft_ms"]["avg"] / of_cell["cache"]["ttft_ms"]["avg"]
            print(
                f"{plots.short(isl)}, {concurrency} at once: {ours:.1f}x; the slides have "
                f"{slides[-1] / slides_cache[-1]:.1f}x, of another model on another machine"
            )


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.aiperf_ttft",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--url", "--base-url", default="http://localhost:8000", help="without /v1")
    add("--model", help="its name there (default: the first that the server lists)")
    add("--tokenizer", help="a folder or a name (default: the model's)")
    add(
        "--system", default="server", help="what is measured, as --out names it: nocache, cache, prefix or another name"
    )
    add("--isl", type=numbers, default=list(LENGTHS), help="prefix lengths in tokens, with commas between")
    add("--concurrency", type=numbers, default=list(CONCURRENCIES))
    add("--osl", type=at_least(1), default=100, help="tokens of each answer")
    add("--requests", type=at_least(1), default=100, help="timed requests of each cell")
    add("--warmup-requests", type=at_least(0), default=4)
    add("--seed", type=int, default=176)
    add("--aiperf", type=Path, help=f"the program (default: {BUILT}, else that on the PATH)")
    add("--aiperf-arguments", default="", help="further ones, as one text")
    add("--out", type=Path, default=Path("aiperf_ttft.json"), help="systems of one --out are compared")
    return made


def main(words: Sequence[str] | None = None) -> int:
    options = parser().parse_args(words)
    url = options.url.rstrip("/").removesuffix("/v1")
    model = options.model or asyncio.run(find_model(url))
    server = Server(url, model, options.tokenizer or model)
    settings = {name: getattr(options, name) for name in SETTINGS}
    result.known(options.out, QUESTION, settings, options.system)
    folder = options.out.with_name(f"{options.out.stem}-aiperf") / options.system
    rows, failed = [], None
    try:
        for row in sweep(server, options, folder):
            rows.append(row)
    except AiperfFailed as error:
        failed = error  # of the cells before it each took minutes
        print(f"NOT GOOD: {failed}", file=sys.stderr)
    if not rows:
        return 1
    whole = result.add(options.out, QUESTION, settings, options.system, {"model": model, "rows": rows})
    draw(options.out.with_suffix(".svg"), whole)
    show(whole)
    print(f"written: {options.out}, {options.out.with_suffix('.svg')} and {folder}")
    return int(failed is not None)


if __name__ == "__main__":
    arguments.run(main)
