"""Times to the first token by aiperf over input lengths: with a cache, without one, and as vLLM's own prefix hit.

    python -m benchmarks.serving aiperf_ttft --out RESULT.json     # starts and stops vLLM itself, for each of the three
    python -m benchmarks.aiperf_ttft --base-url http://localhost:8000 --system nocache --out RESULT.json

The sweep of DDN's slides: one prefix prompt of 1K ... 100K tokens that all requests share, 100 tokens of answer, 1 and
2 requests at once, four warm-up requests before each, which fill a cache. The table has their columns, and beside them
the floor (`prefix`: the prompt is in the GPU's own cache). aiperf itself runs in an environment of its own, which
`make aiperf` makes in build/aiperf. Written are RESULT.json, RESULT.svg and aiperf's own files in RESULT-aiperf/.
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
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks import plots, report
from benchmarks.serving import arguments, counters, result
from benchmarks.serving.arguments import at_least, numbers
from benchmarks.serving.client import find_model

QUESTION = "time to the first token over input length, by aiperf"
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 102400)
SETTINGS = ("isl", "concurrency", "osl", "requests", "warmup_requests", "seed", "aiperf_arguments")
EXPORT = "profile_export_aiperf.json"
STATISTICS = ("avg", "p50", "p90", "p95", "p99", "min", "max", "std")
BUILT = Path(__file__).resolve().parents[1] / "build" / "aiperf" / "bin" / "aiperf"
TIMEOUT_S = 7200.0
# For aiperf's own processes to start: its 30 s, and ten attempts a second apart, end a run on a busy machine.
PATIENCE = {
    f"AIPERF_SERVICE_{name}": "300" for name in ("START_TIMEOUT", "REGISTRATION_TIMEOUT", "REGISTRATION_MAX_ATTEMPTS")
}


class AiperfFailed(Exception):
    """aiperf ended with an error, or its files are no whole measurement; the text has its output."""


def command(program: Path, options: argparse.Namespace, isl: int, concurrency: int, folder: Path) -> list[str]:
    """Return aiperf's command as the slides show it, without `nvext`, which is Dynamo's."""
    model, tokenizer = shlex.quote(options.model), shlex.quote(options.tokenizer or options.model)
    return shlex.split(
        f"{shlex.quote(str(program))} profile --model {model} --tokenizer {tokenizer} --endpoint-type chat "
        f"--url {options.base_url} --streaming --concurrency {concurrency} --request-count {options.requests} "
        "--num-prefix-prompts 1 --synthetic-input-tokens-mean 1 --synthetic-input-tokens-stddev 0 "
        f"--prefix-prompt-length {isl} --output-tokens-mean {options.osl} --output-tokens-stddev 0 "
        f"--random-seed {options.seed} --dataset-sampling-strategy shuffle "
        f"--warmup-request-count {options.warmup_requests} --extra-inputs ignore_eos:true --ui none "
        f"--artifact-dir {shlex.quote(str(folder))} {options.aiperf_arguments}"
    )


def run(words: Sequence[str], folder: Path, requests: int) -> dict[str, Any]:
    """Run aiperf to its end and read the files of so many requests in the folder. Raise AiperfFailed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    log = folder / "aiperf.log"
    # With HF_HUB_OFFLINE it does not take a tokenizer from a folder.
    environment = PATIENCE | {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    with log.open("w") as out:
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
        try:
            status = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise AiperfFailed(f"{shlex.join(words)}\nis not done after {TIMEOUT_S:.0f} s; {log}") from None
        finally:
            with suppress(ProcessLookupError):  # it starts many processes, which must all end
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status != 0 or not (folder / EXPORT).exists():
        raise AiperfFailed(f"{shlex.join(words)}\nended with status {status}\n{log.read_text()[-3000:]}")
    try:
        return parse(json.loads((folder / EXPORT).read_text()), requests)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise AiperfFailed(f"{folder / EXPORT} is not as expected: {type(error).__name__}: {error}") from None


def parse(export: dict[str, Any], requests: int) -> dict[str, Any]:
    """Return the figures of aiperf's export. Raise AiperfFailed if requests failed or are missing."""
    counted = int(export.get("request_count", {}).get("avg", 0))
    failed = export.get("error_request_count", {}).get("avg", 0)
    if counted < requests or failed or export.get("was_cancelled") or export.get("error_summary"):
        summary = export.get("error_summary")
        raise AiperfFailed(f"{counted} of {requests} requests were answered, {failed:.0f} failed: {summary}")
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


def sweep(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each length and concurrency, the short ones first. Raise AiperfFailed.

    tokens: the sources of the prompts' tokens, warm-up included.
    """
    on_path = shutil.which("aiperf")
    places = (options.aiperf, BUILT, Path(on_path) if on_path else None)
    program = next((place for place in places if place is not None and place.exists()), None)
    if program is None:
        raise SystemExit("there is no aiperf: run `make aiperf`, or give --aiperf PATH")
    cells = [(isl, concurrency) for isl in options.isl for concurrency in options.concurrency]
    for isl, concurrency in track(cells, f"aiperf, {options.system}", console=Console(stderr=True)):
        place = folder / f"ISL{isl}_CON{concurrency}"
        before = counters.read(options.base_url)
        row = run(command(program, options, isl, concurrency, place), place, options.requests)
        yield {"isl": isl, "concurrency": concurrency, **row, "tokens": counters.since(options.base_url, before)}


def means(whole: dict[str, Any]) -> dict[tuple[int, int], dict[str, float]]:
    """Return {(input length, concurrency): {system: mean ms}}."""
    found: dict[tuple[int, int], dict[str, float]] = {}
    for system, measured in whole["systems"].items():
        for row in measured["rows"]:
            found.setdefault((row["isl"], row["concurrency"]), {})[system] = row["ttft_ms"]["avg"]
    return found


def table_rows(whole: dict[str, Any]) -> report.Table:
    """Return columns and rows of the slides' table, one row an input length: mean milliseconds, and the speed-up."""
    cells, systems = means(whole), list(whole["systems"])
    cached = [system for system in systems if system != "nocache" and "nocache" in systems]
    concurrencies = sorted({concurrency for _, concurrency in cells})
    columns = ["ISL"]
    for concurrency in concurrencies:
        columns += [f"{system} CONC={concurrency}" for system in systems] + [f"nocache/{system}" for system in cached]
    rows = []
    for isl in sorted({isl for isl, _ in cells}):
        row = [plots.short(isl)]
        for concurrency in concurrencies:
            found = cells.get((isl, concurrency), {})
            row += [f"{found[system]:,.1f}" if system in found else "-" for system in systems]
            for system in cached:
                is_known = {"nocache", system} <= set(found)
                row.append(f"{found['nocache'] / found[system]:.1f}x" if is_known else "-")
        rows.append(row)
    return columns, rows


def draw(path: Path, whole: dict[str, Any]) -> None:
    """Draw a colour for each system, a dashed line for more than one request at once."""
    systems = list(whole["systems"])
    points: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for (isl, concurrency), found in means(whole).items():
        for system, value in found.items():
            points.setdefault((system, concurrency), []).append((isl, value))
    drawn = [
        plots.Line(f"{system}, {concurrency} at once", of_line, systems.index(system), int(concurrency > 1))
        for (system, concurrency), of_line in points.items()
    ]
    plots.lines(path, "Mean time to the first token, by aiperf", "input tokens", "ms", drawn)


def parser() -> argparse.ArgumentParser:
    made = arguments.parser("aiperf_ttft", __doc__)
    add = made.add_argument
    add("--tokenizer", help="a folder or a name (default: the model's)")
    add("--isl", type=numbers, default=list(LENGTHS), help="prefix lengths in tokens, separated by commas")
    add("--concurrency", type=numbers, default=[1, 2])
    add("--osl", type=at_least(1), default=100, help="tokens of each answer")
    add("--requests", type=at_least(1), default=100, help="timed requests of each length and concurrency")
    add("--warmup-requests", type=at_least(0), default=4)
    add("--seed", type=int, default=176)
    add("--aiperf", type=Path, help=f"the program (default: {BUILT}, else that on the PATH)")
    add("--aiperf-arguments", default="", help="further ones, as one text")
    return made


def main(words: Sequence[str] | None = None) -> int:
    options = parser().parse_args(words)
    options.model = options.model or asyncio.run(find_model(options.base_url))
    settings = {name: getattr(options, name) for name in SETTINGS}
    result.known(options.out, QUESTION, settings, options.system)
    folder = options.out.with_name(f"{options.out.stem}-aiperf") / options.system
    rows, status = [], 0
    try:
        for row in sweep(options, folder):
            rows.append(row)
    except AiperfFailed as error:  # the cells before it took minutes and are kept
        status = 1
        print(f"NOT GOOD: {error}", file=sys.stderr)
    if rows:
        whole = result.add(options.out, QUESTION, settings, options.system, {"model": options.model, "rows": rows})
        draw(options.out.with_suffix(".svg"), whole)
        print("\nmean TTFT, ms")
        report.table(*table_rows(whole))
    return status


if __name__ == "__main__":
    sys.exit(main())
