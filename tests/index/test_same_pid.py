"""Processes with one id, of containers that each have process ids of their own, share an index."""

import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

from kvtier.index.lmdb import process
from kvtier.index.lmdb.index import LmdbIndex

OWN_IDS = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
SAME_PID = """
import os, sys
from kvtier.index.lmdb.index import LmdbIndex
assert os.getpid() == 1
index = LmdbIndex(sys.argv[1])
index.put_note(sys.argv[2], b"here", None)
print(sorted(index.notes("", 0.0)), flush=True)
for line in sys.stdin:
    index.put_note(sys.argv[2] + line.strip(), b"here", None)
    print(sorted(index.notes("", 0.0)), flush=True)
index.close()
"""


def container(folder: Path, name: str) -> subprocess.Popen[str]:
    words = [*OWN_IDS, sys.executable, "-c", SAME_PID, str(folder), name]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(one: subprocess.Popen[str], line: str | None = None) -> str:
    assert one.stdin is not None and one.stdout is not None
    if line is not None:
        one.stdin.write(f"{line}\n")
        one.stdin.flush()
    return one.stdout.readline().strip()


def end(one: subprocess.Popen[str]) -> int:
    assert one.stdin is not None
    one.stdin.close()
    return one.wait(60)


def can_unshare() -> bool:
    try:
        return subprocess.run([*OWN_IDS, "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


READER = """
import sys
from kvtier.index.lmdb.index import LmdbIndex
index = LmdbIndex(sys.argv[1])
env = index._shared._opened.env
with env.begin():
    for _ in range(2):
        print(len(env.readers().splitlines()) - 1, flush=True)
        sys.stdin.readline()
    index.put_note("still", b"here", None)
"""


@pytest.mark.skipif(not can_unshare(), reason="may make no namespace of process ids here")
@pytest.mark.parametrize("last", ["index.close()", "sys.exit()", "os._exit(0)"])
def test_a_reader_stays_when_a_process_with_its_id_ends(tmp_path: Path, last: str) -> None:
    """LMDB freed it, and a writer could overwrite what it was reading."""
    words = [*OWN_IDS, sys.executable, "-c"]
    reader = subprocess.Popen(
        [*words, READER, str(tmp_path / "index")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert said(reader) == "1"
        source = SAME_PID.replace("index.close()", last)
        other = [*words, source, str(tmp_path / "index"), "b"]
        assert subprocess.run(other, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=True).stdout
        assert said(reader, "?") == "1"
        assert end(reader) == 0
    finally:
        reader.kill()


@pytest.mark.skipif(not can_unshare(), reason="may make no namespace of process ids here")
def test_three_containers_whose_processes_have_the_same_id_share_an_index(tmp_path: Path) -> None:
    """The second one did not start."""
    folder = tmp_path / "index"
    one, two, three = container(folder, "a"), None, None
    try:
        assert said(one) == "['a']"
        two = container(folder, "b")
        assert said(two) == "['a', 'b']"
        assert said(one, "1") == "['a', 'a1', 'b']"
        three = container(folder, "c")
        assert said(three) == "['a', 'a1', 'b', 'c']"
        assert end(one) == 0
        assert said(two, "2") == "['a', 'a1', 'b', 'b2', 'c']", "it is no stale reader to those that come or go"
        index = LmdbIndex(str(folder))
        with index._shared._opened.env.begin():  # type: ignore[union-attr]
            assert said(two, "3")  # one that reads, and one that adds
            assert index._shared._opened.env.reader_check() == 0, "readers that live are not taken for dead"  # type: ignore[union-attr]
        index.close()
        assert said(three, "3") == "['a', 'a1', 'b', 'b2', 'b3', 'c', 'c3']"
        assert end(two) == end(three) == 0
    finally:
        for process in (one, two, three):
            if process is not None and process.poll() is None:
                process.kill()


def test_where_the_id_cannot_be_replaced_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for image in (b"", b"MZ", b"\x7fELF\x02\x01", b"\x7fELF\x01\x01" + bytes(100)):
        path = tmp_path / "other.so"
        path.write_bytes(image)
        monkeypatch.setattr(lmdb.cpython, "__file__", str(path))
        with pytest.raises(lmdb.LockError):
            process.open_with_another_id(lambda: None)


def test_the_id_is_replaced_only_while_it_opens(tmp_path: Path) -> None:
    places = process._places()
    before = [place[0] for place in places]
    tries = []

    def refused() -> None:
        tries.append([place[0] for place in places])
        raise lmdb.LockError

    with pytest.raises(lmdb.LockError):
        process.open_with_another_id(refused)
    assert len(tries) == process.TRIES and before not in tries
    assert [place[0] for place in places] == before
