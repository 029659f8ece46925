"""A KvikIO over host memory: the calls that kvtier makes of it, with the traps of the real one.

A future gives its answer once; a read at the end of the file is a RuntimeError; a file that is freed while a task uses
it is caught; each task must be a whole pread.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType
from typing import Any


class FakeFuture:
    def __init__(self, future: Future[int]) -> None:
        self._future: Future[int] | None = future

    def done(self) -> bool:
        assert self._future is not None, "the future was used up"
        return self._future.done()

    def get(self) -> int:
        assert self._future is not None, "the future was used up"
        future, self._future = self._future, None
        return future.result()


class FakeKvikio(ModuleType):
    """`before` runs in each task, with its file offset: it may wait, raise, or return how many bytes to read.

    refuses_to_free: ids of files, "buffer" (the registered one), "bounce": giving these back raises.
    """

    def __init__(self, threads: int = 4) -> None:
        super().__init__("kvikio")
        self.settings: dict[str, Any] = {}
        self.registered: list[int] = []
        self.opened: list[FakeCuFile] = []
        self.before: Callable[[int], int | None] = lambda offset: None
        self.reads = 0
        self.freed = 0
        self.refuses_to_free: set[object] = set()
        self.pool = ThreadPoolExecutor(threads)
        self.lock = threading.Lock()
        self.compat, self.gds = True, False
        self.defaults = self  # its functions stand below
        self.cufile_driver = self
        self.__name__ = "kvikio"

    def CuFile(self, path: str, flags: str = "r") -> FakeCuFile:
        assert flags == "r"
        file = FakeCuFile(self, path)
        self.opened.append(file)
        return file

    def set(self, config: dict[str, Any]) -> None:
        self.settings |= config

    def get(self, name: str) -> Any:
        return {"is_gds_available": self.gds}[name]

    def libcufile_version(self) -> tuple[int, int]:
        return (1, 16)

    def is_compat_mode_preferred(self) -> bool:
        return self.compat

    def refuse(self, what: object) -> None:
        if what in self.refuses_to_free:
            raise RuntimeError("KvikIO failure at: shim/utils.hpp:111: CUDA_ERROR_ILLEGAL_ADDRESS")

    def bounce_buffer_free(self) -> int:
        self.refuse("bounce")
        self.freed += 1
        return 0

    def memory_register(self, buffer: Any) -> None:
        self.registered.append(buffer.__cuda_array_interface__["data"][0])

    def memory_deregister(self, buffer: Any) -> None:
        self.refuse("buffer")
        self.registered.remove(buffer.__cuda_array_interface__["data"][0])


class FakeCuFile:
    def __init__(self, kvikio: FakeKvikio, path: str) -> None:
        self._kvikio = kvikio
        self._fd = os.open(path, os.O_RDONLY)
        self.closed = False
        self.tasks = 0

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        assert not self.tasks, "closed while a task uses it"
        self._kvikio.refuse(id(self))
        self.closed = True
        os.close(self._fd)

    def pread(
        self, buf: Any, size: int | None = None, file_offset: int = 0, task_size: int | None = None
    ) -> FakeFuture:
        array = buf.__cuda_array_interface__
        assert array["typestr"] == "|u1" and array["shape"] == (size,) and array["version"] == 3
        assert size is not None and task_size is not None and task_size >= size, "more than one task"
        with self._kvikio.lock:
            self.tasks += 1
            self._kvikio.reads += 1
        return FakeFuture(self._kvikio.pool.submit(self._read, array["data"][0], size, file_offset))

    def _read(self, address: int, size: int, offset: int) -> int:
        try:
            wanted = self._kvikio.before(offset)
            got = os.pread(self._fd, size if wanted is None else wanted, offset)
            if not got:
                raise RuntimeError("KvikIO failure at: posix_io.hpp:173: POSIX error on pread: EOF")
            time.sleep(0.001)
            ctypes.memmove(address, got, len(got))
            return len(got)
        finally:
            with self._kvikio.lock:
                self.tasks -= 1
