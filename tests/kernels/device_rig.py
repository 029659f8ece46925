"""The Triton kernels for tests: compiled where there is a CUDA device, else interpreted, on tensors of the CPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton.experimental.gluon  # noqa: F401  # its own functions as for everyone: Triton comes to it with a launch

from tests.engines import fast_interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available()
DEVICE = torch.device("cpu" if INTERPRETED else "cuda:0")


@contextmanager
def as_interpreted() -> Iterator[None]:
    """Kernels whose modules are first imported within are interpreted, where there is no device to compile them for.

    Triton reads the variable where a kernel is defined. It must not stay: engines that tests start would inherit it.
    """
    before = os.environ.get("TRITON_INTERPRET")
    if INTERPRETED:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("TRITON_INTERPRET", None)
        else:
            os.environ["TRITON_INTERPRET"] = before


if INTERPRETED:
    fast_interpreter.install()
with as_interpreted():
    from kvtier.kernels import device, device_block_sums, device_checksum

__all__ = ["DEVICE", "INTERPRETED", "as_interpreted", "device", "device_block_sums", "device_checksum"]
