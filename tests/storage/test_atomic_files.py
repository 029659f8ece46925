"""Files that many processes create at once: all see one content, whole."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.storage import atomic_files
from kvtier.storage.atomic_files import create_once, read_small, replace_small

CREATOR = """
import sys
from pathlib import Path
from kvtier.storage.atomic_files import create_once
folder = Path(sys.argv[1])
sys.stdin.readline()  # all begin together
for n in range(200):
    mine = sys.argv[2].encode() * 3000
    sys.stdout.write(create_once(folder / str(n), mine)[:1].decode())
    assert len(create_once(folder / str(n), mine)) == 3000
"""


def test_processes_that_start_at_once_agree(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CREATOR, str(tmp_path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in "ABCD"
    ]
    for process in processes:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()
    answers = {process.communicate(timeout=60)[0] for process in processes}
    assert all(process.returncode == 0 for process in processes)
    assert len(answers) == 1 and len(answers.pop()) == 200
    assert sorted(os.listdir(tmp_path)) == sorted(str(n) for n in range(200))  # no drafts are left


def test_file_system_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(errno.EPERM, "no hard links here")

    monkeypatch.setattr(os, "link", refuse)
    assert create_once(tmp_path / "a", b"first") == b"first"
    assert create_once(tmp_path / "a", b"second") == b"first"
    assert os.listdir(tmp_path) == ["a"]


def test_other_faults_of_linking_are_not_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: object, target: object) -> None:
        raise OSError(errno.EIO, "broken disk")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(OSError, match="broken disk"):
        create_once(tmp_path / "a", b"first")
    assert os.listdir(tmp_path) == []


def test_reader_waits_only_so_long_for_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_files, "WAIT_FOR_WRITER_S", 0.05)
    (tmp_path / "a").write_bytes(b"")
    assert read_small(tmp_path / "a") == b""


def test_replacing(tmp_path: Path) -> None:
    create_once(tmp_path / "a", b"first")
    replace_small(tmp_path / "a", b"second")
    assert read_small(tmp_path / "a") == b"second" and os.listdir(tmp_path) == ["a"]
