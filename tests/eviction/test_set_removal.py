"""Files that are missing when their set is removed, as on a brick that is down, and come back."""

from pathlib import Path

import pytest

from kvtier.eviction.evictor import Evictor
from kvtier.eviction.limits import Need
from kvtier.eviction.set_removal import AWAY_S, Remover
from kvtier.format.geometry import Extent
from kvtier.index.base import Location, NewRecord, SetInfo
from kvtier.index.memory import MemoryIndex
from kvtier.storage.segments import segment_name
from tests.support.clock import Clock

NAMESPACE, SET_ID, FILE_BYTES = bytes(16), 7 << 20, 64 << 10


def record(rank: int) -> NewRecord:
    extent = Extent(0, 1, rank, 1)
    return NewRecord(bytes(16), Location(SET_ID, rank, 0, 4096, extent, (1,)), Extent(0, 1, 0, 2))


Removed = tuple[Remover, MemoryIndex, Path, Path, Clock]


@pytest.fixture
def removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Removed:
    """A remover after it removed a set of two files, of which the second was away."""
    folder, clock = tmp_path / "v2" / NAMESPACE.hex(), Clock(1e9)
    folder.mkdir(parents=True)
    files = [folder / segment_name(SET_ID, part) for part in (0, 16)]
    for file in files:
        file.write_bytes(b"k" * FILE_BYTES)
    index = MemoryIndex()
    info = SetInfo(SET_ID, NAMESPACE, "engine", 2 * FILE_BYTES, clock.now_s, clock.now_s, is_open=False)
    index.create_set(info)
    index.publish([record(rank) for rank in (0, 1)])
    remover = Remover(index, tmp_path / "v2", clock)
    monkeypatch.setattr(remover, "_may_be_away", True)
    files[1].rename(tmp_path / "away")
    assert remover.remove(info) == FILE_BYTES and not files[0].exists()
    return remover, index, tmp_path / "away", files[1], clock


def test_its_bytes_count_until_it_is_back_and_unlinked(removed: Removed) -> None:
    remover, index, away, file, clock = removed
    assert remover.pending_bytes(clock.now_s) == FILE_BYTES
    remover.finish(clock.now_s)
    assert remover.pending_bytes(clock.now_s) == FILE_BYTES, "it is still away"
    away.rename(file)
    remover.finish(clock.now_s)
    assert not file.exists() and remover.pending_bytes(clock.now_s) == 0


def test_what_never_comes_back_does_not_count_for_ever(removed: Removed) -> None:
    remover, _, _, _, clock = removed
    remover.finish(clock.now_s)
    clock.now_s += AWAY_S + 1
    assert remover.pending_bytes(clock.now_s) == 0


def test_a_set_that_was_taken_in_again_is_left_to_the_index(removed: Removed) -> None:
    remover, index, away, file, clock = removed
    away.rename(file)
    index.create_set(SetInfo(SET_ID, NAMESPACE, "", FILE_BYTES, clock.now_s, clock.now_s, is_open=False))
    remover.finish(clock.now_s)
    assert file.exists() and remover.pending_bytes(clock.now_s) == 0


@pytest.mark.parametrize("ranks", [(), (0,)], ids=["no file yet", "one file of two"])
def test_files_that_were_never_made_are_not_away(
    ranks: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sets that a killed engine kept ready counted for AWAY_S, and as much less was stored for so long."""
    folder, clock, index = tmp_path / "v2" / NAMESPACE.hex(), Clock(1e9), MemoryIndex()
    folder.mkdir(parents=True)
    info = SetInfo(SET_ID, NAMESPACE, "killed", 2 * FILE_BYTES, clock.now_s, clock.now_s)
    index.create_set(info)
    for rank in ranks:
        (folder / segment_name(SET_ID, 16 * rank)).write_bytes(b"k" * FILE_BYTES)
        index.publish([record(rank)])
    remover = Remover(index, tmp_path / "v2", clock)
    monkeypatch.setattr(remover, "_may_be_away", True)
    assert remover.remove(info) == len(ranks) * FILE_BYTES
    assert remover.pending_bytes(clock.now_s) == 0


def test_what_a_sweep_unlinked_in_between_is_not_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep, or the next evictor, finishes removals that it finds begun, also while the one that began it lives."""
    folder, clock, index = tmp_path / "v1" / NAMESPACE.hex(), Clock(1e9), MemoryIndex()
    folder.mkdir(parents=True)
    (folder / segment_name(SET_ID, 0)).write_bytes(b"k" * FILE_BYTES)
    info = SetInfo(SET_ID, NAMESPACE, "engine", FILE_BYTES, clock.now_s, clock.now_s, is_open=False)
    index.create_set(info)
    first, second = (Remover(index, tmp_path / "v1", clock) for _ in range(2))
    for remover in (first, second):
        monkeypatch.setattr(remover, "_may_be_away", True)
    remove_set = index.remove_set

    def remove_and_be_overtaken(set_id: int, token: int | None = None) -> None:
        remove_set(set_id, token)
        monkeypatch.setattr(index, "remove_set", remove_set)
        second.finish(clock.now_s)

    monkeypatch.setattr(index, "remove_set", remove_and_be_overtaken)
    first.remove(info)
    assert first.pending_bytes(clock.now_s) == 0


def test_room_is_made_beside_what_is_away(removed: Removed, tmp_path: Path) -> None:
    """Otherwise a full root would save nothing for AWAY_S after a brick was down."""
    _, index, _, _, clock = removed
    for number in (1, 2):
        space = SetInfo(number, NAMESPACE, "engine", FILE_BYTES, clock.now_s, clock.now_s, is_open=False)
        index.create_set(space)
    evictor = Evictor(index, tmp_path / "v1", "engine", clock=clock)
    need = Need(FILE_BYTES, NAMESPACE)
    assert evictor.make_room(need, 3 * FILE_BYTES) is not None
    assert evictor.fits(need, 3 * FILE_BYTES) and [info.set_id for info in index.sets()] == [2]
