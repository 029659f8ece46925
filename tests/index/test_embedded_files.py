"""What lies in the embedded index's folder: other boots, garbage, foreign formats, full maps, wrong places."""

import errno
import logging
import os
import resource
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import lmdb
import pytest

from kvtier.errors import ConfigError, IndexUnavailable
from kvtier.index.base import Use
from kvtier.index.lmdb.environment import _READERS_BYTES, RESERVE_BYTES
from kvtier.index.lmdb.index import LmdbIndex, is_of_this_boot

from index_data import check, fill, join, key, record, set_info, start

MAP_BYTES = 16 << 20
KEYS = [key(number) for number in range(10)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "index"


def open_filled(folder: Path, boot_id: str | None = None) -> LmdbIndex:
    index = LmdbIndex(str(folder), MAP_BYTES, boot_id=boot_id)
    fill(index, 1, range(10))
    index.rebuilt(index.loss())
    return index


def assert_starts_empty(folder: Path, boot_id: str | None = None) -> None:
    """It opens, says that it knows nothing, and works."""
    index = LmdbIndex(str(folder), MAP_BYTES, boot_id=boot_id)
    assert index.was_reset
    assert index.resolve(KEYS) == [] and index.sets() == []
    assert fill(index, 1, range(10)) == 10
    assert len(index.resolve(KEYS)) == 10
    index.close()


def test_only_its_user_may_read_it(folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o755)
    index = open_filled(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == dict.fromkeys(("data.mdb", "lock.mdb", "lock", "boot-id", "inodes"), 0o600)
    index.close()


def test_who_rebuilds_an_index_that_is_lost_meanwhile_has_not_rebuilt_it(folder: Path) -> None:
    index = LmdbIndex(str(folder), MAP_BYTES, boot_id="boot-1")
    loss = index.loss()
    assert loss is not None and index.loss() == loss
    index.close()
    index = LmdbIndex(str(folder), MAP_BYTES, boot_id="boot-2")
    assert index.was_reset
    index.rebuilt(loss)
    assert index.was_reset and index.loss() not in (None, loss)
    index.rebuilt(index.loss())
    assert not index.was_reset and index.loss() is None
    index.close()


def test_another_boot_throws_it_away(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_filled(folder, "boot-1").close()
    with caplog.at_level(logging.WARNING, "kvtier"):
        assert_starts_empty(folder, "boot-2")
    assert "another boot" in caplog.text


def start_after_boot(folder: Path, number: int) -> None:
    index = LmdbIndex(str(folder), MAP_BYTES, timeout_s=20.0, boot_id="boot-2")
    assert index.was_reset
    assert fill(index, number, range(100 * number, 100 * number + 10)) == 10
    index.close()


def test_processes_that_start_at_once_after_a_boot_throw_it_away_once(folder: Path) -> None:
    open_filled(folder, "boot-1").close()
    join(*[start(start_after_boot, folder, number) for number in range(2, 6)])
    index = LmdbIndex(str(folder), MAP_BYTES, boot_id="boot-2")
    assert [info.set_id for info in index.sets()] == [2, 3, 4, 5]
    assert index.counts().records == 40
    index.close()


@pytest.mark.parametrize("garbage", [b"not an index" * 2000, bytes(8192), b"x", b""])
def test_garbage_in_its_place_is_thrown_away(folder: Path, garbage: bytes) -> None:
    open_filled(folder).close()
    (folder / "data.mdb").write_bytes(garbage)
    assert_starts_empty(folder)


def test_a_cut_off_file_is_thrown_away(folder: Path) -> None:
    """Reading a page behind the end would be a SIGBUS."""
    open_filled(folder).close()
    os.truncate(folder / "data.mdb", 3 * 4096)
    assert_starts_empty(folder)


def test_another_format_of_lmdb_is_thrown_away(folder: Path) -> None:
    open_filled(folder).close()
    for name in ("data.mdb", "lock.mdb"):
        (folder / name).unlink()
    lmdb.open(str(folder), lib_version=1).close()
    assert_starts_empty(folder)


def test_a_missing_or_garbled_stamp_is_another_boot(folder: Path) -> None:
    open_filled(folder).close()
    (folder / "boot-id").write_bytes(b"\xff\x00")
    assert_starts_empty(folder)
    (folder / "boot-id").unlink()
    assert_starts_empty(folder)


@pytest.mark.parametrize("option", ["-a", "-al"])
def test_a_copy_is_thrown_away(folder: Path, option: str, caplog: pytest.LogCaptureFixture) -> None:
    """A copy of a root in use is torn: of 60 such copies, LMDB ended the process that opened one, and another was
    inconsistent. With hard links, two roots would write to one index."""
    index = open_filled(folder)
    copy = folder.with_name("copy")
    subprocess.run(["cp", option, folder, copy], check=True)
    assert not is_of_this_boot(copy) and (is_of_this_boot(folder) or option == "-al")
    with caplog.at_level(logging.WARNING, "kvtier"):
        assert_starts_empty(copy)
    assert "a copy" in caplog.text
    assert len(index.resolve(KEYS)) == 10 and is_of_this_boot(folder)
    index.close()
    copy.rename(folder.with_name("moved"))
    index = LmdbIndex(str(folder.with_name("moved")), MAP_BYTES)
    assert len(index.resolve(KEYS)) == 10, "a folder that was moved is the same"
    index.close()


DAMAGE = """
import sys
from kvtier.errors import IndexUnavailable
from kvtier.index.lmdb.index import LmdbIndex, is_of_this_boot
folder, keys = sys.argv[1], [number.to_bytes(16, "big") for number in range(3000)]
index = LmdbIndex(folder, 16 << 20)
assert len(index.resolve(keys)) == 3000
with open(folder + "/data.mdb", "r+b") as file:
    file.seek(0, 2)
    pages = file.tell() // 4096
    for page in range(2, pages):
        file.seek(page * 4096 + 10)
        file.write(b"\\xee" * 100)
try:
    index.resolve(keys)
    index.sets()
    print("unnoticed")
except IndexUnavailable as fault:
    print("unavailable")
assert index.was_reset and index.resolve(keys) == []
index.rebuilt(index.loss())
assert not index.was_reset
"""


def test_damage_under_an_open_index_starts_an_empty_one(folder: Path) -> None:
    index = LmdbIndex(str(folder), MAP_BYTES)
    assert fill(index, 1, range(3000)) == 3000
    index.close()
    run = subprocess.run([sys.executable, "-c", DAMAGE, str(folder)], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (0, "unavailable\n"), run.stderr


def replace_index(folder: Path) -> None:
    """What a process does that finds the files broken."""
    for name in ("data.mdb", "lock.mdb"):
        (folder / name).unlink()
    index = LmdbIndex(str(folder), MAP_BYTES)
    fill(index, 2, range(100, 110))
    index.close()


def test_a_process_follows_when_another_starts_an_empty_index(folder: Path) -> None:
    index = open_filled(folder)
    join(start(replace_index, folder))
    assert [info.set_id for info in index.sets()] == [2]
    assert index.publish([record(110, 2, 10)]) == 1
    index.close()


def test_a_full_map_grows_and_then_refuses(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Past its bound publishing fails; lookups and evictions go on, and make room."""
    index = LmdbIndex(str(folder), map_bytes=128 << 10)
    published = 0
    with caplog.at_level(logging.WARNING, "kvtier"), pytest.raises(IndexUnavailable, match="MAP_FULL"):
        for set_id in range(1000):
            published += fill(index, set_id, range(set_id * 100, set_id * 100 + 100))
    assert "grown to 1048576 bytes" in caplog.text
    assert published > 1000
    keys = [key(number) for number in range(published)]
    assert len(index.resolve(keys)) == published
    for set_id in range(published // 200):
        assert index.remove_set(set_id) == 100
    assert fill(index, 5000, range(100_000, 100_100)) == 100
    check(index, keys)
    index.close()


def fill_up_and_evict(folder: Path) -> None:
    # The kernel refuses longer files to this process, as a full disk does.
    resource.setrlimit(resource.RLIMIT_FSIZE, (RESERVE_BYTES + (4 << 20), resource.RLIM_INFINITY))
    index = LmdbIndex(str(folder), map_bytes=1 << 30)
    published = 0
    with pytest.raises(IndexUnavailable):
        for set_id in range(100):
            published += fill(index, set_id, range(set_id * 1000, set_id * 1000 + 1000))
    assert published > 10_000
    n_sets = len(index.sets())
    assert index.acquire_lease("evict", "me", 1.0, 5.0) == 1
    for set_id in range(n_sets - 5):
        index.touch({set_id + 1: Use(10.0 + set_id, 1)})
        assert index.remove_set(set_id) == 1000
    check(index, [key(number) for number in range(published)])
    index.close()


def test_a_full_disk_stops_publishing_and_not_eviction(folder: Path) -> None:
    """LMDB copies pages to remove, too: without a reserve nobody could make room again."""
    join(start(fill_up_and_evict, folder))


def test_a_full_disk_ends_no_process_that_opens_it_or_reads(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMDB writes to its readers' table through a mapping: a hole that no room is left for would be a SIGBUS."""
    open_filled(folder).close()
    table = folder / "lock.mdb"
    assert table.stat().st_size == _READERS_BYTES <= table.stat().st_blocks * 512
    with table.open("r+b") as file:  # as LMDB makes it
        file.truncate(0)
        file.truncate(_READERS_BYTES)
    index = LmdbIndex(str(folder), MAP_BYTES)
    assert len(index.resolve(KEYS)) == 10 and table.stat().st_blocks * 512 >= _READERS_BYTES
    index.close()

    def refuse(descriptor: int, offset: int, n_bytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(
        IndexUnavailable, match="No space left on device; records are added while its disk has 16 MiB free"
    ):
        LmdbIndex(str(folder), MAP_BYTES)


@pytest.mark.parametrize(
    ("number", "n_free", "named"), [(errno.EIO, 0, True), (errno.EIO, 4096, False), (errno.ENOSPC, 4096, True)]
)
def test_a_write_that_a_full_disk_cut_short_names_the_disk(
    folder: Path, number: int, n_free: int, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB mostly reports a full disk as an input/output error."""
    index = open_filled(folder)

    def fail(view: object) -> None:
        raise lmdb.Error(f"mdb_txn_commit: {os.strerror(number)}")

    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=n_free))
    with pytest.raises(IndexUnavailable) as raised:
        index._shared.write(fail)
    assert ("records are added while its disk has 16 MiB free" in str(raised.value)) == named
    index.close()


def test_a_process_with_the_same_id_is_refused_where_lmdb_can_be_given_no_other(folder: Path) -> None:
    """Two containers of one node: LMDB marks readers by process id."""
    unshare = shutil.which("unshare")
    own_ids = [str(unshare), "--user", "--map-root-user", "--pid", "--fork"]
    if unshare is None or subprocess.run([*own_ids, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs leave to make a namespace of process ids")
    program = (
        "import sys, time\nfrom kvtier.errors import ConfigError\nfrom kvtier.index.lmdb.index import LmdbIndex\n"
        "from kvtier.index.lmdb import process\nprocess._places = lambda: []\n"
        "try:\n    index = LmdbIndex(sys.argv[1])\nexcept ConfigError as fault:\n    sys.exit(str(fault))\n"
        "print('open', flush=True)\nsys.stdin.read()\n"
    )
    start = [*own_ids, sys.executable, "-c", program, str(folder)]
    with subprocess.Popen(start, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "open\n"
        second = subprocess.run(start, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert second.returncode == 1
    assert "index.path" in second.stderr and "another container" in second.stderr
    assert first.returncode == 0


def publish_much(folder: Path) -> None:
    index = LmdbIndex(str(folder), map_bytes=128 << 10)
    for set_id in range(2, 22):
        assert fill(index, set_id, range(100 * set_id, 100 * set_id + 100)) == 100
    index.close()


def test_a_process_follows_when_another_grows_the_map(folder: Path) -> None:
    reader = LmdbIndex(str(folder), map_bytes=128 << 10)
    fill(reader, 1, range(100))
    join(start(publish_much, folder))
    assert len(reader.resolve([key(number) for number in range(100)])) == 100
    assert len(reader.resolve([key(number) for number in range(200, 2200)])) == 2000
    assert reader.publish([record(5000, 1, 5000)]) == 1
    reader.close()


@pytest.mark.parametrize("kind", ["nfs4", "lustre", "fuse.sshfs", "gpfs"])
def test_a_network_file_system_is_refused(folder: Path, kind: str) -> None:
    mountinfo = (
        "27 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
        f"90 27 0:99 / {folder.parent} rw shared:7 - {kind} server:/export rw\n"
    )
    with pytest.raises(ConfigError, match=kind) as refused:
        LmdbIndex(str(folder), MAP_BYTES, mountinfo=mountinfo)
    assert (refused.value.key, refused.value.value) == ("index.path", str(folder))
    assert "local disk" in refused.value.fix
    assert not folder.exists()


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "index"):
        with pytest.raises(ConfigError) as refused:
            LmdbIndex(str(path), MAP_BYTES)
        assert refused.value.key == "index.path"


def test_refused_places_leave_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "index").write_text("")
    with pytest.raises(ConfigError):
        LmdbIndex(str(tmp_path / "index"), MAP_BYTES)
    (tmp_path / "index").unlink()
    index = LmdbIndex(str(tmp_path / "index"), MAP_BYTES)
    assert index.create_set(set_info(1))
    index.close()


def test_a_map_that_has_no_room_names_the_setting(tmp_path: Path) -> None:
    """It was called an index that does not answer. Each attempt left its lock file open."""
    n_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError) as caught:
        LmdbIndex(str(tmp_path / "index"), map_bytes=1 << 60)
    assert caught.value.key == "index.map_bytes" and "lower it" in caught.value.fix
    assert len(os.listdir("/proc/self/fd")) == n_open
