"""Files of one user: a body comes back as it was, and a damaged file is no file."""

import errno
import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from blake3 import blake3

from kvtier.storage import cache_folder
from kvtier.storage.cache_folder import CacheFolder

KEY = "key"


def files(folder: Path) -> CacheFolder:
    return CacheFolder(folder, "plan", b"TESTING1")


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


def hashed(number: int) -> str:
    return blake3(bytes([number])).hexdigest()


def test_files_that_were_used_longest_ago_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder, "FOLDER_BYTES_MAX", 3500)
    own = files(tmp_path)
    draft = tmp_path / f".{hashed(9)}.plan.{'0' * 32}"  # of a writer that was killed
    users = [tmp_path / name for name in ("notes.plan", f"{hashed(8)}.kernel", ".git")]
    for path in (draft, *users):
        path.write_bytes(bytes(1000))
        os.utime(path, (1, 1))
    for number in range(3):
        own.put(hashed(number), bytes(1000))
        os.utime(own.path(hashed(number)), (10 + number, 10 + number))
    assert not draft.exists()
    assert own.get(hashed(0)) is not None
    own.put(hashed(3), bytes(1000))
    assert [own.get(hashed(number)) is not None for number in range(4)] == [True, False, True, True]
    own.put(hashed(4), bytes(5000))
    assert [own.get(hashed(number)) is not None for number in range(5)] == [False] * 4 + [True]
    assert all(path.exists() for path in users)


def test_a_new_file_stays_where_the_clock_was_set_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder, "FOLDER_BYTES_MAX", 2500)
    own, ahead_s = files(tmp_path), time.time() + 86400
    for number in range(2):
        own.put(hashed(number), bytes(1000))
        os.utime(own.path(hashed(number)), (ahead_s, ahead_s + number))
    own.put(hashed(2), bytes(1000))
    assert [own.path(hashed(number)).exists() for number in range(3)] == [False, True, True]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
def test_files_of_other_users_are_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder, "FOLDER_BYTES_MAX", 1500)
    own = files(tmp_path)
    for number in range(3):
        own.put(hashed(number), bytes(1000))
        os.utime(own.path(hashed(number)), (number, number))
        if number == 0:
            os.chown(own.path(hashed(0)), 4242, -1)
    assert [own.path(hashed(number)).exists() for number in range(3)] == [True, False, True]


def test_a_file_that_another_process_is_writing_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_folder, "FOLDER_BYTES_MAX", 1500)
    draft = tmp_path / f".{hashed(9)}.plan.{'0' * 32}"
    draft.write_bytes(bytes(1000))
    for number in range(3):
        files(tmp_path).put(hashed(number), bytes(1000))
    assert draft.exists()


def test_ranks_that_write_at_the_same_time_keep_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache_folder, "FOLDER_BYTES_MAX", 10_000)
    with caplog.at_level(logging.INFO, "kvtier"), ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: files(tmp_path).put(hashed(number), bytes(1000)), range(200)))
    assert 5_000 <= sum(path.stat().st_size for path in tmp_path.iterdir()) <= 10_000
    assert not caplog.records


def test_a_read_only_file_system_gives_the_body(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = files(tmp_path)
    own.put(KEY, b"body")

    def refused(*_: object) -> None:
        raise OSError(errno.EROFS, "read-only file system")

    monkeypatch.setattr(os, "utime", refused)
    assert own.get(KEY) == b"body"
