"""Tables of the transform codec for tests, and KV that is as they were made for."""

from functools import cache
from pathlib import Path

import torch

from kvtier.codecs.transform.calibrate import PlaneStatistics, table_tensors
from kvtier.codecs.transform.codec import TransformCoder
from kvtier.codecs.transform.reference import turned
from kvtier.codecs.transform.table import read_table, write_table
from kvtier.codecs.vectors import VectorPages
from kvtier.format.checksum import slab_checksum, slab_seed
from kvtier.format.geometry import Extent, padded
from kvtier.kernels.paged import Move, PagedKV, PagedLayer, Patch

N_TOKENS = 512
MODEL, WEIGHTS = "test-model", "test"


@cache
def vectors(layers: int, heads: int, size: int, seed: int) -> torch.Tensor:
    """(layers, heads, N_TOKENS, size) fp32: correlated, with a large mean, K as it is without its rotary embedding."""
    draw = torch.Generator().manual_seed(seed)
    mix = torch.randn(layers, heads, size, size, generator=draw) * torch.logspace(-1.5, 1, size)
    x = torch.randn(layers, heads, N_TOKENS, size, generator=draw) @ mix.mT
    return x + 30 * torch.randn(layers, heads, 1, size, generator=draw)


def frequencies(layers: int, size: int) -> torch.Tensor:
    """(layers, size / 2): a base of 10,000 and one of 1,000,000 in turn, but none in the last layer."""
    bases = torch.tensor([1e4, 1e6], dtype=torch.float64).repeat(layers)[:layers, None]
    found = bases ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    found[-1] = 0
    return found


def kv(layers: int, heads: int, size: int, position: int = 0, v_size: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """K as an engine has it from `position` on, and V."""
    k = vectors(layers, heads, size, 0)
    turns = frequencies(layers, size)
    back = torch.stack([turned(x, turn, position, True) for x, turn in zip(k, turns, strict=True)])
    return back, vectors(layers, heads, v_size or size, 1)


def make_table(path: Path, layers: int, heads: int, size: int, v_size: int = 0) -> Path:
    """Write a table of `kv` of these sizes."""
    draw = torch.Generator().manual_seed(2)
    planes = [
        PlaneStatistics.of(x, torch.randn(x.shape, generator=draw) * 1e-3)
        for x in (vectors(layers, heads, size, 0), vectors(layers, heads, v_size or size, 1))
    ]
    write_table(path, table_tensors(*planes, frequencies(layers, size)), MODEL, WEIGHTS)
    return path


def check_transform(
    folder: Path, sizes: tuple[int, int], dtype: torch.dtype, device: str, preset: str = "tc4", tokens: int = 64
) -> None:
    """Check that the kernels encode to the bytes of the reference, refuse what it refuses, and decode to its values but
    for a rounding. Two chunks of two layers and heads, one of vectors of other magnitudes; sums are checked too."""
    from kvtier.codecs.transform.device import CudaTransform, TransformTiling

    layers, heads, held = 2, 2, Extent(3, 2, 5, 2)
    table = read_table(make_table(folder / "table", 5, 7, *sizes), preset)
    coder = TransformCoder(table, held, tokens, torch.device("cpu"))
    k, v = (x[3:, 5:, : 3 * tokens].clone() for x in kv(5, 7, sizes[0], 2 * tokens, sizes[1]))
    for x in (k, v):
        x[:, :, tokens : 2 * tokens : 3] *= 50
        x[:, :, tokens + 1 : 2 * tokens : 3] = 0
    v[1, 1, 2 * tokens + 5, 3] = float("nan")

    def pages(is_filled: bool, device: str) -> PagedKV:
        planes = [
            [torch.zeros(3 * tokens // 16, 16, heads, x.shape[-1], dtype=dtype) for x in (k, v)] for _ in range(layers)
        ]
        for number, layer in enumerate(planes if is_filled else ()):
            for plane, x in zip(layer, (k, v), strict=True):
                plane.copy_(x[number].transpose(0, 1).unflatten(0, (-1, 16)))
        return PagedKV(tuple(PagedLayer(*(plane.to(device) for plane in layer)) for layer in planes), 16)

    slab_bytes, patch = padded(coder.n_bytes(range(3, 5))), Patch(0, 0, layers, 0, heads)

    def moves(device: str, first_block: int = 0) -> list[Move]:
        per = tokens // 16
        slabs = [torch.zeros(heads, slab_bytes, dtype=torch.uint8, device=device) for _ in range(3)]
        blocks = [tuple(range(chunk * per, (chunk + 1) * per)) for chunk in range(3)]
        return [
            Move(patch, blocks[chunk], slabs[chunk], first_block, bytes(16), position=(2 + chunk) * tokens)
            for chunk in range(3)
        ]

    def ours(of: PagedKV) -> CudaTransform:
        if device != "cpu":
            return CudaTransform(of, coder, held, table)
        tiling = TransformTiling(32 << (max(sizes) - 1).bit_length(), 1)
        return CudaTransform(of, coder, held, table, (tiling, tiling), places=8)

    source, wanted, found = pages(True, "cpu"), moves("cpu"), moves(device)
    expected = VectorPages(source, coder, held).encode(wanted).wait()
    verdicts = ours(pages(True, device)).encode(found).wait()
    refused = [verdict.is_refused for verdict in verdicts]
    assert refused == [verdict.is_refused for verdict in expected] == [False, False, True]
    for a, b, verdict in zip(wanted[:2], found[:2], verdicts, strict=False):
        assert torch.equal(a.slabs, b.slabs.cpu())
        seeds = [slab_seed(a.key, head, held.first_layer) for head in range(held.first_head, held.end_head)]
        sums = [slab_checksum(slab.numpy(), seed) for slab, seed in zip(a.slabs, seeds, strict=True)]
        assert verdict.sums is not None and [value % 2**64 for value in verdict.sums] == sums
    backs = [pages(False, "cpu"), pages(False, device)]
    first = [move._replace(first_block=1) for move in wanted[:2]]
    VectorPages(backs[0], coder, held).decode(first)
    ours(backs[1]).decode([move._replace(slabs=move.slabs.to(device)) for move in first])
    for a, b in zip(*([plane for layer in back.layers for plane in layer.planes] for back in backs), strict=True):
        assert not b[:1].any() and torch.allclose(a.float(), b.cpu().float(), rtol=2**-7, atol=1e-3)
        assert (a != b.cpu()).float().mean() < 0.05, "a rounding here and there"
