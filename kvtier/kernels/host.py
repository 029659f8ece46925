"""Gather and scatter in host memory, natively: the same as the reference in kvtier.kernels.paged, one call a chunk."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvtier.io.native import library, slab_checksums
from kvtier.kernels.paged import Move, PagedKV, Patch, SlabRun

TO_SLABS, TO_PAGES = 0, 1

_PLANE = np.dtype([
    ("base", "<u8"), ("block_stride", "<i8"), ("token_stride", "<i8"), ("head_stride", "<i8"), ("row_bytes", "<u8"),
    ("slab_offset", "<u8"), ("n_blocks", "<i8"),
])  # fmt: skip

_copy = library.kvtier_copy_pages
_copy.restype = ctypes.c_int
_copy.argtypes = [
    ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t,
    ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t,
]  # fmt: skip


class HostPages:
    """The planes of a PagedKV in host memory, as the native code sees them. Keeps the tensors alive."""

    def __init__(self, pages: PagedKV) -> None:
        self._pages = pages
        self._planes_a_layer = len(pages.layers[0].planes)
        self._planes = np.array([_describe(plane) for layer in pages.layers for plane in layer.planes], dtype=_PLANE)

    def gather(self, moves: Sequence[Move]) -> None:
        """See kvtier.kernels.paged.gather."""
        self._move(TO_SLABS, moves)

    def scatter(self, moves: Sequence[Move]) -> None:
        """See kvtier.kernels.paged.scatter."""
        self._move(TO_PAGES, moves)

    def _move(self, direction: int, moves: Sequence[Move]) -> None:
        described, planes, address = None, self._planes, 0
        for patch, block_ids, slabs, first_block, _, skip_bytes, _ in moves:
            n_blocks = len(block_ids)
            assert slabs.is_contiguous() and slabs.shape[0] == patch.n_heads
            if described != (patch, n_blocks, skip_bytes):  # neighbouring moves mostly have the same planes
                described = patch, n_blocks, skip_bytes
                planes = self._planes_of(patch, n_blocks, skip_bytes)
                address = planes.ctypes.data
            blocks = array("q", block_ids)
            error = _copy(
                direction, address, len(planes), blocks.buffer_info()[0], n_blocks,
                first_block if direction == TO_PAGES else 0, self._pages.block_tokens, patch.page_head, patch.n_heads,
                slabs.data_ptr(), slabs.shape[1],
            )  # fmt: skip
            if error:
                raise ValueError(f"blocks {min(block_ids)}-{max(block_ids)} or their slab are out of range")

    def _planes_of(self, patch: Patch, n_blocks: int, skip_bytes: int) -> npt.NDArray[np.void]:
        """Return the planes of the patch's layers, with the offset of each in a slab of `n_blocks` blocks."""
        first = patch.page_layer * self._planes_a_layer
        planes = self._planes[first : first + patch.n_layers * self._planes_a_layer].copy()
        plane_bytes = planes["row_bytes"] * np.uint64(n_blocks * self._pages.block_tokens)
        before = patch.slab_layer * int(plane_bytes[: self._planes_a_layer].sum()) + skip_bytes
        ends: npt.NDArray[np.uint64] = np.cumsum(plane_bytes, dtype=np.uint64)
        planes["slab_offset"] = ends - plane_bytes + np.uint64(before)
        return planes


def _describe(plane: torch.Tensor) -> tuple[int, ...]:
    assert plane.device.type == "cpu" and plane.stride(3) == 1
    size = plane.element_size()
    block, token, head, _ = (stride * size for stride in plane.stride())
    return plane.data_ptr(), block, token, head, plane.shape[3] * size, 0, plane.shape[0]


def checksums(runs: Sequence[SlabRun]) -> list[tuple[int, ...]]:
    return [
        slab_checksums(run.slabs.data_ptr(), run.slabs.shape[1], run.slabs.shape[0], run.key, run.first_head,
                       run.first_layer)
        for run in runs
    ]  # fmt: skip
