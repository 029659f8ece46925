"""Bytes that are not what was written: a miss, a counter, and never anything else in the engine's blocks (I2)."""

import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvtier.errors import IndexUnavailable, TierUnavailable
from kvtier.format.geometry import PAGE_BYTES
from kvtier.index import entry as entries
from kvtier.io.ring import Batch
from kvtier.maintenance.scrub import verify
from kvtier.maintenance.sweeper import Sweeper
from kvtier.plan import SaveOutcome
from kvtier.storage.root import find_root
from kvtier.storage.segments import SegmentFiles, segment_name
from kvtier.worker.record_writer import RecordWriter
from kvtier.worker.saving import Saver
from tests.damage import flip, header_of, write
from tests.support.rig import BLOCKS, TARGET, TOKENS, Engine, saved_by_another
from tests.waiting import wait_until


def segments(root: Path) -> list[Path]:
    return sorted(root.glob("v2/*/*.kvseg"))


def flip_payload(path: Path, slot: int) -> None:
    flip(path, header_of(path).slot_offset(slot) + PAGE_BYTES + 12345, 0x10)


def zero_payload_page(path: Path, slot: int) -> None:
    write(path, header_of(path).slot_offset(slot) + 2 * PAGE_BYTES, bytes(PAGE_BYTES))


def zero_record(path: Path, slot: int) -> None:
    header = header_of(path)
    write(path, header.slot_offset(slot), bytes(header.slot_bytes))


def truncate(path: Path, slot: int) -> None:
    os.truncate(path, header_of(path).slot_offset(slot) + PAGE_BYTES + 8192)


def swap_records(path: Path, slot: int) -> None:
    header, data = header_of(path), path.read_bytes()
    size = header.slot_bytes
    first, second = header.slot_offset(slot), header.slot_offset(slot + 1)
    write(path, first, data[second : second + size])
    write(path, second, data[first : first + size])


def stale_record(path: Path, slot: int) -> None:
    """An older write of another chunk that never left the page cache of a dead disk."""
    header, data = header_of(path), path.read_bytes()
    first, other = header.slot_offset(slot), header.slot_offset(0)
    write(path, first, data[other : other + header.slot_bytes])


@pytest.mark.parametrize("damage", [flip_payload, zero_payload_page, zero_record, truncate, swap_records, stale_record])
def test_damaged_record_is_a_miss_from_there_on(tmp_path: Path, damage: Callable[[Path, int], None]) -> None:
    saved_by_another(tmp_path, TOKENS, BLOCKS)
    (path,) = segments(tmp_path)
    damage(path, 2)
    reader = Engine(tmp_path)
    report = verify(find_root(tmp_path), reader.store._keeper._index)
    assert report.bad and all(finding.segment == path.name for finding in report.bad)
    assert 2 in {finding.slot for finding in report.bad}
    n_chunks, (answer,) = reader.load(TOKENS, TARGET)
    assert n_chunks == 5
    assert answer.failed_blocks == frozenset(TARGET[8:])
    counted = reader.transfers[0].metrics.total()
    expected = (0, 1) if damage is truncate else (1, 0)
    assert (counted.get("checksum_failures", 0), counted.get("gone_chunks", 0)) == expected
    assert counted["load_tokens"] == 2 * 64 < reader.store.metrics.total()["hit_tokens"] == 5 * 64
    assert all(not tensor.any() for tensor in reader.blocks(TARGET[8:])), "bad bytes reached the engine"
    assert reader.holds(TOKENS, TARGET[:8])
    assert reader.load(TOKENS, TARGET)[0] == 2, "a bad record is not offered again (I11)"
    assert {answer.outcome.value for answer in reader.save(TOKENS, TARGET)} <= {"saved", "present"}


def test_damaged_header_page_is_found_by_verify_and_payload_still_loads(tmp_path: Path) -> None:
    saved_by_another(tmp_path, TOKENS, BLOCKS)
    (path,) = segments(tmp_path)
    write(path, header_of(path).slot_offset(3) + 200, b"\xff")
    reader = Engine(tmp_path)
    report = verify(find_root(tmp_path), reader.store._keeper._index)
    assert [(finding.slot, "CRC" in finding.what) for finding in report.bad] == [(3, True)]
    assert reader.load(TOKENS, TARGET)[1][0].failed_blocks == frozenset()


def test_swapped_segments_are_a_miss(tmp_path: Path) -> None:
    other = list(range(5000, 5000 + 64 * 5))
    saved_by_another(tmp_path, TOKENS, BLOCKS)
    saved_by_another(tmp_path, other, BLOCKS)
    first, second = segments(tmp_path)
    spare = tmp_path / "spare"
    first.rename(spare), second.rename(first), spare.rename(second)
    reader = Engine(tmp_path)
    for tokens in (TOKENS, other):
        _, (answer,) = reader.load(tokens, TARGET)
        assert answer.failed_blocks == frozenset(TARGET)
    assert all(not tensor.any() for tensor in reader.blocks(TARGET))
    report = verify(find_root(tmp_path), reader.store._keeper._index)
    assert {finding.segment for finding in report.bad} == {first.name, second.name}


@pytest.mark.parametrize("how", ["gone", "damaged"])
@pytest.mark.parametrize("arena_slots", [20, 5])
def test_what_lies_before_a_lost_chunk_is_loaded(tmp_path: Path, how: str, arena_slots: int) -> None:
    """Chunks are begun far ahead, so the loss of the tenth is known while the nine before it are on their way."""
    slot_bytes = PAGE_BYTES + (256 << 10)
    tokens, blocks, target = list(range(64 * 12)), list(range(48)), list(range(100, 148))
    writer = Engine(tmp_path, changes={"segment_bytes": PAGE_BYTES + 9 * slot_bytes})
    writer.save(tokens[: 64 * 9], blocks[:36])
    writer.save(tokens, blocks)
    (location,) = entries.unpack(writer.store.lookup(writer.keys(tokens))[9])
    writer.close()
    (tenth,) = (path for path in segments(tmp_path) if path.name == segment_name(location.set_id, 0))
    if how == "gone":
        tenth.unlink()
    else:
        flip_payload(tenth, 0)
    reader = Engine(tmp_path, changes={"host": {"arena_bytes": arena_slots * slot_bytes}})
    n_chunks, (answer,) = reader.load(tokens, target)
    assert n_chunks == 12 and answer.failed_blocks == frozenset(target[36:])
    totals = reader.transfers[0].metrics.total()
    assert (totals["load_tokens"], totals["load_failures"]) == (64 * 9, 1)
    assert all(not tensor.any() for tensor in reader.blocks(target[36:]))
    assert reader.holds(tokens, target[:36])
    wait_until(reader.has_all_slots, "a slot that what was read ahead in vain returns")


def test_a_lost_segment_is_found_out_about_once(tmp_path: Path) -> None:
    """All of a prompt that lay in it is saved anew by the request that misses it: it is not one chunk a request."""
    keys = saved_by_another(tmp_path, TOKENS, BLOCKS)
    (path,) = segments(tmp_path)
    path.unlink()
    reader = Engine(tmp_path)
    index = reader.store._keeper._index
    n_chunks, (answer,) = reader.load(TOKENS, TARGET)
    assert n_chunks == 5 and answer.failed_blocks == frozenset(TARGET)
    # After the answer, which does not wait for it.
    wait_until(lambda: not any(index.resolve([key]) for key in keys), "an offer of the others is taken back")


def test_many_lost_segments_are_one_log_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An operator may evict thousands under load."""
    engine = Engine(tmp_path, changes={"segment_bytes": "300KiB"})
    prompts = [list(range(first, first + 64)) for first in (1000, 2000, 3000)]
    for number, tokens in enumerate(prompts):
        engine.save(tokens, BLOCKS[4 * number : 4 * number + 4])
    engine.close()
    reader = Engine(tmp_path)
    for path in segments(tmp_path):
        path.unlink()
    for tokens in prompts:
        _, done = reader.load(tokens, BLOCKS[:4])
        assert done[0].failed_blocks
    reader.close()
    assert caplog.text.count("recomputed from chunk") == 1


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_all_that_a_segment_ends_before_is_missed_at_once(tmp_path: Path, kept: int) -> None:
    """It was found out about one chunk at a time: a prompt of 390 was recomputed in part 390 times."""
    keys = saved_by_another(tmp_path, TOKENS, BLOCKS)
    (path,) = segments(tmp_path)
    os.truncate(path, header_of(path).slot_offset(kept) + 2 * PAGE_BYTES)
    reader = Engine(tmp_path)
    assert reader.load(TOKENS, TARGET)[1][0].failed_blocks
    index = reader.store._keeper._index
    wait_until(lambda: [bool(index.resolve([key])) for key in keys] == [True] * kept + [False] * (5 - kept))
    assert reader.load(TOKENS, TARGET)[0] == kept
    reader.save(TOKENS, BLOCKS)
    wait_until(lambda: reader.load(TOKENS, TARGET)[0] == 5)
    assert reader.load(TOKENS, TARGET)[1][0].failed_blocks == frozenset()


def test_a_folder_that_is_away_takes_no_more_than_one_chunk_along(tmp_path: Path) -> None:
    """As when a mount is gone for a moment: what lies there is not lost."""
    keys = saved_by_another(tmp_path, TOKENS, BLOCKS)
    reader = Engine(tmp_path)
    entries_before = reader.store.lookup(keys)
    assert entries_before is not None and len(entries_before) == 5
    folder = segments(tmp_path)[0].parent
    folder.rename(folder.with_suffix(".away"))
    chunks = reader.store.plan_load("r", keys, entries_before, TARGET, 0).chunks
    reader.transfers[0]._loader._chunks.reader.retract_gone(reader.store.namespace_id, chunks)
    assert all(reader.store._keeper._index.resolve([key]) for key in keys)
    folder.with_suffix(".away").rename(folder)


@pytest.mark.parametrize("how", ["zeroed header", "truncated to nothing", "unlinked", "replaced by a link"])
def test_lost_segment_is_a_miss(tmp_path: Path, how: str) -> None:
    saved_by_another(tmp_path / "root", TOKENS, BLOCKS)
    (path,) = segments(tmp_path / "root")
    if how == "zeroed header":
        write(path, 0, bytes(PAGE_BYTES))
    elif how == "truncated to nothing":
        os.truncate(path, 0)
    else:
        moved = tmp_path / "moved"
        shutil.move(path, moved)
        if how == "replaced by a link":
            path.symlink_to(moved)
    reader = Engine(tmp_path / "root")
    _, (answer,) = reader.load(TOKENS, TARGET)
    assert answer.failed_blocks == frozenset(TARGET)
    assert reader.transfers[0].metrics.total().get("gone_chunks", 0) == (how == "unlinked")
    assert verify(find_root(tmp_path / "root"), reader.store._keeper._index).bad or how == "unlinked"


def test_another_namespace_shares_nothing(tmp_path: Path) -> None:
    """Another value in one tensor's pages gives other weights, and so another namespace and other keys."""
    one, two = Engine(tmp_path, weights="a"), Engine(tmp_path, weights="b")
    one.save(TOKENS, BLOCKS)
    assert one.namespace.id != two.namespace.id
    assert two.load(TOKENS, TARGET) == (0, [])


def test_files_are_private(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.save(TOKENS, BLOCKS)
    for path in (tmp_path / "v2").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_reset_leaves_everything_behind_and_removes_what_nobody_can_ask_for(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.save(TOKENS, BLOCKS)
    engine.store.reset()
    assert engine.load(TOKENS, TARGET) == (0, [])
    assert {answer.outcome.value for answer in engine.save(TOKENS, BLOCKS)} == {"saved"}
    assert engine.load(TOKENS, TARGET)[0] == 5
    private = engine.store.namespace_id
    engine.close()
    assert SegmentFiles(tmp_path / "v2" / private.hex(), direct=False).ids() == []
    again = Engine(tmp_path)
    assert again.load(TOKENS, TARGET)[0] == 5, "the namespace of the files is as it was"


def test_a_segment_whose_writer_died_before_its_header_is_unfinished_not_bad(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.save(TOKENS, BLOCKS)
    (path,) = segments(tmp_path)
    path.with_name(f"{99:016x}-0000-00.kvseg").write_bytes(bytes(1 << 20))
    report = verify(find_root(tmp_path), engine.store._keeper._index)
    assert (report.bad, report.unfinished, report.records) == ((), 1, 5)
    assert Sweeper(engine.store._keeper._index, tmp_path / "v2", "me").rebuild().unreadable == ()
    write(path, 0, bytes(PAGE_BYTES))
    assert verify(find_root(tmp_path), engine.store._keeper._index).bad, "records were there"


def test_saving_rests_while_the_index_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when its folder is gone but segments are still open: each chunk was written for nobody, and logged."""
    engine = Engine(tmp_path)

    def refuse(records: object, **options: bool) -> int:
        raise IndexUnavailable("away")

    index = engine.transfers[0]._worker.index
    monkeypatch.setattr(index, "publish", refuse)
    assert [done.outcome for done in engine.save(TOKENS[:64], BLOCKS[:4])] == [SaveOutcome.FAILED]
    engine.store._rest.clear()  # it plans on
    assert [done.outcome for done in engine.save(TOKENS[64:], BLOCKS[4:])] == 4 * [SaveOutcome.RESTING]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    ("owner", "step"),
    [
        (Batch, "results"),
        (RecordWriter, "_write"),
        (RecordWriter, "_submit"),
        (RecordWriter, "_publish"),
        (Saver, "end"),
    ],
)
def test_a_fault_of_the_loop_ends_the_chunks_and_keeps_others_from_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: type, step: str
) -> None:
    """The set took no chunk any more, or (seed 10563 of the simulation) the loop looked for ended writes for ever."""
    engine = Engine(tmp_path)
    saver, call, broken = engine.transfers[0]._saver, getattr(owner, step), iter([True])

    def fail_once(*args: Any, **options: Any) -> Any:
        if next(broken, False):
            raise RuntimeError("a bug")
        return call(*args, **options)

    monkeypatch.setattr(owner, step, fail_once)
    assert [done.outcome for done in engine.save(TOKENS[:64], BLOCKS[:4])] == [SaveOutcome.FAILED]
    assert (engine.store.lookup(engine.keys(TOKENS[:64])) == []) is (owner is not Saver)
    wait_until(lambda: not saver._loop._is_running and not saver.writer._batches)
    wait_until(lambda: saver.n_gathered == 0)
    saver.writer.disk.worked()
    done = {answer.key: answer.outcome for answer in engine.save(TOKENS, BLOCKS)}
    assert [done[key] for key in engine.keys(TOKENS)[1:]] == 4 * [SaveOutcome.SAVED]
    files = saver._worker.files(engine.store.namespace_id)
    assert not any(segment.users for segment in files._open.values())


def test_a_chunk_that_was_given_up_while_it_was_signed_is_not_answered_again(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    saver = engine.transfers[0]._saver
    saver._signed([object()], TierUnavailable("the worker is closed"))  # type: ignore[list-item]
    assert saver.take_done() == []


def test_a_set_that_is_gone_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each chunk that is saved meets it again, until the engine's next sign of life."""
    caplog.set_level(logging.INFO, "kvtier")
    engine = Engine(tmp_path)
    worker, segments = engine.transfers[0]._worker, engine.transfers[0]._saver.writer.segments
    for _ in range(3):
        segments._unlink(worker.files(engine.store.namespace_id), 5, [0])
    assert caplog.text.count("segment set 0000000000000005 was removed") == 1
