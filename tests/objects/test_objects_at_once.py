"""Objects that several callers put, get and delete at once, and what one process may open: answers stay apart."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.connectors.objects.size_class import SizeClass
from kvtier.connectors.objects.store import SIZE_CLASSES_MAX, ObjectTier
from kvtier.errors import TierUnavailable
from tests.objects.rig import drained, expected, get, names, put, tier_at


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[ObjectTier]:
    with tier_at(tmp_path) as tier:
        yield tier


class Caller(threading.Thread):
    """Keeps what a call answers, or raises."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.answer: Any = None

    def run(self) -> None:
        try:
            self.answer = self._call()
        except Exception as fault:
            self.answer = fault


def test_who_looks_late_still_finds_the_answer_to_what_it_put(
    tier: ObjectTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object was stored, deleted, and put again by another before the first caller looked."""
    key, waits, may_look, look = names(1), threading.Event(), threading.Event(), SizeClass._outcome

    def look_late(size_class: SizeClass, *what: Any) -> Any:
        if threading.current_thread() is first:
            waits.set()
            may_look.wait(20)
        return look(size_class, *what)

    monkeypatch.setattr(SizeClass, "_outcome", look_late)
    first = Caller(lambda: put(tier, key))
    first.start()
    assert waits.wait(20) and drained(tier, 20)
    assert put(tier, names(1, "other")) == [True]
    assert tier.delete(key) == [True] and put(tier, key) == [True]
    may_look.set()
    first.join(20)
    assert first.answer == [True]
    assert get(tier, key) == expected(key)


def test_sizes_of_before_take_no_place_of_those_that_come(tmp_path: Path) -> None:
    """Engines of other models, and of other chunks, may have left any number of sizes on the root."""
    with tier_at(tmp_path) as before:
        for pages in range(SIZE_CLASSES_MAX):
            put(before, names(1, str(pages)), pages * 4096)
    with tier_at(tmp_path) as tier:
        keys, size = names(3, "new"), SIZE_CLASSES_MAX * 4096
        assert put(tier, keys, size) == [True] * 3 and get(tier, keys, size) == expected(keys, size)
        assert get(tier, names(1, "7"), 7 * 4096) == expected(names(1, "7"), 7 * 4096)


def test_a_call_that_comes_after_the_end_opens_nothing(tmp_path: Path) -> None:
    """Hosts do not wait for ever for their tasks; one that goes on would leave an engine that never ends."""
    with tier_at(tmp_path) as tier:
        put(tier, names(3))
    with pytest.raises(TierUnavailable, match="closed"):
        put(tier, names(3))
    assert get(tier, names(3)) == [None] * 3 and tier.exists(names(3)) == [False] * 3
    assert tier._size_classes == {}
