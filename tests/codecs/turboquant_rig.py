"""Turboquant's kernels for tests: compiled where there is a CUDA device, else interpreted, on tensors of the CPU.

The interpreter knows no PTX: there the kernels take their plain path, and with `ptx_interpreted` the one of a GPU, its
PTX run by tests.kernels.ptx.
"""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from kvtier.codecs.turboquant.codec import TurboquantCoder
from kvtier.codecs.turboquant.layout import SlabFormat
from kvtier.codecs.vectors import VectorPages
from kvtier.format.checksum import slab_checksum, slab_seed
from kvtier.format.geometry import Extent
from kvtier.kernels.paged import Move, PagedKV
from tests.kernels import ptx
from tests.kernels.device_rig import DEVICE, INTERPRETED, as_interpreted

with as_interpreted():
    from kvtier.codecs.turboquant import device as turboquant_device

TurboquantTiling = turboquant_device.TurboquantTiling
SMALL = TurboquantTiling(16, 1) if INTERPRETED else TurboquantTiling(64, 4)


def mover(
    pages: PagedKV, slab_format: SlabFormat, held: Extent, tiling: TurboquantTiling = SMALL
) -> turboquant_device.CudaTurboquant:
    others = (
        tiling if tiling.rows >= 16 * tiling.warps else SMALL
    )  # 8 rows a warp are enough for encoding by warps only
    coder = TurboquantCoder(slab_format, held, DEVICE)
    return turboquant_device.CudaTurboquant(pages, coder, held, tiling, others, others)


def reference(pages: PagedKV, slab_format: SlabFormat, held: Extent) -> VectorPages:
    return VectorPages(pages, TurboquantCoder(slab_format, held, DEVICE), held)


def sums_of(move: Move, held: Extent) -> tuple[int, ...]:
    """Of a move's slabs as they are, from the definition."""
    first_layer = held.first_layer + move.patch.page_layer - move.patch.slab_layer
    first_head = held.first_head + move.patch.page_head
    slabs = move.slabs.cpu().numpy()
    return tuple(
        slab_checksum(slab, slab_seed(move.key, first_head + number, first_layer)) for number, slab in enumerate(slabs)
    )


def ptx_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels take the path of a GPU, in the interpreter."""
    monkeypatch.setattr(tl, "inline_asm_elementwise", _elementwise)
    monkeypatch.setattr(turboquant_device.CudaTurboquant, "is_fast", True)


def _elementwise(
    asm: str, constraints: str, args: Sequence[tl.tensor], dtype: object, is_pure: bool, pack: int
) -> object:
    """tl.inline_asm_elementwise: `pack` elements at a time that lie side by side, as many as fill a register.

    A scalar that differs between the lanes of a warp has a value for each of them.
    """
    blocks = np.broadcast_arrays(*(each.handle.data for each in args if each.type.is_block()))
    of_blocks = iter(blocks)
    values = [next(of_blocks) if each.type.is_block() else each.handle.data for each in args]
    registers = [np.dtype(np.uint64 if each.dtype.scalar.is_ptr() else np.uint32) for each in args]
    for value, register in zip(values, registers, strict=True):
        assert value.itemsize * pack == register.itemsize, "a register has 32 bits, or 64 for a pointer"
    types = list(dtype) if isinstance(dtype, tuple | tl.tuple) else [dtype]
    outputs = constraints.count("=")
    assert outputs == len(types)
    words = [
        np.ascontiguousarray(value).reshape(-1).view(register)
        for value, register in zip(values, registers, strict=True)
    ]
    shape = blocks[0].shape if blocks else None
    found = []
    for word, kind in zip(ptx.run(_unwrapped(asm), words, outputs), types, strict=True):
        numbers = word.view({"fp32": np.float32, "int32": np.int32, "int8": np.int8}[str(kind)])
        if shape is None:
            found.append(tl.tensor(TensorHandle(numbers, kind), kind))
        else:
            block = tl.block_type(kind, list(shape))
            found.append(tl.tensor(TensorHandle(numbers.reshape(shape), kind), block))
    return tuple(found) if outputs > 1 else found[0]


def _unwrapped(value: tl.constexpr | str) -> str:
    """Constants of a kernel's module are wrapped, those in a tuple are not."""
    return value.value if isinstance(value, tl.constexpr) else value


__all__ = [
    "DEVICE",
    "INTERPRETED",
    "SMALL",
    "TurboquantTiling",
    "mover",
    "ptx_interpreted",
    "reference",
    "sums_of",
    "torch",
    "turboquant_device",
]
