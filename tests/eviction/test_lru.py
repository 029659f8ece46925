"""Sets whose times are later than now, of a clock that was wrong."""

from pathlib import Path

from kvtier.eviction.choice import FUTURE_S, FutureTimes
from kvtier.eviction.evictor import Evictor
from kvtier.eviction.limits import Rules
from kvtier.index.base import SetInfo, Use
from kvtier.index.memory import MemoryIndex

DAY_S, NOW_S = 86400.0, 1_800_000_000.0


def made(set_id: int, created_s: float, used_s: float, uses: int = 0) -> SetInfo:
    return SetInfo(set_id, bytes(16), "gone", 100, created_s, used_s, is_open=False, uses=uses)


def test_a_set_used_in_the_future_was_used_when_it_was_seen_first() -> None:
    times = FutureTimes()
    ahead_s = NOW_S + 365 * DAY_S
    for later_s in (0.0, 5.0):
        (info,) = times.corrected([made(1, NOW_S - 9.0, ahead_s)], NOW_S + later_s)
        assert (info.created_s, info.used_s) == (NOW_S - 9.0, NOW_S)
    (info,) = times.corrected([made(1, NOW_S - 9.0, ahead_s, uses=1)], NOW_S + 7.0)
    assert info.used_s == NOW_S + 7.0, "it was used again"
    (info,) = times.corrected([made(1, NOW_S - 9.0, ahead_s, uses=1)], NOW_S)
    assert info.used_s == NOW_S, "the clock was set back"
    (info,) = times.corrected([made(2, ahead_s, ahead_s)], NOW_S)
    assert (info.created_s, info.used_s) == (NOW_S, NOW_S)
    plain = [made(3, NOW_S, NOW_S + FUTURE_S / 2), made(4, 1.0, 2.0)]
    assert times.corrected(plain, NOW_S) == plain


def test_a_clock_that_is_behind_for_a_moment_costs_nothing() -> None:
    times, sets = FutureTimes(), [made(1, NOW_S - DAY_S, NOW_S)]
    times.corrected(sets, NOW_S - 8 * DAY_S)
    assert times.corrected(sets, NOW_S) == sets


def test_a_set_that_was_used_in_the_future_goes_in_its_turn(tmp_path: Path) -> None:
    """It stayed for a year, and everything else went in its place."""
    index, now = MemoryIndex(), [NOW_S]
    index.create_set(made(0, NOW_S, NOW_S))
    index.touch({0: Use(NOW_S + 365 * DAY_S, 1)})
    evictor = Evictor(index, tmp_path, "one", Rules(ttl_s=7 * DAY_S), clock=lambda: now[0])
    for day in range(1, 10):
        now[0] = NOW_S + day * DAY_S
        evictor.keep_limits(10**9)
        assert bool(index.sets()) == (day <= 8), "first seen on the first day"
