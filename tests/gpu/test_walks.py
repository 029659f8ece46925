"""Both walks on a real GPU: what the engine launched is still running while chunks are gathered and loaded."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvtier.plan import SaveOutcome
from kvtier.runtime import metrics as names
from kvtier.scheduler.store import WantedChunk
from kvtier.worker.cuda_events import CudaEvent, CudaOrder
from tests.damage import flip_slab
from tests.support.rig import BLOCKS, TARGET, TOKENS, Engine, fill, geometry

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

SLEEP_CYCLES = 200_000_000  # a tenth of a second on a GPU of 2 GHz: longer than all that must not overtake it
SLOT_BYTES = (4 + 128) << 10  # of a chunk of the rig in bf16: a header page, and four heads of four layers
CUDA = {"host": {"arena_bytes": "16MiB"}, "hbm": {"staging_bytes": "16MiB"}}


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for engine in made:
        worker = engine.transfers[0]._worker
        engine.transfers[0].drain(10)
        for arena in (worker.arena, worker.host):
            assert arena is not None
            arena.check()
            assert arena.available == arena.n_ready, "a slot was lost"
        engine.close()


def start(root: Path, made: list[Engine], order: CudaOrder | None = None, **changes: object) -> Engine:
    engine = Engine(root, geometry(dtype="bfloat16", element_bytes=2), device="cuda", changes=CUDA | changes)
    worker = engine.transfers[0]._worker
    deadline = time.monotonic() + 20
    while worker.host is not None and worker.host.n_ready < worker.host.n_slots:
        assert time.monotonic() < deadline, "the host arena is not pinned"
        time.sleep(0.01)
    if order is not None:
        object.__setattr__(worker, "order", order)
    made.append(engine)
    return engine


def set_blocks(engine: Engine, block_ids: list[int], value: float) -> None:
    """Launched, and not waited for: a list of blocks would be copied to the device behind what is running there."""
    index = slice(block_ids[0], block_ids[-1] + 1)
    assert len(block_ids) == index.stop - index.start
    for layer in engine.pages[0].layers:
        for plane in layer.planes:
            plane[index] = value


def save_late(engine: Engine) -> list[SaveOutcome]:
    """The forward takes long, and the blocks are handed on behind it at once."""
    engine.wait_for_set()
    plan = engine.plan(TOKENS, BLOCKS)
    engine.prefill(TOKENS, BLOCKS)
    known = [plane.clone() for layer in engine.pages[0].layers for plane in layer.planes]
    set_blocks(engine, BLOCKS, 0)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    for layer in engine.pages[0].layers:
        for plane in layer.planes:
            plane.copy_(known.pop(0))
    engine.transfers[0].save(plan)
    set_blocks(engine, BLOCKS, 7)
    assert engine.transfers[0].drain(20)
    done = engine.transfers[0].poll().saves
    engine.store.saved(done)
    return [answer.outcome for answer in done]


def load_behind(engine: Engine, computed: int = 0) -> tuple[int, frozenset[int]]:
    """The engine still zeroes the blocks, late, when the load begins. (chunks, failed blocks)."""
    torch.cuda._sleep(SLEEP_CYCLES)
    set_blocks(engine, TARGET[computed // 16 :], 0)
    n, done = engine.load(TOKENS, TARGET, computed)
    torch.cuda.synchronize()
    return n, done[0].failed_blocks if done else frozenset()


def expected(engine: Engine) -> list[torch.Tensor]:
    for number, block in enumerate(BLOCKS):
        fill(engine.pages[0], engine.shares[0], block, hash(tuple(TOKENS[: (number + 1) * 16])))
    return engine.blocks(BLOCKS)


def is_equal(one: list[torch.Tensor], two: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(one, two, strict=True))


def test_what_is_handed_on_and_zeroed_meanwhile(tmp_path: Path, engines: list[Engine]) -> None:
    assert save_late(start(tmp_path, engines)) == 5 * [SaveOutcome.SAVED]
    reader = start(tmp_path, engines)
    assert load_behind(reader) == (5, frozenset())
    assert is_equal(reader.blocks(TARGET), expected(reader))
    totals = reader.transfers[0].metrics.total()
    assert names.CHECKSUM_FAILURES not in totals and totals[names.FILE_READ_BYTES] > 0


def test_from_the_host_arena(tmp_path: Path, engines: list[Engine]) -> None:
    engine = start(tmp_path, engines)
    save_late(engine)
    assert load_behind(engine) == (5, frozenset())
    assert is_equal(engine.blocks(TARGET), expected(engine))
    totals = engine.transfers[0].metrics.total()
    assert totals[names.HOST_HIT_CHUNKS] == 5 and names.FILE_READ_BYTES not in totals


def test_from_the_hbm_arena_after_a_save(tmp_path: Path, engines: list[Engine]) -> None:
    engine = start(tmp_path, engines, hbm={"staging_bytes": "16MiB", "arena_bytes": "4MiB", "admit": "saved"})
    save_late(engine)
    assert load_behind(engine) == (5, frozenset())
    assert is_equal(engine.blocks(TARGET), expected(engine))
    totals = engine.transfers[0].metrics.total()
    assert totals[names.ARENA_HIT_CHUNKS] == 5
    assert names.HOST_HIT_CHUNKS not in totals and names.FILE_READ_BYTES not in totals


def test_from_the_hbm_arena_after_two_loads(tmp_path: Path, engines: list[Engine]) -> None:
    save_late(start(tmp_path, engines))
    reader = start(tmp_path, engines, hbm={"staging_bytes": "16MiB", "arena_bytes": "4MiB"})
    for hits in (0, 0, 5):
        assert load_behind(reader) == (5, frozenset())
        assert is_equal(reader.blocks(TARGET), expected(reader))
        assert reader.transfers[0].metrics.total().get(names.ARENA_HIT_CHUNKS, 0) == hits


def test_what_the_hbm_arena_holds_goes_under_load_and_is_right_all_the_same(
    tmp_path: Path, engines: list[Engine]
) -> None:
    """Other prompts are saved while one is loaded again and again: six slots in all, so they take each other's."""
    save_late(start(tmp_path, engines))
    slots = {"staging_bytes": 5 * SLOT_BYTES, "arena_bytes": SLOT_BYTES, "admit": "always"}
    engine = start(tmp_path, engines, hbm=slots, io={"threads": 4, "calibrate": False})
    assert engine.transfers[0]._worker.arena.n_slots == 6
    for number in range(20):
        tokens = list(range(9000 * number, 9000 * number + 64 * 5))
        engine.prefill(tokens, range(40, 60))
        engine.wait_for_set()
        keys = engine.keys(tokens)
        plan = engine.store.plan_save([WantedChunk(key, bytes(16), tuple(range(40, 44))) for key in keys])
        assert plan is not None
        engine.transfers[0].save(plan)
        assert load_behind(engine) == (5, frozenset())
        assert is_equal(engine.blocks(TARGET), expected(engine))
    assert names.CHECKSUM_FAILURES not in engine.transfers[0].metrics.total()


def test_a_copy_that_went_bad_in_the_hbm_arena_is_read_again(tmp_path: Path, engines: list[Engine]) -> None:
    engine = start(tmp_path, engines, hbm={"staging_bytes": "16MiB", "arena_bytes": "4MiB", "admit": "saved"})
    save_late(engine)
    arena, key = engine.transfers[0]._worker.arena, engine.keys(TOKENS)[2]
    slot, sources = arena.lease(key)  # type: ignore[misc]
    arena.slabs(slot, sources[0].cut.slot_offset, 4, sources[0].cut.slab_bytes)[1, 99] ^= 1
    arena.release(slot, key)
    torch.cuda.synchronize()
    assert load_behind(engine) == (5, frozenset())
    assert is_equal(engine.blocks(TARGET), expected(engine))
    assert engine.transfers[0].metrics.total()[names.CHECKSUM_FAILURES] == 1


def test_a_local_hit_that_ends_inside_a_chunk(tmp_path: Path, engines: list[Engine]) -> None:
    save_late(start(tmp_path, engines))
    reader = start(tmp_path, engines)
    set_blocks(reader, TARGET[:6], 5)
    assert load_behind(reader, computed=96)[1] == frozenset()
    found, wanted = reader.blocks(TARGET), expected(reader)
    assert is_equal([plane[6:] for plane in found], [plane[6:] for plane in wanted])
    assert all(bool((plane[:6] == 5).all()) for plane in found)


def test_a_flipped_byte_is_a_miss(tmp_path: Path, engines: list[Engine]) -> None:
    save_late(start(tmp_path, engines))
    (segment,) = tmp_path.rglob("*.kvseg")
    flip_slab(segment, 0)
    reader = start(tmp_path, engines)
    n, failed = load_behind(reader)
    assert (n, failed) == (5, frozenset(TARGET))
    assert reader.transfers[0].metrics.total()[names.CHECKSUM_FAILURES] == 1


class WithoutGather(CudaOrder):
    def is_done(self, event: CudaEvent) -> bool:
        return True


class WithoutEngine(CudaOrder):
    def begin(self, work: Callable[[], None], *after: CudaEvent) -> CudaEvent:
        return super().begin(work)


@pytest.mark.parametrize("broken", [WithoutGather, WithoutEngine])
def test_an_event_left_out_shows(tmp_path: Path, engines: list[Engine], broken: type[CudaOrder]) -> None:
    device = torch.device("cuda")
    writer = start(tmp_path, engines, broken(device) if broken is WithoutGather else None)
    save_late(writer)
    torch.cuda.synchronize()
    reader = start(tmp_path, engines, broken(device) if broken is WithoutEngine else None)
    load_behind(reader)
    wrong = not is_equal(reader.blocks(TARGET), expected(reader))
    assert wrong or names.CHECKSUM_FAILURES in reader.transfers[0].metrics.total()
