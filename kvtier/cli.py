"""The command line: looking at a root, checking every byte of it, and making its index anew.

    kvtier stats PATH            what lies in the root
    kvtier verify PATH           reads every record and checks every checksum
    kvtier index rebuild PATH    makes the index agree with the segment files

PATH is the configured `root`. `--json` prints for programs. Exit status: 0 all is well, 1 something bad was found,
2 it could not be done (one line on standard error says why).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError, IndexUnavailable, KVTierError
from kvtier.housekeeping import Housekeeper, Rebuilt
from kvtier.index.base import Index
from kvtier.index.embedded import LmdbIndex
from kvtier.index.memory import MemoryIndex
from kvtier.inspect import NamespaceStats, RootStats, VerifyReport, stats, verify
from kvtier.owner import read_owner, this_node
from kvtier.root import Root, find_root

OK, FOUND_BAD, NOT_DONE = 0, 1, 2
INTERRUPTED = 130  # as shells have it: 128 + SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status. `arguments`: without the program's name; None: those of the process."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(find_root(options.path), options.json)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # its reader has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (KVTierError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return NOT_DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvtier", description="Looks after the folder of a KV cache tier.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_command(commands, "stats", "what lies in the root", run_stats)
    _add_command(commands, "verify", "read every record and check every checksum", run_verify)
    index = commands.add_parser("index", help="work on the index").add_subparsers(required=True, metavar="COMMAND")
    _add_command(index, "rebuild", "make the index agree with the segment files", run_rebuild)
    return parser


def _add_command(commands: Any, name: str, description: str, run: Callable[[Root, bool], int]) -> None:
    parser = commands.add_parser(name, help=description, description=description)
    parser.add_argument("path", metavar="PATH", type=Path, help="the configured root")
    parser.add_argument("--json", action="store_true", help="print for programs")
    parser.set_defaults(run=run)


def run_stats(root: Root, as_json: bool) -> int:
    with _readable_index(root) as index:
        found = stats(root, index)
    if as_json:
        _print_json(_stats_values(root, found))
    else:
        _print_stats(root, found)
    return FOUND_BAD if found.unreadable else OK


def run_verify(root: Root, as_json: bool) -> int:
    started = time.monotonic()
    with _readable_index(root) as index:
        report = verify(root, index, _progress("verifying"))
    if as_json:
        _print_json({"root": str(root.path), **asdict(report), "bad": [finding._asdict() for finding in report.bad]})
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
        rebuilt = _housekeeper(index, root).rebuild(_progress("rebuilding"))
        index.rebuilt()
    finally:
        index.close()
    if as_json:
        _print_json({"root": str(root.path), "index_path": str(root.index_path), **asdict(rebuilt)})
    else:
        _print_rebuilt(root, rebuilt)
    return FOUND_BAD if rebuilt.unreadable else OK


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


def _print_json(values: dict[str, Any]) -> None:
    print(json.dumps(values, indent=2, sort_keys=True))


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
    print(f"{root.path}: {_size(found.n_bytes)} in {len(rows)} namespaces")
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
        _size(entry.n_bytes), used,
    )  # fmt: skip


def _print_report(root: Root, report: VerifyReport, seconds: float) -> None:
    for finding in report.bad:
        place = finding.segment if finding.slot is None else f"{finding.segment} slot {finding.slot}"
        print(f"BAD {place}: {finding.what}")
    rate = report.n_bytes / max(seconds, 1e-9) / 1e9
    print(
        f"{root.path}: {report.records:,} records ({_size(report.n_bytes)}) in {report.segments:,} segments read "
        f"in {seconds:.1f} s ({rate:.1f} GB/s); {len(report.bad)} bad, {report.unfinished} never finished"
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


def _size(n_bytes: int) -> str:
    size, unit = float(n_bytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{n_bytes} bytes" if unit == "bytes" else f"{size:.1f} {unit}"


if __name__ == "__main__":
    sys.exit(main())
