"""Rates of the transform codec's kernels, beside the device's own copy, and bytes compared with the reference.

    python -m benchmarks.gpu.transform_rate

A cache of the dimensions of an 8B model, 64 chunks of 256 tokens; tables are of random statistics. Rates are bytes of
the engine's KV over the median time on the device, of several tilings. Before, two heads of a chunk are encoded by the
kernels and by the reference on the CPU, whose bytes must be equal.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.gpu.kernel_cases import CHUNK_TOKENS, DeviceClock, PagesCase
from kvtier.codecs.coded_pages import SlabShape
from kvtier.codecs.transform.calibrate import PlaneStatistics, table_tensors
from kvtier.codecs.transform.codec import TransformCoder
from kvtier.codecs.transform.device import TILINGS, CudaTransform, TransformTiling, TransformTilings
from kvtier.codecs.transform.table import TransformTable, read_table, write_table
from kvtier.codecs.vectors import VectorPages
from kvtier.format.geometry import Extent, padded
from kvtier.kernels.paged import Move, PagedKV, Patch

TRIED = (
    TILINGS,
    *(
        TransformTilings(TransformTiling(*each), TransformTiling(*each))
        for each in (
            (8192, 8),
            (8192, 8, 168),
            (8192, 8, 128),
            (16384, 8, 168),
            (16384, 8, 128),
            (8192, 4),
            (8192, 4, 128),
            (4096, 4),
            (4096, 8),
        )
    ),
)
HEADS_COMPARED = 2


def table_of(case: PagesCase, preset: str) -> TransformTable:
    """Return a table of normal vectors with correlated elements."""
    draw = torch.Generator().manual_seed(0)
    shape = (case.layers, case.heads, 256, case.size)
    scales = torch.logspace(-1, 1, case.size)
    vectors = [torch.randn(shape, generator=draw) * scales for _ in range(4)]
    planes = [PlaneStatistics.of(*vectors[n : n + 2]) for n in (0, 2)]
    frequencies = 1e6 ** (-torch.arange(0, case.size, 2, dtype=torch.float64) / case.size)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "table")
        write_table(path, table_tensors(*planes, frequencies.expand(case.layers, -1)), "random", "")
        return read_table(path, preset)


def moves_of(case: PagesCase, slab_bytes: int) -> list[Move]:
    slabs = torch.zeros(case.chunks, case.heads, slab_bytes, dtype=torch.uint8, device="cuda")
    patch = Patch(0, 0, case.layers, 0, case.heads)
    places = enumerate(case.blocks(1))
    return [Move(patch, ids, slabs[n], 0, bytes(16), position=n * CHUNK_TOKENS) for n, ids in places]


def wrong_bytes(case: PagesCase, pages: PagedKV, coder: TransformCoder, move: Move) -> int:
    """Return how many bytes of the first heads differ from the reference's."""
    part = Patch(0, 0, case.layers, 0, HEADS_COMPARED)
    host = PagedKV(
        tuple(replace(layer, k=layer.k.cpu(), v=None if layer.v is None else layer.v.cpu()) for layer in pages.layers),
        pages.block_tokens,
    )
    expected = torch.zeros(HEADS_COMPARED, move.slabs.shape[1], dtype=torch.uint8)
    VectorPages(host, coder, Extent(0, case.layers, 0, case.heads)).encode([move._replace(patch=part, slabs=expected)])
    return int((move.slabs[:HEADS_COMPARED].cpu() != expected).sum())


def main() -> None:
    clock, rows = DeviceClock(), []
    case = PagesCase()
    held = Extent(0, case.layers, 0, case.heads)
    values = torch.randn(case.kv_bytes // 2, dtype=case.dtype, device="cuda")
    pages = case.pages(values.view(torch.uint8))
    for preset in ("tc4", "tc3"):
        table = table_of(case, preset)
        coder = TransformCoder(table, held, CHUNK_TOKENS, torch.device("cpu"))
        moves = moves_of(case, padded(coder.n_bytes(range(case.layers))))
        for tilings in TRIED:
            mover = CudaTransform(pages, SlabShape(CHUNK_TOKENS, coder.n_bytes), held, table, tilings)
            mover.encode(moves).wait()
            wrong = wrong_bytes(case, pages, coder, moves[1]) if tilings == TILINGS else ""
            times = clock.device_ms(lambda: mover.encode(moves)), clock.device_ms(lambda: mover.decode(moves))  # noqa: B023
            rates = (f"{case.kv_bytes / ms / 1e9:.2f}" for ms in times)
            rows.append((preset, "; ".join(dict.fromkeys(map(str, map(tuple, tilings)))), *rates, str(wrong)))
    report.table(("preset", "tiling", "encode, TB/s", "decode, TB/s", "wrong bytes"), rows)


if __name__ == "__main__":
    main()
