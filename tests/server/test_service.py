"""A root that takes long to open, as on a mount that hangs, holds up only who needs it, and them for a moment."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtier.admin.opened import Opened, opened
from kvtier.errors import IndexUnavailable
from kvtier.index.memory import MemoryIndex
from kvtier.server import service as module
from kvtier.server.service import Service
from kvtier.storage.root import open_root
from tests.server.serving import TOKENS, fill

TIMEOUT_S = 60.0  # of calls that must not hang, also on a busy machine, seconds


class Mount:
    """A root whose opening hangs until it is let go on."""

    def __init__(self, path: Path) -> None:
        self.settings = fill(path).settings()
        self.index = MemoryIndex()
        self.is_asked, self.may_answer, self.times = threading.Event(), threading.Event(), 0
        self.is_closed = threading.Event()
        self.index.close = self.is_closed.set  # type: ignore[method-assign]

    def open(self) -> Opened:
        self.times += 1
        self.is_asked.set()
        assert self.may_answer.wait(TIMEOUT_S)
        return opened(self.settings, open_root(self.settings), self.index)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    mount = Mount(tmp_path)
    yield mount
    mount.may_answer.set()


def beside(work: Callable[[], object]) -> object:
    """What it returns, from a thread of its own, so that a wait without end fails a test."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result(TIMEOUT_S)


def test_what_needs_no_root_does_not_wait_for_one(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OPENING_WAIT_S", 0.05)
    service = Service(mount.settings, lambda: TOKENS, mount.open)
    with ThreadPoolExecutor(1) as opener:
        first = opener.submit(lambda: service.opened)
        assert mount.is_asked.wait(TIMEOUT_S)
        assert beside(service.history) == []
        beside(service.changed)
        for needs_it in (lambda: service.opened, service.snapshot, lambda: service.verifying):
            with pytest.raises(IndexUnavailable, match="being opened"):
                beside(needs_it)
        beside(service.add_point)  # a gap in the history
        assert not first.done() and service.history() == []
        mount.may_answer.set()
        assert first.result(TIMEOUT_S).index is mount.index
    assert service.opened is first.result() and service.verifying is not None and mount.times == 1
    service.add_point()
    assert len(service.history()) == 1
    service.close()
    assert mount.is_closed.is_set()


def test_who_waits_for_the_opening_gets_what_was_opened(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OPENING_WAIT_S", TIMEOUT_S)
    service = Service(mount.settings, lambda: TOKENS, mount.open)
    with ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(lambda: service.opened) for _ in range(8)]
        assert mount.is_asked.wait(TIMEOUT_S)
        mount.may_answer.set()
        assert len({id(one.result(TIMEOUT_S)) for one in asked}) == 1 and mount.times == 1
    service.close()


def test_a_service_that_ends_does_not_wait_for_the_opening(mount: Mount) -> None:
    service = Service(mount.settings, lambda: TOKENS, mount.open)
    with ThreadPoolExecutor(1) as opener:
        first = opener.submit(lambda: service.opened)
        assert mount.is_asked.wait(TIMEOUT_S)
        beside(service.close)
        assert not mount.is_closed.is_set()
        mount.may_answer.set()
        with pytest.raises(IndexUnavailable, match="ended"):
            first.result(TIMEOUT_S)
    assert mount.is_closed.is_set(), "what came late is not left open"


def test_an_index_that_is_down_is_named_and_asked_again_after_a_pause(
    mount: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [IndexUnavailable("index /kv: no room")]

    def open_root() -> Opened:
        mount.may_answer.set()
        if faults:
            raise faults.pop()
        return mount.open()

    service = Service(mount.settings, lambda: TOKENS, open_root)
    for _ in range(2):  # the second time without an attempt
        with pytest.raises(IndexUnavailable, match="index /kv: no room"):
            assert service.opened
    monkeypatch.setattr(module, "REOPEN_PAUSE_S", 0.0)
    assert service.opened.index is mount.index and mount.times == 1
    service.close()
