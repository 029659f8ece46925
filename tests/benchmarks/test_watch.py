"""Digests of blocks, by which benchmarks/gpu/equality.py says that loaded KV is what was saved."""

import pytest
import torch

from benchmarks.gpu.watch import BlockDigests
from kvtier.kernels.paged import PagedKV, PagedLayer


@pytest.mark.parametrize("row", [128, 134, 132, 101])
def test_any_changed_byte_is_seen_where_it_is(row: int) -> None:
    """Rows of slots (turboquant) are no whole number of 8-byte words; layers of a model may differ."""
    generator = torch.Generator().manual_seed(row)
    slots = torch.randint(0, 256, (4, 16, 3, row), generator=generator, dtype=torch.uint8)
    plain = torch.randn(4, 16, 3, 32, generator=generator).to(torch.bfloat16)
    digests = BlockDigests(PagedKV((PagedLayer(plain, plain.clone()), PagedLayer(slots, None)), 16))
    before = digests.of([1, 2])
    slots[2, 7, 1, row - 1] ^= 1
    assert (digests.of([1, 2]) != before).nonzero().tolist() == [[1, 1]]
    slots[2, 7, 1, row - 1] ^= 1
    assert torch.equal(digests.of([1, 2]), before)
