"""An LMDB environment that is safe to share: by threads, by several users in one process, by processes, over fork.

Holds no knowledge of what is stored. Seven things stand between a caller and LMDB:

- One environment a process and folder, counted by reference: LMDB's POSIX locks forbid a second open (and py-lmdb
  refuses it), while both halves of a connector may live in one process.
- A writer lock of our own (a POSIX record lock on `lock`), taken with a deadline: LMDB's own waits for ever, for
  example behind a stopped process (I10). The kernel drops it when its owner is killed; LMDB's mutex is robust too.
- Quiet at fork: `os.register_at_fork` waits for running transactions, and the child closes what it inherited.
- Throwing away: the files are written without fsync, so those of another boot are not trusted, nor those that LMDB
  calls corrupt, nor data without the locks that it was used with: who has it open may have those still. Whoever throws
  them away unlinks them under the writer lock; the others see that the files under the path are not those that they
  have open, and open the new ones.
- A reserve: LMDB writes new pages even to remove, so on a full disk nothing could be evicted any more. What adds
  keeps some allocated bytes behind the pages in use, for what does not.
- Room for LMDB's table of readers, which it maps and writes: on a full disk the first touch of a hole is a SIGBUS.
- Another process id where a process of another container has this one's (`lmdb_pid`).

Never open lock.mdb while LMDB has it open: closing the descriptor would drop LMDB's locks.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar

import lmdb

from kvtier.errors import ConfigError, IndexUnavailable, TierUnavailable
from kvtier.index.lmdb.locks import file_lock, held
from kvtier.index.lmdb.process import open_with_another_id
from kvtier.index.lmdb.view import Identity, Opened, Work
from kvtier.runtime.file_descriptors import close_file
from kvtier.storage.root_owner import INDEX_STAMP, index_stamp
from kvtier.storage.safe_open import hand_over, make_private, remove_strange

log = logging.getLogger("kvtier")

T = TypeVar("T")
Reopen = Callable[[], object]

_FILES = _DATA, _LMDB_LOCK, _LOCK, _STAMP, _NEW_STAMP = (
    "data.mdb",
    "lock.mdb",
    "lock",
    INDEX_STAMP,
    f"{INDEX_STAMP}.new",
)
_OPENING = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_READERS_MAX = 1024  # one a running read transaction; 64 bytes each
_READERS_BYTES = 64 * (_READERS_MAX + 2)  # of lock.mdb, with its head
_GROWTH_MAX = 8  # a full map is doubled at most to this many times the configured size
RESERVE_BYTES = 16 << 20
"""Two removals of 512 records from anywhere in the index write 5 MB before LMDB takes freed pages again."""

_BROKEN = (
    lmdb.InvalidError,
    lmdb.CorruptedError,
    lmdb.VersionMismatchError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.BadTxnError,  # what the first read of a transaction says when the root of a named database is damaged
)
_WRONG_PATH = (PermissionError, NotADirectoryError, FileExistsError, IsADirectoryError)


class SharedEnvironment:
    """All users of one folder in this process share one of these; see `attach`."""

    def __init__(
        self, path: str, map_bytes: int, timeout_s: float, stamp: str, databases: tuple[str, ...], reopen: Reopen | None
    ) -> None:
        """stamp: what must stand in the file `boot-id` for the files to be trusted. reopen: see `attach`."""
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
        self._opened: Opened | None = None
        self._lock_file = -1
        # Order: writing, then reading. `reading` guards `_opened` and the map under a read transaction; it is held
        # for microseconds (the interpreter's lock would be, anyway), `writing` while other processes write.
        self._writing = threading.Lock()
        self._reading = threading.Lock()

    def open(self) -> None:
        """Opens it now, so that what is wrong shows at start-up. Raises ConfigError, IndexUnavailable."""
        try:
            self._ready(self._deadline())
        except _WRONG_PATH as error:
            raise ConfigError("index.path", self.path, f"{error.strerror}: {self._whose()}") from None
        except lmdb.LockError as error:
            # LMDB marks readers by process id, found this process's own taken, and could not be given another one.
            fix = (
                "a process with this one's id, so in another container, uses it: let both share one namespace of "
                f"process ids ({error})"
            )
            raise ConfigError("index.path", self.path, fix) from None
        except lmdb.MemoryError as error:
            fix = f"this process has no room for a map of that size ({error}): lower it, or raise ulimit -v"
            raise ConfigError("index.map_bytes", self._map_bytes, fix) from None
        except (lmdb.Error, OSError) as error:
            raise self._unavailable(None, error) from error

    def _whose(self) -> str:
        """Say what to do about a folder that cannot be used: another user may have made its files."""
        for path in (self.path, *(os.path.join(self.path, name) for name in _FILES)):
            with contextlib.suppress(OSError):
                user = os.lstat(path).st_uid
                if user != os.geteuid():
                    return f"{path} is user {user}'s, this is user {os.geteuid()}: chown it, or run this as user {user}"
        return "name a folder that may be written"

    def read(self, work: Work[T], *, at_once: bool = False) -> T:
        """Runs `work` in a read transaction. Raises IndexUnavailable.

        at_once: never waits for what the folder lies in, whose file system may take longer than any timeout of ours:
        where files that are gone would be opened anew behind `reopen`, that is left to others.
        """
        deadline, opened = self._deadline(), None
        try:
            self._ready(deadline, at_once)
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
        """Runs `work` in a write transaction, perhaps more than once (the map may have to grow first): it must change
        nothing but the transaction. Raises IndexUnavailable.

        adds: `work` is what fills disk and map. It is refused (IndexUnavailable) while there is still room for the
        rest: leases, recency, and removing, which makes room.
        """
        deadline, opened = self._deadline(), None
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
        """Called when nothing runs in it: by its last user, before it is opened anew, and by a forked child."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None
        if self._lock_file >= 0:
            close_file(self._lock_file)
            self._lock_file = -1

    @contextlib.contextmanager
    def quiet(self) -> Iterator[None]:
        """While this is held no transaction runs in this process."""
        with self._writing, self._reading:
            yield

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s

    def _unavailable(self, opened: Opened | None, error: Exception) -> IndexUnavailable:
        if opened is not None and isinstance(error, _BROKEN):
            self._discard(opened)
        return IndexUnavailable(f"index {self.path}: {error}")

    def _write_locked(self, work: Work[T], opened: Opened, deadline: float, map_bytes_max: int) -> T:
        def resize(map_bytes: int) -> None:
            with held(self._reading, deadline):  # a new map under a running read would end it
                opened.env.set_mapsize(map_bytes)

        try:
            return opened.run(work, write=True)
        except lmdb.MapResizedError:  # another process has grown it
            resize(0)
        except lmdb.MapFullError:  # pages may be held back for readers that were killed
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

    def _reserve(self, opened: Opened) -> None:
        """Sees to it that between half and all of the reserve is allocated behind the last page in use. Raises
        OSError when the disk has not got it."""
        used = opened.used_bytes()
        path = os.path.join(self.path, _DATA)
        if os.stat(path).st_size < used + RESERVE_BYTES // 2:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.posix_fallocate(descriptor, used, RESERVE_BYTES)
            finally:
                close_file(descriptor)

    def _ready(self, deadline: float, at_once: bool = False) -> None:
        """Opens what lies under the path, unless that is what is open. Needs no lock, takes both when it opens."""
        if not self._is_current():
            if at_once and self._reopen is not None:
                raise IndexUnavailable(f"index {self.path}: it is gone, and will be opened anew in the background")
            with held(self._writing, deadline):
                self._current(deadline)

    def _is_current(self) -> bool:
        opened = self._opened
        return opened is not None and opened.identity == self._identity()

    def _current(self, deadline: float) -> Opened:
        """What is open, if its files are still those under the path; else opens those. Needs `writing`: the lock file
        is reopened too, which drops this process's lock on it."""
        if self._opened is None or not self._is_current():
            with held(self._reading, deadline):
                self.close()
            if not self.users:
                raise IndexUnavailable(f"index {self.path}: closed")
            self._make_folder()  # may take long: nobody who reads waits for it
            with held(self._reading, deadline):
                self._opened = self._open(deadline)
        return self._opened

    def _identity(self) -> Identity | None:
        """Of the files that all must share: with other locks than theirs nobody is kept out. None: one is missing."""
        try:
            found = [os.stat(path) for path in self._shared_paths]
        except FileNotFoundError:
            return None
        return tuple((status.st_dev, status.st_ino) for status in found)

    def _has(self, name: str) -> bool:
        return os.path.lexists(os.path.join(self.path, name))

    def _open(self, deadline: float) -> Opened:
        if os.stat(self.path).st_mode & 0o077:
            os.chmod(self.path, 0o700)
        remove_strange(self.path, _FILES)
        self._lock_file = self._make(_LOCK, os.O_RDWR)
        with file_lock(self._lock_file, deadline):
            self._check_stamp()
            if self._has(_DATA) and not self._has(_LMDB_LOCK):
                log.warning("the index %s has lost its locks: starting an empty one", self.path)
                self._unlink()
            try:
                opened = self._open_env()
            except _BROKEN as error:
                log.warning("the index %s is broken (%s): starting an empty one", self.path, error)
                self._unlink()
                opened = self._open_env()
        self._was_opened = True
        return opened

    def _make_folder(self) -> None:
        """With what is missing above it, at the start. Later that is whoever's who can `reopen` what it lies in: a file
        system that is not mounted any more must not be taken for an empty one."""
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
        """Throws away what another boot of this machine, or another format of this index, has left."""
        stamp_path = os.path.join(self.path, _STAMP)
        try:
            with open(stamp_path, encoding="ascii", errors="replace") as file:
                stamp = file.read()
        except FileNotFoundError:
            stamp = ""
        if stamp == self._stamp:
            return
        if self._has(_DATA):
            log.warning("the index %s is of another boot or format: starting an empty one", self.path)
            self._unlink()
        new_path = os.path.join(self.path, _NEW_STAMP)
        with open(self._make(_NEW_STAMP, os.O_WRONLY | os.O_TRUNC), "w") as file:
            file.write(self._stamp)
        os.replace(new_path, stamp_path)

    def _open_env(self) -> Opened:
        self._allocate_readers()
        os.close(self._make(_DATA, os.O_RDWR))
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
            identity = self._identity()
            if identity is None:
                raise IndexUnavailable(f"index {self.path}: somebody removes its files")
            opened = Opened(env, identity, close)
            # A file that was cut off would be a SIGBUS on the first page that is missing.
            data_bytes = os.stat(os.path.join(self.path, _DATA)).st_size
            if data_bytes < opened.used_bytes():
                raise lmdb.CorruptedError(f"{data_bytes} bytes, {opened.used_bytes()} are in use")
            opened.open_databases(self._databases)
            return opened
        except BaseException:
            close()
            raise

    def _allocate_readers(self) -> None:
        """Raises OSError when the disk has no room for them."""
        descriptor = self._make(_LMDB_LOCK, os.O_RDWR)
        try:
            os.posix_fallocate(descriptor, 0, _READERS_BYTES)
        finally:
            close_file(descriptor)

    def _make(self, name: str, access: int) -> int:
        """Open one of the files, made if it is missing. Raises OSError."""
        path = os.path.join(self.path, name)
        try:
            descriptor = os.open(path, _OPENING | access | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return os.open(path, _OPENING | access | os.O_CREAT, 0o600)
        hand_over(path)
        return descriptor

    def _discard(self, opened: Opened) -> None:
        """Unlinks the files if they are still those of `opened`; whoever comes next starts an empty index."""
        log.warning("the index %s is broken: starting an empty one", self.path)
        deadline = self._deadline()
        with contextlib.suppress(OSError, IndexUnavailable), held(self._writing, deadline):
            if opened is self._opened and opened.identity == self._identity():
                with file_lock(self._lock_file, deadline):
                    self._unlink()

    def _unlink(self) -> None:
        for name in (_DATA, _LMDB_LOCK):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.path, name))


def has_stamp(path: Path, stamp: str) -> bool:
    """Return whether `path` has the files of an index, with this stamp. Writes nothing."""
    return index_stamp(path) == stamp and all((path / name).exists() for name in (_DATA, _LMDB_LOCK))


_registry: dict[str, SharedEnvironment] = {}
_registry_lock = threading.Lock()


def attach(
    path: str, map_bytes: int, timeout_s: float, stamp: str, databases: tuple[str, ...], reopen: Reopen | None = None
) -> SharedEnvironment:
    """The environment of `path` in this process, opened. Give it back with `detach`.

    reopen: called before files that are gone, or are others by now, are opened: what the folder lies in is to be looked
    at first, and made if it is missing. It may raise TierUnavailable; then there is no index. None: nothing above the
    folder is ever made again.

    Users after the first get what the first asked for. Raises ConfigError, IndexUnavailable.
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
    # Emptied before the locks open: another thread that forks fills it again.
    _quiet_for_fork.pop_all().close()


def _after_fork_in_child() -> None:
    # The map and the descriptors are the parent's, and LMDB's locks are not inherited. As no transaction ran at the
    # fork, closing touches nothing but this process's copies. The next use opens anew.
    for shared in _registry.values():
        shared.close()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
