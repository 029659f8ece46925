"""Objects of other hosts: what is asked for is what was put under that key, or a miss."""

import itertools
import multiprocessing
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.cli import main
from kvtier.connectors.objects.codec import object_geometry, slab_bytes_of
from kvtier.connectors.objects.size_class import SizeClass
from kvtier.connectors.objects.store import SIZE_CLASSES_MAX, Object, ObjectHost, ObjectTier
from kvtier.errors import ConfigError, IndexUnavailable, TierUnavailable
from kvtier.plan import SaveDone
from kvtier.runtime import metrics
from kvtier.runtime.exit_status import OK
from kvtier.runtime.threads import begin
from kvtier.storage.root import find_root
from tests.damage import damage_entry
from tests.objects.rig import content, drained, expected, flip_byte_of, get, names, put, put_for_ever, segments, tier_at
from tests.redis_server import Server, has_redis
from tests.support.rig import Engine
from tests.waiting import wait_until

SIZES = (0, 1, 4087, 4088, 4089, 5000, 12_280)  # of 4088 bytes and their length a page is full


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[ObjectTier]:
    with tier_at(tmp_path) as tier:
        yield tier


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectTier]:
    with tier_at(tmp_path_factory.mktemp("lasting")) as tier:
        yield tier


def test_what_was_put_comes_back(tier: ObjectTier) -> None:
    keys = names(20)
    assert tier.exists(keys) == [False] * 20
    assert put(tier, keys) == [True] * 20
    assert tier.exists([*keys, b"another"]) == [True] * 20 + [False]
    assert get(tier, [b"another", *reversed(keys)]) == [None, *reversed(expected(keys))]


OPERATIONS = st.lists(
    st.tuples(st.sampled_from(("put", "get", "delete")), st.integers(0, 3), st.sampled_from(SIZES)), max_size=12
)
_rounds = itertools.count()


@settings(max_examples=30, deadline=None)
@given(operations=OPERATIONS)
def test_it_is_a_dictionary_in_which_the_first_stays(
    lasting: ObjectTier, operations: list[tuple[str, int, int]]
) -> None:
    """Until it is deleted, or found to be of another length than the host's objects are."""
    prefix = f"round {next(_rounds)} "
    model: dict[bytes, bytes] = {}
    for number, (what, which, size) in enumerate(operations):
        key = f"{prefix}{which}".encode()
        held = model.get(key)
        if what == "put":
            value = content((prefix, number), size)
            assert lasting.put([Object(key, memoryview(value))]) == [True]
            if held is None or slab_bytes_of(len(held)) != slab_bytes_of(size):
                model[key] = value
        elif what == "get":
            is_good = held is not None and len(held) == size
            assert get(lasting, [key], size) == [held if is_good else None]
            if not is_good:
                model.pop(key, None)
        else:
            assert lasting.delete([key]) == [held is not None]
            model.pop(key, None)
        assert lasting.exists([key]) == [key in model]


def test_it_is_there_after_a_restart_and_for_others_on_the_root(tmp_path: Path) -> None:
    keys = names(30)
    with tier_at(tmp_path) as one:
        put(one, keys[:10])
        with tier_at(tmp_path) as other:
            assert get(other, keys[:10]) == expected(keys[:10])
            assert put(other, keys[5:20]) == [True] * 15
            assert get(one, keys[:20]) == expected(keys[:20])
    with tier_at(tmp_path) as again:
        assert again.exists(keys) == [True] * 20 + [False] * 10
        assert get(again, keys[:20]) == expected(keys[:20])


def test_a_flipped_byte_is_a_miss_and_only_that_one(tmp_path: Path) -> None:
    keys = names(8)
    with tier_at(tmp_path) as tier:
        put(tier, keys)
        flip_byte_of(tmp_path, content(keys[3], 5000))
        assert get(tier, keys) == [*expected(keys[:3]), None, *expected(keys[4:])]
        assert tier.counters()[metrics.CHECKSUM_FAILURES] == 1
        assert tier.exists(keys) == [True] * 3 + [False] + [True] * 4, "what is bad is not offered again"
        assert put(tier, keys) == [True] * 8
        assert get(tier, keys) == expected(keys), "it was stored anew"


def test_an_object_behind_a_bad_one_counts_as_one_hit(tmp_path: Path) -> None:
    keys = names(4)
    with tier_at(tmp_path) as tier:
        put(tier, keys)
        flip_byte_of(tmp_path, expected(keys)[0])
        assert get(tier, keys) == [None, *expected(keys)[1:]]
        counted = tier.counters()
    assert (counted[metrics.HIT_TOKENS], counted[metrics.LOAD_TOKENS], counted[metrics.LOAD_FAILURES]) == (4, 3, 1)


def test_an_object_whose_entry_is_damaged_is_stored_again(tier: ObjectTier) -> None:
    keys = names(2)
    for is_got in (True, False):
        put(tier, keys)
        damage_entry(tier._index, tier._key(keys[0]))
        assert not is_got or get(tier, keys) == [None, expected(keys)[1]]
        assert put(tier, keys) == [True] * 2 and get(tier, keys) == expected(keys)


def test_a_lost_segment_is_a_miss(tmp_path: Path) -> None:
    with tier_at(tmp_path) as tier:
        put(tier, names(3))
    for path in segments(tmp_path):
        path.unlink()
    with tier_at(tmp_path) as tier:
        assert get(tier, names(3)) == [None] * 3


def test_an_index_that_was_lost_is_read_back_before_anything_is_put(tmp_path: Path) -> None:
    with tier_at(tmp_path) as tier:
        put(tier, names(3))
        put(tier, names(3, "large"), 50_000)
    shutil.rmtree(find_root(tmp_path).index_path or tmp_path)
    with tier_at(tmp_path) as tier:
        wanted = [*names(3), *names(3, "large")]
        wait_until(lambda: tier.exists(wanted) == [True] * 6, "the segments are read")
        assert get(tier, names(3)) == expected(names(3))
    with tier_at(tmp_path, segment_bytes="32KiB") as tier:
        assert get(tier, names(3)) == expected(names(3)), "sizes that do not fit any more are left alone"


def test_many_callers_at_once(tier: ObjectTier) -> None:
    """Each puts and gets the same keys in an order of its own."""
    wrong: list[object] = []

    def work(number: int) -> None:
        keys = names(40)
        keys = keys[number * 7 :] + keys[: number * 7]
        for size in (3000, 9000) if number % 2 else (9000, 3000):
            mine = [key + str(size).encode() for key in keys]
            wrong.extend(kept for kept in put(tier, mine, size) if not kept)
            found = zip(get(tier, mine, size), expected(mine, size), strict=True)
            wrong.extend((got, want) for got, want in found if got not in (None, want))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads) and wrong == []
    assert drained(tier, 20)
    for size in (3000, 9000):
        keys = [key + str(size).encode() for key in names(40)]
        assert get(tier, keys, size) == expected(keys, size)


class Contended(deque[SaveDone]):
    """Answers, of which another caller takes all after the first look at their number."""

    def __init__(self, take: Callable[[], None]) -> None:
        super().__init__()
        self._takes = iter([take])

    def __len__(self) -> int:
        number = super().__len__()
        for take in self._takes if number else ():
            take()
        return number


def test_answers_that_another_caller_takes_first_are_not_lost(tier: ObjectTier) -> None:
    tier.prepare(5000)
    (size_class,) = tier._size_classes.values()
    room, size_class._transfer._saver._done = size_class._room, Contended(size_class._collect)
    assert put(tier, names(3)) == [True] * 3
    assert size_class._room == room


def test_more_than_the_arena_and_a_segment_hold_are_put_at_once(tier: ObjectTier) -> None:
    keys = names(200)
    assert put(tier, keys, 60_000) == [True] * 200
    assert get(tier, keys, 60_000) == expected(keys, 60_000)


def test_the_oldest_go_when_the_capacity_is_used(tmp_path: Path) -> None:
    with tier_at(tmp_path, capacity_bytes="8MiB") as tier:
        for first in range(0, 300, 20):
            put(tier, names(300)[first : first + 20], 60_000)
        found = get(tier, names(300), 60_000)
        here = [number for number, got in enumerate(found) if got is not None]
        assert here and len(here) < 300 and all(found[number] == content(names(300)[number], 60_000) for number in here)
        assert sum(tier.usage_bytes().values()) <= 8 << 20


def test_tenants_have_quotas_and_are_accounted(tmp_path: Path) -> None:
    tenants = [{"name": "search", "cache_salts": ["search-*"], "quota_bytes": "4MiB"}]
    with tier_at(tmp_path, capacity={"tenants": tenants}) as tier:
        assert put(tier, names(5, "common")) == [True] * 5
        for first in range(0, 200, 20):
            put(tier, names(200, "mine")[first : first + 20], 60_000, salt="search-1")
        used = tier.usage_bytes()
        assert used.keys() == {"", "search"} and 0 < used["search"] <= 4 << 20
        assert get(tier, names(5, "common")) == expected(names(5, "common")), "the tenant's own were evicted"


def test_families_identities_and_epochs_share_nothing(tmp_path: Path) -> None:
    hosts = [ObjectHost("host"), ObjectHost("other"), ObjectHost("host", identity='{"dtype":"fp8"}')]
    changes: list[dict[str, object]] = [{}, {}, {}, {"epoch": 1}, {"model_tag": "m"}]
    others = list(zip([*hosts, hosts[0], hosts[0]], changes, strict=True))
    for number, (host, change) in enumerate(others):
        with tier_at(tmp_path, host, **change) as tier:
            assert tier.exists([b"k"]) == [False]
            assert tier.put([Object(b"k", memoryview(content(number, 100)))]) == [True]
    for number, (host, change) in enumerate(others):
        with tier_at(tmp_path, host, **change) as tier:
            assert get(tier, [b"k"], 100) == [content(number, 100)]


def test_an_engine_on_the_root_is_none_of_its_business(tmp_path: Path) -> None:
    tokens = list(range(1000, 1000 + 64 * 3))
    engine = Engine(tmp_path)
    try:
        assert len(engine.save(tokens, range(12))) == 3
        with tier_at(tmp_path) as tier:
            assert tier.exists(engine.keys(tokens)) == [False] * 3
            assert put(tier, engine.keys(tokens)) == [True] * 3
            everybody = sum(info.n_bytes for info in tier._index.sets())
            assert 0 < tier.usage_bytes()[""] < everybody, "the engine's sets are not counted"
        assert engine.load(tokens, range(100, 112))[0] == 3
    finally:
        engine.close()


def test_the_tools_read_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tier_at(tmp_path) as tier:
        put(tier, names(9))
        tier.delete(names(2))
    assert main(["verify", str(tmp_path)]) == OK and "9 records" in capsys.readouterr().out
    assert main(["stats", str(tmp_path)]) == OK and "object" in capsys.readouterr().out
    assert main(["index", "rebuild", str(tmp_path)]) == OK
    with tier_at(tmp_path) as tier:
        assert get(tier, names(9)) == expected(names(9)), "those that were deleted, too: their segment was read back"


def test_signed_objects(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"a secret of at least thirty-two bytes")
    secret.chmod(0o600)
    signing = {"key_file": str(secret)}
    with tier_at(tmp_path / "root", signing=signing) as tier:
        assert put(tier, names(4)) == [True] * 4
        assert get(tier, names(4)) == expected(names(4))
    with tier_at(tmp_path / "root") as unsigned:
        assert unsigned.exists(names(4)) == [False] * 4


def test_an_index_that_is_away_is_a_miss(tier: ObjectTier, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tier, names(3))

    def away(keys: object) -> None:
        raise IndexUnavailable("down")

    with monkeypatch.context() as patch:
        patch.setattr(tier._index, "find", away)
        assert tier.exists(names(3)) == [False] * 3 and get(tier, names(3)) == [None] * 3
        assert tier.delete(names(3)) == [False] * 3 and put(tier, names(3)) == [True] * 3
    assert tier.counters()[metrics.INDEX_ERRORS] == 4
    assert get(tier, names(3)) == expected(names(3))


def test_what_cannot_work_stops_the_start(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="codec = 'k4v4': objects of host are kept as they are"),
        tier_at(tmp_path, codec="k4v4"),
    ):
        pass
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="root .* a file, not a folder"), tier_at(tmp_path / "file"):
        pass
    with tier_at(tmp_path / "root") as tier:
        for _ in range(2):
            with pytest.raises(ConfigError, match="segment_bytes"):
                tier.prepare(3 << 20)
        for pages in range(SIZE_CLASSES_MAX):
            tier.prepare(pages * 4096)
        with pytest.raises(ConfigError, match=f"objects of {SIZE_CLASSES_MAX} sizes"):
            tier.prepare(SIZE_CLASSES_MAX * 4096)


def test_memory_that_is_not_contiguous_is_our_bug(tier: ObjectTier) -> None:
    with pytest.raises(ValueError, match="not contiguous"):
        tier.put([Object(b"k", memoryview(bytes(100))[::2])])


def test_an_object_is_a_chunk_of_one_token() -> None:
    shape = object_geometry(slab_bytes_of(5000))
    assert shape.token_bytes == 8192 and shape.chunk_tokens == 1 and shape.whole.cells == 1


@has_redis
def test_with_an_index_in_redis(tmp_path: Path) -> None:
    server = Server(tmp_path / "redis")
    index = {"kind": "redis", "url": f"redis://127.0.0.1:{server.port}/0", "reply_timeout_ms": 5000}
    try:
        keys = names(20)
        with tier_at(tmp_path / "root", index=index) as one, tier_at(tmp_path / "root", index=index) as other:
            assert put(one, keys) == [True] * 20
            assert get(other, keys) == expected(keys)
            assert other.delete(keys[:2]) == [True, True]
            assert one.exists(keys[:3]) == [False, False, True]
            server.kill()
            wait_until(lambda: get(one, keys) == [None] * 20, "it is a miss without the index")
    finally:
        server.kill()


def test_a_size_takes_little_of_the_capacity_before_it_is_used(tmp_path: Path) -> None:
    """The default's eighth of the capacity for each of eight sizes would leave no room."""
    with tier_at(tmp_path, capacity_bytes="256MiB") as tier:
        for pages in range(SIZE_CLASSES_MAX):
            tier.prepare(pages * 4096)
            wait_until(lambda n=pages: len(tier._index.sets()) == 2 * (n + 1), "sets are made ready")  # type: ignore[misc]


def test_what_a_killed_process_left_is_whole_or_a_miss(tmp_path: Path) -> None:
    writer = multiprocessing.get_context("spawn").Process(target=put_for_ever, args=(str(tmp_path),))
    writer.start()
    with tier_at(tmp_path) as tier:
        wait_until(lambda: tier.exists([b"9-0"]) == [True], "objects of the other process", 60.0)
        writer.kill()
        writer.join(20)
        keys = [name for number in range(200) for name in names(8, f"{number}-")]
        found = get(tier, keys, 30_000)
        here = [(got, want) for got, want in zip(found, expected(keys, 30_000), strict=True) if got is not None]
        assert len(here) > 70 and all(got == want for got, want in here)
        assert put(tier, keys[:8], 30_000) == [True] * 8 and get(tier, keys[:8], 30_000) == expected(keys[:8], 30_000)


def test_who_looks_late_still_finds_the_answer_to_what_it_put(
    tier: ObjectTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object was stored, deleted, and put again by another before the first caller looked."""
    key, waits, may_look, look = names(1), threading.Event(), threading.Event(), SizeClass._outcome

    def look_late(size_class: SizeClass, *what: Any) -> Any:
        if threading.current_thread().name == "kvtier-first":
            waits.set()
            may_look.wait(20)
        return look(size_class, *what)

    monkeypatch.setattr(SizeClass, "_outcome", look_late)
    first = begin("first", lambda: put(tier, key))
    assert waits.wait(20) and drained(tier, 20)
    assert put(tier, names(1, "other")) == [True]
    assert tier.delete(key) == [True] and put(tier, key) == [True]
    may_look.set()
    assert first.result(20) == [True]
    assert get(tier, key) == expected(key)


def test_sizes_of_before_take_no_place_of_those_that_come(tmp_path: Path) -> None:
    """Engines of other models, and of other chunks, may have left any number of sizes on the root."""
    with tier_at(tmp_path) as before:
        for pages in range(SIZE_CLASSES_MAX):
            put(before, names(1, str(pages)), pages * 4096)
    with tier_at(tmp_path) as tier:
        keys, size = names(3, "new"), SIZE_CLASSES_MAX * 4096
        assert put(tier, keys, size) == [True] * 3 and get(tier, keys, size) == expected(keys, size)
        assert get(tier, names(1, "7"), 7 * 4096) == expected(names(1, "7"), 7 * 4096)


def test_a_call_that_comes_after_the_end_opens_nothing(tmp_path: Path) -> None:
    """Hosts do not wait for ever for their tasks; one that goes on would leave an engine that never ends."""
    with tier_at(tmp_path) as tier:
        put(tier, names(3))
    with pytest.raises(TierUnavailable, match="closed"):
        put(tier, names(3))
    assert get(tier, names(3)) == [None] * 3 and tier.exists(names(3)) == [False] * 3
    assert tier._size_classes == {}
