"""What the GPUs of one machine do at once, as tensor-parallel ranks do: pinned copies, reads, verified loads.

    python -m benchmarks.gpu.at_once --folder /dev/shm/kv --out OUT/at_once.json [--gpus 2] [--extra '{"io": ...}' ...]

A process for each GPU, as an engine has. First each alone, then all at once: what they lose by each other is the
machine's, where copies and direct reads lose as much, and kvtier's, where loads alone do. The ceilings of the loads at
once are the copies and the reads at once. Loads are those of load_rate.py, of a folder for each GPU, with each --extra
in its turn: settings of kvtier, and "ring": [threads, MiB of a piece, slots of a thread], which are not measured then.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.gpu import report
from benchmarks.gpu.ceilings import direct_flags, direct_writes, read_s
from benchmarks.gpu.report import median

PAUSE_S = 0.2
"""Before each copy and load, as a request comes to an engine that is quiet."""
FILE_BYTES = 4 << 30
READ_THREADS, READ_PIECE_BYTES = 16, 4 << 20
WHAT = ("copies", "reads", "loads")
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
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    direct_writes(root, FILE_BYTES, keep=True)
    flags, _ = direct_flags(root / "ceiling.bin", os.O_RDONLY)
    file = os.open(root / "ceiling.bin", flags)
    for extra in arguments.extra:
        settings = json.loads(extra)
        with forced(settings.pop("ring", None)):
            rig = load_rate.make_rig(root / "tier", arguments.chunks, settings, arguments.gpus)
        works: dict[str, tuple[int, Callable[[], float]]] = {
            "copies": (n_bytes, lambda: copy.seconds(n_bytes, PAUSE_S)),
            "reads": (FILE_BYTES, lambda: read_s(file, FILE_BYTES, READ_THREADS, READ_PIECE_BYTES)),
            "loads": (n_bytes, lambda rig=rig: rig.load("r", arguments.chunks, PAUSE_S)),  # type: ignore[misc]
        }
        for members, what in itertools.product(phases(arguments.gpus), WHAT):
            size, work = works[what]
            seconds = []
            for _ in range(arguments.repeats + 1):
                barrier.wait(BARRIER_S)
                if gpu in members:
                    seconds.append(work())
            if seconds:
                answers.put((extra, members, what, gpu, size, seconds[1:]))
        rig.transfer.close()
        rig.store.close()
        shutil.rmtree(root / "tier")
    os.close(file)


def forced(ring: Sequence[int] | None) -> AbstractContextManager[object]:
    """Within, a worker that starts takes this ring instead of the one that it would measure to be the best."""
    if ring is None:
        return nullcontext()
    from kvtier import mount
    from kvtier.io.calibration import Calibration
    from kvtier.io.engines import Choice

    threads, piece_mib, slots = ring
    choice = Choice("ring", threads, piece_mib << 20, slots)
    found = Calibration(choice, None, None, None, 0.0, ("as it was asked for",))
    return mock.patch.object(mount, "calibrated", lambda *arguments: found)


def run_ranks(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(arguments.gpus), context.Queue()
    ranks = [context.Process(target=rank, args=(gpu, arguments, barrier, answers)) for gpu in range(arguments.gpus)]
    for process in ranks:
        process.start()
    asked = list(itertools.product(arguments.extra, phases(arguments.gpus), WHAT))
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
    report.write(arguments.out, "what the GPUs of one machine do at once", {
        "memory_nodes": nodes, "chunks": arguments.chunks, "rows": rows,
    })  # fmt: skip
    cells = [
        (row["what"], ", ".join(map(str, row["gpus"])), " ".join(f"{rate / 1e9:.1f}" for rate in row["each_bytes_s"]),
         f"{sum(row['each_bytes_s']) / 1e9:.1f}", json.dumps(row["extra"]))
        for row in rows
    ]  # fmt: skip
    print(f"memory nodes: {', '.join(nodes)}")
    report.table(("what", "GPUs", "GB/s each", "together", "settings"), cells)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
