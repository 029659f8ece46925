"""KvikIO as an engine, over a double of it: what arrives, what fails how, and what is never freed too early.

No GPU here. That the real package has these calls is checked in test_kvikio_contract.
"""

import errno
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier.errors import TierUnavailable
from kvtier.format.geometry import PAGE_BYTES
from kvtier.io import kvikio as kvikio_engine
from kvtier.io import kvikio_files
from kvtier.io.cufile import cufile_state, nvidia_fs_loaded
from kvtier.io.kvikio import KvikioReader
from kvtier.io.kvikio_files import load_kvikio
from kvtier.io.ring import AlignedBuffer, OpResult, ReadOp

from fake_kvikio import FakeKvikio

SLAB, SLABS = 5 * PAGE_BYTES, 3
PIECE = 2 * PAGE_BYTES
TIMEOUT_S = 20.0
GONE = b"\xee"


@pytest.fixture(name="kvikio")
def _kvikio() -> Iterator[FakeKvikio]:
    made = FakeKvikio()
    yield made
    made.pool.shutdown(wait=True)


@pytest.fixture(name="target")
def _target() -> AlignedBuffer:
    buffer = AlignedBuffer(8 * SLAB * SLABS)
    buffer.view[:] = GONE * buffer.n_bytes
    return buffer


@pytest.fixture(name="reader")
def _reader(kvikio: FakeKvikio, target: AlignedBuffer) -> Iterator[KvikioReader]:
    made = reader_of(kvikio, target)
    yield made
    assert made.close(TIMEOUT_S)


def reader_of(kvikio: FakeKvikio, target: AlignedBuffer, threads: int = 2) -> KvikioReader:
    return KvikioReader((target.address, target.n_bytes), threads, PIECE, load=lambda: kvikio)


def gated(kvikio: FakeKvikio) -> threading.Event:
    """Block all reads until the returned event is set."""
    release = threading.Event()
    kvikio.before = lambda offset: None if release.wait(TIMEOUT_S) else 0
    return release


def content(path: Path, n_bytes: int) -> bytes:
    path.write_bytes(os.urandom(n_bytes))
    return path.read_bytes()


@pytest.fixture(name="fd")
def _fd(tmp_path: Path) -> Iterator[int]:
    """Descriptor of a segment as large as `target`."""
    content(tmp_path / "segment", 8 * SLAB * SLABS)
    with (tmp_path / "segment").open("rb") as file:
        yield file.fileno()


def op_of(fd: int, target: AlignedBuffer, position: int = 0, offset: int = 0) -> ReadOp:
    address = target.address + position * SLAB * SLABS
    return ReadOp(fd, offset, address, SLAB, SLABS, bytes(16), 0, 0, None, True)


def landed(target: AlignedBuffer, position: int = 0) -> bytes:
    return bytes(target.view[position * SLAB * SLABS : (position + 1) * SLAB * SLABS])


OK = OpResult(0, (), (0,) * SLABS)


def test_many_reads_of_several_files(
    kvikio: FakeKvikio, reader: KvikioReader, target: AlignedBuffer, tmp_path: Path
) -> None:
    texts = [content(tmp_path / str(i), 3 * SLAB * SLABS) for i in range(2)]
    fds = [os.open(tmp_path / str(i), os.O_RDONLY) for i in range(2)]
    ops = [op_of(fds[i % 2], target, i, PAGE_BYTES * i) for i in range(8)]
    batch = reader.submit(ops)
    assert batch.wait(TIMEOUT_S) and batch.wait(0)
    assert batch.results() == [OK] * 8
    for i in range(8):
        assert landed(target, i) == texts[i % 2][PAGE_BYTES * i :][: SLAB * SLABS]
    assert len(kvikio.opened) == 2 and kvikio.reads == 8 * -(-SLAB * SLABS // PIECE)
    again = reader.submit(ops[:1])
    assert again.wait(TIMEOUT_S) and len(kvikio.opened) == 2  # files stay open
    for fd in fds:
        os.close(fd)


def test_tuned(kvikio: FakeKvikio, reader: KvikioReader) -> None:
    assert kvikio.settings == {
        "num_threads": 2,
        "task_size": PIECE,
        "bounce_buffer_size": PIECE,
        "auto_direct_io_read": True,
        "gds_threshold": 1,
    }


def test_the_open_file_is_read_not_its_name(
    kvikio: FakeKvikio, reader: KvikioReader, target: AlignedBuffer, tmp_path: Path
) -> None:
    path = tmp_path / "segment"
    old = content(path, SLAB * SLABS)
    with path.open("rb") as file:
        path.unlink()
        content(path, SLAB * SLABS)
        batch = reader.submit([op_of(file.fileno(), target)])
        assert batch.wait(TIMEOUT_S) and landed(target) == old
        with path.open("rb") as replaced:
            batch = reader.submit([op_of(replaced.fileno(), target, 1)])
            assert batch.wait(TIMEOUT_S) and landed(target, 1) == path.read_bytes()


def test_evicted_files_are_let_go(
    kvikio: FakeKvikio, reader: KvikioReader, target: AlignedBuffer, tmp_path: Path
) -> None:
    path = tmp_path / "segment"
    content(path, SLAB * SLABS)
    release = gated(kvikio)
    with path.open("rb") as file:
        batch = reader.submit([op_of(file.fileno(), target)])
        reader.files.forget(file.fileno())  # its set was removed; the file may still have a name, as on NFS
        reader.files.close_unused(0.0)
        assert not kvikio.opened[0].closed  # in use
        release.set()
        assert batch.wait(TIMEOUT_S)
    reader.files.close_unused(0.0)
    assert kvikio.opened[0].closed


def test_a_file_is_opened_anew_when_its_bytes_may_be_stale(
    kvikio: FakeKvikio, reader: KvikioReader, target: AlignedBuffer, tmp_path: Path
) -> None:
    path = tmp_path / "segment"
    content(path, SLAB * SLABS)
    release = gated(kvikio)
    with path.open("rb") as file, path.open("rb") as anew:
        first = reader.submit([op_of(file.fileno(), target)])
        reader.files.reopen(anew.fileno())
        second = reader.submit([op_of(anew.fileno(), target, 1)])
        assert len(kvikio.opened) == 2 and not kvikio.opened[0].closed
        release.set()
        assert first.wait(TIMEOUT_S) and second.wait(TIMEOUT_S)
        third = reader.submit([op_of(anew.fileno(), target, 1)])
        assert third.wait(TIMEOUT_S) and len(kvikio.opened) == 2
    assert reader.close()
    assert all(file.closed for file in kvikio.opened)


def test_files_long_unused_are_closed(kvikio: FakeKvikio, target: AlignedBuffer, tmp_path: Path) -> None:
    now = [0.0]
    reader = KvikioReader((target.address, target.n_bytes), load=lambda: kvikio, clock=lambda: now[0])
    content(tmp_path / "a", SLAB * SLABS)
    content(tmp_path / "b", SLAB * SLABS)
    for name in "ab":
        with (tmp_path / name).open("rb") as file:
            assert reader.submit([op_of(file.fileno(), target)]).wait(TIMEOUT_S)
        now[0] += 20.0
    reader.files.close_unused(0.0)
    assert [file.closed for file in kvikio.opened] == [True, False]
    assert reader.close()
    assert kvikio.opened[1].closed


# --- faults ---


def test_a_file_that_ends_early(reader: KvikioReader, target: AlignedBuffer, tmp_path: Path) -> None:
    content(tmp_path / "short", SLAB * SLABS - PAGE_BYTES)
    content(tmp_path / "empty", 0)
    content(tmp_path / "whole", SLAB * SLABS)
    files = [(tmp_path / name).open("rb") for name in ("short", "empty", "whole")]
    batch = reader.submit([op_of(file.fileno(), target, i) for i, file in enumerate(files)])
    assert batch.wait(TIMEOUT_S)
    assert [result.error for result in batch.results()] == [errno.ENODATA, errno.ENODATA, 0]
    for file in files:
        file.close()


def test_a_piece_that_comes_short(kvikio: FakeKvikio, reader: KvikioReader, target: AlignedBuffer, fd: int) -> None:
    kvikio.before = lambda offset: PAGE_BYTES if offset == PIECE else None
    batch = reader.submit([op_of(fd, target)])
    assert batch.wait(TIMEOUT_S) and batch.results()[0].error == errno.ENODATA


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (OSError(errno.ESTALE, "stale"), errno.ESTALE),
        (OSError("nameless"), errno.EIO),
        (RuntimeError("cuFile error: 5"), errno.EIO),
        (ValueError("x"), errno.EIO),
        (MemoryError(), errno.EIO),
    ],
)
def test_a_fault_is_its_operations_alone(
    fault: Exception, error: int, kvikio: FakeKvikio, reader: KvikioReader, target: AlignedBuffer, tmp_path: Path
) -> None:
    text = content(tmp_path / "segment", 2 * SLAB * SLABS)

    def before(offset: int) -> None:
        if offset == PIECE:
            raise fault

    kvikio.before = before
    with (tmp_path / "segment").open("rb") as file:
        batch = reader.submit([op_of(file.fileno(), target), op_of(file.fileno(), target, 1, SLAB * SLABS)])
        assert batch.wait(TIMEOUT_S)
        assert [result.error for result in batch.results()] == [error, 0]
        assert landed(target, 1) == text[SLAB * SLABS :]


def test_pread_that_refuses(
    kvikio: FakeKvikio, reader: KvikioReader, target: AlignedBuffer, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("cuFileRead: 5030")

    assert reader.submit([op_of(fd, target)]).wait(TIMEOUT_S)
    monkeypatch.setattr(type(kvikio.opened[0]), "pread", refuse)
    batch = reader.submit([op_of(fd, target)])
    assert batch.wait(TIMEOUT_S) and batch.results()[0].error == errno.EIO


def test_failed_operation_ends_only_when_nothing_can_land_any_more(
    kvikio: FakeKvikio, target: AlignedBuffer, fd: int
) -> None:
    """The first piece fails at once; the second is on its way and lands late. The batch must wait for it."""
    reader = reader_of(kvikio, target, threads=4)
    release = threading.Event()

    def before(offset: int) -> None:
        if offset == 0:
            raise OSError(errno.EIO, "bad sector")
        release.wait(TIMEOUT_S)

    kvikio.before = before
    batch = reader.submit([op_of(fd, target)])
    assert not batch.wait(0.1)
    with pytest.raises(RuntimeError, match="not done"):
        batch.results()
    release.set()
    assert batch.wait(TIMEOUT_S) and batch.results()[0].error == errno.EIO
    before_reuse = landed(target)
    target.view[:] = GONE * target.n_bytes
    assert before_reuse != landed(target)
    threading.Event().wait(0.05)
    assert landed(target) == GONE * SLAB * SLABS  # nothing came after the answer
    assert reader.close(TIMEOUT_S)


def test_cancel_drops_what_waits(kvikio: FakeKvikio, reader: KvikioReader, target: AlignedBuffer, fd: int) -> None:
    release = gated(kvikio)
    batch = reader.submit([op_of(fd, target, i, i * SLAB * SLABS) for i in range(8)])
    assert kvikio.reads == 2 * kvikio_engine.IN_FLIGHT_PER_THREAD  # the rest waits here
    batch.cancel()
    assert not batch.wait(0.05)
    release.set()
    assert batch.wait(TIMEOUT_S)
    errors = [result.error for result in batch.results()]
    assert errors[0] == 0 and errors[-1] == errno.ECANCELED
    assert kvikio.reads == 2 * kvikio_engine.IN_FLIGHT_PER_THREAD


def test_a_batch_that_nobody_waits_for_holds_up_no_other(
    kvikio: FakeKvikio, reader: KvikioReader, target: AlignedBuffer, fd: int
) -> None:
    first = [reader.submit([op_of(fd, target, i)]) for i in range(7)]
    last = reader.submit([op_of(fd, target, 7)])
    assert last.wait(TIMEOUT_S)
    assert all(batch.wait(TIMEOUT_S) for batch in first)


def test_close_leaves_hanging_reads_their_files(kvikio: FakeKvikio, target: AlignedBuffer, fd: int) -> None:
    reader = reader_of(kvikio, target)
    release = gated(kvikio)
    reader.submit([op_of(fd, target)])
    assert not reader.close(0.05)
    assert not reader.close(0.0), "it hangs as before"
    assert not kvikio.opened[0].closed and not kvikio.freed and reader in kvikio_files.left_behind
    with pytest.raises(TierUnavailable, match="closed"):
        reader.submit([op_of(fd, target)])
    release.set()
    assert reader.close(TIMEOUT_S) and kvikio.opened[0].closed
    kvikio_files.left_behind.clear()


def test_what_kvikio_does_not_take_back_is_kept_and_the_rest_given_back(
    kvikio: FakeKvikio,
    target: AlignedBuffer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(kvikio_engine, "cufile_state", lambda _: cufile_state(None)._replace(mode="gds"))
    reader = reader_of(kvikio, target)
    for name in "ab":
        content(tmp_path / name, SLAB * SLABS)
        with (tmp_path / name).open("rb") as file:
            assert reader.submit([op_of(file.fileno(), target)]).wait(TIMEOUT_S)
    first, second = kvikio.opened
    kvikio.refuses_to_free = {id(first), "buffer", "bounce"}
    assert not reader.close(), "the buffer is registered still: it must not be freed"
    assert (first.closed, second.closed, kvikio.freed, kvikio.registered) == (False, True, 0, [target.address])
    file, buffer, bounce = kvikio_files.left_behind
    assert file.handle is first and buffer.__cuda_array_interface__["data"][0] == target.address  # type: ignore[attr-defined]
    assert bounce is reader and caplog.text.count("cannot release a file or buffer") == 1
    kvikio.refuses_to_free = set()
    assert reader.close() and kvikio.registered == [] and kvikio.freed == 1
    kvikio_files.left_behind.clear()


def test_a_file_that_does_not_close_stops_no_reads(kvikio: FakeKvikio, target: AlignedBuffer, tmp_path: Path) -> None:
    reader = reader_of(kvikio, target)
    for name in "ab":
        content(tmp_path / name, SLAB * SLABS)
    with (tmp_path / "a").open("rb") as gone, (tmp_path / "b").open("rb") as there:
        assert reader.submit([op_of(gone.fileno(), target)]).wait(TIMEOUT_S)
        (tmp_path / "a").unlink()
        kvikio.refuses_to_free = {id(kvikio.opened[0])}
        reader.files.close_unused(0.0)
        assert reader.submit([op_of(there.fileno(), target)]).wait(TIMEOUT_S)
    assert reader.close() and kvikio.opened[1].closed and len(kvikio_files.left_behind) == 1
    kvikio_files.left_behind.clear()


def test_refused_operations(reader: KvikioReader, target: AlignedBuffer, fd: int) -> None:
    fine = op_of(fd, target)
    for change in (
        {"on_device": False},
        {"checksums": (1, 2, 3)},
        {"offset": 100},
        {"address": target.address + 1},
        {"slab_bytes": 100},
        {"n_slabs": 0},
        {"address": target.address - PAGE_BYTES},
        {"address": target.address + target.n_bytes - PAGE_BYTES},
    ):
        with pytest.raises(ValueError):
            reader.submit([fine, fine._replace(**change)])
    with pytest.raises(TierUnavailable, match="cannot open"):
        reader.submit([fine, fine._replace(fd=9999)])
    assert reader.submit([fine]).wait(TIMEOUT_S)


def test_queue_is_bounded(
    reader: KvikioReader, target: AlignedBuffer, fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kvikio_engine, "QUEUED_PIECES_MAX", 4)
    with pytest.raises(TierUnavailable, match="queue"):
        reader.submit([op_of(fd, target)])


# --- what it is ---


def test_absent_kvikio_names_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(TierUnavailable, match="pip install kvikio-cu13"):
        load_kvikio()


def proc_with(tmp_path: Path, modules: str) -> Path:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "modules").write_text(modules)
    return tmp_path / "proc"


def test_compat_mode_off_does_not_prove_gds(kvikio: FakeKvikio, tmp_path: Path) -> None:
    proc = proc_with(tmp_path, "nvidia 1 0 - Live 0x0\nnvidia_fs_other 1 0 - Live 0x0\n")
    assert not nvidia_fs_loaded(proc)
    kvikio.compat, kvikio.gds = False, True
    state = cufile_state(kvikio, proc)
    assert state.mode == "compat" and "although KvikIO's is off" in state.reasons[-1]
    (proc / "modules").write_text("nvidia_fs 262144 0 - Live 0x0000000000000000 (OE)\n")
    assert nvidia_fs_loaded(proc) and cufile_state(kvikio, proc).mode == "gds"
    kvikio.gds = False
    assert cufile_state(kvikio, proc).mode == "compat"
    kvikio.compat = True
    assert cufile_state(kvikio, proc).mode == "compat"
    assert cufile_state(None, proc).mode == "absent"


def test_the_buffer_is_registered_once_where_gds_is_real(
    kvikio: FakeKvikio, target: AlignedBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader_of(kvikio, target).close()
    assert kvikio.registered == []
    monkeypatch.setattr(kvikio_engine, "cufile_state", lambda _: cufile_state(None)._replace(mode="gds"))
    reader = reader_of(kvikio, target)
    assert kvikio.registered == [target.address]
    assert reader.close() and kvikio.registered == [] and kvikio.freed == 2
