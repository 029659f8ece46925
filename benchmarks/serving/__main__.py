"""Runs a benchmark against vLLM without and with kvtier: starts each server, asks it, stops it, and compares.

    python -m benchmarks.serving long_doc_qa [--model FOLDER] [--out RESULT.json] [-- --num-documents 20 ...]
    python -m benchmarks.serving aiperf_ttft [--model FOLDER] [--out RESULT.json] [-- --isl 1024,32768 ...]
    python -m benchmarks.serving capacity [--model FOLDER] [--out RESULT.json] [-- --documents 2,4,8 ...]

What follows -- is the benchmark's own; what follows one more -- is asked of the same server after that, and goes into
RESULT-2.json (give it other documents). Without --model a small model with random weights is made, as the demo has it.
Ctrl-C stops the server in order. The tier lies in a folder of its own, benchmark-tier in --work or in the root that
--tier names, which is emptied before each system that does not go on with what another one stored, and at the end.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from benchmarks import aiperf_ttft, capacity, long_doc_qa
from benchmarks.serving import result
from benchmarks.serving.server import MODULE, SYSTEMS, ServerFailed, Setup, System, running

Main = Callable[[Sequence[str]], int]
URL_FLAGS = {"long_doc_qa": "--base-url", "aiperf_ttft": "--url", "capacity": "--base-url"}
PARSERS = {"long_doc_qa": long_doc_qa.parser, "aiperf_ttft": aiperf_ttft.parser, "capacity": capacity.parser}
MAINS: dict[str, Main] = {"long_doc_qa": long_doc_qa.main, "aiperf_ttft": aiperf_ttft.main, "capacity": capacity.main}
USUAL_SYSTEMS = {
    "long_doc_qa": ("prefix", "kvtier", "restarted"),
    "aiperf_ttft": ("nocache", "cache", "prefix"),
    "capacity": ("prefix", "kvtier", "kvtier-k4v4"),
}
SMALL_TIER = {
    "capacity_bytes": "4GiB",
    "segment_bytes": "256MiB",
    "host": {"arena_bytes": "512MiB"},
    "min_load_tokens": 256,
}
"""For the small model: the disk of a stranger's machine may be small, and every hit is loaded."""
SMALL_VLLM = "--dtype float32 --enforce-eager --max-model-len 16384 --block-size 32 --max-num-seqs 4"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    systems = "; ".join(f"{name}: {system.what}" for name, system in SYSTEMS.items())
    made.add_argument("benchmark", choices=MAINS)
    made.add_argument("--systems", help=f"with commas between; {systems}")
    made.add_argument("--model", help="what vLLM is to serve (default: a small model that is made in --work)")
    made.add_argument("--tier", type=json.loads, help='kvtier\'s settings as JSON, such as {"root": ..., "codec": ...}')
    made.add_argument("--native", type=json.loads, help="settings of vLLM's own tiering as JSON")
    made.add_argument("--vllm", help="more arguments of vLLM's, as one text")
    made.add_argument("--program", default=f"{sys.executable} -m {MODULE}", help="what becomes the server")
    made.add_argument("--start-timeout", type=float, default=1800.0, help="seconds until a server must be up")
    made.add_argument("--work", type=Path, default=Path("build/serving"), help="for the tier's root, model and logs")
    made.add_argument("--out", type=Path, help="the result (default: <work>/<benchmark>.json); it is replaced")
    return made


def setup(options: argparse.Namespace) -> Setup:
    """Raises SystemExit for settings that are none."""
    work = options.work.absolute()
    result.writable(work / "server.log").unlink()
    tier = {} if options.model else SMALL_TIER
    given = f"{'' if options.model else SMALL_VLLM} {options.vllm or ''}"
    for flag in ("tier", "native"):
        if not isinstance(getattr(options, flag) or {}, dict):
            raise SystemExit(f"--{flag}: a JSON object is wanted")
    model = options.model or str(_small_model(work))
    return Setup(
        model,
        work,
        tier | (options.tier or {}),
        words("--vllm", given),
        words("--program", options.program),
        options.start_timeout,
        options.native or {},
    )


def words(flag: str, text: str) -> list[str]:
    """As a shell has them. Raises SystemExit."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise SystemExit(f"{flag}: {error}") from None


def _small_model(work: Path) -> Path:
    from benchmarks.demo.model import make_model, size_here

    size = size_here()
    make_model(work / size.name, size)
    return work / size.name


def chosen(options: argparse.Namespace) -> list[str]:
    names = options.systems.split(",") if options.systems else list(USUAL_SYSTEMS[options.benchmark])
    for name in names:
        if name not in SYSTEMS:
            raise SystemExit(f"--systems: there is no {name!r}; there are {', '.join(SYSTEMS)}")
    stored: System | None = None
    for name in names:
        system = SYSTEMS[name]
        if system.keeps and (stored is None or (stored.tier, stored.extra) != (system.tier, system.extra)):
            raise SystemExit(f"--systems: {name} goes on with what kvtier stored right before it, and there is nothing")
        stored = system if system.tier else stored
    return names


def runs_of(words: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """The wrapper's own words, and the benchmark's for each time that it is run."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word == "--":
            parts.append([])
        else:
            parts[-1].append(word)
    return parts[0], parts[1:] or [[]]


def out_of(out: Path, number: int) -> Path:
    return out if number == 0 else out.with_name(f"{out.stem}-{number + 1}{out.suffix}")


def empty(root: Path) -> None:
    """The folder stays: a server that runs may hold it."""
    root.mkdir(parents=True, exist_ok=True)
    for path in root.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def main(arguments: Sequence[str]) -> int:
    own, runs = runs_of(arguments)
    options = parser().parse_args(own)
    names, common = chosen(options), setup(options)
    out = (options.out or common.work / f"{options.benchmark}.json").absolute()
    for flags in runs:
        PARSERS[options.benchmark]().parse_args(flags)  # no server is started, and no result removed, for wrong ones
    for number in range(len(runs)):
        result.writable(out_of(out, number)).unlink()
    try:
        return max(status for name in names for status in asked_of(name, common, options.benchmark, out, runs))
    finally:
        if any(SYSTEMS[name].tier for name in names):
            empty(common.root)  # it may lie in memory, and nothing goes on with it


def asked_of(name: str, common: Setup, benchmark: str, out: Path, runs: Sequence[Sequence[str]]) -> list[int]:
    """The benchmark's status of each run against a server of this system."""
    system, statuses = SYSTEMS[name], []
    if system.tier and not system.keeps:
        empty(common.root)
    print(f"\n##### {name}: {system.what}", flush=True)
    with running(common, name) as url:
        for number, flags in enumerate(runs):
            if number and system.tier == "native":
                empty(common.root)  # it evicts nothing, and nothing is asked again of what the run before stored
            asked = ["--out", str(out_of(out, number)), "--system", name, URL_FLAGS[benchmark], url]
            statuses.append(MAINS[benchmark]([*asked, *flags]))
    return statuses


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        sys.exit(main(sys.argv[1:]))
    except ServerFailed as failed:
        sys.exit(str(failed))
    except KeyboardInterrupt:
        sys.exit("interrupted; the server is stopped")
