"""What others with access to the share may put into a root: no link is followed out of it, nothing makes an engine
hang, crash, or read and write where no record is, and what kvtier makes is its own user's alone."""

import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, Corrupt, TierUnavailable
from kvtier.format.geometry import PAGE_BYTES, Extent
from kvtier.format.record import RecordHeader, SegmentHeader, record_bytes
from kvtier.index.lmdb.index import LmdbIndex
from kvtier.index.memory import MemoryIndex
from kvtier.io.ring import WriteOp
from kvtier.maintenance.scrub import verify
from kvtier.maintenance.sweeper import ORPHAN_GRACE_S, Sweeper
from kvtier.model.weights_fingerprint import MAGIC
from kvtier.plan import SaveChunk, SavePlan
from kvtier.storage import root_owner
from kvtier.storage.atomic_files import create_once, read_small
from kvtier.storage.cache_folder import CacheFolder
from kvtier.storage.root import NAMESPACE_FILE, find_root, namespace_folders, open_namespace, open_root, segments_bytes
from kvtier.storage.segments import SegmentFiles, direct_io_works, parse_segment_name, segment_name
from kvtier.worker.own_segments import OwnSegments
from tests.support.rig import Engine, geometry, namespace, settings
from tests.waiting import wait_until

TOKENS = list(range(1000, 1000 + 64 * 3))
BLOCKS, TARGET = list(range(12)), list(range(100, 112))
SET, RANK = 7, 0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a namespace in a new root."""
    return open_namespace(open_root(settings(tmp_path / "kv")), namespace(geometry()))


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A file that is none of the tier's business."""
    path = tmp_path / "outside"
    path.write_bytes(b"another's")
    return path


def header_in(folder: Path, **changes: object) -> SegmentHeader:
    extent, slab = Extent(0, 4, 0, 4), PAGE_BYTES
    made = SegmentHeader(bytes.fromhex(folder.name), SET, RANK, 4, record_bytes(extent, slab), extent, slab, 1000)
    return replace(made, **changes)  # type: ignore[arg-type]


# --- modes ---


@pytest.mark.parametrize("umask", [0o000, 0o027])
def test_all_that_is_made_is_its_users_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: int) -> None:
    monkeypatch.setattr(root_owner, "LOCAL_STATE", tmp_path / "var")
    (tmp_path / "var").mkdir()
    before = os.umask(umask)
    try:
        engine = Engine(tmp_path / "kv")
        engine.save(TOKENS, BLOCKS)
        seen = {path: path.lstat() for path in (tmp_path / "kv").rglob("*")}
        engine.close()
        create_once(root_owner.private_folder() / "kept", b"x")
        CacheFolder(root_owner.private_folder() / "fingerprints", "fingerprint", MAGIC).put("0a", b"0" * 64)
    finally:
        os.umask(before)
    seen |= {path: path.lstat() for place in ("kv", "var") for path in (tmp_path / place).rglob("*")}
    assert {path.suffix for path in seen} >= {".kvseg", ".json", ".mdb", ""}
    for path, status in seen.items():
        assert stat.S_IMODE(status.st_mode) == (0o700 if stat.S_ISDIR(status.st_mode) else 0o600), path


def test_what_is_made_again_of_a_root_that_vanished_is_its_users_alone(tmp_path: Path) -> None:
    """By an engine that runs. (Above the root it is as the umask has it, as at a start.)"""
    before = os.umask(0o022)
    try:
        engine = Engine(tmp_path / "deep" / "kv")
        (tmp_path / "deep").rename(tmp_path / "gone")  # at once: the engine may make it anew at any moment
        shutil.rmtree(tmp_path / "gone")
        wait_until(lambda: (tmp_path / "deep/kv/v2/index").exists())
        engine.close()
    finally:
        os.umask(before)
    for path in (tmp_path / "deep/kv", tmp_path / "deep/kv/v2", tmp_path / "deep/kv/v2/index"):
        assert stat.S_IMODE(path.lstat().st_mode) == 0o700, path


def test_the_users_own_folder_that_was_made_too_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(root_owner, "LOCAL_STATE", tmp_path)
    (tmp_path / f"kvtier-{os.getuid()}").mkdir()
    (tmp_path / f"kvtier-{os.getuid()}").chmod(0o777)
    assert stat.S_IMODE(root_owner.private_folder().stat().st_mode) == 0o700


# --- links ---


def test_a_root_that_is_a_link_is_the_operators_choice(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "kv").symlink_to(tmp_path / "disk")
    engine = Engine(tmp_path / "kv")
    engine.save(TOKENS, BLOCKS)
    assert engine.load(TOKENS, TARGET)[1][0].failed_blocks == frozenset()
    engine.close()
    assert find_root(tmp_path / "kv").folder == tmp_path / "kv" / "v2"


@pytest.mark.parametrize("root", ["kv", "kv/below"])
def test_a_link_to_nothing_is_named(tmp_path: Path, root: str) -> None:
    """As to a disk that is not mounted: it was called a file, or the folder above it was."""
    (tmp_path / "kv").symlink_to(tmp_path / "disk")
    with pytest.raises(ConfigError, match=f"{tmp_path}/kv is a link to {tmp_path}/disk, which is not there"):
        open_root(settings(tmp_path / root))


def test_the_folder_of_the_format_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "v2").symlink_to(tmp_path / "elsewhere")
    for look in (lambda: open_root(settings(tmp_path / "kv")), lambda: find_root(tmp_path / "kv")):
        with pytest.raises(ConfigError, match="v2 is a link, and none is followed"):
            look()
    assert not list((tmp_path / "elsewhere").iterdir())


def test_the_index_in_a_root_is_no_link(tmp_path: Path) -> None:
    open_root(settings(tmp_path / "kv"))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "kv" / "v2" / "index").symlink_to(tmp_path / "elsewhere")
    for look in (lambda: open_root(settings(tmp_path / "kv")), lambda: find_root(tmp_path / "kv")):
        with pytest.raises(ConfigError, match="is a link out of the root"):
            look()


def test_files_of_the_index_are_no_links(tmp_path: Path, outside: Path) -> None:
    (tmp_path / "index").mkdir(mode=0o700)
    names = ("data.mdb", "lock.mdb", "lock", "boot-id", "boot-id.new", "inodes")
    for name in names:
        (tmp_path / "index" / name).symlink_to(outside)
    index = LmdbIndex(str(tmp_path / "index"))
    index.put_note("a", b"b", None)
    index.close()
    assert outside.read_bytes() == b"another's"
    assert not any((tmp_path / "index" / name).is_symlink() for name in names)


def test_a_namespaces_folder_is_no_link(folder: Path, tmp_path: Path) -> None:
    SegmentFiles(folder, direct=False).create(header_in(folder))
    moved = folder.rename(tmp_path / folder.name)  # as large and as valid as ever, but not in the root
    folder.symlink_to(moved)
    before = sorted(moved.iterdir())
    files = SegmentFiles(folder, direct=False)
    assert namespace_folders(folder.parent) == []
    for use in (
        files.ids,
        lambda: files.lease(SET, RANK),
        lambda: files.create(header_in(folder, set_id=8)),
        lambda: files.unlink(SET, RANK),
        lambda: files.unlink_set(SET),
    ):
        with pytest.raises(TierUnavailable, match="Not a directory"):
            use()
    with pytest.raises(ConfigError, match="is a link"):
        open_namespace(find_root(folder.parents[1]), namespace(geometry()))
    Sweeper(MemoryIndex(), folder.parent, "me").erase_namespace(bytes.fromhex(folder.name))
    assert sorted(moved.iterdir()) == before


def test_the_folder_above_is_replaced_by_a_link_while_an_engine_runs(folder: Path, tmp_path: Path) -> None:
    files = SegmentFiles(folder, direct=False)
    moved = folder.parent.rename(tmp_path / "moved")
    folder.parent.symlink_to(moved)
    with pytest.raises(TierUnavailable, match="Not a directory"):
        files.create(header_in(folder))
    assert not list(moved.rglob("*.kvseg"))


@pytest.mark.parametrize("name", ["owner.json", f"namespace/{NAMESPACE_FILE}"])
def test_small_files_are_no_links_and_no_pipes(folder: Path, tmp_path: Path, name: str) -> None:
    path = folder / NAMESPACE_FILE if name.startswith("namespace") else folder.parent / name
    copy = path.rename(tmp_path / "copy")
    for put in (lambda: path.symlink_to(copy), lambda: os.mkfifo(path), path.mkdir):
        put()
        with pytest.raises(OSError, match="not a plain file"):
            read_small(path)
        with pytest.raises(ConfigError):
            open_namespace(open_root(settings(folder.parents[1])), namespace(geometry()))
        path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()


def test_a_probe_of_the_disk_writes_to_no_file_that_is_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name can't be known before, so nobody can have put a link to another's file there."""
    opened, seen = os.open, []

    def note(path: Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        seen.append((path, flags & os.O_EXCL, flags & os.O_TRUNC))
        return opened(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", note)
    direct_io_works(folder)
    direct_io_works(folder)
    assert len({path for path, *_ in seen}) == 2 and all(alone and not cuts for _, alone, cuts in seen)


# --- segments that are none ---


def make_device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero: never ends, never blocks
    except PermissionError:
        pytest.skip("needs the right to make devices")


STRANGE: dict[str, Callable[[Path, Path], object]] = {
    "a link": lambda path, outside: path.symlink_to(outside),
    "a pipe": lambda path, outside: os.mkfifo(path),
    "a folder": lambda path, outside: path.mkdir(),
    "a socket": lambda path, outside: os.mknod(path, stat.S_IFSOCK | 0o600),
    "a device": lambda path, outside: make_device(path),
    "a hard link": lambda path, outside: os.link(outside, path),
}


@pytest.mark.parametrize("what", STRANGE)
def test_what_is_no_segment_is_not_opened_and_swept(folder: Path, outside: Path, what: str) -> None:
    STRANGE[what](folder / segment_name(SET, RANK), outside)
    with pytest.raises(Corrupt):
        SegmentFiles(folder, direct=False).lease(SET, RANK)
    index = MemoryIndex()
    swept = Sweeper(index, folder.parent, "me", clock=lambda: os.stat(folder).st_mtime + 9 * ORPHAN_GRACE_S)
    assert swept.rebuild() is not None
    swept.sweep()
    assert swept.swept_s() > 0, "what comes after it was swept too"
    assert (folder / segment_name(SET, RANK)).exists() == (what == "a folder")
    assert outside.read_bytes() == b"another's" and not index.sets()


def test_a_pipe_that_may_only_be_read_is_not_waited_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is put there between looking and opening; a descriptor for writing is refused, so one for reading is tried."""
    path = folder / segment_name(SET, RANK)
    path.write_bytes(b"")
    plain, opened = os.stat(path), os.open
    path.unlink()
    os.mkfifo(path)

    class Racing:
        def __getattr__(self, name: str) -> object:
            return getattr(os, name)

        def stat(self, *arguments: object, **more: object) -> os.stat_result:
            return plain

        def open(self, name: str, flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> int:
            if flags & os.O_RDWR:
                raise PermissionError(13, "not permitted")
            return opened(name, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr("kvtier.storage.segments.os", Racing())
    with pytest.raises(Corrupt, match="not a plain file"):
        SegmentFiles(folder, direct=False).lease(SET, RANK)


def test_a_segment_of_another_name_or_namespace_by_hard_link(folder: Path, tmp_path: Path) -> None:
    SegmentFiles(folder, direct=False).create(header_in(folder))
    os.link(folder / segment_name(SET, RANK), folder / segment_name(SET + 1, RANK))
    other = open_namespace(find_root(folder.parents[1]), namespace(geometry(), weights="others"))
    os.link(folder / segment_name(SET, RANK), other / segment_name(SET, RANK))
    for place, set_id in ((folder, SET + 1), (other, SET)):
        with pytest.raises(Corrupt, match="renamed or copied"):
            SegmentFiles(place, direct=False).lease(set_id, RANK)


@pytest.mark.parametrize("name", ["-001-00", "+001-00", " 001-00", "1_00-00", "٠٠٠١-00", "0001-16", "0001"])
def test_names_that_are_almost_those_of_segments(name: str) -> None:
    assert parse_segment_name(f"{SET:016x}-0001-00.kvseg") == (SET, 16)
    assert parse_segment_name(f"{SET:016x}-{name}.kvseg") is None


# --- headers that lie ---


def put_segment(folder: Path, header: SegmentHeader, file_bytes: int, records: dict[int, RecordHeader]) -> Path:
    path = folder / segment_name(header.set_id, header.part)
    with path.open("wb") as file:
        file.write(header.pack())
        for slot, record in records.items():
            file.seek(header.slot_offset(slot))
            file.write(record.pack())
        file.truncate(file_bytes)
    return path


def record_in(header: SegmentHeader, slot: int, **changes: object) -> RecordHeader:
    made = RecordHeader(
        bytes([slot % 251]) * 16,
        bytes(16),
        header.namespace,
        header.slab_bytes,
        64,
        slot,
        header.extent,
        header.set_id,
        (1,) * header.extent.n_heads,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def test_billions_of_slots_in_a_file_of_holes(folder: Path) -> None:
    n_slots = 2**32 - 1
    header = header_in(folder, slots=n_slots)
    put_segment(folder, header, 1 << 43, {2: record_in(header, 2), 10**8: record_in(header, 10**8)})
    found = [slot for slot, page in SegmentFiles(folder, direct=False).pages(SET, RANK) if any(page)]
    assert found == [2, 10**8]
    index = MemoryIndex()
    rebuilt = Sweeper(index, folder.parent, "me").rebuild()
    assert rebuilt is not None and rebuilt.records == 2
    report = verify(find_root(folder.parents[1]), index)
    assert len(report.bad) == 2 and all("checksum" in finding.what for finding in report.bad)


@pytest.mark.parametrize("slab_bytes", [1 << 30, 1 << 40, (1 << 63) - PAGE_BYTES, (1 << 64) - 2 * PAGE_BYTES])
def test_slabs_of_any_size(folder: Path, slab_bytes: int) -> None:
    extent = Extent(0, 4, 0, 496 if slab_bytes <= 1 << 40 else 1)
    size = record_bytes(extent, slab_bytes)
    header = header_in(folder, extent=extent, slab_bytes=slab_bytes, slot_bytes=size, slots=2**32 - 1)
    put_segment(folder, header, 1 << 43, {0: record_in(header, 0)})
    index = MemoryIndex()
    assert Sweeper(index, folder.parent, "me").rebuild() is not None
    (finding,) = verify(find_root(folder.parents[1]), index).bad
    assert ("is not read" in finding.what) == (slab_bytes == 1 << 30) and finding.slot == 0


def test_a_record_of_another_cut_than_its_segment_is_no_record(folder: Path) -> None:
    header = header_in(folder)
    records = {
        0: record_in(header, 0, slab_bytes=1 << 50),
        1: record_in(header, 1, extent=Extent(0, 4, 0, 3), checksums=(1,) * 3),
        2: record_in(header, 2),
    }
    put_segment(folder, header, header.file_bytes, records)
    index = MemoryIndex()
    rebuilt = Sweeper(index, folder.parent, "me").rebuild()
    assert rebuilt is not None and rebuilt.records == 1
    said = {finding.slot: finding.what for finding in verify(find_root(folder.parents[1]), index).bad}
    assert "other layers" in said[0] and "other layers" in said[1] and "checksum" in said[2]


def test_a_set_from_the_future_is_as_old_as_the_day_it_was_found(folder: Path) -> None:
    header = header_in(folder, created_ms=2**64 - 1)
    put_segment(folder, header, header.file_bytes, {0: record_in(header, 0)})
    index = MemoryIndex()
    Sweeper(index, folder.parent, "me", clock=lambda: 5000.0).rebuild()
    (info,) = index.sets()
    assert info.created_s == info.used_s == 5000.0, "so it is evicted when its turn comes"


@pytest.mark.parametrize("label", ["a\x1b[2Jb", "a\nkvtier: all is well", "\x07", "a\u202eb"])
def test_a_label_that_terminals_would_act_on(folder: Path, label: str) -> None:
    with pytest.raises(Corrupt, match="not printable"):
        SegmentHeader.unpack(header_in(folder, tenant=label).pack())


def test_sizes_of_links_are_not_counted(folder: Path, outside: Path) -> None:
    outside.write_bytes(bytes(1 << 20))
    (folder / segment_name(SET, RANK)).symlink_to(outside)
    assert segments_bytes(folder.parents[1]) < 1 << 20


# --- under a writer ---


LIES: dict[str, Callable[[SegmentHeader], SegmentHeader]] = {
    "slabs that reach beyond the arena": lambda made: replace(
        made, slab_bytes=1 << 40, slot_bytes=record_bytes(made.extent, 1 << 40)
    ),
    "more heads": lambda made: replace(
        made, extent=Extent(0, 4, 0, 400), slot_bytes=record_bytes(Extent(0, 4, 0, 400), made.slab_bytes)
    ),
    "fewer slots": lambda made: replace(made, slots=1),
    "another tenant's": lambda made: replace(made, tenant="others"),
}


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path / "kv")


@pytest.mark.parametrize("lie", LIES)
def test_a_segment_that_was_put_in_a_writers_place(engine: Engine, lie: str) -> None:
    """Set ids can be read in the index before the file is made. What the header says decides how much of the arena is
    written into the file."""
    worker = engine.transfers[0]._worker
    writes = worker.share.writes
    assert writes is not None
    segments = OwnSegments(worker, writes)
    plan = SavePlan(engine.namespace.id, 4, (chunk := SaveChunk(b"k" * 16, b"p" * 16, SET, 0, ()),))
    put_segment(worker.files(engine.namespace.id).folder, LIES[lie](segments._header(plan, chunk, 0)), 1 << 20, {})
    with pytest.raises(Corrupt, match="not the segment that this engine created"):
        segments.lease(plan, chunk, 0)


def test_saving_beside_such_a_segment_writes_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ring, submitted = engine.transfers[0]._worker.io.ring, []
    submit = ring.submit

    def note(ops: list[WriteOp]) -> object:
        submitted.extend(ops)
        return submit(ops)

    created = SegmentFiles.create
    lie = LIES["slabs that reach beyond the arena"]
    monkeypatch.setattr(SegmentFiles, "create", lambda files, header: created(files, lie(header)))
    monkeypatch.setattr("kvtier.storage.segments._allocate", lambda fd, n_bytes: None)
    monkeypatch.setattr(ring, "submit", note)
    done = engine.save(TOKENS, BLOCKS)
    assert [answer.outcome.value for answer in done] == ["failed"] * 3 and not submitted
