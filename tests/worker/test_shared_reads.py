"""One chunk that several loads want at a time: it is read once, whichever of them gives up meanwhile."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvtier.io.base import Reader
from kvtier.io.ring import Batch, ReadOp, WriteOp
from kvtier.plan import LoadDone
from kvtier.runtime import metrics as names
from kvtier.worker import loads
from tests.support.rig import Engine, reader_of_saved, saved_by_another
from tests.waiting import wait_until
from tests.worker.held_ring import HeldBatch, HeldRing

TOKENS = list(range(1000, 1128))
BLOCKS = list(range(8))
N_CHUNKS = 2
SOON_S = 5.0


class Readers:
    """Loads of one worker that want the same two chunks, each into blocks of its own."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.transfer = engine.transfers[0]
        self.worker = self.transfer._worker
        self.ring = HeldRing(self.worker.io.ring)
        self.transfer._loader._chunks.reader.engine = self.ring
        self._done: dict[str, LoadDone] = {}

    def ask(self, name: str, first: int) -> list[int]:
        blocks = list(range(first, first + len(BLOCKS)))
        self.engine.begin_load(name, TOKENS, blocks)
        return blocks

    def answer(self, name: str) -> LoadDone:
        def has_come() -> bool:
            self._done |= {done.request_id: done for done in self.transfer.poll(0.05).loads}
            return name in self._done

        wait_until(has_come, f"{name} is answered", SOON_S)
        return self._done[name]

    def all_is_given_back(self) -> bool:
        return self.engine.has_all_slots() and not self.transfer._loader._fetches


@pytest.fixture(name="readers")
def _readers(tmp_path: Path) -> Iterator[Readers]:
    engine = reader_of_saved(tmp_path, TOKENS, BLOCKS)
    readers = Readers(engine)
    yield readers
    readers.ring.let_go.set()
    wait_until(readers.all_is_given_back, "a slot or a fetch was left")
    engine.close()


def test_a_chunk_is_read_once_for_all_loads_that_want_it(readers: Readers) -> None:
    asked = {name: readers.ask(name, 16 * number + 16) for number, name in enumerate(("first", "second", "third"))}
    wait_until(lambda: readers.ring.n_submitted == N_CHUNKS)
    fetches = readers.transfer._loader._fetches
    wait_until(lambda: all(fetch.n_loads == len(asked) for fetch in fetches.values()), "all loads want all chunks")
    readers.ring.let_go.set()
    for name, blocks in asked.items():
        assert readers.answer(name).failed_blocks == frozenset()
        assert readers.engine.holds(TOKENS, blocks)
    assert readers.ring.n_submitted == N_CHUNKS


def test_a_load_that_gives_up_ends_no_other_loads_read(readers: Readers) -> None:
    now_s = readers.worker.clock()
    object.__setattr__(readers.worker, "clock", lambda: now_s)
    first = readers.ask("first", 16)
    wait_until(lambda: readers.ring.n_submitted == N_CHUNKS)
    object.__setattr__(readers.worker, "clock", lambda: now_s + readers.worker.timeout_s / 2)
    second = readers.ask("second", 32)
    fetches = readers.transfer._loader._fetches
    wait_until(lambda: [fetch.n_loads for fetch in fetches.values()] == [2, 2], "it waits for the same reads")
    object.__setattr__(readers.worker, "clock", lambda: now_s + readers.worker.timeout_s + 0.1)
    assert readers.answer("first").failed_blocks == frozenset(first)
    readers.ring.let_go.set()
    assert readers.answer("second").failed_blocks == frozenset()
    assert readers.engine.holds(TOKENS, second) and readers.ring.n_submitted == N_CHUNKS
    assert all(not plane.any() for plane in readers.engine.blocks(first)), "written after its answer"


def test_a_copy_that_went_bad_is_read_anew_once(tmp_path: Path) -> None:
    engine = reader_of_saved(tmp_path, TOKENS, BLOCKS)
    readers = Readers(engine)
    readers.ring.let_go.set()
    readers.transfer._loader._chunks._admit.arena.keeps_loaded = lambda key: True  # type: ignore[method-assign]
    readers.ask("fills the arena", 16)
    readers.answer("fills the arena")
    arena, key = readers.worker.arena, engine.keys(TOKENS)[1]
    leased = arena.lease(key)
    assert leased is not None
    arena.slabs(leased[0], leased[1][0].cut.slot_offset, 4, leased[1][0].cut.slab_bytes)[1, 77] ^= 1
    arena.release(leased[0], key)
    asked = {name: readers.ask(name, 16 * number + 32) for number, name in enumerate(("first", "second"))}
    for name, blocks in asked.items():
        assert readers.answer(name).failed_blocks == frozenset()
        assert readers.engine.holds(TOKENS, blocks)
    assert readers.ring.n_submitted == N_CHUNKS + 1
    assert readers.transfer.metrics.total()[names.CHECKSUM_FAILURES] == 1
    wait_until(readers.all_is_given_back, "a slot or a fetch was left")


def test_a_decode_that_raises_costs_its_loads_and_no_slot(readers: Readers, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the driver refuses a launch. The thread ends with its traceback, and another one goes on."""
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    readers.ring.let_go.set()
    decode = readers.worker.codec.decode

    def refuse(*args: object) -> None:
        raise RuntimeError("no launch")

    readers.worker.codec.decode = refuse  # type: ignore[method-assign]
    first = readers.ask("first", 16)
    assert readers.answer("first").failed_blocks == frozenset(first)
    wait_until(readers.all_is_given_back, "a slot was lost")
    readers.worker.codec.decode = decode  # type: ignore[method-assign]
    second = readers.ask("second", 32)
    assert readers.answer("second").failed_blocks == frozenset()
    assert readers.engine.holds(TOKENS, second) and len(raised) == 1


@pytest.mark.parametrize("fault", [OSError, ValueError])
def test_a_read_that_is_not_submitted_frees_no_slot_of_those_under_way(
    readers: Readers, monkeypatch: pytest.MonkeyPatch, fault: type[Exception]
) -> None:
    """The slot of the first chunk of a batch was given to others, and its bytes landed there."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    arena, submit = readers.worker.arena, readers.ring.submit

    def submit_first(ops: Sequence[ReadOp | WriteOp]) -> HeldBatch:
        if readers.ring.n_submitted:
            raise fault("no read")
        return submit(ops)

    monkeypatch.setattr(readers.ring, "submit", submit_first)
    first = readers.ask("first", 16)
    wait_until(lambda: arena.available == arena.n_slots - 1, "the second chunk gives its slot back", SOON_S)
    readers.ring.let_go.set()
    assert readers.answer("first").failed_blocks == frozenset(first[4:])


def test_one_free_slot_is_enough(readers: Readers) -> None:
    """Who looked for a slot in vain took the slot of the chunk before away again, for ever."""
    readers.ring.let_go.set()
    arena = readers.worker.arena
    taken = [arena.reserve() for _ in range(arena.n_slots - 1)]
    readers.ask("first", 16)
    assert readers.answer("first").failed_blocks == frozenset()
    assert readers.ring.n_submitted == N_CHUNKS
    for slot in taken:
        assert slot is not None
        arena.discard(slot)


def test_a_read_that_hangs_keeps_no_slots_from_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks behind the one that hangs hold the whole window: they give way to other loads."""
    monkeypatch.setattr(loads, "WINDOW_MIN", 4)
    monkeypatch.setattr(loads, "WINDOW_MAX", 4)
    long, short = list(range(64 * 6)), list(range(5000, 5128))
    saved_by_another(tmp_path, long, range(24))
    saved_by_another(tmp_path, short, BLOCKS)
    engine = Engine(tmp_path, changes={"host": {"arena_bytes": 8 << 20, "admit": "never"}, "io": {"timeout_s": 8.0}})
    transfer, ring = engine.transfers[0], engine.transfers[0]._worker.io.ring
    first_key, let_go = engine.keys(long)[0], threading.Event()

    class HangingReader(Reader):
        never_waits = True

        def submit(self, ops: Sequence[ReadOp]) -> Batch | HeldBatch:
            batch = ring.submit(ops)
            return HeldBatch(batch, let_go) if ops[0].key == first_key else batch

        def close(self, timeout_s: float = 1.0) -> bool:
            return ring.close(timeout_s)

    transfer._loader._chunks.reader.engine = HangingReader()
    engine.begin_load("long", long, range(100, 124))
    engine.begin_load("short", short, range(200, 208))
    done: list[LoadDone] = []
    wait_until(lambda: done.extend(transfer.poll(0.05).loads) or len(done) == 1, "the short load ends", 6.0)
    assert done[0].request_id == "short" and not done[0].failed_blocks
    let_go.set()
    wait_until(lambda: done.extend(transfer.poll(0.05).loads) or len(done) == 2, "the long load ends", 6.0)
    assert not done[1].failed_blocks
