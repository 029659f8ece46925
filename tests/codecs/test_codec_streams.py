"""On a GPU only: codecs' launches wait for no stream, come after what their stream did before, and so do verdicts."""

import pytest
import torch

from kvtier.codecs.base import Mover
from kvtier.codecs.int8.codec import Int8Coder
from kvtier.codecs.turboquant.layout import PRESETS, SlabFormat
from kvtier.format.geometry import Extent, padded
from kvtier.kernels.paged import Move, PagedKV, Patch
from tests.codecs import int8_rig, turboquant_rig
from tests.kernels.device_pages import Cache, noise
from tests.kernels.device_rig import INTERPRETED
from tests.kernels.test_device_streams import busy_stream
from tests.kernels.test_device_streams import own_stream as own_stream  # a fixture

pytestmark = pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")

CACHE = Cache("B2NHD", blocks=64)
PATCH = Patch(0, 0, CACHE.layers, 0, CACHE.heads)
HELD = Extent(0, CACHE.layers, 0, CACHE.heads)
SIZES = (CACHE.k_size, CACHE.v_size)
SLAB_BYTES = padded(Int8Coder(32, *SIZES).n_bytes(range(CACHE.layers)))
"""The slab of two blocks in int8; one of turboquant fits as well."""


@pytest.fixture(params=["int8", "k4v4"])
def mover(request: pytest.FixtureRequest) -> Mover:
    if request.param == "int8":
        return int8_rig.mover(PAGES, 32, HELD)
    return turboquant_rig.mover(PAGES, SlabFormat(32, *SIZES, PRESETS["k4v4"], 1e4, 7), HELD)


def _pages() -> PagedKV:
    pages = CACHE.pages(noise(CACHE.n_bytes, 1))
    for plane in (plane for layer in pages.layers for plane in layer.planes):
        plane.copy_(torch.randn(plane.shape, generator=torch.Generator().manual_seed(1)))
    return pages


PAGES = _pages()


def moves(n: int) -> list[Move]:
    slabs = torch.zeros(n, CACHE.heads, SLAB_BYTES, dtype=torch.uint8, device=PAGES.layers[0].k.device)
    return [Move(PATCH, (2 * number, 63 - 2 * number), slabs[number]) for number in range(n)]


def test_encoding_waits_for_nothing_and_its_tables_are_its_own(mover: Mover) -> None:
    """More launches than tables pinned ahead, each of other blocks: a table that is written again too early shows."""
    wanted, found = moves(32), moves(32)
    verdicts = mover.encode(wanted).wait()  # type: ignore[union-attr]
    with busy_stream():
        pending = [mover.encode([move]) for move in found]
    assert [one for each in pending for one in each.wait()] == verdicts  # type: ignore[union-attr]
    assert not any(verdict.is_refused for verdict in verdicts)
    assert all(torch.equal(one.slabs, two.slabs) for one, two in zip(found, wanted, strict=True))


def test_verdicts_are_of_what_the_stream_did_before(mover: Mover) -> None:
    """And wait for it."""
    one = PAGES.layers[1].k[5, 3, 1, 7]
    was = one.clone()
    with busy_stream():
        one.fill_(float("nan"))
        spoilt = mover.encode([moves(1)[0]._replace(block_ids=(5, 9))])
        one.copy_(was)
        sound = mover.encode([moves(1)[0]._replace(block_ids=(5, 9))])
    assert [pending.wait()[0].is_refused for pending in (spoilt, sound)] == [True, False]  # type: ignore[union-attr]


def test_decoding_comes_after_what_its_stream_did_before(mover: Mover) -> None:
    """The zeroing of blocks, say."""
    (move,) = moves(1)
    mover.encode([move]).wait()  # type: ignore[union-attr]
    planes = [plane for layer in PAGES.layers for plane in layer.planes]
    exact = [plane.clone() for plane in planes]
    mover.decode([move])
    wanted = [plane.clone() for plane in planes]
    with busy_stream():
        for plane in planes:
            plane[0].zero_()
            plane[63].zero_()
        mover.decode([move])
    assert all(torch.equal(plane, want) for plane, want in zip(planes, wanted, strict=True))
    for plane, values in zip(planes, exact, strict=True):
        plane.copy_(values)
