"""Files that are missing when their set is removed, as on a brick that is down, and come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.eviction.set_removal import AWAY_S, Remover
from kvtier.index.base import SetInfo
from kvtier.index.memory import MemoryIndex
from kvtier.storage.segments import segment_name

NAMESPACE, SET_ID, FILE_BYTES = bytes(16), 7 << 20, 64 << 10


class Clock:
    now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Remover, MemoryIndex, Path, Path, Clock]:
    """A remover after it removed a set of two files, of which the second was away."""
    folder, clock = tmp_path / "v1" / NAMESPACE.hex(), Clock()
    folder.mkdir(parents=True)
    files = [folder / segment_name(SET_ID, rank) for rank in (0, 1)]
    for file in files:
        file.write_bytes(b"k" * FILE_BYTES)
    index = MemoryIndex()
    info = SetInfo(SET_ID, NAMESPACE, "engine", 2 * FILE_BYTES, clock.now_s, clock.now_s, is_open=False)
    index.create_set(info)
    remover = Remover(index, tmp_path / "v1", clock)
    monkeypatch.setattr(remover, "_may_be_away", True)
    files[1].rename(tmp_path / "away")
    assert remover.remove(info) == FILE_BYTES and not files[0].exists()
    return remover, index, tmp_path / "away", files[1], clock


def test_its_bytes_count_until_it_is_back_and_unlinked(
    removed: tuple[Remover, MemoryIndex, Path, Path, Clock],
) -> None:
    remover, index, away, file, clock = removed
    assert remover.pending_bytes(clock.now_s) == FILE_BYTES
    remover.finish(clock.now_s)
    assert remover.pending_bytes(clock.now_s) == FILE_BYTES, "it is still away"
    away.rename(file)
    remover.finish(clock.now_s)
    assert not file.exists() and remover.pending_bytes(clock.now_s) == 0


def test_what_never_comes_back_does_not_count_for_ever(
    removed: tuple[Remover, MemoryIndex, Path, Path, Clock],
) -> None:
    remover, _, _, _, clock = removed
    remover.finish(clock.now_s)
    clock.now_s += AWAY_S + 1
    assert remover.pending_bytes(clock.now_s) == 0


def test_a_set_that_was_taken_in_again_is_left_to_the_index(
    removed: tuple[Remover, MemoryIndex, Path, Path, Clock],
) -> None:
    remover, index, away, file, clock = removed
    away.rename(file)
    index.create_set(SetInfo(SET_ID, NAMESPACE, "", FILE_BYTES, clock.now_s, clock.now_s, is_open=False))
    remover.finish(clock.now_s)
    assert file.exists() and remover.pending_bytes(clock.now_s) == 0
