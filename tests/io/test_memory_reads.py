"""How files in memory are read: decided by measuring, the simplest way wherever no other is clearly faster or none can
be measured."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path

import pytest

from kvtier.errors import TierUnavailable
from kvtier.io import memory_reads
from kvtier.io.memory_reads import BOUNCED, IN_PLACE, measured
from kvtier.io.ring import InMemory, Ring, RingSizes

SIZES = RingSizes(2, 256 << 10, 256 << 10)
MAPPED = IN_PLACE._replace(map_reads=True)
BOTH = BOUNCED._replace(map_reads=True)


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
    ("in_place_s", "bounced_s", "mapped_s", "how"),
    [
        (0.005, 0.004, 0.006, BOUNCED), (0.004, 0.005, 0.006, IN_PLACE), (0.00404, 0.004, 0.006, IN_PLACE),
        (0.005, 0.004, 0.003, BOTH), (0.004, 0.005, 0.003, MAPPED), (0.005, 0.004, 0.00396, BOUNCED),
        (0.004, 0.005, 0.00396, IN_PLACE),
    ],
)  # fmt: skip
def test_the_fastest_way_is_taken_and_the_simpler_one_if_they_are_about_as_fast(
    tmp_path: Path, in_place_s: float, bounced_s: float, mapped_s: float, how: InMemory
) -> None:
    assert measured(tmp_path, SIZES, stopwatch(in_place_s, bounced_s, mapped_s)).how == how
    assert list(tmp_path.iterdir()) == []


def test_the_best_of_each_counts(tmp_path: Path) -> None:
    """One slow round, of a machine that does something else, changes nothing."""
    clock = stopwatch(0.005, 0.9, 0.9, 0.005, 0.004, 0.9, 0.9, 0.004, 0.003, 0.005, 0.004, 0.9, 0.005, 0.9, 0.9)
    assert measured(tmp_path, SIZES, clock).how == BOTH


def test_the_log_says_which_and_why(tmp_path: Path) -> None:
    """Of one of the reads that were timed."""
    said = measured(tmp_path, SIZES, stopwatch(0.008, 0.006, 0.004)).said
    assert said == "mapped (ms of processor for 16 MiB: in place 4.0, through bounce buffers 3.0, mapped 2.0)"


def test_it_is_measured_here(tmp_path: Path, tmpfs: Path | None) -> None:
    assert measured(tmp_path, SIZES).how in (IN_PLACE, BOUNCED, MAPPED, BOTH)
    if tmpfs is not None:
        assert measured(tmpfs, SIZES).how in (IN_PLACE, BOUNCED, MAPPED, BOTH)


def test_large_pieces_do_not_bounce(tmp_path: Path) -> None:
    sizes = SIZES._replace(piece_bytes=2 * memory_reads.BOUNCE_BYTES_MAX)
    assert measured(tmp_path, sizes, stopwatch(0.005, 0.006)).how == IN_PLACE
    assert measured(tmp_path, sizes, stopwatch(0.005, 0.004)).how == MAPPED


def _no_room(fd: int, data: memoryview, offset: int) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _no_threads(*_: object, **__: object) -> Ring:
    raise TierUnavailable("I/O threads cannot be started")


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [(os, "pwrite", _no_room), (os, "pwrite", lambda *_: 0), (memory_reads, "Ring", _no_threads)],
)
def test_what_cannot_be_measured_is_read_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str, fault: Callable[..., object]
) -> None:
    monkeypatch.setattr(owner, name, fault)
    assert measured(tmp_path, SIZES, stopwatch(0.005, 0.004, 0.003)).how == IN_PLACE
    assert measured(tmp_path / "missing", SIZES).how == IN_PLACE


def test_a_read_without_an_answer_keeps_its_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_reads, "HANGS_S", 0.0)
    kept: list[object] = []
    monkeypatch.setattr(memory_reads, "_left_behind", kept)
    assert measured(tmp_path, SIZES, stopwatch(0.005, 0.004, 0.003)).how == IN_PLACE
    assert len(kept) == 1
