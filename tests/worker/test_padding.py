"""A slot holds one chunk after another. What an older one left behind a slab's end must not get into a file: it may be
another user's, and whoever may read the file may not read that."""

from pathlib import Path

import pytest
import torch

from kvtier.arena.arena import Arena
from kvtier.codecs.base import slab_bytes
from kvtier.format.geometry import Geometry
from kvtier.index import entry as entries
from kvtier.io.ring import AlignedBuffer
from kvtier.plan import SaveOutcome
from kvtier.worker.context import ChunkArena
from tests.support.lazy import LazyEngine
from tests.support.rig import Engine, geometry

TOKENS = list(range(1000, 1000 + 64 * 3))
BLOCKS, TARGET = list(range(12)), list(range(100, 112))
SHAPE = geometry(layers=3, k_head_size=64, v_head_size=64, dtype="bfloat16", element_bytes=2)
ODD = geometry(layers=3, k_head_size=20, v_head_size=20, dtype="bfloat16", element_bytes=2)
OLDER = 0xA5


def fill_slots(*arenas: ChunkArena) -> None:
    """As older chunks would: every byte of every slot."""
    for arena in arenas:
        arena._buffer.fill_(OLDER)


def check_files(engine: Engine) -> None:
    """They hold the three chunks, no byte of the older ones, and are read back whole."""
    worker = engine.transfers[0]._worker
    n_bytes = worker.codec.layers_bytes(worker.geometry, range(worker.geometry.layers))
    padding = slab_bytes(worker.codec, worker.geometry, worker.geometry.whole) - n_bytes
    assert padding > 64, "this shape has nothing to show"
    files = [path.read_bytes() for path in engine.root.rglob("*") if path.is_file()]
    assert max(map(len, files)) > 3 * 4 * n_bytes
    assert not any(bytes([OLDER]) * 64 in content for content in files)


@pytest.mark.parametrize(("codec", "shape"), [("raw", ODD), ("int8", ODD), ("int8", SHAPE), ("k4v4", SHAPE)])
@pytest.mark.parametrize("cut", [(1, None), (2, [range(1), range(1, 3)])])
def test_written_from_the_slots_it_was_gathered_into(
    tmp_path: Path, codec: str, shape: Geometry, cut: tuple[int, list[range] | None]
) -> None:
    engine = Engine(tmp_path, shape, *cut, changes={"codec": codec})
    fill_slots(*(transfer._worker.arena for transfer in engine.transfers))
    done = engine.save(TOKENS, BLOCKS)
    assert {answer.outcome for answer in done} == {SaveOutcome.SAVED}
    check_files(engine)
    n, answers = engine.load(TOKENS, TARGET)
    assert n == 3 and not any(answer.failed_blocks for answer in answers)


def test_copied_down_from_staging(tmp_path: Path) -> None:
    """Summed before that: the sums are those of zeros, too, or nothing would be published."""
    engine = LazyEngine(tmp_path, ODD)
    engine.lay_over()
    engine.on_threads()
    fill_slots(engine.staging, engine.host)
    done = engine.save(TOKENS, BLOCKS)
    assert [answer.outcome for answer in done] == [SaveOutcome.SAVED] * 3
    check_files(engine)


def test_of_one_chunk_every_record_has_the_same_bytes(tmp_path: Path) -> None:
    found = []
    for number, older in enumerate((0x00, OLDER, 0xFF)):
        engine = Engine(tmp_path / str(number), ODD)
        arena = engine.transfers[0]._worker.arena
        arena._buffer.fill_(older)
        engine.wait_for_set()
        assert {answer.outcome for answer in engine.save(TOKENS, BLOCKS)} == {SaveOutcome.SAVED}
        found.append(entries.unpack(engine.store.lookup(engine.keys(TOKENS))[0]))
    checksums = {location.checksums for locations in found for location in locations}
    assert len(checksums) == 1


def test_only_the_padding_is_blanked() -> None:
    buffer = torch.frombuffer(AlignedBuffer(5 * 12288).view, dtype=torch.uint8).fill_(7)
    arena: ChunkArena = Arena(buffer, 12288)
    arena.blank([3, 1], n_slabs=2, slab_bytes=4096, begin=4090)
    slots = buffer.view(5, 3, 4096)
    assert slots[[3, 1], 1:, 4090:].sum() == 0
    assert (slots == 0).sum() == 2 * 2 * 6
    arena.blank([0, 2], n_slabs=2, slab_bytes=4096, begin=4096)
    assert (slots == 0).sum() == 2 * 2 * 6
