"""`kvtier bench`: rates of the storage and the index of a root on this machine, each with its ceiling.

A quick estimate: benchmarks/ compares with other systems. Writes one file in the root and removes it.
"""

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from kvtier.admin.opened import Opened
from kvtier.cli import bench_storage
from kvtier.cli.app import NotDone, app
from kvtier.cli.place import CommandTarget, ConfigOption, JsonOption, PathArgument, deployment, find_place
from kvtier.cli.progress import progress
from kvtier.cli.prompts import size_argument
from kvtier.cli.tables import percent, print_table, seconds
from kvtier.index.base import Index
from kvtier.io.calibrate import RECORD_BYTES
from kvtier.io.ring import sizes_for
from kvtier.runtime.exit_status import MEANINGS, OK, print_json
from kvtier.runtime.units import counted, exact, rate, size
from kvtier.storage.filesystem import IN_MEMORY, file_system_of
from kvtier.storage.root import Root
from kvtier.storage.segments import direct_io_works

LOOKUP_CHUNKS = 391  # chunks of a prompt of 100,000 tokens
LOOKUPS = 101
SETS_MAX = 64  # sets read to find that many chunks
BYTES = 256 << 20
BYTES_MAX = 4 << 30


@dataclass(frozen=True, slots=True)
class Figure:
    """unit: bytes/s or s. share: fraction of the ceiling that was reached."""

    what: str
    unit: str
    value: float
    ceiling: float
    ceiling_is: str

    @property
    def share(self) -> float:
        return self.value / self.ceiling if self.unit == "bytes/s" else self.ceiling / self.value


@app.command("bench", epilog=MEANINGS)
def bench(
    path: PathArgument = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    n_bytes: Annotated[
        int | None,
        typer.Option(
            "--size",
            metavar="SIZE",
            parser=size_argument,
            help=f"How much is written and read at a time; {size(BYTES)} without it.",
        ),
    ] = None,
) -> int:
    """Measure storage and index of a root, each beside its ceiling."""
    if n_bytes is not None and n_bytes < RECORD_BYTES:
        raise NotDone(f"--size {n_bytes}: one record takes {exact(RECORD_BYTES)}: set it to several times that")
    place = find_place(path, config)
    steps = itertools.count(1)
    with progress("measuring", "steps") as show:

        def step() -> None:
            show(next(steps), bench_storage.ROUNDS * len(bench_storage.STEPS) + 1)

        figures, notes = _storage(place, BYTES if n_bytes is None else n_bytes, step)
        if place.is_bare and place.root.index_path is None or place.settings.index.kind == "memory":
            notes.append("lookups: not measured, there is no index here that this command can see")
        else:
            with deployment(path, config, needs_settings=False) as opened:
                more, note = _lookups(opened)
            figures += more
            notes += [note] if note else []
        step()
    if as_json:
        rows = [asdict(figure) | {"share": figure.share} for figure in figures]
        print_json({"root": str(place.root.path), "figures": rows, "notes": notes})
    else:
        _print(place.root, figures, notes)
    return OK


def _storage(place: CommandTarget, n_bytes: int, step: Any) -> tuple[list[Figure], list[str]]:
    io, folder = place.settings.io, place.root.folder
    mount = file_system_of(folder)
    sizes = sizes_for(mount.kind in IN_MEMORY, io.threads, io.piece_bytes)
    direct = io.direct != "never" and direct_io_works(folder)
    flushes = mount.is_flushed(io.fdatasync)
    rates, moved = bench_storage.measure(folder, sizes, direct, flushes, min(n_bytes, BYTES_MAX), step)
    said = f"{'direct' if direct else 'buffered'} on {mount.kind}, {sizes.threads} threads, {size(moved)} at a time"
    of_flush = (
        "writes count the fdatasync that engines call there before they publish"
        if flushes
        else "writes count no fdatasync, as engines call none there"
    )
    plain = f"the best of {bench_storage.ROUNDS} with plain system calls, without checksums"
    plain_write = f"{plain}, with one fdatasync" if flushes else plain
    return [
        Figure("writing records", "bytes/s", rates["write"], rates["plain write"], plain_write),
        Figure("reading and checking records", "bytes/s", rates["read"], rates["plain read"], plain),
    ], [f"storage: {said}, median of {bench_storage.ROUNDS}; {of_flush} (io.fdatasync: {io.fdatasync})"]


def _lookups(opened: Opened) -> tuple[list[Figure], str]:
    keys = _stored_keys(opened.index)
    if not keys:
        return [], "lookups: not measured, the index is empty"
    lookup_s = statistics.median(_taken_s(opened.index, keys))
    # The minimum, because one key may take as long as many if the index is in this process.
    trip_s = min(lookup_s, *_taken_s(opened.index, keys[:1]))
    kind = opened.settings.index.kind
    what, ceiling_is = f"lookup of {counted(len(keys), 'chunk')}", f"the quickest of {LOOKUPS} lookups of one chunk"
    figure = Figure(what, "s", lookup_s, trip_s, ceiling_is)
    return [figure], f"lookups: {kind} index, median of {LOOKUPS}"


def _stored_keys(index: Index) -> list[bytes]:
    """Return keys of up to LOOKUP_CHUNKS chunks that a lookup finds."""
    found: list[bytes] = []
    for info in index.sets()[:SETS_MAX]:
        waiting = [key for key, _ in index.members(info.set_id)]
        while waiting and len(found) < LOOKUP_CHUNKS:
            n_found = len(index.resolve(waiting))
            found += waiting[:n_found]
            waiting = waiting[n_found + 1 :]  # the next chunk lacks layers or heads
    return list(dict.fromkeys(found))[:LOOKUP_CHUNKS]


def _taken_s(index: Index, keys: Sequence[bytes]) -> list[float]:
    taken = []
    for _ in range(LOOKUPS):
        started_s = time.perf_counter()
        index.resolve(keys)
        taken.append(time.perf_counter() - started_s)
    return taken


def _print(root: Root, figures: Sequence[Figure], notes: Sequence[str]) -> None:
    rows = [(str(root.path), "measured", "ceiling", "of it", "the ceiling is")]
    for figure in figures:
        text = rate if figure.unit == "bytes/s" else seconds
        rows.append((figure.what, text(figure.value), text(figure.ceiling), percent(figure.share), figure.ceiling_is))
    print_table(rows, right=(1, 2, 3))
    for note in notes:
        print(note)
