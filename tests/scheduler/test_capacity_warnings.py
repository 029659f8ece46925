"""Warnings of an engine about its capacity_bytes, and about segment sets that find no room."""

import json
import time
from pathlib import Path

import pytest

from kvtier.config.types import parse_bytes
from kvtier.eviction.limits import Need
from kvtier.index.base import SetInfo
from kvtier.index.memory import MemoryIndex
from kvtier.runtime.metrics import Metrics
from kvtier.runtime.units import exact, size
from kvtier.scheduler.capacity_warnings import COMPARE_INTERVAL_S, CapacityWatch
from kvtier.scheduler.engine_report import COUNT_MAX, NOTE_PREFIX, About, Reporter
from tests.eviction.test_capacity import BLOCKS, RECORD_BYTES, SEGMENT_BYTES, tiny, tokens_of
from tests.support.rig import Engine
from tests.waiting import wait_until

SPACE = bytes(16)


def said(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [text for text in caplog.messages if words in text]


def report(index: MemoryIndex, owner: str, capacity_bytes: int | None) -> None:

    note = Reporter(owner, About(capacity_bytes=capacity_bytes), Metrics(), lambda: 1.0).report(2.0, SPACE).note()
    index.put_note(NOTE_PREFIX + owner, note, None)


def test_an_engine_says_once_that_its_disk_is_smaller(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(tmp_path, changes={"capacity_bytes": "9000TiB", "writer_lease_s": 0.1})
    time.sleep(0.5)  # several signs of life
    engine.close()
    (text,) = said(caplog, "is more than the tier can have here")
    assert "capacity_bytes (9000TiB)" in text and "iB): it would fill" in text and text.endswith("set it to less")
    caplog.clear()
    Engine(tmp_path / "fits").close()
    assert not said(caplog, "capacity_bytes")


def test_what_segments_take_counts_as_room(caplog: pytest.LogCaptureFixture) -> None:
    index = MemoryIndex()
    CapacityWatch("me", 1000, index, lambda: 0).look(1.0)
    assert not caplog.messages, "an index that is to be made anew knows of no segment"
    index.rebuilt(index.loss())
    index.create_set(SetInfo(1, SPACE, "me", 600, 1.0, 1.0))
    CapacityWatch("me", 1000, index, lambda: 400).look(1.0)
    assert not caplog.messages
    CapacityWatch("me", 1000, index, lambda: -5).look(1.0)
    assert said(caplog, "can have here (600 bytes)")

    def gone() -> int:
        raise OSError("gone")

    CapacityWatch("me", 1000, index, gone).look(1.0)
    assert len(caplog.messages) == 1


def test_engines_with_unlike_capacities_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Engine(tmp_path)
    Engine(tmp_path)
    assert not said(caplog, "on the same root")
    Engine(tmp_path, changes={"capacity_bytes": "1GiB"})
    wait_until(lambda: said(caplog, "on the same root"))
    (text,) = said(caplog, "on the same root")
    assert "capacity_bytes is 1GiB here and 64MiB at " in text and "set it alike" in text


def test_who_was_there_before_says_so_later_and_once(caplog: pytest.LogCaptureFixture) -> None:
    index = MemoryIndex()
    watch = CapacityWatch("me", 1 << 30, index, lambda: 1 << 40)
    report(index, "me", 1 << 30)
    report(index, "old", None)
    report(index, "alike", 1 << 30)
    index.put_note(NOTE_PREFIX + "strange", b"{", None)
    watch.look(1.0)
    report(index, "unlike", 1 << 31)
    watch.look(2.0)
    assert not caplog.messages
    for number in (1, 2, 3):
        watch.look(1.0 + number * COMPARE_INTERVAL_S)
    (text,) = caplog.messages
    assert "1GiB here and 2GiB at 'unlike'" in text


def test_an_engine_says_what_to_lower_where_few_sets_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The engine said to lower segment_bytes also where a set is one chunk, which no value makes smaller."""
    one_chunk = {"segment_bytes": 4096 + RECORD_BYTES, "capacity_bytes": 3 * (4096 + RECORD_BYTES)}
    small_capacity = {"segment_bytes": SEGMENT_BYTES, "capacity_bytes": 3 * SEGMENT_BYTES}
    for number, (changes, lower) in enumerate(
        ((one_chunk, "chunk_tokens, for a set is one chunk"), (small_capacity, "segment_bytes"))
    ):
        caplog.clear()
        Engine(tmp_path / str(number), changes=changes).close()
        (text,) = said(caplog, "is less than 4 times a segment set (")
        assert text.endswith(f"raise capacity_bytes, or lower {lower}")


def test_a_capacity_beyond_what_a_report_holds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(tmp_path, changes={"capacity_bytes": "99999999TiB"})
    index = engine.store._keeper.index
    (note,) = index.notes(NOTE_PREFIX, time.time()).values()
    assert json.loads(note)["capacity_bytes"] == COUNT_MAX
    other = Engine(tmp_path, changes={"capacity_bytes": "99999999TiB"})
    other.close()
    engine.close()
    assert not said(caplog, "on the same root")


def test_no_room_names_the_key_and_what_to_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = tiny(tmp_path, sets=1)
    one.save(tokens_of(1), BLOCKS)
    tiny(tmp_path, sets=1)
    wait_until(lambda: said(caplog, "no room for another segment set: capacity_bytes ("))
    assert "raise it, or look at" in said(caplog, "no room")[0] and "saving pauses for" in said(caplog, "no")[0]
    keeper, segment = one.store._keeper, one.settings.segment_bytes
    why = keeper._evictor.why_no_room
    need = keeper._epoch[0]

    wanted = Need(segment, need.id)
    text = why(wanted, segment, 5 * segment)
    assert "the root's disk has " in text and f"capacity_bytes is {exact(5 * segment)}" in text
    assert "tried again" in why(Need(0, need.id), segment, segment)


def test_no_room_below_a_quota_names_that(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tenants = [{"name": "search", "cache_salts": ["s*"], "quota_bytes": SEGMENT_BYTES}]
    engine = tiny(tmp_path, sets=9, capacity={"namespace_quota_bytes": SEGMENT_BYTES, "tenants": tenants})
    engine.save(tokens_of(1), BLOCKS)
    wait_until(lambda: said(caplog, f"is at its quota of {exact(SEGMENT_BYTES)}; raise capacity.namespace_quota_bytes"))

    text = engine.store._keeper._evictor.why_no_room(Need(2 * SEGMENT_BYTES, SPACE, "search"), 1 << 40, 1 << 40)
    assert text.startswith("tenant 'search' is at its quota") and "capacity.tenants.search.quota_bytes" in text


@pytest.mark.parametrize("n_bytes", [0, 1, 1023, 1024, 1 << 20, 64 << 30, 500 * 10**9, 9000 << 40, (1 << 20) + 1])
def test_exact_sizes_are_read_back(n_bytes: int) -> None:
    assert parse_bytes(exact(n_bytes).removesuffix(f" ({size(n_bytes)})").removesuffix(" bytes")) == n_bytes
    assert len(exact(n_bytes)) < 40
