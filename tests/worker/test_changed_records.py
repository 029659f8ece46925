"""What happens to a record between the lookup and the read: a miss from that chunk on, of which nothing reaches the
engine's blocks (I2). On the host, where the ring sums what it reads, and over a device, where the slots are summed."""

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvtier.format.geometry import PAGE_BYTES
from kvtier.io.base import Reader, Reads
from kvtier.io.ring import ReadOp
from kvtier.plan import LoadDone
from kvtier.runtime import metrics as names
from kvtier.storage import open_segments
from kvtier.storage.segments import Sharing
from tests.damage import record_of, write
from tests.support.lazy import LazyEngine
from tests.support.rig import BLOCKS, TARGET, Engine, saved_by_another
from tests.waiting import wait_until

TOKENS, OTHERS = list(range(1000, 1000 + 64 * 5)), list(range(7000, 7000 + 64 * 5))
BAD = 2  # the chunk, and the slot of its record
NO_ARENA = {"host": {"arena_bytes": 8 << 20, "admit": "never"}}


def becomes_zeros(path: Path, newer: Path) -> None:
    offset, record = record_of(path, BAD)
    write(path, offset, bytes(len(record)))


def holds_a_newer_chunk(path: Path, newer: Path) -> None:
    write(path, record_of(path, BAD)[0], record_of(newer, BAD)[1])


def is_shortened(path: Path, newer: Path) -> None:
    os.truncate(path, record_of(path, BAD)[0] + PAGE_BYTES + 8192)


def is_shortened_to_its_header_page(path: Path, newer: Path) -> None:
    os.truncate(path, record_of(path, BAD)[0] + PAGE_BYTES)


def is_replaced(path: Path, newer: Path) -> None:
    """By a whole segment of the same size, header and all."""
    size = path.stat().st_size
    newer.replace(path)
    assert path.stat().st_size == size


def holds_what_another_held(path: Path, newer: Path) -> None:
    """As restored from a backup of a wrong day: the name and the header are right, the records another segment's."""
    spare, header = path.with_suffix(".spare"), path.read_bytes()[:PAGE_BYTES]
    shutil.copyfile(newer, spare)
    write(spare, 0, header)
    spare.replace(path)


class FailingReader(Reader):
    """The kernel answers reads of one chunk with EIO: they go to unmapped memory of this process, as a file."""

    never_waits = True

    def __init__(self, inner: Reader, key: bytes) -> None:
        self._inner = inner
        self._key = key
        self._fd = os.open("/proc/self/mem", os.O_RDONLY)

    def submit(self, ops: Sequence[ReadOp]) -> Reads:
        return self._inner.submit([op._replace(fd=self._fd) if op.key == self._key else op for op in ops])

    def close(self, timeout_s: float = 1.0) -> bool:
        os.close(self._fd)
        return self._inner.close(timeout_s)


@pytest.fixture(name="reader", params=["host", "device"])
def _reader(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(open_segments, "CHECKED_FOR_S", 0.0)  # until then an open file's old bytes are served, and good
    for tokens in (TOKENS, OTHERS):
        saved_by_another(tmp_path, tokens, BLOCKS)
    engine = Engine(tmp_path, changes=NO_ARENA) if request.param == "host" else LazyEngine(tmp_path)
    if isinstance(engine, LazyEngine):
        engine.lay_over(admit="never")
        engine.on_threads()
    yield engine
    for transfer in engine.transfers:
        transfer._worker.arena.check()
    wait_until(engine.has_all_slots, "a slot was lost")  # what a failed load read ahead may still be read
    engine.close()


def segments_of(root: Path, reader: Engine) -> tuple[Path, Path]:
    """Those of TOKENS and of OTHERS, by the header of their first record."""
    first = reader.keys(TOKENS)[0]
    found = sorted(root.glob("v2/*/*.kvseg"), key=lambda path: first not in record_of(path, 0)[1][:PAGE_BYTES])
    assert len(found) == 2 and first in record_of(found[0], 0)[1][:PAGE_BYTES]
    return found[0], found[1]


def load(reader: Engine, damage: Callable[[], None]) -> LoadDone:
    """Looks TOKENS up, has the damage done, and loads."""
    plan = reader.plan_load("r", TOKENS, TARGET)
    assert plan is not None and len(plan.chunks) == 5
    damage()
    (done,) = reader.run_load(plan)
    return done


def assert_loaded(reader: Engine, done: LoadDone, n_good: int) -> None:
    """The first `n_good` chunks hold what was saved; of the others nothing was claimed, and nothing written."""
    assert done.failed_blocks == frozenset(TARGET[4 * n_good :])
    assert all(not plane[4 * n_good :].any() for plane in reader.blocks(TARGET)), "bad bytes reached the engine"
    assert reader.holds(TOKENS, TARGET[: 4 * n_good])


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(
    ("damage", "n_good"),
    [
        (becomes_zeros, BAD),
        (holds_a_newer_chunk, BAD),
        (is_shortened, BAD),
        (is_shortened_to_its_header_page, BAD),
        (is_replaced, 0),
        (holds_what_another_held, 0),
    ],
)
def test_a_record_that_changes_meanwhile_is_no_hit(
    tmp_path: Path, reader: Engine, damage: Callable[[Path, Path], None], n_good: int, is_open: bool
) -> None:
    if is_open:  # its descriptor is kept from an earlier load
        assert load(reader, lambda: None).failed_blocks == frozenset()
        for plane in (plane for layer in reader.pages[0].layers for plane in layer.planes):
            plane.zero_()
    done = load(reader, lambda: damage(*segments_of(tmp_path, reader)))
    assert_loaded(reader, done, n_good)
    assert len(reader.store.lookup(reader.keys(TOKENS))) == n_good, "it is offered again (I11)"


@pytest.mark.parametrize(("damage", "n_good"), [(becomes_zeros, BAD), (is_replaced, 0)])
def test_where_reads_may_be_stale_a_bad_record_is_read_again_and_stays_in_the_index(
    tmp_path: Path, reader: Engine, damage: Callable[[Path, Path], None], n_good: int
) -> None:
    records = reader.transfers[0]._loader._chunks.reader
    records._sharing = Sharing(may_be_stale=True)
    done = load(reader, lambda: damage(*segments_of(tmp_path, reader)))
    assert_loaded(reader, done, n_good)
    assert len(reader.store.lookup(reader.keys(TOKENS))) == 5 and len(records.rechecks._waiting) == 1
    counted = reader.transfers[0].metrics.total()
    assert names.CHECKSUM_FAILURES not in counted and counted.get(names.REREAD_CHUNKS, 0) == (n_good == BAD)


def test_a_read_that_ends_with_eio_is_no_hit(reader: Engine) -> None:
    worker = reader.transfers[0]._worker
    reads = FailingReader(worker.io.reader, reader.keys(TOKENS)[BAD])
    reader.transfers[0]._loader._chunks.reader.engine = reads
    done = load(reader, lambda: None)
    assert_loaded(reader, done, BAD)
    assert len(reader.store.lookup(reader.keys(TOKENS))) == 5, "the storage failed; of the record nothing is known"


def test_an_index_entry_of_which_one_bit_changed_is_no_hit(tmp_path: Path) -> None:
    """Whichever it is: of where the records are, of what they hold, or of what they sum to. Two ranks wrote them."""
    saved_by_another(tmp_path, TOKENS[:64], BLOCKS[:4], tensor_size=2)
    reader = Engine(tmp_path, changes=NO_ARENA)
    transfer = reader.transfers[0]
    (key,) = reader.keys(TOKENS[:64])
    (entry,) = reader.store.lookup([key])

    def is_hit(entry: bytes) -> bool:
        (done,) = reader.run_load(reader.store.plan_load("r", [key], [entry], BLOCKS[:4], 0))
        return not done.failed_blocks

    assert is_hit(entry)
    for bit in range(8 * len(entry)):
        changed = bytearray(entry)
        changed[bit // 8] ^= 1 << bit % 8
        assert not is_hit(bytes(changed))
    assert reader.has_all_slots() and not transfer._loader._fetches
