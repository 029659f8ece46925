"""What must hold of every image of a root: a new engine opens it, every chunk that it offers is the one that was saved
or a miss, `verify` names what is bad and nothing else, and no byte stays behind that nobody would ever remove."""

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from kvtier.eviction.set_removal import PREFIX
from kvtier.format.geometry import PAGE_BYTES
from kvtier.format.record import RECORD_MAGIC, RecordHeader, SegmentHeader
from kvtier.index import entry as entries
from kvtier.index.base import Index, Location
from kvtier.index.lmdb.index import LmdbIndex
from kvtier.maintenance.scrub import verify
from kvtier.maintenance.sweeper import Sweeper
from kvtier.storage.root import NAMESPACE_FILE, find_root, namespace_folders
from kvtier.storage.segments import SegmentFiles, parse_segment_name, segment_name
from tests.crash.images import INDEX, Step
from tests.crash.record_writes import CHUNKS, SEGMENT_BYTES, SHAPE, tokens_of
from tests.support.rig import Engine, is_equal

TARGET = [10]  # the block that is loaded into
READER = {
    "segment_bytes": 2 * SEGMENT_BYTES,
    "capacity_bytes": 64 << 20,
    "host": {"arena_bytes": 1 << 20, "admit": "never"},
}
"""It has room enough, so that it evicts nothing, and keeps nothing in memory."""
LATER_S = 10_000.0  # after so long no writer is believed to live, and what is in no index is nobody's


class Saved:
    """What was really written: the bytes of all segments, and what each chunk's blocks held."""

    def __init__(self, steps: list[Step], scratch: Path) -> None:
        self._segments: dict[str, bytearray] = {}
        for step in steps:
            if step.path.endswith(".kvseg"):
                content = self._segments.setdefault(Path(step.path).name, bytearray())
                end = max(step.at + len(step.data), len(content))
                content.extend(bytes(end - len(content)))
                content[step.at : step.at + len(step.data)] = step.data
        self.chunks: dict[bytes, list[torch.Tensor]] = {}
        self.prompts: list[list[bytes]] = []
        engine = Engine(scratch, shape=SHAPE, n_blocks=16, changes=READER)
        for number, n_chunks in enumerate(CHUNKS):
            tokens = tokens_of(number)
            keys = engine.keys(tokens)
            engine.prefill(tokens, range(n_chunks))
            self.chunks.update((key, engine.blocks([block])) for block, key in enumerate(keys))
            self.prompts.append(keys)
        engine.close()

    def header_page(self, segment: str) -> bytes:
        return bytes(self._segments[segment][:PAGE_BYTES])

    def record(self, segment: str, slot: int) -> bytes:
        """Its header page and slabs; all zeros where none was written."""
        header = SegmentHeader.unpack(self.header_page(segment))
        return bytes(self._segments[segment][header.slot_offset(slot) : header.slot_offset(slot + 1)])

    def set_of(self, key: bytes) -> int:
        """The set in which a chunk was saved."""
        for name in self._segments:
            header = SegmentHeader.unpack(self.header_page(name))
            for slot in range(header.slots):
                page = self.record(name, slot)[:PAGE_BYTES]
                if page[:8] == RECORD_MAGIC and RecordHeader.unpack(page).key == key:
                    return header.set_id
        raise KeyError(key)


@dataclass(frozen=True)
class Found:
    """Of one image. lost: offered, and then not loaded. bad: that verify named."""

    loaded: frozenset[bytes]
    lost: frozenset[bytes]
    bad: int


def check_image(root: Path, saved: Saved) -> Found:
    engine = Engine(root, shape=SHAPE, n_blocks=16, changes=READER)
    try:
        index = engine.store._keeper._index
        bad = _check_verify(root, index, saved)
        loaded, lost = set(), set()
        for key, wanted in saved.chunks.items():
            outcome = _load(engine, root, key, wanted, saved)
            if outcome is not None:
                (loaded if outcome else lost).add(key)
    finally:
        engine.close()
    _check_space(root)
    return Found(frozenset(loaded), frozenset(lost), bad)


def _is_right(root: Path, location: Location, saved: Saved, with_header: bool) -> bool:
    """Whether the segment's header and the record are what was written."""
    name = segment_name(location.set_id, location.part)
    (path, *_) = [*root.glob(f"v2/*/{name}"), None]
    if path is None:
        return False
    content, first = path.read_bytes(), 0 if with_header else PAGE_BYTES
    header = SegmentHeader.unpack(saved.header_page(name))
    record = content[header.slot_offset(location.slot) : header.slot_offset(location.slot + 1)]
    return (
        content[:PAGE_BYTES] == saved.header_page(name) and record[first:] == saved.record(name, location.slot)[first:]
    )


def _check_verify(root: Path, index: Index, saved: Saved) -> int:
    """verify names every record of the index that is not as it was written; what else it names is not so either."""
    found = verify(find_root(root), index)
    named = {(finding.segment, finding.slot) for finding in found.bad}
    for info in index.sets():
        for _, location in index.members(info.set_id):
            name = segment_name(location.set_id, location.part)
            is_named = (name, location.slot) in named or (name, None) in named
            assert is_named is not _is_right(root, location, saved, True), f"slot {location.slot} of {name}"
    for segment, slot in named:
        assert parse_segment_name(segment) is not None, found.bad
        (path,) = root.glob(f"v2/*/{segment}") if any(root.glob(f"v2/*/{segment}")) else (None,)
        if slot is None:
            assert path is not None and path.read_bytes()[:PAGE_BYTES] != saved.header_page(segment)
        else:
            set_id, rank = parse_segment_name(segment) or (0, 0)
            assert not _is_right(root, Location(set_id, rank, slot, 0, SHAPE.whole, ()), saved, True), found.bad
    return len(named)


def _load(engine: Engine, root: Path, key: bytes, wanted: list[torch.Tensor], saved: Saved) -> bool | None:
    """Whether the chunk came; None when it was not offered."""
    offered = engine.store.lookup([key])
    assert offered is not None
    if not offered:
        return None
    for plane in (plane for pages in engine.pages for layer in pages.layers for plane in layer.planes):
        plane[TARGET] = 0
    (done,) = engine.run_load(engine.store.plan_load(key.hex(), [key], offered, TARGET, 0))
    got = engine.blocks(TARGET)
    if done.failed_blocks:
        assert not any(plane.any() for plane in got), "bad bytes reached the engine"
        assert not all(_is_right(root, at, saved, False) for at in entries.unpack(offered[0])), "it was lost in vain"
        assert not engine.store.lookup([key]), "a bad record is offered again (I11)"
        return False
    assert is_equal(got, wanted), "other bytes than those saved (I2)"
    return True


def _check_space(root: Path) -> None:
    """Long after, all that is left is in the index, and counted as what it takes."""
    folder = root / "v2"
    index = LmdbIndex(str(folder / INDEX.name))
    try:
        keeper = Sweeper(index, folder, "a sweeper", lambda: time.time() + LATER_S)
        keeper.sweep()
        keeper.sweep()
        on_disk: Counter[int] = Counter()
        for space in namespace_folders(folder):
            sizes = SegmentFiles(space, direct=False).sizes()
            on_disk.update({set_id: sum(of.values()) for set_id, of in sizes.items()})
        on_disk = +on_disk
        # A set all of whose files are gone takes nothing; its entries go when somebody asks for them, or with it.
        counted = {info.set_id: info.n_bytes for info in index.sets() if info.n_bytes}
        assert counted == dict(on_disk), f"{counted}, on disk {on_disk}; {index.sets()}"
        assert all(index.members(set_id) for set_id in on_disk), "a set without records stays"
        assert not index.notes(PREFIX, time.time() + LATER_S)
    finally:
        index.close()
    known = {"owner.json", INDEX.name, NAMESPACE_FILE}
    strays = [
        path.name
        for place in (folder, *namespace_folders(folder))
        for path in place.iterdir()
        if path.name not in known and parse_segment_name(path.name) is None and path not in namespace_folders(folder)
    ]
    assert strays == [], f"nobody removes {strays}"
