"""Runs a benchmark against vLLM without and with kvtier: starts each server, asks it, stops it, and compares.

    python -m benchmarks.serving long_doc_qa [--model FOLDER] [--out RESULT.json] [-- --num-documents 20 ...]
    python -m benchmarks.serving aiperf_ttft [--model FOLDER] [--out RESULT.json] [-- --isl 1024,32768 ...]

Arguments behind -- belong to the benchmark; those behind one more -- are a second run against the same server, whose
result is RESULT-2.json (give it other documents). Without --model a small model with random weights is made. Ctrl-C
stops the server in order. The tier's root is the folder benchmark-tier, in --work or in the root that --tier names; it
is emptied before each system that does not continue with what another one stored, and at the end.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from benchmarks import aiperf_ttft, long_doc_qa
from benchmarks.serving import result
from benchmarks.serving.server import MODULE, SYSTEMS, ServedSystem, ServerFailed, ServerSetup, running

BENCHMARKS = {"long_doc_qa": long_doc_qa, "aiperf_ttft": aiperf_ttft}
USUAL_SYSTEMS = {"long_doc_qa": "prefix,kvtier,restarted", "aiperf_ttft": "nocache,cache,prefix"}
# For the small model: a small disk is enough, and every hit is loaded.
SMALL_TIER = {
    "capacity_bytes": "4GiB",
    "segment_bytes": "256MiB",
    "host": {"arena_bytes": "512MiB"},
    "min_load_tokens": 256,
}
SMALL_VLLM = "--dtype float32 --enforce-eager --max-model-len 16384 --block-size 32 --max-num-seqs 4"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = made.add_argument
    systems = "; ".join(f"{name}: {system.what}" for name, system in SYSTEMS.items())
    add("benchmark", choices=BENCHMARKS)
    add("--systems", help=f"separated by commas; {systems}")
    add("--model", help="the model for vLLM (default: a small model that is made in --work)")
    add("--tier", type=json_object, default={}, help='kvtier\'s settings as JSON, such as {"root": ..., "codec": ...}')
    add("--native", type=json_object, default={}, help="settings of vLLM's own tiering as JSON")
    add("--vllm", type=shlex.split, default=[], help="more arguments of vLLM's, as one text")
    add("--program", type=shlex.split, default=[sys.executable, "-m", MODULE], help="the command of the server")
    add("--start-timeout", type=float, default=1800.0, help="seconds until a server must be up")
    add("--work", type=Path, default=Path("build/serving"), help="for the tier's root, model and logs")
    add("--out", type=Path, help="the result (default: <work>/<benchmark>.json); it is replaced")
    return made


def json_object(text: str) -> dict[str, object]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("this must be a JSON object")
    return found


def setup(options: argparse.Namespace) -> ServerSetup:
    """Raise SystemExit if --work cannot be written."""
    work = options.work.absolute()
    result.writable(work / "server.log").unlink()
    model, tier, vllm = options.model, options.tier, options.vllm
    if not model:
        from benchmarks.demo.model import make_model_here

        model, tier, vllm = str(make_model_here(work)), SMALL_TIER | tier, [*SMALL_VLLM.split(), *vllm]
    return ServerSetup(model, work, tier, vllm, options.program, options.start_timeout, options.native)


def chosen(options: argparse.Namespace) -> list[str]:
    names = (options.systems or USUAL_SYSTEMS[options.benchmark]).split(",")
    stored: ServedSystem | None = None
    for name in names:
        if name not in SYSTEMS:
            raise SystemExit(f"--systems: there is no {name!r}; there are {', '.join(SYSTEMS)}")
        system = SYSTEMS[name]
        if system.keeps and (stored is None or (stored.tier, stored.extra) != (system.tier, system.extra)):
            raise SystemExit(f"--systems: {name} needs what kvtier stored right before it, and there is nothing")
        stored = system if system.tier else stored
    return names


def runs_of(words: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Return the wrapper's own words, and the benchmark's for each of its runs."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word == "--":
            parts.append([])
        else:
            parts[-1].append(word)
    return parts[0], parts[1:] or [[]]


def empty(root: Path) -> None:
    """Remove the folder's content but not the folder, which a running server may hold."""
    root.mkdir(parents=True, exist_ok=True)
    for path in root.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def main(arguments: Sequence[str]) -> int:
    own, runs = runs_of(arguments)
    options = parser().parse_args(own)
    names, common = chosen(options), setup(options)
    out = (options.out or common.work / f"{options.benchmark}.json").absolute()
    outs = [out, *(out.with_name(f"{out.stem}-{number}{out.suffix}") for number in range(2, len(runs) + 1))]
    benchmark = BENCHMARKS[options.benchmark]
    for flags in runs:
        benchmark.parser().parse_args(flags)  # no server is started, and no result removed, for wrong ones
    for path in outs:
        result.writable(path).unlink()
    statuses = []
    try:
        for name in names:
            system = SYSTEMS[name]
            if system.tier and not system.keeps:
                empty(common.root)
            print(f"\n##### {name}: {system.what}", flush=True)
            with running(common, name) as url:
                for number, (path, flags) in enumerate(zip(outs, runs, strict=True)):
                    if number and system.tier == "native":
                        empty(common.root)  # it evicts nothing, and no run needs what the run before stored
                    asked = ["--out", str(path), "--system", name, "--base-url", url]
                    statuses.append(benchmark.main([*asked, *flags]))
        return max(statuses)
    finally:
        if any(SYSTEMS[name].tier for name in names):
            empty(common.root)  # it may be in memory, and nothing continues with it


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
