"""The embedded index used by several threads and processes at once: races, killed and stopped writers, forks."""

import itertools
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from kvtier.errors import IndexUnavailable
from kvtier.index import entry
from kvtier.index.lmdb import index as embedded
from kvtier.index.lmdb.environment import View
from kvtier.index.lmdb.index import LmdbIndex
from tests.waiting import in_child, wait_until

from index_data import PROCESS_TIMEOUT_S, check, fill, join, key, record, set_info, start

SHARED_KEYS = range(100)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "index"


@pytest.fixture
def index(folder: Path) -> Iterator[LmdbIndex]:
    index = LmdbIndex(str(folder), map_bytes=64 << 20)
    yield index
    index.close()


def publish_all(folder: Path, writer: int, taken_path: Path) -> None:
    """Publishes keys of its own, and those that every writer publishes."""
    index = LmdbIndex(str(folder), map_bytes=64 << 20, timeout_s=20.0)
    index.create_set(set_info(writer))
    numbers = [*SHARED_KEYS, *range(1000 * writer, 1000 * writer + 200)]
    random.Random(writer).shuffle(numbers)
    taken = sum(index.publish([record(number, writer, slot)]) for slot, number in enumerate(numbers))
    index.close()
    taken_path.write_text(str(taken))


def test_each_chunk_gets_one_place_however_many_publish_it(tmp_path: Path, index: LmdbIndex, folder: Path) -> None:
    writers = range(1, 5)
    join(*[start(publish_all, folder, one, tmp_path / str(one)) for one in writers])
    assert sum(int((tmp_path / str(writer)).read_text()) for writer in writers) == len(SHARED_KEYS) + 4 * 200
    found = index.resolve([key(number) for number in SHARED_KEYS])
    assert len(found) == len(SHARED_KEYS)
    assert all(len(entry.unpack(value)) == 1 for value in found)
    check(index, [key(number) for number in (*SHARED_KEYS, *(1000 * w + n for w in writers for n in range(200)))])


def publish_for_ever(folder: Path, writer: int, stop: Path) -> None:
    index = LmdbIndex(str(folder), map_bytes=64 << 20, timeout_s=20.0)
    rng = random.Random(writer)
    slot = 0
    while not stop.exists():
        set_id = rng.randrange(6)
        index.publish([record(rng.randrange(300), set_id, writer * 100_000 + slot + n) for n in range(5)])
        slot += 5


def evict_for_ever(folder: Path, seed: int, stop: Path) -> None:
    index = LmdbIndex(str(folder), map_bytes=64 << 20, timeout_s=20.0)
    rng = random.Random(seed)
    while not stop.exists():
        index.remove_set(rng.randrange(6))
        index.create_set(set_info(rng.randrange(6)))


def test_eviction_races_with_publishing(tmp_path: Path, index: LmdbIndex, folder: Path) -> None:
    """Two processes publish into sets that two others remove and make again; every snapshot is consistent."""
    stop = tmp_path / "stop"
    targets = [(publish_for_ever, 1), (publish_for_ever, 2), (evict_for_ever, 3), (evict_for_ever, 4)]
    processes = [start(target, folder, seed, stop) for target, seed in targets]
    deadline = time.monotonic() + 3.0
    seen = 0
    while time.monotonic() < (deadline if seen else deadline + 30.0):  # processes start late on a busy machine
        seen += index.counts().records
        index.resolve([key(number) for number in range(300)])
    stop.touch()
    join(*processes)
    assert seen > 0
    check(index, [key(number) for number in range(300)])


def test_a_removal_that_is_cut_short_leaves_the_set(index: LmdbIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large set goes in several transactions; whoever dies between them leaves a smaller set, not a hanging entry."""
    monkeypatch.setattr(embedded, "_RECORDS_PER_TRANSACTION", 10)
    fill(index, 1, range(35))
    write = index._shared.write
    calls: list[int] = []

    def die_at_the_third(work: object, **adds: bool) -> object:
        calls.append(1)
        if len(calls) == 3:
            raise IndexUnavailable("killed")
        return write(work, **adds)  # type: ignore[arg-type]

    monkeypatch.setattr(index._shared, "write", die_at_the_third)
    with pytest.raises(IndexUnavailable):
        index.remove_set(1)
    assert [info.set_id for info in index.sets()] == [1]
    assert index.counts().records == 15
    check(index, [key(number) for number in range(35)])
    assert index.remove_set(1) == 15
    assert index.sets() == []


def hold_leases(folder: Path, owner: str, log_path: Path) -> None:
    index = LmdbIndex(str(folder), map_bytes=64 << 20, timeout_s=20.0)
    lines = []
    while len(lines) < 30:
        token = index.acquire_lease("evict", owner, time.time(), 30.0)
        if token is None:
            time.sleep(0.001)
            continue
        begin_s = time.monotonic()
        assert index.lease_owner("evict", time.time()) == owner
        lines.append(f"{token} {begin_s} {time.monotonic()}")
        index.release_lease("evict", owner)
    log_path.write_text("\n".join(lines))


def test_a_lease_has_one_winner_among_processes(tmp_path: Path, index: LmdbIndex, folder: Path) -> None:
    logs = [tmp_path / f"log-{number}" for number in range(4)]
    join(*[start(hold_leases, folder, log.name, log) for log in logs])
    held = [line.split() for log in logs for line in log.read_text().splitlines()]
    holdings = sorted((int(token), float(begin_s), float(end_s)) for token, begin_s, end_s in held)
    assert [token for token, _, _ in holdings] == list(range(1, 121)), "each new owner gets the next token"
    for (_, _, end_s), (_, begin_s, _) in itertools.pairwise(holdings):
        assert end_s <= begin_s, "two owners at once"


def write_and_hang(folder: Path, ready: Path) -> None:
    """Ends within a write transaction that is never committed."""
    index = LmdbIndex(str(folder), map_bytes=64 << 20)

    def work(view: View) -> None:
        view.put("entries", key(77), b"never committed")
        ready.touch()
        time.sleep(PROCESS_TIMEOUT_S)

    index._shared.write(work)


def hanging_writer(folder: Path, sent: signal.Signals) -> BaseProcess:
    """Return a process that has received the signal in the middle of a transaction."""
    ready = folder.with_name("ready")
    process = start(write_and_hang, folder, ready)
    wait_until(ready.exists)
    assert process.pid is not None
    os.kill(process.pid, sent)
    return process


def test_a_killed_writer_blocks_nobody(index: LmdbIndex, folder: Path) -> None:
    process = hanging_writer(folder, signal.SIGKILL)
    begin_s = time.monotonic()
    assert fill(index, 1, range(10)) == 10
    assert time.monotonic() - begin_s < PROCESS_TIMEOUT_S / 2
    assert index.resolve([key(77)]) == []
    process.join()


def test_a_stopped_writer_costs_the_timeout_and_no_read(folder: Path) -> None:
    """LMDB's own mutex would wait for ever (I10)."""
    index = LmdbIndex(str(folder), map_bytes=64 << 20, timeout_s=0.3)
    fill(index, 1, range(10))
    process = hanging_writer(folder, signal.SIGSTOP)
    begin_s = time.monotonic()
    with pytest.raises(IndexUnavailable, match="another process"):
        index.publish([record(11, 1, 11)])
    assert 0.2 < time.monotonic() - begin_s < PROCESS_TIMEOUT_S / 2
    assert len(index.resolve([key(number) for number in range(10)])) == 10
    process.kill()
    process.join()
    assert index.publish([record(11, 1, 11)]) == 1
    index.close()


def test_writers_killed_at_random_moments_leave_a_consistent_index(
    tmp_path: Path, index: LmdbIndex, folder: Path
) -> None:
    rng = random.Random(5)
    for set_id in range(6):
        index.create_set(set_info(set_id))
    for seed in range(4):
        before = index.counts().records
        process = start(publish_for_ever, folder, 10 + seed, tmp_path / "never")
        deadline = time.monotonic() + PROCESS_TIMEOUT_S
        while index.counts().records == before and time.monotonic() < deadline:
            index.remove_set(rng.randrange(6))
            index.create_set(set_info(rng.randrange(6)))
            before = min(before, index.counts().records)
        time.sleep(rng.random() * 0.05)
        process.kill()
        process.join()
        check(index, [key(number) for number in range(300)])
        assert fill(index, 100 + seed, range(1000 * seed + 1000, 1000 * seed + 1010)) == 10


def test_a_forked_child_opens_it_anew(index: LmdbIndex) -> None:
    fill(index, 1, range(10))

    def child() -> None:
        assert len(index.resolve([key(number) for number in range(10)])) == 10
        assert index.publish([record(10, 1, 10)]) == 1
        index.close()

    assert in_child(child) == 0
    assert len(index.resolve([key(number) for number in range(11)])) == 11
    assert index.publish([record(11, 1, 11)]) == 1


def test_forks_while_threads_read_and_write(index: LmdbIndex) -> None:
    """A child inherits no half-done transaction: neither it nor the parent hangs or loses its place."""
    fill(index, 1, range(100))
    done = threading.Event()
    faults: list[BaseException] = []

    def run(step: object) -> None:
        count = 0
        while not done.is_set():
            try:
                step(count)  # type: ignore[operator]
            except BaseException as error:
                faults.append(error)
                return
            count += 1

    threads = [
        threading.Thread(target=run, args=(lambda count: index.publish([record(1000 + count, 1, 1000 + count)]),)),
        threading.Thread(target=run, args=(lambda count: len(index.resolve([key(n) for n in range(100)])) == 100,)),
    ]
    for thread in threads:
        thread.start()
    codes = [in_child(lambda: fill(index, 2, range(5)) and index.resolve([key(0)])) for _ in range(15)]
    done.set()
    for thread in threads:
        thread.join()
    assert codes == [0] * 15 and faults == []


def test_two_users_in_one_process_share_it(index: LmdbIndex, folder: Path, tmp_path: Path) -> None:
    """The scheduler's and the worker's half may live in one process, where LMDB may be opened once."""
    (tmp_path / "link").symlink_to(folder)
    other = LmdbIndex(str(tmp_path / "link"))
    fill(other, 1, range(3))
    assert len(index.resolve([key(0), key(1), key(2)])) == 3
    other.close()
    other.close()
    assert len(index.resolve([key(0), key(1), key(2)])) == 3


def test_a_closed_index_says_so(folder: Path) -> None:
    index = LmdbIndex(str(folder))
    index.close()
    with pytest.raises(IndexUnavailable):
        index.resolve([key(0)])
    with pytest.raises(IndexUnavailable):
        index.create_set(set_info(1))
    reopened = LmdbIndex(str(folder))
    assert reopened.sets() == []
    reopened.close()
