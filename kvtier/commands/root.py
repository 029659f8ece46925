"""The commands that look at a root: stats, verify, index rebuild."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from kvtier.commands.status import FOUND_BAD, OK, print_json
from kvtier.errors import ConfigError, IndexUnavailable
from kvtier.housekeeping import SWEEP_LEASE, Housekeeper, Rebuilt
from kvtier.index.base import Index
from kvtier.index.embedded import LmdbIndex
from kvtier.index.memory import MemoryIndex
from kvtier.inspect import NamespaceStats, RootStats, VerifyReport, stats, verify
from kvtier.owner import read_owner, this_node
from kvtier.root import Root
from kvtier.sizes import size

OTHERS_TIMEOUT_S = 60.0
"""A rebuild waits so long for an engine's sweep; a killed engine's lease runs out sooner."""


def run_stats(root: Root, as_json: bool) -> int:
    with _readable_index(root) as index:
        found = stats(root, index)
    if as_json:
        print_json(_stats_values(root, found))
    else:
        _print_stats(root, found)
    return FOUND_BAD if found.unreadable else OK


def run_verify(root: Root, as_json: bool) -> int:
    started = time.monotonic()
    with _readable_index(root) as index:
        report = verify(root, index, _progress("verifying"))
    if as_json:
        print_json({"root": str(root.path), **asdict(report), "bad": [finding._asdict() for finding in report.bad]})
    else:
        _print_report(root, report, time.monotonic() - started)
    return FOUND_BAD if report.bad else OK


def run_rebuild(root: Root, as_json: bool) -> int:
    if root.index_path is None:
        raise ConfigError("index.path", None, f"root {root.path} has no embedded index: there is nothing to rebuild")
    if not _is_ours(root):
        owner = read_owner(root.folder)
        fix = f"the index of this root lies on node {owner.node if owner else '?'}: run this there"
        raise ConfigError("index.path", str(root.index_path), fix)
    index = LmdbIndex(str(root.index_path))
    try:
        index.bind(root.folder)
        rebuilt = _rebuild(index, root)
        index.rebuilt()
    finally:
        index.close()
    if as_json:
        print_json({"root": str(root.path), "index_path": str(root.index_path), **asdict(rebuilt)})
    else:
        _print_rebuilt(root, rebuilt)
    return FOUND_BAD if rebuilt.unreadable else OK


def _rebuild(index: Index, root: Root) -> Rebuilt:
    """Waits for an engine's sweep to end. Raises IndexUnavailable when it does not."""
    housekeeper = _housekeeper(index, root)
    deadline = time.monotonic() + OTHERS_TIMEOUT_S
    while (rebuilt := housekeeper.rebuild(_progress("rebuilding"))) is None:
        if time.monotonic() > deadline:
            other = index.lease_owner(SWEEP_LEASE, time.time())
            raise IndexUnavailable(f"{root.path}: {other} is sweeping it or rebuilding its index already; try again")
        time.sleep(0.1)
    return rebuilt


@contextmanager
def _readable_index(root: Root) -> Iterator[Index]:
    """The root's index; where there is none here or it is empty, one in memory, made from the record headers."""
    embedded = _embedded_index(root)
    if embedded is not None:
        try:
            yield embedded
        finally:
            embedded.close()
        return
    print("no index of this root here: reading the headers of all records instead", file=sys.stderr)
    memory = MemoryIndex()
    _housekeeper(memory, root).rebuild(_progress("reading headers"))
    yield memory


def _embedded_index(root: Root) -> Index | None:
    """The root's own index, if it is here, can be opened and holds something."""
    path = root.index_path
    if path is None or not path.is_dir() or not _is_ours(root):
        return None
    try:
        index = LmdbIndex(str(path))
    except (ConfigError, IndexUnavailable, OSError) as fault:
        print(fault, file=sys.stderr)
        return None
    try:
        index.bind(root.folder)
        if not index.was_reset:
            index.counts()
            return index
    except (ConfigError, IndexUnavailable) as fault:
        print(fault, file=sys.stderr)
    index.close()
    return None


def _is_ours(root: Root) -> bool:
    owner = read_owner(root.folder)
    return owner is not None and owner.node == this_node()


def _housekeeper(index: Index, root: Root) -> Housekeeper:
    return Housekeeper(index, root.folder, f"cli/{os.getpid()}")


def _progress(doing: str) -> Callable[[int, int], None]:
    """Rewrites one line on a terminal; silent elsewhere."""

    def show(done: int, total: int) -> None:
        end = "\r" if done < total else "\n"
        print(f"\033[K{doing}: {done} of {total} segments", end=end, file=sys.stderr, flush=True)

    def stay_silent(done: int, total: int) -> None:
        pass

    return show if sys.stderr.isatty() else stay_silent


# --- for programs ---


def _stats_values(root: Root, found: RootStats) -> dict[str, Any]:
    namespaces = [
        {"id": entry.namespace.id.hex(), "tokens": entry.tokens, **asdict(entry)} for entry in found.namespaces
    ]
    return {"root": str(root.path), "n_bytes": found.n_bytes, "unreadable": found.unreadable, "namespaces": namespaces}


# --- for people ---


def _print_stats(root: Root, found: RootStats) -> None:
    rows = [_stats_row(entry) for entry in found.namespaces]
    if rows:
        titles = ("namespace", "engine", "KV", "codec", "chunks", "tokens", "sets", "segments", "on disk", "last used")
        _print_table([titles, *rows])
    print(f"{root.path}: {size(found.n_bytes)} in {len(rows)} namespaces")
    for fault in found.unreadable:
        print(f"BAD {fault}")


def _stats_row(entry: NamespaceStats) -> tuple[str, ...]:
    namespace, shape = entry.namespace, entry.namespace.geometry
    sets = f"{entry.sets}" + (f" ({entry.open_sets} open)" if entry.open_sets else "")
    sets += f" ({entry.pinned_sets} pinned)" if entry.pinned_sets else ""
    used = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.last_used_s)) if entry.last_used_s else "never"
    return (
        namespace.id.hex()[:12], namespace.engine, f"{shape.layers}x{shape.kv_heads} {shape.dtype}",
        namespace.codec.name, f"{entry.chunks:,}", f"{entry.tokens:,}", sets, f"{entry.segments:,}",
        size(entry.n_bytes), used,
    )  # fmt: skip


def _print_report(root: Root, report: VerifyReport, seconds: float) -> None:
    for finding in report.bad:
        place = f"{finding.namespace}/{finding.segment}" + ("" if finding.slot is None else f" slot {finding.slot}")
        print(f"BAD {place}: {finding.what}")
    rate = report.n_bytes / max(seconds, 1e-9) / 1e9
    print(
        f"{root.path}: {report.records:,} records ({size(report.n_bytes)}) in {report.segments:,} segments read "
        f"in {seconds:.1f} s ({rate:.1f} GB/s); {len(report.bad)} bad, {report.unfinished} never finished"
    )
    if report.bad:
        print(
            "What is bad is a miss at its next use: nothing has to be done. index rebuild takes out what has no file."
        )


def _print_rebuilt(root: Root, rebuilt: Rebuilt) -> None:
    for fault in rebuilt.unreadable:
        print(f"BAD {fault}")
    print(
        f"{root.path}: {rebuilt.records:,} records of {rebuilt.segments:,} segments were added to {root.index_path}; "
        f"{rebuilt.removed_sets} sets without files were taken out"
    )


def _print_table(rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
