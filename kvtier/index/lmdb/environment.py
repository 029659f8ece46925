"""LMDB environment shared safely by threads, by several users in one process, by processes, and over fork.

It adds to LMDB:

- One reference-counted environment for each process and folder: LMDB's POSIX locks forbid a second open (and py-lmdb
  refuses it), but both halves of a connector may run in one process.
- A writer lock (a POSIX record lock on `lock`) with a deadline: LMDB's own blocks without limit, for example behind a
  stopped process (I10). The kernel releases both when their owner is killed.
- Fork safety: `os.register_at_fork` waits for running transactions, and the child closes the inherited environment.
- Replacement of the files. Discarded are: files of another boot, because they are written without fsync; files that
  LMDB reports as corrupt; copies, because a copy of an index in use is torn, and LMDB may end the process that opens
  it; and data and lock file where one of them is gone, because another process may still have both open, and LMDB keeps
  the number of the last transaction in the lock file. A process discards files by unlinking them under the writer lock;
  the others notice that the path has other files than their open ones, and open the new ones.
- A reserve: LMDB writes new pages even for removals, so on a full disk eviction would fail. Transactions that add keep
  some bytes allocated behind the used pages for those that do not.
- Preallocation of LMDB's reader table, which is mapped: on a full disk the first write into a hole is a SIGBUS.
- Another process id where a process of another container has the same one (kvtier.index.lmdb.process).

Never open lock.mdb while LMDB has it open: closing the descriptor would release LMDB's locks.
"""

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import lmdb

from kvtier.errors import ConfigError, IndexUnavailable, TierUnavailable
from kvtier.index.lmdb.process import open_with_another_id
from kvtier.runtime.file_descriptors import close_file, size_hint
from kvtier.storage.filesystem import FULL
from kvtier.storage.root_owner import INDEX_STAMP, index_stamp
from kvtier.storage.safe_open import hand_over, make_private, remove_strange

log = logging.getLogger("kvtier")

T = TypeVar("T")
Work = Callable[["View"], T]
Identity = tuple[tuple[int, int], ...]
Database = Any  # py-lmdb does not export the type of its handles
Reopen = Callable[[], object]

_DATA, _LMDB_LOCK, _LOCK, _STAMP, _NEW_STAMP = "data.mdb", "lock.mdb", "lock", INDEX_STAMP, f"{INDEX_STAMP}.new"
_INODES = "inodes"  # file with the inodes of data and lock file, by which a copy of them is recognised
_FILES = (_DATA, _LMDB_LOCK, _LOCK, _STAMP, _NEW_STAMP, _INODES)
_OPENING = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_READERS_MAX = 1024  # concurrent read transactions; 64 bytes each
_READERS_BYTES = 64 * (_READERS_MAX + 2)  # size of lock.mdb, with its head
_POLL_MIN_S, _POLL_MAX_S = 20e-6, 2e-3  # interval between attempts at the writer lock, seconds; it doubles
_GROWTH_MAX = 8  # a full map is doubled up to this many times the configured size
RESERVE_BYTES = 16 << 20  # two removals of 512 records write up to 5 MB before LMDB reuses freed pages

_BROKEN = (
    lmdb.InvalidError,
    lmdb.CorruptedError,
    lmdb.VersionMismatchError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.BadTxnError,  # raised by the first read when the root page of a named database is damaged
)
_device_and_inode = attrgetter("st_dev", "st_ino")
_WRONG_PATH = (PermissionError, NotADirectoryError, FileExistsError, IsADirectoryError)


class View(NamedTuple):
    """Named databases within one transaction."""

    txn: lmdb.Transaction
    databases: dict[str, Database]

    def get(self, database: str, key: bytes) -> bytes | None:
        return self.txn.get(key, None, self.databases[database])  # type: ignore[return-value]  # buffers=False

    def values(self, database: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of each key, None where it is missing."""
        return list(map(partial(self.txn.get, db=self.databases[database]), keys))  # type: ignore[arg-type]

    def leading(self, database: str, keys: Sequence[bytes], wanted: Callable[[bytes], bool]) -> list[bytes]:
        """Return the values of `keys` before the first that is missing or not `wanted`."""
        get, handle = self.txn.get, self.databases[database]
        found: list[bytes] = []
        for key in keys:
            value: bytes | None = get(key, None, handle)  # type: ignore[assignment]  # buffers=False
            if value is None or not wanted(value):
                break
            found.append(value)
        return found

    def put(self, database: str, key: bytes, value: bytes) -> None:
        self.txn.put(key, value, db=self.databases[database])

    def put_all(self, database: str, values: Mapping[bytes, bytes]) -> None:
        self.txn.cursor(self.databases[database]).putmulti(values.items())

    def delete(self, database: str, key: bytes) -> None:
        self.txn.delete(key, db=self.databases[database])

    def scan(self, database: str, prefix: bytes = b"", limit: int | None = None) -> list[tuple[bytes, bytes]]:
        """Return (key, value) of the keys that begin with `prefix`, in order; at most the first `limit`."""
        found: list[tuple[bytes, bytes]] = []
        cursor = self.txn.cursor(self.databases[database])
        if not prefix:
            return list(islice(cursor, limit))  # type: ignore[arg-type]  # buffers=False
        if cursor.set_range(prefix):
            for key, value in islice(cursor, limit):
                if not bytes(key).startswith(prefix):
                    break
                found.append((bytes(key), bytes(value)))
        return found

    def count(self, database: str) -> int:
        return int(self.txn.stat(self.databases[database])["entries"])

    def clear(self, database: str) -> None:
        self.txn.drop(self.databases[database], delete=False)


class OpenEnvironment:
    """Open environment and its named databases. identity: device and inode of its files. close: closes `env`."""

    def __init__(self, env: lmdb.Environment, identity: Identity, close: Callable[[], None]) -> None:
        self.env = env
        self.identity = identity
        self.close = close
        self.databases: dict[str, Database] = {}

    def open_databases(self, names: tuple[str, ...]) -> None:
        """Open the databases, creating missing ones. The caller holds the writer lock."""
        with self.env.begin(write=True) as txn:
            self.databases = {name: self.env.open_db(name.encode(), txn=txn) for name in names}

    def used_bytes(self) -> int:
        """Return the length of the data file up to its last used page."""
        return int(self.env.info()["last_pgno"] + 1) * int(self.env.stat()["psize"])

    def run(self, work: Work[T], *, write: bool) -> T:
        with self.env.begin(write=write) as txn:
            return work(View(txn, self.databases))


def held(lock: threading.Lock, deadline: float) -> AbstractContextManager[object]:
    """Acquire a lock of threads, which the end of the context releases. Raises IndexUnavailable at the deadline."""
    if not lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
        raise IndexUnavailable("the index is busy: another thread holds it")
    release = contextlib.ExitStack()
    release.callback(lock.release)
    return release


def file_lock(descriptor: int, deadline: float) -> AbstractContextManager[object]:
    """Acquire a lock of processes, which the end of the context releases. Raises IndexUnavailable at the deadline."""
    # Polled: a POSIX lock has no wait with a deadline. Not `flock`: a forked child would hold it after its parent was
    # killed.
    pause_s = _POLL_MIN_S
    while True:
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError):
            if time.monotonic() >= deadline:
                raise IndexUnavailable("the index is busy: another process holds its writer lock") from None
        time.sleep(pause_s)
        pause_s = min(pause_s * 2, _POLL_MAX_S)
    release = contextlib.ExitStack()
    release.callback(fcntl.lockf, descriptor, fcntl.LOCK_UN)
    return release


class SharedEnvironment:
    """Environment of one folder, shared by all its users in this process; see `attach`."""

    def __init__(
        self, path: str, map_bytes: int, timeout_s: float, stamp: str, databases: tuple[str, ...], reopen: Reopen | None
    ) -> None:
        """stamp: content of the file `boot-id` of valid files. reopen: see `attach`."""
        self.path = path
        self.users = 0
        self._map_bytes = map_bytes
        self._map_bytes_max = map_bytes * _GROWTH_MAX
        self._timeout_s = timeout_s
        self._stamp = stamp
        self._databases = databases
        self._shared_paths = [os.path.join(path, name) for name in (_DATA, _LMDB_LOCK, _LOCK)]
        self._reopen = reopen
        self._was_opened = False
        self._opened: OpenEnvironment | None = None
        self._lock_file = -1
        # Lock order: writing, then reading. `reading` guards `_opened` and the map of a read transaction, and is held
        # for microseconds; `writing` is held while other processes write.
        self._writing = threading.Lock()
        self._reading = threading.Lock()

    def open(self) -> None:
        """Open the files, so that faults show at the start. Raises ConfigError, IndexUnavailable."""
        try:
            if self._valid() is None:
                self._open_again(time.monotonic() + self._timeout_s)
        except _WRONG_PATH as error:
            raise ConfigError("index.path", self.path, f"{error.strerror}: {self._path_fix()}") from None
        except lmdb.LockError as error:
            # LMDB identifies readers by process id, and another id could not be substituted.
            fix = f"another container's process with the same id uses it: let both share a PID namespace ({error})"
            raise ConfigError("index.path", self.path, fix) from None
        except lmdb.MemoryError as error:
            fix = f"this process has no address space for a map of that size ({error}): lower it, or raise ulimit -v"
            raise ConfigError("index.map_bytes", self._map_bytes, fix) from None
        except (lmdb.Error, OSError) as error:
            if isinstance(error, OSError) and error.errno == errno.EROFS:
                fix = f"{error.strerror}, and readers write to its files too: mount it for writing"
                raise ConfigError("index.path", self.path, fix) from None
            raise self._unavailable(None, error) from error

    def _path_fix(self) -> str:
        """Return the fix for a folder that cannot be used: another user may own it."""
        for path in (self.path, *(os.path.join(self.path, name) for name in _FILES)):
            with contextlib.suppress(OSError):
                user = os.lstat(path).st_uid
                if user != os.geteuid():
                    return f"user {user} owns {path}, this is user {os.geteuid()}: chown it, or run this as user {user}"
        return "name a writable folder"

    def read(self, work: Work[T], *, at_once: bool = False) -> T:
        """Run `work` in a read transaction. Raises IndexUnavailable.

        at_once: never call `reopen`, whose file system may block longer than any timeout: raise where it is needed.
        """
        deadline, opened = time.monotonic() + self._timeout_s, None
        try:
            if self._valid() is None:
                self._open_again(deadline, at_once)
            with held(self._reading, deadline):
                opened = self._opened
                if opened is None:
                    raise IndexUnavailable(f"index {self.path}: closed")
                try:
                    return opened.run(work, write=False)
                except lmdb.MapResizedError:
                    opened.env.set_mapsize(0)
                except lmdb.ReadersFullError:
                    opened.env.reader_check()
                return opened.run(work, write=False)
        except (lmdb.Error, OSError) as error:
            raise self._unavailable(opened, error) from error

    def write(self, work: Work[T], *, adds: bool = False) -> T:
        """Run `work` in a write transaction, more than once if the map has to grow. Raises IndexUnavailable.

        work: must not change anything but the transaction.
        adds: `work` adds records or sets. It is refused while there is still space for leases, recency and removals.
        """
        deadline, opened = time.monotonic() + self._timeout_s, None
        try:
            with held(self._writing, deadline):
                opened = self._current(deadline)
                with file_lock(self._lock_file, deadline):
                    if adds:
                        self._reserve(opened)
                    map_bytes_max = self._map_bytes_max * (1 if adds else 2)
                    return self._write_locked(work, opened, deadline, map_bytes_max)
        except (lmdb.Error, OSError) as error:
            raise self._unavailable(opened, error) from error

    def close(self) -> None:
        """Close the files while no transaction runs: for the last user, before a reopen, in a forked child."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None
        if self._lock_file >= 0:
            close_file(self._lock_file)
            self._lock_file = -1

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """Exclude all transactions of this process."""
        with self._writing, self._reading:
            yield

    def _unavailable(self, opened: OpenEnvironment | None, error: Exception) -> IndexUnavailable:
        if opened is not None and isinstance(error, _BROKEN):
            self._discard(opened)
        said = str(error) if isinstance(error, lmdb.Error) else ""
        is_full = (isinstance(error, OSError) and error.errno in FULL) or os.strerror(errno.ENOSPC) in said
        if os.strerror(errno.EIO) in said:  # LMDB also reports EIO for a write that a full disk cut short
            with contextlib.suppress(OSError):
                is_full = not shutil.disk_usage(self.path).free
        fix = f"; records are added while its disk has {RESERVE_BYTES >> 20} MiB free" if is_full else ""
        return IndexUnavailable(f"index {self.path}: {error}{fix or size_hint(error)}")

    def _write_locked(self, work: Work[T], opened: OpenEnvironment, deadline: float, map_bytes_max: int) -> T:
        def resize(map_bytes: int) -> None:
            with held(self._reading, deadline):  # a new map invalidates a running read
                opened.env.set_mapsize(map_bytes)

        try:
            return opened.run(work, write=True)
        except lmdb.MapResizedError:  # another process has grown it
            resize(0)
        except lmdb.MapFullError:  # readers that were killed may hold freed pages
            opened.env.reader_check()
        while True:
            try:
                return opened.run(work, write=True)
            except lmdb.MapFullError:
                map_bytes = opened.env.info()["map_size"] * 2
                if map_bytes > map_bytes_max:
                    raise
                log.warning("the map of the index %s is full; grown to %d bytes", self.path, map_bytes)
                resize(map_bytes)

    def _reserve(self, opened: OpenEnvironment) -> None:
        """Allocate the reserve behind the last used page if less than half of it is left. Raises OSError on a full
        disk."""
        used = opened.used_bytes()
        path = os.path.join(self.path, _DATA)
        if os.stat(path).st_size < used + RESERVE_BYTES // 2:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.posix_fallocate(descriptor, used, RESERVE_BYTES)
            finally:
                close_file(descriptor)

    def _open_again(self, deadline: float, at_once: bool = False) -> None:
        """Open the environment, which is not open yet or whose files were replaced. The caller holds no lock."""
        if at_once and self._reopen is not None:
            raise IndexUnavailable(f"index {self.path}: its files are gone; they are reopened in the background")
        with held(self._writing, deadline):
            self._current(deadline)

    def _current(self, deadline: float) -> OpenEnvironment:
        """Return the open environment, reopened if the path has other files. The caller holds `writing`: the lock file
        is reopened too, which releases this process's lock on it."""
        opened = self._valid()
        if opened is None:
            with held(self._reading, deadline):
                self.close()
            if not self.users:
                raise IndexUnavailable(f"index {self.path}: closed")
            self._make_folder()  # may take long, so outside of `reading`
            with held(self._reading, deadline):
                opened = self._opened = self._open(deadline)
        return opened

    def _valid(self) -> OpenEnvironment | None:
        """Return the open environment; None if the path has other files."""
        opened = self._opened  # read once: another thread may close it
        return opened if opened is not None and opened.identity == self._identity() else None

    def _identity(self) -> Identity | None:
        """Return the identity of the files that all users must share, locks included. None: one is missing."""
        try:
            return tuple(map(_device_and_inode, map(os.stat, self._shared_paths)))
        except FileNotFoundError:
            return None

    def _has(self, name: str) -> bool:
        return os.path.lexists(os.path.join(self.path, name))

    def _open(self, deadline: float) -> OpenEnvironment:
        if os.stat(self.path).st_mode & 0o077:
            os.chmod(self.path, 0o700)
        remove_strange(self.path, _FILES)
        self._lock_file, _ = self._make(_LOCK, os.O_RDWR)
        with file_lock(self._lock_file, deadline):
            self._check_stamp()
            if self._has(_DATA) != self._has(_LMDB_LOCK):
                log.warning("a file of the index %s is gone: starting an empty one", self.path)
                self._unlink()
            try:
                opened = self._open_env()
            except _BROKEN as error:
                log.warning("the index %s is broken (%s): starting an empty one", self.path, error)
                self._unlink()
                opened = self._open_env()
            self._note_inodes()
        self._was_opened = True
        return opened

    def _make_folder(self) -> None:
        """Create the folder, at the first open with its parents. Later `reopen` checks and creates the parents: an
        unmounted file system must not be taken for an empty one."""
        if not self._was_opened:
            make_private(self.path)
        elif self._reopen is None:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self.path, 0o700)
                hand_over(self.path)
        else:
            try:
                self._reopen()
            except TierUnavailable as fault:
                raise IndexUnavailable(f"index {self.path}: {fault}") from fault
            make_private(self.path)

    def _check_stamp(self) -> None:
        """Discard files of another boot of this machine, of another format, and copies."""
        stamp_path, path = os.path.join(self.path, _STAMP), Path(self.path)
        is_current = index_stamp(path) == self._stamp
        if is_current and _is_original(path):
            return
        if self._has(_DATA):
            what = "a copy, which may be torn" if is_current else "from another boot or format"
            log.warning("the index %s is %s: starting an empty one", self.path, what)
            self._unlink()
        new_path = os.path.join(self.path, _NEW_STAMP)
        with open(self._make(_NEW_STAMP, os.O_WRONLY | os.O_TRUNC)[0], "w") as file:
            file.write(self._stamp)
        os.replace(new_path, stamp_path)

    def _note_inodes(self) -> None:
        if not _is_original(Path(self.path)):
            with contextlib.suppress(FileNotFoundError):  # it may be a hard link to another root's
                os.unlink(os.path.join(self.path, _INODES))
            with open(self._make(_INODES, os.O_WRONLY)[0], "w") as file:
                file.write(_inodes(Path(self.path)))

    def _open_env(self) -> OpenEnvironment:
        locks, is_new_lock = self._make(_LMDB_LOCK, os.O_RDWR)
        try:
            os.posix_fallocate(locks, 0, _READERS_BYTES)
            of_locks = os.fstat(locks)
        finally:
            close_file(locks)
        data, is_new = self._make(_DATA, os.O_RDWR)
        try:
            if is_new != is_new_lock:
                raise self._being_removed()
            identity = tuple(map(_device_and_inode, (os.fstat(data), of_locks, os.fstat(self._lock_file))))
            return self._open_files(identity)
        finally:
            os.close(data)  # not before LMDB has the same file open: no other one has got its inode

    def _open_files(self, identity: Identity) -> OpenEnvironment:
        """Open the files with LMDB, which opens them by their names. identity: those that it must find there."""
        open_it = partial(
            lmdb.open,
            self.path,
            map_size=self._map_bytes,
            max_dbs=len(self._databases),
            max_readers=_READERS_MAX,
            mode=0o600,
            sync=False,
            metasync=False,
            writemap=False,
            lib_version=0,
        )
        try:
            env = open_it()
            close = env.close
        except lmdb.LockError:
            env, close = open_with_another_id(open_it)
        try:
            env.reader_check()
            if self._identity() != identity:
                raise self._being_removed()
            opened = OpenEnvironment(env, identity, close)
            # The first read of a missing page of a truncated file would be a SIGBUS.
            data_bytes = os.stat(os.path.join(self.path, _DATA)).st_size
            if data_bytes < opened.used_bytes():
                raise lmdb.CorruptedError(f"{data_bytes} bytes, {opened.used_bytes()} are in use")
            opened.open_databases(self._databases)
            return opened
        except BaseException:
            close()
            raise

    def _being_removed(self) -> lmdb.CorruptedError:
        """Unlink data and lock file, of which others may have one open beside another file, and return the error."""
        self._unlink()
        return lmdb.CorruptedError("its files are being removed")

    def _make(self, name: str, access: int) -> tuple[int, bool]:
        """Open one of the files; create it if it is missing. Return its descriptor, and whether it was created. Raises
        OSError."""
        path = os.path.join(self.path, name)
        while True:
            with contextlib.suppress(FileExistsError):
                descriptor = os.open(path, _OPENING | access | os.O_CREAT | os.O_EXCL, 0o600)
                hand_over(path)
                return descriptor, True
            with contextlib.suppress(FileNotFoundError):  # it was removed since then
                return os.open(path, _OPENING | access), False

    def _discard(self, opened: OpenEnvironment) -> None:
        """Unlink the files if they are still those of `opened`; the next access starts an empty index."""
        log.warning("the index %s is broken: starting an empty one", self.path)
        deadline = time.monotonic() + self._timeout_s
        with contextlib.suppress(OSError, IndexUnavailable), held(self._writing, deadline):
            if opened is self._opened and opened.identity == self._identity():
                with file_lock(self._lock_file, deadline):
                    self._unlink()

    def _unlink(self) -> None:
        for name in (_DATA, _LMDB_LOCK):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.path, name))


def has_stamp(path: Path, stamp: str) -> bool:
    """Return whether `path` has an index with this stamp, which is no copy. Writes nothing."""
    return index_stamp(path) == stamp and _is_original(path)


def _inodes(path: Path) -> str:
    """Return the inodes of data and lock file. Not the devices: their numbers may change with a mount. Hard links are
    told apart. Raises OSError."""
    found = [os.stat(path / name) for name in (_DATA, _LMDB_LOCK)]
    return " ".join(str(one.st_ino) if one.st_nlink == 1 else "linked" for one in found)


def _is_original(path: Path) -> bool:
    """Return whether data and lock file are those that an index made there, and have no other name."""
    try:
        inodes = _inodes(path)
        return "linked" not in inodes and (path / _INODES).read_text(encoding="ascii", errors="replace") == inodes
    except OSError:
        return False


_registry: dict[str, SharedEnvironment] = {}
_registry_lock = threading.Lock()


def attach(
    path: str, map_bytes: int, timeout_s: float, stamp: str, databases: tuple[str, ...], reopen: Reopen | None = None
) -> SharedEnvironment:
    """Return the open environment of `path` in this process. Release it with `detach`.

    reopen: called before files that were removed or replaced are opened again, to check the root around the folder and
    create it if it is missing. May raise TierUnavailable. None: parents of the folder are never created again.

    Only the first user's arguments count. Raises ConfigError, IndexUnavailable.
    """
    real_path = os.path.realpath(path)
    with _registry_lock:
        shared = _registry.get(real_path)
        if shared is None:
            shared = SharedEnvironment(real_path, map_bytes, timeout_s, stamp, databases, reopen)
        shared.users += 1
        try:
            shared.open()
        except BaseException:
            shared.users -= 1
            if not shared.users:
                shared.close()
            raise
        _registry[real_path] = shared
        return shared


def detach(shared: SharedEnvironment) -> None:
    with _registry_lock:
        shared.users -= 1
        if not shared.users:
            _registry.pop(shared.path)
            with shared.quiet():
                shared.close()


_quiet_for_fork = contextlib.ExitStack()


def _before_fork() -> None:
    _quiet_for_fork.enter_context(_registry_lock)
    for shared in _registry.values():
        _quiet_for_fork.enter_context(shared.quiet())


def _after_fork() -> None:
    # `pop_all` empties it before the locks are released: another forking thread fills it again.
    _quiet_for_fork.pop_all().close()


def _after_fork_in_child() -> None:
    # The map and the descriptors are the parent's, and LMDB's locks are not inherited. No transaction ran at the fork,
    # so closing affects only this process's copies. The next use opens the files again.
    for shared in _registry.values():
        shared.close()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
