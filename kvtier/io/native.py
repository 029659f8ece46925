"""Native library, loaded with ctypes, and its checksum functions. `ring.py`, `ranges.py` and `cuda.py` call the
others.

`_native.abi3.so` is built from `native/*.cpp` when the package is installed, beside this file.
"""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

from kvtier.errors import KVTierError

_LIBRARY_NAME = "_native.abi3.so"


def _load() -> ctypes.CDLL:
    path = Path(__file__).with_name(_LIBRARY_NAME)
    if not path.exists():
        raise KVTierError(
            f"kvtier: its native library is missing ({path}). It is built when kvtier is installed: run "
            "`pip install -e .` in a checkout, or install kvtier again (the compiler is $CXX, c++, g++ or clang++; "
            "without one the build takes the ziglang package), or install a wheel from `make wheel`"
        )
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise KVTierError(f"kvtier: {path} cannot be loaded ({error}): install kvtier again on this machine") from error


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    c = ctypes
    handle = c.c_void_p
    for name, result, arguments in (
        ("kvtier_instruction_sets", c.c_int, []),
        ("kvtier_instruction_set", c.c_char_p, [c.c_int]),
        ("kvtier_checksum", c.c_uint64, [c.c_int, c.c_void_p, c.c_size_t, c.c_uint64, c.c_uint64]),
        (
            "kvtier_slab_checksums",
            None,
            [c.c_void_p, c.c_size_t, c.c_uint32, c.c_char_p, c.c_uint32, c.c_uint32, c.c_void_p],
        ),
        ("kvtier_reads_issued", c.c_uint64, []),
        ("kvtier_ring_open", c.c_int, [c.c_char_p, c.POINTER(handle), c.c_char_p, c.c_size_t]),
        ("kvtier_ring_widen", c.c_int, [handle, c.c_int64, c.c_char_p, c.c_size_t]),
        ("kvtier_ring_close", c.c_int, [handle, c.c_int64]),
        ("kvtier_submit_batches", c.c_int, [handle, c.c_char_p, c.c_char_p, c.c_size_t, c.c_char_p, c.c_void_p]),
        ("kvtier_batches_states", None, [c.c_char_p, c.c_size_t, c.c_char_p]),
        ("kvtier_batches_free", None, [c.c_char_p, c.c_size_t]),
        ("kvtier_batch_wait", c.c_int, [handle, c.c_int64]),
        ("kvtier_batch_cancel", None, [handle]),
        ("kvtier_batch_results", c.c_int, [handle, c.c_void_p, c.c_void_p, c.c_void_p]),
        ("kvtier_slots_open", c.c_int, [c.c_void_p, c.POINTER(handle), c.c_char_p, c.c_size_t]),
        ("kvtier_slots_prepare", c.c_int, [handle, c.c_char_p, c.c_size_t]),
        ("kvtier_slots_free", None, [handle]),
        (
            "kvtier_range_start",
            c.c_int,
            [handle, *[c.c_void_p, c.c_size_t] * 3, c.POINTER(handle), c.c_char_p, c.c_size_t],
        ),
        ("kvtier_range_wait", c.c_int, [handle, c.c_int64]),
        ("kvtier_range_cancel", None, [handle]),
        (
            "kvtier_range_progress",
            None,
            [handle, *[c.POINTER(c.c_uint64)] * 2, c.POINTER(c.c_uint32), c.POINTER(c.c_uint64)],
        ),
        (
            "kvtier_range_failure",
            c.c_int,
            [handle, c.POINTER(c.c_uint32), c.POINTER(c.c_uint64), c.c_char_p, c.c_size_t],
        ),
        ("kvtier_range_free", None, [handle]),
        ("kvtier_resident_bytes", c.c_int64, [c.c_int, c.c_uint64, c.c_uint64]),
        ("kvtier_cuda_load", None, [c.c_char_p]),
        ("kvtier_cuda_version", c.c_int, [c.POINTER(c.c_int), c.c_char_p, c.c_size_t]),
        ("kvtier_cuda_relax_thread", c.c_int, [c.c_char_p, c.c_size_t]),
        ("kvtier_cuda_launch", c.c_int, [c.c_char_p, c.c_char_p, c.c_size_t]),
        ("kvtier_cuda_pin", c.c_int, [c.c_void_p, c.c_size_t, c.c_int, c.c_char_p, c.c_size_t]),
        ("kvtier_cuda_unpin", c.c_int, [c.c_void_p, c.c_char_p, c.c_size_t]),
    ):
        try:
            function = getattr(lib, name)
        except AttributeError as error:
            raise KVTierError(
                f"kvtier: its native library is of another version ({error}): install it again"
            ) from error
        function.restype = result
        function.argtypes = arguments
    return lib


library = _declare(_load())  # each call releases the interpreter lock
# Calls that keep the interpreter lock, for functions that take microseconds and never wait: getting the lock back from
# a busy engine takes a hundred times as long.
quick = _declare(ctypes.PyDLL(str(Path(__file__).with_name(_LIBRARY_NAME))))


class Message:
    """Buffer for CUDA's error message: `*message.room` are a call's last two arguments."""

    def __init__(self) -> None:
        self._text = ctypes.create_string_buffer(512)
        self.room = (self._text, len(self._text))

    def of(self, error: int) -> str:
        """Return CUDA's message, or the text of the errno that the call returned."""
        return self._text.value.decode(errors="replace") if error == errno.EREMOTEIO else os.strerror(error)


def instruction_sets() -> dict[str, int]:
    """Return name -> number of each checksum version that this processor runs, slowest first."""
    names = ((library.kvtier_instruction_set(i), i) for i in range(library.kvtier_instruction_sets()))
    return {name.decode(): i for name, i in names if name is not None}


def instruction_set() -> str:
    """Return the checksum version in use: "avx512", "avx2" or "scalar"."""
    return str(library.kvtier_instruction_set(-1).decode())


def reads_issued() -> int:
    """Return the number of read system calls of this process's rings; adjacent reads share one."""
    return int(quick.kvtier_reads_issued())


def checksum(
    buffer_address: int, n_bytes: int, seed: int, first_pair: int = 0, *, instruction_set: str | None = None
) -> int:
    """Sum `n_bytes` (a multiple of 8) of memory. With `first_pair`, the result is the summand of one piece of a slab.

    See `kvtier.format.checksum.slab_checksum`. `instruction_set`: one of `instruction_sets()`, by default the fastest.
    """
    if n_bytes % 8 or n_bytes < 0:
        raise ValueError(f"{n_bytes} bytes are not whole pairs of 8")
    which = -1 if instruction_set is None else instruction_sets()[instruction_set]
    return int(library.kvtier_checksum(which, buffer_address, n_bytes, seed, first_pair))


def slab_checksums(
    address: int, slab_bytes: int, n_slabs: int, key: bytes, first_head: int, first_layer: int
) -> tuple[int, ...]:
    """Return the checksums of `n_slabs` consecutive slabs at `address`, in head order."""
    if slab_bytes % 8 or slab_bytes <= 0 or len(key) != 16:
        raise ValueError(f"slabs of {slab_bytes} bytes under a key of {len(key)} bytes")
    sums = (ctypes.c_uint64 * n_slabs)()
    library.kvtier_slab_checksums(address, slab_bytes, n_slabs, key, first_head, first_layer, sums)
    return tuple(sums)
