"""Files of the embedded index that are removed while it is used, all of them or some; who waits for what then."""

import random
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from kvtier.config.settings import Settings
from kvtier.errors import IndexUnavailable
from kvtier.index import open as indexes
from kvtier.index import values
from kvtier.index.base import SetInfo
from kvtier.index.lmdb import environment
from kvtier.index.lmdb.index import LmdbIndex
from kvtier.storage.root import open_root
from tests.waiting import wait_until

from index_data import PROCESS_TIMEOUT_S, check, fill, join, key, record, set_info, start


def open_index(folder: Path, reopen: Callable[[], object] | None = None) -> LmdbIndex:
    return LmdbIndex(str(folder), map_bytes=64 << 20, timeout_s=2.0, reopen=reopen)


def test_a_lookup_never_waits_for_what_the_folder_lies_in(tmp_path: Path) -> None:
    """Its file system may hang, and so who looks at it; a lookup is the engine's own thread."""
    goes_on, looks = threading.Event(), threading.Event()

    def hang() -> None:
        looks.set()
        assert goes_on.wait(PROCESS_TIMEOUT_S)

    index = open_index(tmp_path / "index", hang)
    assert index.resolve([key(1)]) == []
    shutil.rmtree(tmp_path / "index")
    with pytest.raises(IndexUnavailable, match="in the background"):
        index.resolve([key(1)])
    assert not looks.is_set(), "the lookup itself looked"
    other = threading.Thread(target=index.counts)
    other.start()
    try:
        assert looks.wait(PROCESS_TIMEOUT_S)
        before_s = time.monotonic()
        with pytest.raises(IndexUnavailable):
            index.resolve([key(1)])
        assert time.monotonic() - before_s < PROCESS_TIMEOUT_S / 2, "it waited for who looks"
    finally:
        goes_on.set()
        other.join()
    assert index.resolve([key(1)]) == []
    index.close()


@pytest.mark.parametrize("listing", [LmdbIndex.sets, LmdbIndex.counts])
def test_a_lookup_does_not_wait_while_sets_are_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, listing: Callable[[LmdbIndex], object]
) -> None:
    """A root may have 20,000 sets."""
    index = open_index(tmp_path / "index")
    assert index.create_set(set_info(1))
    unpack, found = values.unpack_set, list[list[bytes]]()

    def look_up_first(set_id: int, value: bytes) -> SetInfo:
        found.append(index.resolve([key(1)]))  # raises once the lookup's time is over
        return unpack(set_id, value)

    monkeypatch.setattr(values, "unpack_set", look_up_first)
    listing(index)
    assert found == [[]]
    index.close()


def test_another_thread_may_close_it_at_any_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = open_index(tmp_path / "index")
    opened = index._shared._opened
    found = iter([opened])
    monkeypatch.setattr(
        environment.SharedEnvironment, "_opened", property(lambda self: next(found, None)), raising=False
    )
    with pytest.raises(IndexUnavailable, match="closed"):
        index.resolve([key(1)])
    monkeypatch.undo()
    index.close()


def use_again(folder: Path, asks: Path, answers: Path) -> None:
    """Has it open before `asks` is there, and looks again afterwards."""
    index = open_index(folder)
    fill(index, 1, range(50))
    answers.touch()
    wait_until(asks.exists)
    index.create_set(set_info(2))
    assert index.publish([record(1000, 2, 0)]) == 1
    check(index, [key(number) for number in (*range(50), 1000)])
    index.close()


@pytest.mark.parametrize("name", ["data.mdb", "lock.mdb", "lock"])
def test_a_file_that_was_removed_alone(tmp_path: Path, name: str) -> None:
    """As by a removal of the whole folder that met an engine opening it. Who opens it then would share the data with
    those who have it open, but not the locks: with two writers, or pages that are given away under a reader. Or the
    locks and not the data: LMDB counts the transactions of both in the lock file."""
    folder, asks, answers = tmp_path / "index", tmp_path / "asks", tmp_path / "answers"
    other = start(use_again, folder, asks, answers)
    wait_until(answers.exists)
    before = [(folder / each).stat().st_ino for each in ("data.mdb", "lock.mdb")]
    (folder / name).unlink()
    index = open_index(folder)
    is_same = (folder / "data.mdb").stat().st_ino == before[0]
    assert is_same == (name == "lock"), "the other may be at it, but for LMDB's locks"
    assert is_same == ((folder / "lock.mdb").stat().st_ino == before[1]), "both are made anew together"
    asks.touch()
    join(other)
    check(index, [key(number) for number in (*range(50), 1000)])
    assert len(index.resolve([key(1000)])) == 1 and len(index.resolve([key(7)])) == is_same
    (folder / name).unlink()
    assert index.publish([record(1001, 2, 1)]) == is_same and (folder / name).exists(), "who has it open sees it too"
    index.close()


def use_for_ever(folder: Path, number: int, stop: Path) -> None:
    index = None
    while index is None:
        with suppress(IndexUnavailable):  # somebody removes its files, which an engine's start may meet, too
            index = open_index(folder, lambda: folder.mkdir(exist_ok=True))
    rng = random.Random(number)
    while not stop.exists():
        with suppress(IndexUnavailable):
            set_id = rng.randrange(6)
            index.create_set(set_info(set_id))
            index.publish(
                [record(rng.randrange(300), set_id, number * 100_000 + rng.randrange(9999)) for _ in range(5)]
            )
            check_some = index.resolve([key(rng.randrange(300))])
            assert len(check_some) <= 1
            if rng.random() < 0.1:
                index.remove_set(set_id)


def test_a_folder_that_is_removed_again_and_again(tmp_path: Path) -> None:
    """Under four processes that make it anew; file by file, as rm does. In the end all use the same files."""
    folder, stop = tmp_path / "index", tmp_path / "stop"
    index = open_index(folder)
    processes = [start(use_for_ever, folder, number, stop) for number in range(4)]
    rng = random.Random(0)
    for _ in range(150):
        for path in rng.sample(names := sorted(folder.glob("*")), len(names)):
            path.unlink(missing_ok=True)
        time.sleep(rng.random() * 0.02)
    stop.touch()
    join(*processes)
    wait_until(lambda: is_usable(index))
    index.close()


def is_usable(index: LmdbIndex) -> bool:
    with suppress(IndexUnavailable):
        check(index, [key(number) for number in range(300)])
        return True
    return False


def test_one_that_does_not_answer_at_the_start_is_closed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what is asked of the same folder later gets the environment that failed, and its file stays open."""
    found = Settings.load({"root": str(tmp_path / "kv")})
    root = open_root(found)

    def fail(index: LmdbIndex, folder: Path) -> None:
        raise IndexUnavailable("MDB_CORRUPTED")

    with monkeypatch.context() as broken, pytest.raises(IndexUnavailable):
        broken.setattr(LmdbIndex, "bind", fail)
        indexes.open_index(found, root)
    assert str(root.index_path) not in environment._registry
    indexes.open_index(found, root).close()
