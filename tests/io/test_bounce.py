"""Whether reads bounce: decided by measuring, in place wherever that is not clearly faster or cannot be measured."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import pytest

from kvtier.errors import TierUnavailable
from kvtier.io import bounce
from kvtier.io.ring import Ring, RingSizes

SIZES = RingSizes(2, 256 << 10, 256 << 10)


def stopwatch(*seconds: float) -> Callable[[], float]:
    """A clock that finds that the reads take so long, in turn."""

    def times() -> Iterator[float]:
        now_s = 100.0
        for taken in cycle(seconds):
            yield now_s
            now_s += taken
            yield now_s

    clock = times()
    return lambda: next(clock)


@pytest.mark.parametrize(
    ("in_place_s", "bounced_s", "pays"), [(0.005, 0.004, True), (0.004, 0.005, False), (0.00404, 0.004, False)]
)
def test_the_faster_way_is_taken_and_the_simpler_one_if_they_are_about_as_fast(
    tmp_path: Path, in_place_s: float, bounced_s: float, pays: bool
) -> None:
    assert bounce.pays(tmp_path, SIZES, stopwatch(in_place_s, bounced_s)) is pays
    assert list(tmp_path.iterdir()) == []


def test_the_best_of_each_counts(tmp_path: Path) -> None:
    """One slow round, of a machine that does something else, changes nothing."""
    assert bounce.pays(tmp_path, SIZES, stopwatch(0.005, 0.9, 0.005, 0.004, 0.9, 0.004, 0.005, 0.004, 0.005, 0.9))


def test_it_is_measured_here(tmp_path: Path) -> None:
    assert bounce.pays(tmp_path, SIZES) in (True, False)


def test_large_pieces_are_not_tried(tmp_path: Path) -> None:
    sizes = SIZES._replace(piece_bytes=2 * bounce.PIECE_BYTES_MAX)
    assert bounce.pays(tmp_path, sizes, stopwatch(0.005, 0.004)) is False


def _no_room(fd: int, data: memoryview, offset: int) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _no_threads(*_: object, **__: object) -> Ring:
    raise TierUnavailable("I/O threads cannot be started")


@pytest.mark.parametrize(
    ("owner", "name", "fault"), [(os, "pwrite", _no_room), (os, "pwrite", lambda *_: 0), (bounce, "Ring", _no_threads)]
)
def test_what_cannot_be_measured_is_read_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, fault: Callable[..., object]
) -> None:
    monkeypatch.setattr(owner, name, fault)
    assert bounce.pays(tmp_path, SIZES, stopwatch(0.005, 0.004)) is False
    assert bounce.pays(tmp_path / "missing", SIZES) is False


def test_a_read_without_an_answer_keeps_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounce, "HANGS_S", 0.0)
    kept: list[object] = []
    monkeypatch.setattr(bounce, "_left_behind", kept)
    assert bounce.pays(tmp_path, SIZES, stopwatch(0.005, 0.004)) is False
    assert len(kept) == 1
