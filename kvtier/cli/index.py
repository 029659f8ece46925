"""`kvtier index rebuild` and `kvtier index check`: for an embedded index, and for one in Redis that settings name."""

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path

from kvtier.cli.app import index as index_app
from kvtier.cli.place import ConfigOption, JsonOption, PathArgument, find_place
from kvtier.cli.progress import progress
from kvtier.cli.root import open_embedded, sweeper
from kvtier.errors import ConfigError, IndexUnavailable
from kvtier.index.base import Index
from kvtier.index.open import open_redis_to_mend
from kvtier.maintenance.consistency_check import ConsistencyReport, check_consistency, drop_lost
from kvtier.maintenance.sweep_lease import SWEEP_LEASE
from kvtier.maintenance.sweeper import Rebuilt
from kvtier.runtime.exit_status import FOUND_BAD, MEANINGS, OK, print_json
from kvtier.runtime.units import counted
from kvtier.storage.root import NOTES_FOLDER, Root, open_root

OTHERS_TIMEOUT_S = 60.0  # longest wait for an engine's sweep, seconds; the lease of a killed engine expires sooner


@index_app.command("rebuild", epilog=MEANINGS)
def rebuild(path: PathArgument = None, config: ConfigOption = None, as_json: JsonOption = False) -> int:
    """Make the index agree with the segment files."""
    with _index_of(path, config) as (root, index, where):
        loss = index.loss()
        rebuilt = _rebuild(index, root)
        index.rebuilt(loss)  # first: all segments are read, whether the records are counted again or not
        removed_records = drop_lost(index)
    if as_json:
        index_path = None if root.index_path is None else str(root.index_path)
        head = {"root": str(root.path), "index_path": index_path, "index": where}
        values = asdict(rebuilt) | {"restored": rebuilt.restored._asdict(), "removed_records": removed_records}
        print_json({**head, **values})
        return FOUND_BAD if rebuilt.unreadable else OK
    for fault in rebuilt.unreadable:
        print(f"BAD {fault}")
    taken_out = (
        f"{counted(rebuilt.removed_sets, 'set')} without files",
        f"{counted(rebuilt.gone_records, 'record')} gone from their files",
        counted(rebuilt.bad_records, "bad record"),
        f"{counted(removed_records, 'record')} without a set",
    )
    added = f"{counted(rebuilt.records, 'record')} of {counted(rebuilt.segments, 'segment')}"
    print(f"{root.path}: {added} added to {where}; taken out of it: {', '.join(taken_out)}")
    if any(rebuilt.restored):
        restored = f"{counted(rebuilt.restored.pins, 'pin')} and {counted(rebuilt.restored.quotas, 'quota')}"
        print(f"{restored} that the index had lost were restored from {root.folder / NOTES_FOLDER}")
    return FOUND_BAD if rebuilt.unreadable else OK


@index_app.command("check", epilog=MEANINGS)
def check(path: PathArgument = None, config: ConfigOption = None, as_json: JsonOption = False) -> int:
    """Tell whether index and segment files agree."""
    with _index_of(path, config) as (root, index, where), progress("checking", "segment sets") as show:
        found = check_consistency(root, index, show)
    if as_json:
        lists = {name: [row._asdict() for row in getattr(found, name)] for name in ("disagreements", "unnamed_places")}
        print_json({"root": str(root.path), "index": where, **asdict(found), **lists})
    else:
        _print(root, where, found)
    return OK if found.is_clean else FOUND_BAD


def _print(root: Root, where: str, found: ConsistencyReport) -> None:
    for row in found.disagreements:
        place = "/".join(part for part in (row.namespace, row.segment) if part)
        print(f"BAD {place}{'' if row.slot is None else f' slot {row.slot}'}: {row.what}")
    if found.n_disagreements > len(found.disagreements):
        print(f"... and {found.n_disagreements - len(found.disagreements):,} more")
    print(
        f"{root.path}: {counted(found.records, 'record')} in {counted(found.segments, 'segment')}; {where} knows "
        f"{counted(found.chunks, 'chunk')} in {counted(found.sets, 'segment set')}. Records: {found.indexed:,} in the "
        f"index, {found.second:,} of chunks that others stored first, {found.unpublished:,} not published yet, "
        f"{found.unnamed:,} of chunks that the index does not have; {counted(found.n_disagreements, 'disagreement')}"
    )
    if found.unnamed:
        print(
            "A record whose chunk is not in the index is a miss and takes room until its set is evicted. Such records "
            "remain where two engines stored a chunk and the record that the index had was evicted. kvtier index "
            "rebuild adds them; if the writer of their set had lost it, 10 minutes after their file was last written."
        )
    if found.n_disagreements:
        print(
            "Such records are misses at their next use. kvtier index rebuild makes the index agree with the segments."
        )


@contextmanager
def _index_of(path: Path | None, config: Path | None) -> Iterator[tuple[Root, Index, str]]:
    """Open the index of a target. Return root, index, and the index's name in messages. Raises ConfigError,
    IndexUnavailable."""
    place = find_place(path, config)
    root, settings = place.root, place.settings
    index: Index
    if settings.index.kind == "redis":
        root = open_root(settings, needs_room=False)
        index, where = open_redis_to_mend(settings, root), f"the index at {settings.index.url}"
    elif root.root_id:
        fix = "the index of this root is in Redis: name the engines' settings with --config FILE"
        raise ConfigError("index.url", None, fix)
    else:
        index, where = open_embedded(root, settings.index), str(root.index_path)
    with closing(index):
        yield root, index, where


def _rebuild(index: Index, root: Root) -> Rebuilt:
    """Rebuild the index once no engine sweeps. Raises IndexUnavailable if one does for too long."""
    keeping = sweeper(index, root)
    deadline = time.monotonic() + OTHERS_TIMEOUT_S
    with progress("rebuilding", "segments") as show:
        while (rebuilt := keeping.rebuild(show)) is None:
            if time.monotonic() > deadline:
                other = index.lease_owner(SWEEP_LEASE, time.time())
                why = (
                    f"{other} is sweeping it or rebuilding its index"
                    if other
                    else "the rebuild took longer than its lease"
                )
                raise IndexUnavailable(f"{root.path}: {why}; try again")
            time.sleep(0.1)
    return rebuilt
