"""int8's reference: what its errors are, and which channels share their bits."""

import pytest
import torch

from kvtier.codecs.int8.codec import Int8Coder
from kvtier.format.geometry import Extent

TOKENS = 64
CELLS = Extent(0, 1, 0, 1)


def errors(k: torch.Tensor) -> torch.Tensor:
    """Return the largest error of each channel of K, the first token left out. k: (tokens, size) float32."""
    coder = Int8Coder(len(k), k.shape[1], k.shape[1])
    encoded = coder.encode(k[None], k[None], CELLS)
    assert not encoded.refused.any()
    back, _ = coder.decode(encoded.data, CELLS, k.dtype)
    return (back[0, 1:] - k[1:]).abs().amax(0)


def spread(ranges: torch.Tensor) -> torch.Tensor:
    """Return (tokens, size): values that fill the ranges of channels evenly, after a first token of zeros."""
    generator = torch.Generator().manual_seed(0)
    turn = torch.linspace(-0.5, 0.5, TOKENS - 1)
    values = torch.stack([turn[torch.randperm(TOKENS - 1, generator=generator)] for _ in ranges], 1)
    return torch.cat([torch.zeros(1, len(ranges)), values * ranges])


@pytest.mark.parametrize(
    ("size", "first", "second"), [(64, 0, 56), (64, 9, 49), (64, 31, 39), (72, 0, 68), (80, 0, 72)]
)
def test_a_wide_channel_takes_codes_of_its_partner(size: int, first: int, second: int) -> None:
    """The wide channel may be in either half of the head. Its pair has one step then, and other pairs keep theirs."""
    for wide, narrow in ((first, second), (second, first)):
        ranges = torch.ones(size)
        ranges[wide] = 64.0
        found = errors(spread(ranges))
        step = 1.0 / (256 / 8 - 1)
        assert 0.4 * step < found[wide] < 0.51 * step, "8 times the codes, so about an eighth of an error with 256"
        assert found[narrow] < 0.51 * step
        others = torch.ones(size, dtype=torch.bool)
        others[[wide, narrow]] = False
        assert found[others].max() < 0.51 / 255


def test_no_pair_has_fewer_than_sixteen_codes_a_channel() -> None:
    ranges = torch.ones(64)
    ranges[:32] = 1e6
    found = errors(spread(ranges))
    assert found[:32].max() < 0.51 * 1e6 / 4095
    assert found[32:].max() <= 1.0


def test_biases_and_constant_channels_cost_nothing() -> None:
    ranges = torch.ones(64)
    ranges[5] = 0.0
    bias = torch.linspace(-400, 400, 64)
    found = errors(spread(ranges) + bias)
    assert found[5] == 0
    assert found.max() < 0.6 / 255


def test_errors_stay_within_a_step_for_any_ratio_of_ranges() -> None:
    """One token holds the extremes of both channels of a pair, where a code that is too large changes the other."""
    generator = torch.Generator().manual_seed(0)
    k = torch.randn(TOKENS, 256, generator=generator) * torch.exp2(4 * torch.randn(256, generator=generator))
    k[1], k[2] = k[1:].amin(0), k[1:].amax(0)
    ranges = k[2] - k[1]
    partners = ranges.view(-1, 8).flip(0).flatten()
    step = torch.maximum((ranges * partners).sqrt() / 255, torch.maximum(ranges, partners) / 4095)
    assert bool((errors(k) < 0.55 * step).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_first_token_comes_back_as_it_is(dtype: torch.dtype) -> None:
    k, v = (torch.randn(1, TOKENS, 64, generator=torch.Generator().manual_seed(n)).to(dtype) for n in (0, 1))
    coder = Int8Coder(TOKENS, 64, 64, dtype.itemsize)
    encoded = coder.encode(k, v, CELLS)
    assert encoded.data.shape[-1] == coder.n_bytes(range(1))
    for vectors, back in zip((k, v), coder.decode(encoded.data, CELLS, dtype), strict=True):
        assert back.dtype == dtype and torch.equal(back[:, 0], vectors[:, 0])
        assert not torch.equal(back[:, 1:], vectors[:, 1:])
