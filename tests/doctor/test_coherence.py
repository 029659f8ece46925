"""`kvtier doctor --peer`: coherence of two mounts. Both are one folder here; stale reads are made up."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.cli import main
from kvtier.doctor import coherence
from kvtier.doctor.coherence import PIECES, Coherence, examine_peer, measure, peer_folder
from kvtier.doctor.host import Diagnosis, Host, ProbeFailed
from kvtier.storage.filesystem import FileSystem

KIND = FileSystem("fuse.somefs", True, "/mnt/kv")
COHERENT = Coherence(PIECES, (0, 0), (0, 0), 0.001, 0.01, 0.02)


@pytest.fixture(autouse=True)
def _short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:  # undone before tmp_path is removed
    for name in ("SETTLE_S", "GROWTH_S", "NAME_S", "APPEAR_S"):
        monkeypatch.setattr(coherence, name, 0.05)
    yield


def two_mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coherence, "_is_one_mount", lambda *_: False)


def answered(monkeypatch: pytest.MonkeyPatch, answer: object) -> dict[str, Diagnosis]:
    """The verdicts where the probe answers so, the two delays left out."""

    def probe(*_: object, **__: object) -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(Host, "probe", probe)
    found = list(examine_peer(Host(), Path("/mnt/kv/root"), KIND, Path("/mnt/other"), True))
    return {verdict.what: verdict for verdict in reversed(found)}


@pytest.mark.parametrize("direct", [True, False])
def test_a_coherent_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool) -> None:
    two_mounts(monkeypatch)
    found = Coherence(**measure(tmp_path, tmp_path, direct))
    assert (found.plain, found.synced) == ((0, 0), (0, 0)) and found.growth_s is not None and found.name_s is not None
    assert not list(tmp_path.iterdir())


def test_stale_reads_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that shows nothing of the other before fdatasync, and then through a new descriptor alone."""
    two_mounts(monkeypatch)
    synced, opened = set(), []
    real = (os.preadv, os.pwritev, os.fdatasync, os.open)

    def write(fd: int, views: list[memoryview], offset: int) -> int:
        synced.discard(offset)
        return real[1](fd, views, offset)

    def sync(fd: int) -> None:
        synced.update(range(0, (PIECES + 1) * coherence.PIECE_BYTES, coherence.PIECE_BYTES))
        real[2](fd)

    def read(fd: int, views: list[memoryview], offset: int) -> int:
        n_read = real[0](fd, views, offset)
        if offset not in synced or opened[-1] != len(synced):
            views[0][:1] = b"\0"
        return n_read

    def open_(path: str, flags: int, *mode: int) -> int:
        opened.append(len(synced))
        return real[3](path, flags, *mode)

    for name, double in {"preadv": read, "pwritev": write, "fdatasync": sync, "open": open_}.items():
        monkeypatch.setattr(os, name, double)
    found = Coherence(**measure(tmp_path, tmp_path, False))
    assert found.plain == (PIECES, PIECES) and found.synced[0] > 0 and found.synced[1] == 0


def test_what_is_no_other_mount_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(OSError, match="does not show what is written"):
        measure(tmp_path, tmp_path / "other", False)
    with pytest.raises(OSError, match="there is no such folder"):
        measure(tmp_path, tmp_path / "missing", False)
    with pytest.raises(OSError, match="share one cache"):
        measure(tmp_path, tmp_path, False)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_the_same_folder_is_looked_for_below_the_other_mount_point(tmp_path: Path) -> None:
    kind = FileSystem("nfs4", True, str(tmp_path / "one"))
    (tmp_path / "two/kv/root").mkdir(parents=True)
    assert peer_folder(tmp_path / "one/kv/root", kind, tmp_path / "two") == tmp_path / "two/kv/root"
    assert peer_folder(tmp_path / "one/kv/root", kind, tmp_path / "two/kv/root") == tmp_path / "two/kv/root"


def test_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    found = answered(monkeypatch, COHERENT._asdict())["coherence"]
    assert found.level == "ok" and "Coherent" in found.value
    found = answered(monkeypatch, COHERENT._replace(plain=(9, 2))._asdict())["coherence"]
    assert found.level == "ok" and "right after fdatasync" in found.value and "9 by an open" in found.value
    found = answered(monkeypatch, COHERENT._replace(plain=(16, 16), synced=(15, 0))._asdict())["coherence"]
    assert found.level == "warn" and "opened anew" in found.fix
    found = answered(monkeypatch, COHERENT._replace(plain=(16, 16), synced=(15, 3))._asdict())["coherence"]
    assert found.level == "bad" and "another file system" in found.fix
    found = answered(monkeypatch, ProbeFailed("no answer in 120 s"))["coherence"]
    assert found.level == "bad" and "no answer in 120 s" in found.value


def test_the_command_measures_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "kv").mkdir()
    assert main(["doctor", str(tmp_path / "kv"), "--peer", str(tmp_path / "kv")]) == 1
    assert f"bad   coherence: {tmp_path}/kv cannot be measured" in capsys.readouterr().out
