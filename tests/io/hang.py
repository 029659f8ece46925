"""A read that hangs in the kernel until it is let go: its target is memory whose page faults wait for a userfaultfd."""

import ctypes
import fcntl
import os
import platform
import select

import pytest

from kvtier.format.geometry import PAGE_BYTES
from kvtier.io.ring import AlignedBuffer, Batch, ReadOp, Ring, WriteOp

from records import TIMEOUT_S

_SYSCALL = {"x86_64": 323, "aarch64": 282}
_API = (0xAA, 0, 0)  # struct uffdio_api: api, features, ioctls
_UFFDIO_API, _UFFDIO_REGISTER = 0xC018AA3F, 0xC020AA00
_REGISTER_MISSING = 1


class HungRead:
    """`op` reads one page of /dev/zero and does not return before `release`. Keeps its own memory alive.

    `long_op` reads four pages, of which the first hangs. `write_op` writes a record of which the header page hangs.
    """

    def __init__(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._faults = libc.syscall(_SYSCALL.get(platform.machine(), -1), os.O_CLOEXEC | os.O_NONBLOCK)
        if self._faults < 0:
            pytest.skip(f"a hung read needs userfaultfd: {os.strerror(ctypes.get_errno())}")
        fcntl.ioctl(self._faults, _UFFDIO_API, (ctypes.c_uint64 * 3)(*_API))
        self._target = AlignedBuffer(4 * PAGE_BYTES)
        region = (ctypes.c_uint64 * 4)(self._target.address, PAGE_BYTES, _REGISTER_MISSING, 0)
        fcntl.ioctl(self._faults, _UFFDIO_REGISTER, region)
        self._zeros = os.open("/dev/zero", os.O_RDONLY)
        self.op = ReadOp(self._zeros, 0, self._target.address, PAGE_BYTES, 1, bytes(16), 0, 0, None)
        self.long_op = self.op._replace(n_slabs=4)

    def write_op(self, fd: int) -> WriteOp:
        return WriteOp(fd, 0, self._target.address, PAGE_BYTES, 3, bytes(16), 0, 0)

    def wait_until_hanging(self, timeout_s: float) -> None:
        """A thread is in the read now: its page fault has been reported."""
        poll = select.poll()
        poll.register(self._faults, select.POLLIN)
        assert poll.poll(timeout_s * 1000) == [(self._faults, select.POLLIN)]

    def release(self) -> None:
        """The fault is served, the read returns a page of zeros."""
        if self._faults >= 0:
            os.close(self._faults)
            self._faults = -1


def blocked(ring: Ring, hung: HungRead) -> Batch:
    """Submit a batch in which the single thread of `ring` hangs."""
    batch = ring.submit([hung.op])
    hung.wait_until_hanging(TIMEOUT_S)
    return batch
