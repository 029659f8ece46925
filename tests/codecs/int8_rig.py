"""int8's kernels for tests: compiled where there is a CUDA device, else interpreted, on tensors of the CPU.

As in tests.codecs.turboquant_rig: the interpreter takes the plain path, and with `ptx_interpreted` that of a GPU.
"""

import pytest

from kvtier.codecs.int8.codec import Int8Coder
from kvtier.codecs.vectors import VectorPages
from kvtier.format.geometry import Extent
from kvtier.kernels.paged import PagedKV
from tests.codecs import turboquant_rig
from tests.kernels.device_rig import INTERPRETED, as_interpreted

with as_interpreted():
    from kvtier.codecs.int8 import device as int8_device

CudaInt8, Int8Tiling = int8_device.CudaInt8, int8_device.Int8Tiling
SMALL = Int8Tiling(1024, 1) if INTERPRETED else int8_device.ENCODE_TILINGS[0]


def _coder_of(pages: PagedKV, tokens: int) -> Int8Coder:
    k_size, v_size = (plane.shape[3] for plane in pages.layers[0].planes)
    return Int8Coder(tokens, k_size, v_size)


def mover(pages: PagedKV, tokens: int, held: Extent, tiling: Int8Tiling = SMALL) -> CudaInt8:
    return CudaInt8(pages, _coder_of(pages, tokens), held, tiling, tiling)


def reference(pages: PagedKV, tokens: int, held: Extent) -> VectorPages:
    return VectorPages(pages, _coder_of(pages, tokens), held)


def ptx_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels take the path of a GPU, in the interpreter."""
    turboquant_rig.ptx_interpreted(monkeypatch)
    monkeypatch.setattr(CudaInt8, "is_fast", True)


def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels take the path of the interpreter."""
    monkeypatch.setattr(CudaInt8, "is_fast", False)


__all__ = [
    "INTERPRETED",
    "SMALL",
    "CudaInt8",
    "Int8Tiling",
    "int8_device",
    "mover",
    "plain",
    "ptx_interpreted",
    "reference",
]
