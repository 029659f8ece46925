"""Files of one user: a body comes back as it was, and a damaged file is no file."""

import errno
import logging
import os
from pathlib import Path

import pytest

from kvtier.storage.own_files import OwnFiles

KEY = "key"


def files(folder: Path) -> OwnFiles:
    return OwnFiles(folder, "plan", b"TESTING1")


def test_a_body_comes_back_in_private_folders(tmp_path: Path) -> None:
    own = files(tmp_path / "a" / "plans")
    assert own.get(KEY) is None
    for body in (b"", b"x", os.urandom(5000)):
        own.put(KEY, body)
        assert own.get(KEY) == body
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "a", tmp_path / "a" / "plans")] == [0o700] * 2


def test_damage_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = files(tmp_path)
    own.put(KEY, bytes(100))
    content = own.path(KEY).read_bytes()
    damaged = [content[:n] for n in range(len(content))]
    damaged += [content[:n] + bytes([content[n] ^ 1]) + content[n + 1 :] for n in range(len(content))]
    for each in damaged:
        own.path(KEY).write_bytes(each)
        caplog.clear()
        assert own.get(KEY) is None
        assert f"{KEY}.plan is not used, and made anew: it is not a whole plan file" in caplog.text
        assert not own.path(KEY).exists()


def test_a_file_that_cannot_be_read_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = files(tmp_path)
    own.put(KEY, b"body")

    def refused(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refused)
        assert own.get(KEY) is None and "cannot be read" in caplog.text
    assert own.get(KEY) == b"body"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_user_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = files(tmp_path)
    own.put(KEY, b"body")
    os.chown(own.path(KEY), 4242, -1)
    assert own.get(KEY) is None and "of another user" in caplog.text


def test_a_folder_that_cannot_be_made_costs_the_file(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvtier"):
        files(Path("/proc/none")).put(KEY, b"body")
    assert "cannot keep the plan" in caplog.text
