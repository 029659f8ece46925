"""A start on storage that hangs says so, and ends by its deadline with what to do."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier import build
from kvtier.errors import ConfigError
from kvtier.storage import start_wait
from kvtier.storage.start_wait import in_time
from tests.support.rig import Engine, settings


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Has folders be made only when it is set."""
    go_on, mkdir = threading.Event(), os.mkdir

    def mkdir_later(*args: object, **options: object) -> None:
        go_on.wait(30)
        mkdir(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "mkdir", mkdir_later)
    monkeypatch.setattr(start_wait, "SAID_AFTER_S", 0.2)
    monkeypatch.setattr(start_wait, "TIMEOUT_S", 1.0)
    yield go_on
    go_on.set()


def test_it_is_said_and_ends_in_time(tmp_path: Path, hang: threading.Event, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError) as told:
        Engine(tmp_path / "kv")
    assert f"{tmp_path}/kv" in str(told.value) and "then start this again" in str(told.value)
    assert "mounted at" in str(told.value) and "does not answer" in str(told.value)
    (line,) = [line for line in caplog.messages if "waits for the storage" in line]
    assert f"root {tmp_path}/kv" in line and "mounted at" in line and "owner.json" in line


def test_storage_that_answers_late_is_waited_for(
    tmp_path: Path, hang: threading.Event, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(start_wait, "TIMEOUT_S", 30.0)
    threading.Timer(0.6, hang.set).start()
    Engine(tmp_path / "kv").close()
    assert sum("waits for the storage" in line for line in caplog.messages) == 1


def test_what_the_storage_answers_is_passed_on(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("a file")
    with pytest.raises(ConfigError, match="a file, not a folder"):
        Engine(tmp_path / "kv")

    def refuse() -> None:
        raise TimeoutError("an error of the storage, not of the wait")

    with pytest.raises(TimeoutError, match="of the storage"):
        in_time(settings(tmp_path).root, "asking", refuse)


def test_a_measurement_of_storage_that_hangs_ends_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It hung for ever in calls that no deadline of an operation covers, such as listing the folder."""
    go_on = threading.Event()
    monkeypatch.setattr(start_wait, "SAID_AFTER_S", 0.2)
    monkeypatch.setattr(start_wait, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(build, "open_io", lambda *_: go_on.wait(30))
    with pytest.raises(ConfigError, match="measuring its reads .io.calibrate. took more than 1 s"):
        Engine(tmp_path / "kv")
    assert any("waits for the storage" in line and "io.calibrate" in line for line in caplog.messages)
    go_on.set()
