"""Substitute process id for LMDB, where processes of two containers have the same id.

LMDB identifies readers by process id: it locks the byte of its lock file with this number, and refuses a process whose
byte is locked. Two containers of one image often run the same processes with the same ids. LMDB calls getpid() when it
opens an environment, and again when it closes one, to free the readers of that id. `open_with_another_id` replaces
getpid() for the time of either call, only in the import table of LMDB's extension module, by a function that sets upper
bits which no process id has.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import random
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import lmdb

log = logging.getLogger("kvtier")

PID_BITS = 22  # of Linux's largest process id (PID_MAX_LIMIT)
SALTS = 511  # values of the bits between those of an id and the sign of a 32-bit integer
TRIES = 8  # random salts that are tried: another process may use the same one
_MAPS = "/proc/self/maps"
_ELF64_LITTLE = b"\x7fELF\x02\x01"
_RELOCATIONS = 4  # section type SHT_RELA
_SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, info, align, entry size
_RELOCATION = struct.Struct("<QQq")  # offset, info, addend
_SYMBOL_BYTES = 24

_replacing = threading.Lock()


def open_with_another_id(open_it: Callable[[], lmdb.Environment]) -> tuple[lmdb.Environment, Callable[[], None]]:
    """Return the environment that `open_it` opens, and the function that closes it. Raises lmdb.LockError where the id
    cannot be replaced (another executable format, LMDB through cffi), and what `open_it` raises."""
    places = _places()
    if not places:
        raise lmdb.LockError("another process has this one's id, and it cannot be replaced here")
    fault: lmdb.LockError | None = None
    for salt in random.SystemRandom().sample(range(1, SALTS + 1), TRIES):
        try:
            with _replaced(places, salt):
                env = open_it()
        except lmdb.LockError as error:
            fault = error
            continue
        # Never freed: the interpreter's end would close it under the process's own id.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(env))
        log.info("a process of another container has this process's id %d; LMDB uses another id", os.getpid())
        return env, partial(_close, env, places, salt)
    assert fault is not None
    raise fault


def _close(env: lmdb.Environment, places: list[ctypes._Pointer[ctypes.c_void_p]], salt: int) -> None:
    """Close an environment under the id that it was opened with. Under the process's own id, LMDB would free the
    readers of the other process with this id, and overwrite pages that they read."""
    with _replaced(places, salt):
        env.close()


@contextmanager
def _replaced(places: list[ctypes._Pointer[ctypes.c_void_p]], salt: int) -> Iterator[None]:
    """Make LMDB's getpid() return another id, also in a forked child."""
    instead = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: salt << PID_BITS | os.getpid())
    with _replacing:
        before = [place[0] for place in places]
        try:
            for place in places:
                place[0] = ctypes.cast(instead, ctypes.c_void_p).value
            yield
        finally:
            for place, value in zip(places, before, strict=True):
                place[0] = value


def _places() -> list[ctypes._Pointer[ctypes.c_void_p]]:
    """Return pointers to the addresses of getpid() in LMDB's extension module; none where they cannot be found."""
    try:
        path = importlib.import_module("lmdb.cpython").__file__ or ""
        with open(path, "rb") as file:
            offsets = list(_imports(file.read(), b"getpid"))
        with open(_MAPS, encoding="utf-8", errors="surrogateescape") as maps:
            base = min(int(line.partition("-")[0], 16) for line in maps if line.rstrip("\n").endswith(f" {path}"))
    except (ImportError, OSError, ValueError, struct.error, IndexError):
        return []
    return [ctypes.cast(base + offset, ctypes.POINTER(ctypes.c_void_p)) for offset in offsets]


def _imports(image: bytes, name: bytes) -> Iterator[int]:
    """Yield the offsets in an ELF image of the addresses of an imported function. Raises struct.error, ValueError,
    IndexError for malformed files."""
    if not image.startswith(_ELF64_LITTLE):
        return
    (table,) = struct.unpack_from("<Q", image, 0x28)
    entry_bytes, count = struct.unpack_from("<HH", image, 0x3A)
    sections = [_SECTION.unpack_from(image, table + number * entry_bytes) for number in range(count)]
    for section in sections:
        if section[1] != _RELOCATIONS or not section[6]:
            continue
        symbols = sections[section[6]]
        names = sections[symbols[6]][4]
        for at in range(section[4], section[4] + section[5], _RELOCATION.size):
            offset, info, _ = _RELOCATION.unpack_from(image, at)
            (name_at,) = struct.unpack_from("<I", image, symbols[4] + _SYMBOL_BYTES * (info >> 32))
            start = names + name_at
            if info >> 32 and image[start : image.index(b"\0", start)] == name:
                yield offset
