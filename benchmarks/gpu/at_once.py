"""What the GPUs of one machine do at once, as tensor-parallel ranks do: pinned copies, and verified loads from files.

    python -m benchmarks.gpu.at_once --folder /dev/shm/kv --out OUT/at_once.json [--gpus 2] [--extra '{"io": ...}' ...]

A process for each GPU, as an engine has. First each alone, then all at once: what they lose by each other is the
machine's, where copies lose as much, and kvtier's, where loads alone do. The ceilings of the loads at once are the
copies at once, and direct reads of the folder. Loads are those of load_rate.py, of a folder for each GPU, with each
--extra in its turn.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import report
from benchmarks.gpu.ceilings import direct_reads, direct_writes
from benchmarks.gpu.report import median

PAUSE_S = 0.3
"""Before each copy and load, as a request comes to an engine that is quiet."""
FILE_BYTES = 8 << 30
BARRIER_S = 120.0


def phases(n_gpus: int) -> list[tuple[int, ...]]:
    """Who takes part in each: every GPU alone, then all."""
    return [*((gpu,) for gpu in range(n_gpus)), tuple(range(n_gpus))]


def rank(gpu: int, arguments: argparse.Namespace, barrier: Any, answers: Any) -> None:
    """The process of one GPU. Puts (extra, phase, what, gpu, bytes, seconds of each repetition) for each it is in."""
    os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)  # CUDA looks at it when it is first used
    from benchmarks.gpu import load_rate

    copy = load_rate.PinnedCopy()
    root = arguments.folder / f"at-once-{gpu}"
    n_bytes = arguments.chunks * load_rate.SHAPE.chunk_tokens * load_rate.SHAPE.token_bytes
    for extra in arguments.extra:
        shutil.rmtree(root, ignore_errors=True)
        rig = load_rate.make_rig(root, arguments.chunks, json.loads(extra))
        for members in phases(arguments.gpus):
            seconds: dict[str, list[float]] = {"copies": [], "loads": []}
            for repetition in range(arguments.repeats + 1):
                barrier.wait(BARRIER_S)
                if gpu in members:
                    seconds["copies"].append(copy.seconds(n_bytes, PAUSE_S))
                barrier.wait(BARRIER_S)
                if gpu in members:
                    seconds["loads"].append(rig.load(f"{members}-{repetition}", arguments.chunks, PAUSE_S))
            for what, times in seconds.items():
                if times:
                    answers.put((extra, members, what, gpu, n_bytes, times[1:]))
        rig.transfer.close()
        rig.store.close()


def run_ranks(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(arguments.gpus), context.Queue()
    ranks = [context.Process(target=rank, args=(gpu, arguments, barrier, answers)) for gpu in range(arguments.gpus)]
    for process in ranks:
        process.start()
    asked = list(itertools.product(arguments.extra, phases(arguments.gpus), ("copies", "loads")))
    try:
        found = [answers.get(timeout=BARRIER_S) for _, members, _ in asked for _ in members]
    finally:
        for process in ranks:
            process.join(BARRIER_S)
            process.kill()
    return [row_of(key, sorted(answer[3:] for answer in found if answer[:3] == key)) for key in asked]


def row_of(key: tuple[str, tuple[int, ...], str], measured: list[tuple[int, int, list[float]]]) -> dict[str, Any]:
    extra, members, what = key
    return {"extra": json.loads(extra), "what": what, "gpus": list(members),
            "each_bytes_s": [n_bytes / median(seconds) for _, n_bytes, seconds in measured],
            "all_s": [seconds for _, _, seconds in measured]}  # fmt: skip


def reads_of(folder: Path) -> dict[str, Any]:
    direct_writes(folder, FILE_BYTES, keep=True)
    try:
        return direct_reads(folder / "ceiling.bin")
    finally:
        (folder / "ceiling.bin").unlink()


def parse(text: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.at_once", description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=128, help="of 32 MiB, for each GPU")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--extra", action="append", help="more settings of kvtier, as JSON; may be said several times")
    arguments = parser.parse_args(text)
    arguments.extra = arguments.extra or ["{}"]
    return arguments


def main() -> int:
    arguments = parse()
    nodes = sorted(path.name for path in Path("/sys/devices/system/node").glob("node[0-9]*"))
    try:
        rows = run_ranks(arguments)
    finally:
        for gpu in range(arguments.gpus):
            shutil.rmtree(arguments.folder / f"at-once-{gpu}", ignore_errors=True)
    reads = reads_of(arguments.folder)
    report.write(arguments.out, "what the GPUs of one machine do at once", {
        "memory_nodes": nodes, "chunks": arguments.chunks, "reads": reads, "rows": rows,
    })  # fmt: skip
    cells = [
        (row["what"], ", ".join(map(str, row["gpus"])), " ".join(f"{rate / 1e9:.1f}" for rate in row["each_bytes_s"]),
         f"{sum(row['each_bytes_s']) / 1e9:.1f}", json.dumps(row["extra"]))
        for row in rows
    ]  # fmt: skip
    print(f"direct reads {reads['bytes_s'] / 1e9:.1f} GB/s; memory nodes: {', '.join(nodes)}")
    report.table(("what", "GPUs", "GB/s each", "together", "settings"), cells)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
