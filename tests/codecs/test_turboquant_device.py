"""Turboquant's kernels against the torch reference: every byte of slabs and pages, verdicts and sums."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from kvtier.codecs.base import Mover
from kvtier.codecs.turboquant.layout import PRESETS, SlabFormat
from kvtier.format.geometry import Extent, padded
from kvtier.kernels.paged import PagedKV, Patch
from tests.codecs.coded_checks import (
    SMALLEST,
    Change,
    CodedModel,
    CodedSuite,
    check_refused,
    check_whole,
    gaussian,
)
from tests.codecs.turboquant_rig import (
    INTERPRETED,
    SMALL,
    TurboquantTiling,
    mover,
    ptx_interpreted,
    reference,
)
from tests.kernels.device_pages import Cache, noise


@dataclass(frozen=True)
class Model(CodedModel):
    """A model of which some pages are. Sizes and dtype come from the cache."""

    cache: Cache
    preset: str = "k4v4"
    tokens: int = 16
    rope_base: float = 10_000.0
    held: Extent | None = None

    @property
    def format(self) -> SlabFormat:
        cache = self.cache
        return SlabFormat(self.tokens, cache.k_size, cache.v_size, PRESETS[self.preset], self.rope_base, 7)

    def slabs(self, patch: Patch) -> torch.Tensor:
        first = self.extent.first_layer + patch.page_layer
        n_bytes = self.format.n_bytes(range(first - patch.slab_layer, first + patch.n_layers))
        return noise(patch.n_heads * padded(n_bytes), 5).view(patch.n_heads, -1)

    def ours(self, pages: PagedKV, tiling: TurboquantTiling = SMALL) -> Mover:
        return mover(pages, self.format, self.extent, tiling)

    def reference(self, pages: PagedKV) -> Mover:
        return reference(pages, self.format, self.extent)


@pytest.fixture(params=["plain", "ptx"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "ptx":
        if not INTERPRETED:
            pytest.skip("a GPU always takes it")
        ptx_interpreted(monkeypatch)
        monkeypatch.setattr(InterpreterBuilder, "create_dot", _dot)


def _dot(
    self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, precision: object, imprecise: object
) -> TensorHandle:
    """The interpreter keeps bf16 as bits, and multiplies those. Subnormal numbers count, as for the tensor cores."""
    x, y = (
        (each.data.astype(np.uint32) << np.uint32(16)).view(np.float32)
        if each.dtype.scalar == tl.bfloat16
        else each.data
        for each in (a, b)
    )
    return TensorHandle(np.matmul(x, y, dtype=d.data.dtype) + d.data, d.dtype.scalar)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("preset", PRESETS)
def test_presets(preset: str) -> None:
    check_whole(Model(replace(SMALLEST, k_size=128, v_size=128), preset), lambda x: x + 2)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("size", [64, 80, 96, 256])
@pytest.mark.parametrize("preset", PRESETS)
def test_head_sizes(size: int, preset: str) -> None:
    check_whole(Model(replace(SMALLEST, dtype=torch.float16, k_size=size, v_size=size), preset))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize(
    "tiling",
    [
        TurboquantTiling(8, 1),
        TurboquantTiling(16, 2),
        TurboquantTiling(32, 2),
        TurboquantTiling(16, 1),
    ],
    ids=str,
)
def test_tilings_of_the_encoding_by_warps(size: int, preset: str, tiling: TurboquantTiling) -> None:
    """Chunks of two tiles and a part; the mean pays, and takes one step or some."""
    cache = replace(SMALLEST, blocks=8, k_size=size, v_size=size, dtype=torch.bfloat16)
    check_whole(Model(cache, preset, tokens=48), lambda x: x + 2, tiling)


@pytest.mark.parametrize("size", [64, 128])
def test_k_that_keeps_its_rotary_embedding(size: int) -> None:
    check_whole(Model(replace(SMALLEST, k_size=size, v_size=size), rope_base=0.0), lambda x: x + 2)


def _biased(x: torch.Tensor) -> torch.Tensor:
    """Vectors that are almost only a bias, as K of Qwen2.5's layer 0."""
    return x + 100 * torch.randn(x.shape[-1], generator=torch.Generator().manual_seed(4))


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("tokens", [16, 256])
def test_biases(tokens: int) -> None:
    """The mean of 256 tokens takes every second one."""
    check_whole(Model(replace(SMALLEST, blocks=16), tokens=tokens), _biased)


def _outliers(x: torch.Tensor) -> torch.Tensor:
    x = x * torch.exp2(torch.randint(-8, 7, (*x.shape[:3], 1), generator=torch.Generator().manual_seed(3)).float())
    x[..., 3] *= 20
    x[:, 5] = 0
    x[:, 7] *= 100
    return x


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("preset", "size"), [("k4v4", 64), ("k6v5", 128)])
@pytest.mark.parametrize(
    "change",
    [
        torch.zeros_like,
        lambda x: x * 0 - 0.0,
        torch.ones_like,
        _outliers,
        lambda x: x * 2.0**-17,
        lambda x: x * 3000,
        lambda x: (x > 0).float(),
        lambda x: x + 100,
        lambda x: x * 1e-40 * (x > 0) + (x < -1) * 1.0,
    ],
    ids=["zeros", "minus zeros", "ones", "outliers", "tiny", "huge", "few", "mean", "denormals"],
)
def test_awkward_vectors(preset: str, size: int, change: Change) -> None:
    check_whole(Model(replace(SMALLEST, k_size=size, v_size=size), preset), change)


@pytest.mark.usefixtures("path")
def test_a_chunk_with_what_cannot_be_kept_is_refused_and_no_other() -> None:
    """One element of one head's last token, of K or of V; all else of that vector is scaled."""
    bad = [(plane, value, 1.0) for plane in (0, 1) for value in (float("nan"), float("inf"), float("-inf"), 1e30)]
    bad += [(1, value, 0.0) for value in (1e-40, 6e-36, 1e-7)]
    check_refused(Model(Cache("B2NHD", blocks=len(bad) + 2, layers=1, heads=2)), bad)


def test_layers_of_different_dtypes_are_refused() -> None:
    """One number says what all elements are: fp16 read as bf16 would be stored as something else, and well summed."""
    caches = [SMALLEST, replace(SMALLEST, dtype=torch.float16)]
    pages = PagedKV(tuple(gaussian(cache).layers[0] for cache in caches), SMALLEST.tokens)
    with pytest.raises(ValueError, match="bfloat16, torch.float16"):
        Model(replace(SMALLEST, layers=2)).ours(pages)


class TestTurboquant(CodedSuite):
    model = Model
    tile = SMALL._replace(rows=64)


@pytest.mark.usefixtures("path")
class TestMoreBits(CodedSuite):
    model = partial(Model, preset="k6v5")
    tile = SMALL._replace(rows=64)
