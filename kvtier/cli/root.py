"""Work of `kvtier stats` and `kvtier verify` on a root without its deployment."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any

from kvtier.cli.embedded import housekeeper, open_embedded
from kvtier.cli.progress import progress
from kvtier.cli.tables import counted, print_table, when
from kvtier.cli.tables import seconds as duration
from kvtier.errors import ConfigError, IndexUnavailable
from kvtier.format.signing import Signer
from kvtier.index.base import Index
from kvtier.index.lmdb.index import is_of_this_boot
from kvtier.index.memory import MemoryIndex
from kvtier.maintenance.scrub import NamespaceStats, RootStats, VerifyReport, stats, verify
from kvtier.runtime.exit_status import FOUND_BAD, OK, print_json
from kvtier.runtime.units import rate, size
from kvtier.storage.root import Root

SEGMENTS = "segments"


def run_stats(root: Root, as_json: bool) -> int:
    with _readable_index(root) as index:
        found = stats(root, index)
    if as_json:
        print_json(_stats_values(root, found))
    else:
        _print_stats(root, found)
    return FOUND_BAD if found.unreadable else OK


def run_verify(root: Root, as_json: bool, index: Index | None = None, signer: Signer | None = None) -> int:
    """Verify a root and print the findings. index: an open one; None: the root's own, or else one made from the record
    headers. signer: has the secret of signed records; without it signatures are not checked."""
    started = time.monotonic()
    opened = _readable_index(root) if index is None else nullcontext(index)
    with opened as found, progress("verifying", SEGMENTS) as show:
        report = verify(root, found, show, signer)
    if as_json:
        print_json({"root": str(root.path), **asdict(report), "bad": [finding._asdict() for finding in report.bad]})
    else:
        _print_report(root, report, time.monotonic() - started)
    return FOUND_BAD if report.bad else OK


@contextmanager
def _readable_index(root: Root) -> Iterator[Index]:
    """Yield the root's index; if there is none here or it is empty, one in memory, made from the record headers."""
    embedded = _embedded_index(root)
    if embedded is not None:
        try:
            yield embedded
        finally:
            embedded.close()
        return
    print("no index of this root here: reading the headers of all records instead", file=sys.stderr)
    memory = MemoryIndex()
    with progress("reading headers", SEGMENTS) as show:
        housekeeper(memory, root).rebuild(show)
    yield memory


def _embedded_index(root: Root) -> Index | None:
    """Return the root's own index, if it is here, can be opened and has content."""
    if root.index_path is None or not is_of_this_boot(root.index_path):  # one of another boot would be emptied
        return None
    try:
        index = open_embedded(root)
    except (ConfigError, IndexUnavailable, OSError) as fault:
        print(fault, file=sys.stderr)
        return None
    try:
        if not index.was_reset:
            index.counts()
            return index
    except IndexUnavailable as fault:
        print(fault, file=sys.stderr)
    index.close()
    return None


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
        print_table([titles, *rows], right=(4, 5, 6, 7, 8))
    print(f"{root.path}: {size(found.n_bytes)} in {counted(len(rows), 'namespace')}")
    for fault in found.unreadable:
        print(f"BAD {fault}")


def _stats_row(entry: NamespaceStats) -> tuple[str, ...]:
    namespace, shape = entry.namespace, entry.namespace.geometry
    sets = f"{entry.sets}" + (f" ({entry.open_sets} open)" if entry.open_sets else "")
    return (
        namespace.id.hex()[:12],
        namespace.engine,
        f"{shape.layers}x{shape.kv_heads} {shape.dtype}",
        namespace.codec.name,
        f"{entry.chunks:,}",
        f"{entry.tokens:,}",
        sets,
        f"{entry.segments:,}",
        size(entry.n_bytes),
        when(entry.last_used_s),
    )


def _print_report(root: Root, report: VerifyReport, seconds: float) -> None:
    for finding in report.bad:
        place = f"{finding.namespace}/{finding.segment}" + ("" if finding.slot is None else f" slot {finding.slot}")
        print(f"BAD {place}: {finding.what}")
    took = f"read in {duration(seconds)}"
    if report.n_bytes:
        took += f" ({rate(report.n_bytes / max(seconds, 1e-9))})"
    print(
        f"{root.path}: {counted(report.records, 'record')} ({size(report.n_bytes)}) in "
        f"{counted(report.segments, 'segment')} {took}; {len(report.bad)} bad, "
        f"{report.unfinished} never finished"
    )
    if report.unproved:
        print(f"The signatures of {report.unproved:,} records were not checked: name the settings with their secret.")
    if report.bad:
        print(
            "What is bad is a miss at its next use: nothing has to be done. index rebuild takes out what has no file."
        )
