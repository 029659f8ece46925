"""Segment sets of several files a rank: consecutive chunks go to different files, and the set stays one unit."""

import shutil
from pathlib import Path

import pytest

from kvtier.build import set_shape
from kvtier.codecs.raw import RawCodec
from kvtier.config.settings import Settings
from kvtier.errors import Corrupt
from kvtier.eviction.choice import Selection
from kvtier.eviction.evictor import Evictor
from kvtier.format.geometry import PAGE_BYTES, Extent
from kvtier.format.record import SegmentHeader, new_set_id, part_of, parts_of, stripes_of
from kvtier.maintenance.consistency_check import check_consistency
from kvtier.maintenance.scrub import verify
from kvtier.maintenance.sweeper import Sweeper
from kvtier.storage.filesystem import stripes_for
from kvtier.storage.root import find_root
from kvtier.storage.segments import SegmentFiles, parse_segment_name, segment_name
from tests.damage import own_slots
from tests.support.rig import Engine, geometry, settings, shares
from tests.waiting import wait_until

RECORD_BYTES = PAGE_BYTES + 4 * 64 * 4 * 32 * 2 * 4  # 4 heads x 64 tokens x 4 layers x K and V of 32 floats
TOKENS = list(range(1000, 1000 + 64 * 10))
BLOCKS = list(range(40))
TARGET = list(range(100, 140))


def engine_at(root: Path, slots: int = 12, stripes: int = 3, tensor_size: int = 1) -> Engine:
    segment = PAGE_BYTES + slots * (PAGE_BYTES + (RECORD_BYTES - PAGE_BYTES) // tensor_size)
    changes = {
        "segment_bytes": segment,
        "capacity_bytes": 8 * segment * tensor_size,
        "io": {"stripes": stripes, "threads": 4, "timeout_s": 10.0},
    }
    return Engine(root, tensor_size=tensor_size, changes=changes)


def saved(root: Path, tensor_size: int = 1) -> None:
    writer = engine_at(root, tensor_size=tensor_size)
    writer.wait_for_set()
    writer.save(TOKENS, BLOCKS)
    writer.close()


def header_of(stripes: int, stripe: int, slots: int = 10) -> SegmentHeader:
    set_id = new_set_id(1_700_000_000_000, stripes, 7)
    extent = Extent(0, 4, 0, 4)
    return SegmentHeader(b"n" * 16, set_id, 2, slots, PAGE_BYTES * 5, extent, PAGE_BYTES, 1_700_000_000_000, "", stripe)


@pytest.mark.parametrize("stripes", [1, 3, 8, 16])
def test_each_slot_has_one_place(stripes: int) -> None:
    headers = [header_of(stripes, stripe) for stripe in range(stripes)]
    places = [(h.stripe, h.slot_offset(slot)) for h in headers for slot in own_slots(h)]
    assert len(set(places)) == 10
    for header in headers:
        assert SegmentHeader.unpack(header.pack()) == header and stripes_of(header.set_id) == stripes
        assert parse_segment_name(segment_name(header.set_id, header.part)) == (header.set_id, header.part)
        assert header.file_bytes == PAGE_BYTES + len(own_slots(header)) * header.slot_bytes
        for used in range(11):
            kept = [slot for slot in own_slots(header) if slot < used]
            assert header.bytes_up_to(used) == PAGE_BYTES + len(kept) * header.slot_bytes
        for slot in range(12):
            offset = header.offset_of(slot, header.extent, header.slab_bytes)
            assert offset == (header.slot_offset(slot) if slot in own_slots(header) else None)
    assert {part_of(headers[0].set_id, 2, slot) for slot in range(32)} == set(parts_of(headers[0].set_id, 2))


def test_a_stripe_that_the_set_does_not_have_is_refused() -> None:
    with pytest.raises(Corrupt, match="stripe 3 of 3"):
        SegmentHeader.unpack(header_of(3, 3).pack())
    set_id = new_set_id(1, 3, 0)
    assert parse_segment_name(f"{set_id:016x}-0000-03.kvseg") is None
    assert parse_segment_name(f"{set_id:016x}-0000.kvseg") is None


def test_width_by_file_system_setting_and_size(tmp_path: Path) -> None:
    assert [stripes_for(kind, "auto") for kind in ("tmpfs", "lustre", "xfs", "nfs4")] == [8, 8, 1, 1]
    assert stripes_for("xfs", 3) == 3
    shape = geometry()
    small, large = (
        set_shape(settings(tmp_path, segment_bytes=PAGE_BYTES + n * RECORD_BYTES), shape, RawCodec(), shares(shape), 8)
        for n in (9, 64)
    )
    assert (small.slots, small.stripes, large.slots, large.stripes) == (9, 2, 64, 8)
    assert large.set_bytes == 8 * PAGE_BYTES + 64 * RECORD_BYTES


@pytest.mark.parametrize("tensor_size", [1, 2])
def test_chunks_are_spread_over_the_files_and_loaded_by_any_rank(tmp_path: Path, tensor_size: int) -> None:
    saved(tmp_path, tensor_size=tensor_size)
    files = sorted(tmp_path.glob("v2/*/*.kvseg"))
    assert len(files) == 3 * tensor_size
    record = PAGE_BYTES + (RECORD_BYTES - PAGE_BYTES) // tensor_size
    assert sorted(path.stat().st_size for path in files)[-1] == PAGE_BYTES + 4 * record  # of 10 chunks, no more
    reader = engine_at(tmp_path)
    assert reader.load(TOKENS, TARGET)[0] == 10
    assert not any(load.failed_blocks for load in reader.load(TOKENS, TARGET)[1])
    root, index = find_root(tmp_path), reader.store._keeper._index
    assert not verify(root, index).bad and check_consistency(root, index).n_disagreements == 0


def test_a_lost_index_is_rebuilt_from_all_files(tmp_path: Path) -> None:
    saved(tmp_path)
    shutil.rmtree(tmp_path / "v2" / "index")
    reader = engine_at(tmp_path)
    wait_until(lambda: reader.load(TOKENS, TARGET)[0] == 10)
    assert not any(load.failed_blocks for load in reader.load(TOKENS, TARGET)[1])


def test_one_missing_file_costs_its_own_chunks(tmp_path: Path) -> None:
    saved(tmp_path)
    sorted(tmp_path.glob("v2/*/*.kvseg"))[1].unlink()  # slots 1, 4 and 7
    reader = engine_at(tmp_path)
    (load,) = reader.load(TOKENS, TARGET)[1]
    assert load.failed_blocks == frozenset(TARGET[4:])
    assert reader.load(TOKENS, TARGET)[0] == 1  # and it is not offered again
    index = reader.store._keeper._index
    done = Sweeper(index, tmp_path / "v2", "me").rebuild()
    assert (
        done is not None and not done.unreadable and check_consistency(find_root(tmp_path), index).n_disagreements == 0
    )


def test_a_set_is_evicted_with_all_its_files(tmp_path: Path) -> None:
    saved(tmp_path, tensor_size=2)
    reader = engine_at(tmp_path)
    index = reader.store._keeper._index
    full = [info for info in index.sets() if not info.is_open]
    folder = tmp_path / "v2" / reader.namespace.id.hex()
    on_disk = sum(SegmentFiles(folder, direct=False).set_bytes_of(info.set_id) for info in full)
    assert sum(info.n_bytes for info in full) == on_disk
    Evictor(index, tmp_path / "v2", "admin").evict(Selection(), 1 << 40)
    assert not [path for path in folder.glob("*.kvseg") for info in full if path.name.startswith(f"{info.set_id:016x}")]


def test_a_root_of_the_older_format_is_named_and_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    older = tmp_path / "v1" / ("0" * 32) / "0000000000000001-0000.kvseg"
    older.parent.mkdir(parents=True)
    older.write_bytes(b"older")
    engine = engine_at(tmp_path)
    engine.close()
    assert older.read_bytes() == b"older"
    assert f"{tmp_path / 'v1'} has an older format and is not used: remove it to free its space" in caplog.text


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_small_capacity_holds_several_sets_by_default(tmp_path: Path, ranks: int) -> None:
    shape = geometry()
    for capacity in (2 * RECORD_BYTES, 40 * RECORD_BYTES, 400 * RECORD_BYTES):
        found = Settings.load({"root": str(tmp_path), "capacity_bytes": capacity})
        made = set_shape(found, shape, RawCodec(), shares(shape, ranks), 8)
        of_ranks = RECORD_BYTES + (ranks - 1) * PAGE_BYTES  # a header page each
        assert made.slots == max(1, capacity // 16 // of_ranks)
    whole = set_shape(Settings.load({"root": str(tmp_path)}), shape, RawCodec(), shares(shape), 8)
    assert (1 << 30) - RECORD_BYTES < whole.set_bytes - whole.stripes * PAGE_BYTES <= 1 << 30
