"""Segment files against a model: made, filled, cut, evicted, opened and let go of in any order, a leased one reads what
was written into it (I3), and no descriptor is left."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from kvtier.format.geometry import PAGE_BYTES, Extent
from kvtier.format.record import STRIPES_MAX, RecordHeader, SegmentHeader
from kvtier.storage import segments
from kvtier.storage.open_segments import OpenSegment
from kvtier.storage.segments import SegmentFiles

NAMESPACE = bytes(range(16))
SLOTS = 3
EXTENT = Extent(0, 1, 0, 1)
SLOT_BYTES = 2 * PAGE_BYTES
NAMES = st.tuples(st.integers(1, 3), st.sampled_from([0, STRIPES_MAX]))  # ranks 0 and 1
Name = tuple[int, int]


def header_of(name: Name, created_ms: int) -> SegmentHeader:
    return SegmentHeader(NAMESPACE, name[0], name[1] // STRIPES_MAX, SLOTS, SLOT_BYTES, EXTENT, PAGE_BYTES, created_ms)


class File:
    """slots: within its size. pages: header pages that were written, by slot."""

    def __init__(self, created_ms: int) -> None:
        self.created_ms = created_ms
        self.slots = SLOTS
        self.pages: dict[int, bytes] = {}

    def page(self, slot: int) -> bytes:
        return self.pages.get(slot, bytes(PAGE_BYTES)) if slot < self.slots else b""


class SegmentsMachine(RuleBasedStateMachine):
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="kvtier-segments-"))
        self.folder = self.root / "v2" / NAMESPACE.hex()
        self.folder.mkdir(parents=True)
        self.files = SegmentFiles(self.folder, direct=False)
        self.model: dict[Name, File] = {}
        self.held: list[tuple[OpenSegment, File]] = []
        self.serial = 0

    def teardown(self) -> None:
        for segment, _ in self.held:
            segment.release()
        self.files.close()
        assert not self.descriptors(), "a descriptor is left"
        shutil.rmtree(self.root)

    def descriptors(self) -> list[str]:
        """Of segments, with those that are unlinked."""
        found = []
        for number in os.listdir("/proc/self/fd"):
            try:
                path = os.readlink(f"/proc/self/fd/{number}")
            except FileNotFoundError:  # of the listing itself
                continue
            if path.startswith(f"{self.folder}/"):
                found.append(path)
        return found

    @rule(name=NAMES)
    def create(self, name: Name) -> None:
        """One that is there stays as it is."""
        self.serial += 1
        self.files.create(header_of(name, self.serial))
        self.model.setdefault(name, File(self.serial))

    @rule(target=leases, name=NAMES)
    def lease(self, name: Name) -> object:
        segment = self.files.lease(*name)
        assert (segment is not None) == (name in self.model)
        if segment is None:
            return multiple()
        assert segment.header == header_of(name, self.model[name].created_ms)
        self.held.append((segment, self.model[name]))
        return self.held[-1]

    @rule(lease=consumes(leases))
    def release(self, lease: tuple[OpenSegment, File]) -> None:
        lease[0].release()
        self.held.remove(lease)

    @rule(lease=leases, slot=st.integers(0, SLOTS - 1))
    def write(self, lease: tuple[OpenSegment, File], slot: int) -> None:
        segment, file = lease
        if lease not in self.held or slot >= file.slots:
            return
        self.serial += 1
        key = self.serial.to_bytes(16, "big")
        page = RecordHeader(
            key, NAMESPACE, NAMESPACE, PAGE_BYTES, 16, slot, EXTENT, segment.header.set_id, (self.serial,)
        ).pack()
        assert os.pwrite(segment.fd, page, segment.header.slot_offset(slot)) == PAGE_BYTES
        file.pages[slot] = page

    @rule(name=NAMES, slots=st.integers(0, SLOTS))
    def trim(self, name: Name, slots: int) -> None:
        self.files.trim(*name, slots)
        if name in self.model:
            file = self.model[name]
            file.slots = min(file.slots, slots)
            file.pages = {slot: page for slot, page in file.pages.items() if slot < file.slots}

    @rule(name=NAMES)
    def unlink(self, name: Name) -> None:
        self.files.unlink(*name)
        self.model.pop(name, None)

    @rule(set_id=st.integers(1, 3))
    def unlink_set(self, set_id: int) -> None:
        freed = self.files.unlink_set(set_id)
        gone = [name for name in self.model if name[0] == set_id]
        assert (freed > 0) == bool(gone)
        for name in gone:
            del self.model[name]
        held = [segment.fd for segment, _ in self.held]
        unlinked = [path for path in self.descriptors() if path.endswith("(deleted)")]
        assert len(unlinked) <= len(held), "space stays taken by what nobody uses"

    @rule()
    def close_and_open_again(self) -> None:
        """As after a restart beside others that still hold theirs."""
        self.files.close()
        assert len(self.descriptors()) == len({segment.fd for segment, _ in self.held})
        self.files = SegmentFiles(self.folder, direct=False)

    @invariant()
    def it_holds_what_was_made(self) -> None:
        assert self.files.ids() == sorted(self.model)
        assert sorted(self.files.sizes()) == sorted({set_id for set_id, _ in self.model})
        for name, file in self.model.items():
            pages = dict(self.files.pages(*name))  # without those of some holes
            assert all(page == file.page(slot) for slot, page in pages.items())
            assert {slot for slot, page in pages.items() if any(page)} == file.pages.keys()

    @invariant()
    def leased_ones_read_what_was_written(self) -> None:
        for segment, file in self.held:
            for slot in range(SLOTS):
                assert os.pread(segment.fd, PAGE_BYTES, segment.header.slot_offset(slot)) == file.page(slot)


TestSegments = SegmentsMachine.TestCase
TestSegments.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_a_set_without_files_is_closed_too() -> None:
    """Its file was removed while a lease held it open."""
    machine = SegmentsMachine()
    machine.create((1, 0))
    lease = machine.lease((1, 0))
    assert isinstance(lease, tuple)
    machine.unlink((1, 0))
    machine.release(lease)
    machine.unlink_set(1)
    machine.teardown()


def test_open_segments_are_looked_through_once_for_all_files_of_a_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine has two thousand open."""
    machine = SegmentsMachine()
    for rank in range(3):
        machine.create((1, rank * STRIPES_MAX))
    closes: list[int] = []
    monkeypatch.setattr(segments, "close_in_process", lambda folder, set_id: closes.append(set_id))
    machine.unlink_set(1)
    assert closes == [1]
    machine.teardown()
