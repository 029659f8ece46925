"""A process that may start no further thread."""

import threading

import pytest


def refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse each new thread, as under RLIMIT_NPROC or a container's pids.max."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
