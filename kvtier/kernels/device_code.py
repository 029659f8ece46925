"""Compiled kernels without their compiler: code as bytes, loaded and launched by the CUDA driver.

Triton finds a kernel that it has compiled before by hashing its own library of 400 MB and asking ptxas for its version,
once a process. That takes about as long as 8 GB of weights.
"""

from __future__ import annotations

import ctypes
import json
import struct
from typing import NamedTuple

from kvtier.errors import Corrupt
from kvtier.io.cuda import KernelHandle


class DeviceCode(NamedTuple):
    """Machine code of one kernel, its name there, and the threads and bytes of shared memory of a program."""

    name: str
    threads: int
    shared_bytes: int
    cubin: bytes

    def pack(self) -> bytes:
        """Return the code as bytes: the size of a JSON text (u32, little endian), the text, the machine code."""
        text = json.dumps([self.name, self.threads, self.shared_bytes]).encode()
        return struct.pack("<I", len(text)) + text + self.cubin


def unpack(body: bytes) -> DeviceCode:
    """Return what was packed. Raises Corrupt."""
    try:
        (n_bytes,) = struct.unpack_from("<I", body)
        name, threads, shared_bytes = json.loads(body[4 : 4 + n_bytes])
        return DeviceCode(str(name), int(threads), int(shared_bytes), body[4 + n_bytes :])
    except (TypeError, ValueError, struct.error) as error:
        raise Corrupt(f"it is no kernel of this kvtier ({error!r})") from None


def load(code: DeviceCode) -> KernelHandle:
    """Load a kernel into the current device's context, for as long as the process lives. Raises OSError without a
    driver, RuntimeError where the driver refuses the code."""
    driver = ctypes.CDLL("libcuda.so.1")
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    for name, *arguments in (
        ("cuModuleLoadData", ctypes.byref(module), code.cubin),
        ("cuModuleGetFunction", ctypes.byref(function), module, code.name.encode()),
    ):
        if error := getattr(driver, name)(*arguments):
            raise RuntimeError(f"{name} of the CUDA driver failed with error {error}")
    return KernelHandle(function.value or 0, code.threads, code.shared_bytes)
