"""What one node publishes the others read at once, on a file system whose clients write behind and cache."""

import errno
import time
from collections.abc import Iterator

import pytest

from kvtier.maintenance import record_check
from kvtier.maintenance.sweeper import Sweeper
from kvtier.plan import SaveOutcome
from kvtier.runtime import metrics as names
from tests.damage import flip_slab
from tests.redis_server import Server, has_redis
from tests.storage.network.nodes import Nodes, engine_on
from tests.support.rig import Engine
from tests.waiting import wait_until

pytestmark = has_redis

CHUNKS, BLOCKS = 3, list(range(12))
TARGET = list(range(100, 112))


def prompt(number: int) -> list[int]:
    return list(range(1000 * number, 1000 * number + 64 * CHUNKS))


def loaded(engine: Engine, number: int) -> int:
    """Chunks of the prompt that are loaded, each of them right."""
    n_chunks, answers = engine.load(prompt(number), TARGET)
    failed = set().union(*(answer.failed_blocks for answer in answers)) if answers else set()
    good = [block for block in TARGET[: 4 * n_chunks] if block not in failed]
    assert engine.holds(prompt(number), good)
    return len(good) // 4


def counted(engine: Engine, name: str) -> float:
    return engine.transfers[0].metrics.total().get(name, 0)


@pytest.fixture
def pair(nodes: Nodes, server: Server) -> Iterator[tuple[Engine, Engine]]:
    nodes.set("write-behind")
    engines = tuple(engine_on(mount, server.url) for mount in nodes.mounts)
    yield engines  # type: ignore[misc]
    for engine in engines:
        engine.close()


def test_all_is_read_the_moment_it_is_published(pair: tuple[Engine, Engine], nodes: Nodes) -> None:
    writer, reader = pair
    for number in range(5):
        done = writer.save(prompt(number), BLOCKS)
        assert {answer.outcome for answer in done} == {SaveOutcome.SAVED}
        assert loaded(reader, number) == CHUNKS, f"prompt {number}, {reader.transfers[0].metrics.total()}"
    assert counted(reader, names.CHECKSUM_FAILURES) == 0
    assert [loaded(reader, number) for number in range(5)] == [CHUNKS] * 5
    # Once for a segment's header, and once a batch and segment.
    assert nodes.counts()["fsync"] <= len(nodes.segments()) + 2 * 5


@pytest.mark.parametrize(("fault", "outcome"), [(errno.EIO, "FAILED"), (errno.ENOSPC, "NO_SPACE")])
def test_what_cannot_be_flushed_is_not_published(
    pair: tuple[Engine, Engine], nodes: Nodes, fault: int, outcome: str
) -> None:
    writer, reader = pair
    writer.save(prompt(0), BLOCKS)
    nodes.set("fsync fails", fault)
    assert {answer.outcome for answer in writer.save(prompt(1), BLOCKS)} == {SaveOutcome[outcome]}
    assert reader.store.lookup(reader.keys(prompt(1))) in (None, [])
    nodes.set("fsync fails", 0)


def test_where_nothing_reserves_space_a_segment_grows_by_its_records(nodes: Nodes, server: Server) -> None:
    nodes.set("no fallocate")
    engine = engine_on(nodes.mounts[0], server.url)
    assert {answer.outcome for answer in engine.save(prompt(0), BLOCKS)} == {SaveOutcome.SAVED}
    # glibc's posix_fallocate would write once for each 4 KiB of 4 MiB.
    assert nodes.counts()["write"] < 40
    assert loaded(engine, 0) == CHUNKS
    (segment,) = nodes.segments()
    assert segment.stat().st_blocks * 512 < segment.stat().st_size
    engine.close()


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EDQUOT])
def test_where_nothing_reserves_space_a_full_disk_shows_at_a_write(nodes: Nodes, server: Server, fault: int) -> None:
    nodes.set("no fallocate")
    engine = engine_on(nodes.mounts[0], server.url)
    assert {answer.outcome for answer in engine.save(prompt(0), BLOCKS)} == {SaveOutcome.SAVED}
    nodes.set("write fails", fault)
    assert {answer.outcome for answer in engine.save(prompt(1), BLOCKS)} == {SaveOutcome.NO_SPACE}
    assert loaded(engine, 0) == CHUNKS
    engine.close()
    nodes.set("write fails", 0)
    other = engine_on(nodes.mounts[1], server.url)
    assert loaded(other, 0) == CHUNKS
    assert {answer.outcome for answer in other.save(prompt(1), BLOCKS)} == {SaveOutcome.SAVED}
    assert loaded(other, 1) == CHUNKS
    index = other.transfers[0]._worker.index
    for segment in nodes.segments():  # what the writer left empty is given back and not booked
        (info,) = index.some_sets([int(segment.name[:16], 16)])
        assert info.is_open or segment.stat().st_blocks * 512 == info.n_bytes < segment.stat().st_size < 2 << 20
    other.close()


def test_a_bad_record_is_retracted_after_a_second_look(pair: tuple[Engine, Engine], nodes: Nodes) -> None:
    writer, reader = pair
    writer.save(prompt(0), BLOCKS)
    keys = reader.keys(prompt(0))
    flip_slab(nodes.segments()[0], slot=1)
    assert loaded(reader, 0) == 1
    counts = {name: counted(reader, name) for name in (names.REREAD_CHUNKS, names.STALE_READS, names.GONE_CHUNKS)}
    assert counts == {names.REREAD_CHUNKS: 1, names.STALE_READS: 1, names.GONE_CHUNKS: 0}
    wait_until(lambda: counted(reader, names.CHECKSUM_FAILURES) == 1, "the second look")
    wait_until(lambda: len(reader.store.lookup(keys) or ()) == 1, "the retraction")


def test_what_shows_late_is_a_miss_and_is_kept(nodes: Nodes, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_check, "RECHECK_S", 3.0)
    nodes.set("write-behind")
    changes = {"io": {"threads": 4, "timeout_s": 10.0, "fdatasync": "never"}}
    writer, reader = engine_on(nodes.mounts[0], server.url, **changes), engine_on(nodes.mounts[1], server.url)
    writer.save(prompt(0), BLOCKS)
    assert loaded(reader, 0) == 0  # not even the segment's header is there
    writer.close()  # its last close writes back what it wrote
    assert loaded(reader, 0) == CHUNKS
    wait_until(lambda: not reader.transfers[0]._loader.rechecks._waiting, "the second look")
    assert loaded(reader, 0) == CHUNKS
    assert counted(reader, names.CHECKSUM_FAILURES) == 0 and counted(reader, names.STALE_READS) > 0
    reader.close()


def test_a_file_that_is_away_is_a_miss_and_is_kept(pair: tuple[Engine, Engine], nodes: Nodes) -> None:
    writer, reader = pair
    writer.save(prompt(0), BLOCKS)
    nodes.set("away")
    assert loaded(reader, 0) == 0
    assert (counted(reader, names.AWAY_CHUNKS), counted(reader, names.GONE_CHUNKS)) == (1, 0)
    nodes.set("away", 0)
    assert loaded(reader, 0) == CHUNKS


def test_a_segment_that_is_away_is_not_made_anew_by_its_writer(pair: tuple[Engine, Engine], nodes: Nodes) -> None:
    writer, reader = pair
    writer.save(prompt(0), BLOCKS)
    writer.transfers[0]._worker.files.close()  # no descriptor keeps it in sight
    nodes.set("away")
    assert {answer.outcome for answer in writer.save(prompt(1), BLOCKS)} == {SaveOutcome.FAILED}
    nodes.set("away", 0)
    assert loaded(reader, 0) == CHUNKS


def test_a_set_is_removed_when_its_files_are_missing_for_long(pair: tuple[Engine, Engine], nodes: Nodes) -> None:
    writer, reader = pair
    writer.save(prompt(0), BLOCKS)
    index, now_s = reader.transfers[0]._worker.index, [time.time()]
    writer.close()  # a set that is filled is never missing
    (segment,) = nodes.segments()
    set_id = int(segment.name[:16], 16)
    keeper = Sweeper(index, nodes.mounts[1] / "kv" / "v2", "me", lambda: now_s[0])

    def look(away: bool, after_s: float) -> bool:
        nodes.set("away", away)
        now_s[0] += after_s
        if after_s:
            keeper.sweep()
        else:
            done = keeper.rebuild()
            assert done is not None
        nodes.set("away", 0)
        return bool(index.some_sets([set_id]))

    assert look(away=True, after_s=0.0) and look(away=True, after_s=60.0)
    assert loaded(reader, 0) == CHUNKS
    assert look(away=False, after_s=60.0) and all(look(away=True, after_s=290.0) for _ in range(3))
    assert index.some_sets([set_id])[0].n_bytes > 0
    assert loaded(reader, 0) == CHUNKS
    assert not look(away=True, after_s=101.0)
