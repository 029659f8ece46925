"""Another process id for LMDB, for processes of two containers that have the same one.

LMDB tells readers by process id: it locks the byte of its lock file that has this number, and refuses a process whose
number is taken. Two containers of one image often start the same processes with the same ids. LMDB asks for the id with
getpid() as it opens an environment, and keeps it, and asks again as it closes one, to free the readers of that id.
`open_with_another_id` replaces that function, in LMDB's table of imported functions alone and for the time of either
call, by one that sets upper bits, which no id has.
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
SALTS = 511  # values of the bits above, below the sign of a 32-bit integer
TRIES = 8  # drawn salts, each of which another process may have too
_MAPS = "/proc/self/maps"
_ELF64_LITTLE = b"\x7fELF\x02\x01"
_RELOCATIONS = 4  # section type SHT_RELA
_SECTION = struct.Struct("<IIQQQQIIQQ")  # name, type, flags, address, offset, size, link, info, align, entry size
_RELOCATION = struct.Struct("<QQq")  # offset, info, addend
_SYMBOL_BYTES = 24

_replacing = threading.Lock()


def open_with_another_id(open_it: Callable[[], lmdb.Environment]) -> tuple[lmdb.Environment, Callable[[], None]]:
    """Return the environment that `open_it` opens, and what closes it. Raises lmdb.LockError where the id cannot be
    replaced (another machine's format, LMDB through cffi), and what `open_it` raises."""
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
        # Freed at the interpreter's end, it would be closed under the process's own id.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(env))
        log.info("a process of another container has this one's id %d; LMDB uses another", os.getpid())
        return env, partial(_close, env, places, salt)
    assert fault is not None
    raise fault


def _close(env: lmdb.Environment, places: list[ctypes._Pointer[ctypes.c_void_p]], salt: int) -> None:
    """Close an environment under the id that it was opened with: under its own id, the readers of the other process
    that has this id would be freed, and pages that they read be overwritten."""
    with _replaced(places, salt):
        env.close()


@contextmanager
def _replaced(places: list[ctypes._Pointer[ctypes.c_void_p]], salt: int) -> Iterator[None]:
    """Have LMDB see another process id, also in a forked child."""
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
    """Find the places where LMDB's own extension module has the address of getpid()."""
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
    """Offsets, from where the image is mapped, of the addresses of an imported function. Raises struct.error,
    ValueError, IndexError for what is no such file."""
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
