"""int8's kernels against the torch reference: every byte of slabs and pages, verdicts and sums."""

from dataclasses import dataclass, replace

import pytest
import torch

from kvtier.codecs.int8.codec import Int8Coder, _make_mover
from kvtier.codecs.vectors import VectorPages
from kvtier.format.geometry import Extent, padded
from kvtier.kernels.paged import Move, PagedKV, PagedLayer, Patch
from tests.codecs.coded_checks import (
    SMALLEST,
    Change,
    CodedModel,
    CodedSuite,
    check_refused,
    check_whole,
    gaussian,
)
from tests.codecs.int8_rig import (
    INTERPRETED,
    SMALL,
    CudaInt8,
    Int8Tiling,
    mover,
    plain,
    ptx_interpreted,
    reference,
)
from tests.kernels.device_pages import Cache, noise


@dataclass(frozen=True)
class Model(CodedModel):
    """A model of which some pages are. Sizes and dtype come from the cache."""

    cache: Cache
    tokens: int = 16
    held: Extent | None = None

    def slabs(self, patch: Patch) -> torch.Tensor:
        layers = range(patch.slab_layer + patch.n_layers)
        n_bytes = padded(Int8Coder(self.tokens, self.cache.k_size, self.cache.v_size).n_bytes(layers))
        return noise(patch.n_heads * n_bytes, 5).view(patch.n_heads, -1)

    def ours(self, pages: PagedKV, tiling: Int8Tiling = SMALL) -> CudaInt8:
        return mover(pages, self.tokens, self.extent, tiling)

    def reference(self, pages: PagedKV) -> VectorPages:
        return reference(pages, self.tokens, self.extent)


@pytest.fixture(params=["plain", "ptx"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "plain":
        plain(monkeypatch)
    elif INTERPRETED:
        ptx_interpreted(monkeypatch)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    ("size", "dtype"),
    [(size, torch.bfloat16) for size in (8, 64, 72, 80, 128, 256)]
    + [(size, torch.float16) for size in (64, 96, 112, 192)],
)
def test_head_sizes(size: int, dtype: torch.dtype) -> None:
    check_whole(Model(replace(SMALLEST, dtype=dtype, k_size=size, v_size=size)))


def test_blocks_larger_than_a_tile() -> None:
    check_whole(Model(Cache("B2HND", tokens=64, blocks=4, heads=2, layers=1), 128))


def test_a_slab_of_more_layers_than_are_moved_is_not_summed() -> None:
    model = Model(replace(SMALLEST, layers=2))
    two = Patch(0, 0, 2, 0, 1)
    slabs = torch.cat([model.slabs(two), noise(4096, 3).view(1, -1)], 1)
    (verdict,) = mover(gaussian(model.cache), model.tokens, model.extent).encode([Move(two, (1,), slabs)]).wait()
    assert verdict.sums is None


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Vectors of all sizes, with outliers, zeros of either sign, and vectors of nothing but them."""
    x = x * torch.exp2(torch.randint(-10, 9, (*x.shape[:3], 1), generator=torch.Generator().manual_seed(3)).float())
    x[..., 3] *= 20
    x[..., 7] = -0.0
    x[:, 5] = 0
    x[:, 6] = -0.0
    return x


def _ties(x: torch.Tensor) -> torch.Tensor:
    """Values midway between two codes, of either sign, under the scales 1, 3, 5 and 7 of V's tokens."""
    odd = torch.arange(-127, 127) + 0.5
    ties = odd.repeat(x.numel() // len(odd) + 1)[: x.numel()].view(x.shape).clone()
    ties[..., 0], ties[..., 1] = 127, -127
    return ties * (torch.arange(x.shape[1]) % 4 * 2 + 1)[:, None, None]


def _biased(x: torch.Tensor) -> torch.Tensor:
    """Channels that are almost only a bias, as of K of Qwen2.5's layer 0, and constant ones."""
    x = x + 300 * torch.randn(x.shape[-1], generator=torch.Generator().manual_seed(4))
    x[..., 5] = 358.0
    return x


def _uneven(x: torch.Tensor) -> torch.Tensor:
    """Return x with channels of many ranges, one of them 0. Either channel of a pair may be wider, by up to 2^24."""
    x = x * torch.exp2(torch.linspace(-12, 12, x.shape[-1]))
    x[..., 9] = 0.25
    return x


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "change",
    [
        torch.zeros_like,
        lambda x: x * 0 - 0.0,
        torch.ones_like,
        _mixed,
        _ties,
        _biased,
        _uneven,
        lambda x: x.sign() * 2.0**-11.2 * (1 + x.abs() / 100),
        lambda x: (x * 9000).clamp(-65504, 65504),
        lambda x: x * 1e-6 * (x > 0) + (x < -1) * 1.0,
    ],
    ids=["zeros", "minus zeros", "ones", "mixed", "ties", "biased", "uneven", "tiny", "huge", "small"],
)
def test_awkward_vectors(change: Change, dtype: torch.dtype) -> None:
    check_whole(Model(Cache("B2NHD", dtype=dtype, heads=1, layers=1), 64), change)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x * 2.0**-45,
        lambda x: x * 2.0**46,
        lambda x: x * 1e10,
        lambda x: x * 1e-40 * (x > 0) + (x < -1) * 1.0,
    ],
    ids=["scales below the least", "huge", "large", "denormals"],
)
def test_what_only_bf16_holds(change: Change) -> None:
    check_whole(Model(SMALLEST), change)


@pytest.mark.usefixtures("path")
def test_a_chunk_with_what_cannot_be_kept_is_refused_and_no_other() -> None:
    """One element of one head's last token, of K or of V."""
    values = (float("nan"), float("inf"), float("-inf"), 2.0**50, -3e38)
    bad = [(plane, value, 1.0) for plane in (0, 1) for value in values]
    check_refused(Model(Cache("B2NHD", blocks=len(bad) + 2, layers=1, heads=2)), bad)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_slab_comes_back_as_the_reference_has_it(dtype: torch.dtype) -> None:
    """Slabs of noise, but for NaN, which no chunk has that was kept."""
    model = Model(replace(SMALLEST, dtype=dtype, k_size=256, v_size=256))
    slabs = model.slabs(model.whole)
    n_codes, n_columns = model.tokens * 512, 256
    rest = slabs[0, n_codes : n_codes + 2 * model.tokens + 6 * n_columns]
    steps = torch.tensor([0.0, 2.0**-50, 2.0**-20, 3e-6, 0.1, 1.0, 1.7, 65504.0], device=slabs.device).bfloat16()
    n_b = torch.tensor([16, 17, 255, 256, 257, 1000, 4095, 4096], device=slabs.device).to(torch.uint16)
    least = torch.linspace(-400, 400, n_columns, device=slabs.device)
    parts = (
        steps.repeat(model.tokens // 8),
        least,
        steps.repeat(n_columns // 16),
        n_b.repeat_interleave(n_columns // 16),
    )
    rest[:] = torch.cat([part.view(torch.uint8) for part in parts])
    before = noise(model.cache.n_bytes, 9)
    ours, theirs = before.clone(), before.clone()
    move = Move(model.whole, (2,), slabs)
    mover(model.cache.pages(ours), model.tokens, model.extent).decode([move])
    reference(model.cache.pages(theirs), model.tokens, model.extent).decode([move])
    assert torch.equal(ours, theirs)


def test_what_the_kernels_cannot_take_is_refused() -> None:
    model = Model(SMALLEST)
    with pytest.raises(ValueError, match="heads of"):
        mover(gaussian(replace(SMALLEST, k_size=68, v_size=68)), model.tokens, model.extent)
    with pytest.raises(ValueError, match="chunks of 24"):
        mover(gaussian(replace(SMALLEST, tokens=8)), 24, model.extent)


def test_pages_that_the_kernels_cannot_take_are_moved_without_them(caplog: pytest.LogCaptureFixture) -> None:
    """On a device that is none, since on the CPU the kernels are not asked."""
    plane = torch.empty(4, 16, 1, 64, device="meta")
    pages = PagedKV((PagedLayer(plane, plane),), 16)
    coder = Int8Coder(16, 64, 64)
    assert isinstance(_make_mover(pages, coder, Extent(0, 1, 0, 1)), VectorPages)
    assert "many times slower: pages of torch.float32" in caplog.text
    kind = VectorPages if INTERPRETED else CudaInt8
    assert isinstance(_make_mover(gaussian(SMALLEST), coder, Extent(0, 1, 0, 1)), kind)


class TestInt8(CodedSuite):
    model = Model
    tile = SMALL._replace(elements=64 * 64)
