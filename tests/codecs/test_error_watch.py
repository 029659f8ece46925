"""The check of the first chunks: a head whose error is large beside its signal is counted, and named once."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from kvtier.codecs import error_watch
from kvtier.codecs.base import Codec
from kvtier.codecs.error_watch import LAYERS_AT_ONCE, WatchedMover
from kvtier.codecs.int8.codec import Int8Codec
from kvtier.codecs.turboquant.codec import Turboquant
from kvtier.errors import TierUnavailable
from kvtier.format.geometry import Extent, Geometry, padded
from kvtier.kernels.paged import Move, PagedKV, PagedLayer, Patch
from kvtier.runtime.threads import begin
from tests.support.no_threads import refuse_threads

TOKENS, HEADS, SIZE, LAYERS = 64, 2, 64, LAYERS_AT_ONCE + 1
GEOMETRY = Geometry(LAYERS, HEADS, SIZE, SIZE, "bfloat16", 2, "heads", TOKENS)
EXTENT = Extent(0, LAYERS, 0, HEADS)


def pages_with(bias: float, layer: int) -> PagedKV:
    """Four blocks of 16 tokens: noise, and in one layer a V of which almost all is the same for every token."""
    draw = torch.Generator().manual_seed(1)
    planes = [torch.randn(4, 16, HEADS, SIZE, generator=draw) for _ in range(2 * LAYERS)]
    planes[2 * layer + 1] += bias * torch.randn(SIZE, generator=draw)
    found = [plane.bfloat16() for plane in planes]
    return PagedKV(tuple(PagedLayer(*found[n : n + 2]) for n in range(0, 2 * LAYERS, 2)), 16)


def encode(codec: Codec, pages: PagedKV, times: int) -> WatchedMover:
    codec.prepare(pages, GEOMETRY, EXTENT)
    slab_bytes = padded(codec.layers_bytes(GEOMETRY, range(LAYERS)))
    for _ in range(times):
        slabs = torch.zeros(HEADS, slab_bytes, dtype=torch.uint8)
        encoded = codec.encode(pages, [Move(Patch(0, 0, LAYERS, 0, HEADS), (2, 0, 3, 1), slabs)])
        assert encoded is not None
        assert [verdict.is_refused for verdict in encoded.wait()] == [False]
        mover = codec._movers[id(pages)]  # type: ignore[attr-defined]
        assert isinstance(mover, WatchedMover) and mover.comparison is not None
        mover.comparison.result(30.0)
    return mover


def test_heads_with_a_large_error_are_counted_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    mover = encode(Turboquant("k4v4"), pages_with(30.0, 0), 4)
    assert (mover.heads_bad, mover.heads_compared) == (HEADS, 2 * HEADS * LAYERS)
    assert caplog.text.count("codec k4v4 does not suit this model: in 2 of 20 heads") == 1
    assert "set codec to k6v5 or int8" in caplog.text


def test_all_layers_are_compared_before_anything_is_said(caplog: pytest.LogCaptureFixture) -> None:
    mover = encode(Turboquant("k4v4"), pages_with(30.0, LAYERS - 1), 1)
    assert mover.heads_compared == 2 * HEADS * LAYERS_AT_ONCE and not caplog.text


@pytest.mark.parametrize("codec", [Int8Codec(), Turboquant("k6v5"), Turboquant("k4v4", 1e4)])
def test_a_codec_that_suits_the_model_is_not_named(codec: Codec, caplog: pytest.LogCaptureFixture) -> None:
    mover = encode(codec, pages_with(0.0, 0), 3)
    assert (mover.heads_bad, mover.heads_compared) == (0, 2 * HEADS * LAYERS) and not caplog.text


def test_a_head_without_a_signal_is_not_counted() -> None:
    pages = pages_with(0.0, 0)
    for plane in (plane for layer in pages.layers for plane in layer.planes):
        plane.fill_(3.0)
    assert encode(Turboquant("k4v4"), pages, 2).heads_bad == 0


def test_what_is_refused_is_not_compared() -> None:
    pages = pages_with(30.0, 0)
    pages.layers[0].k[1, 2, 0, 5] = float("nan")
    codec = Int8Codec()
    codec.prepare(pages, GEOMETRY, EXTENT)
    slabs = torch.zeros(HEADS, padded(codec.layers_bytes(GEOMETRY, range(LAYERS))), dtype=torch.uint8)
    encoded = codec.encode(pages, [Move(Patch(0, 0, LAYERS, 0, HEADS), (2, 0, 3, 1), slabs)])
    assert encoded is not None and encoded.wait()[0].is_refused
    assert codec._movers[id(pages)].heads_compared == 0  # type: ignore[attr-defined]


def test_verdicts_do_not_wait_for_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transfer loop takes the verdicts. On a GPU a comparison may last as long as a forward."""
    pages, codec, may_decode = pages_with(0.0, 0), Int8Codec(), threading.Event()
    codec.prepare(pages, GEOMETRY, EXTENT)
    mover = codec._movers[id(pages)]
    assert isinstance(mover, WatchedMover)
    decode = mover._vectors.coder.decode

    def decode_later(*args: Any) -> Any:
        assert may_decode.wait(30.0)
        return decode(*args)

    monkeypatch.setattr(mover._vectors.coder, "decode", decode_later)
    slabs = torch.zeros(HEADS, padded(codec.layers_bytes(GEOMETRY, range(LAYERS))), dtype=torch.uint8)
    move = Move(Patch(0, 0, LAYERS, 0, HEADS), (2, 0, 3, 1), slabs)
    for _ in range(2):  # the second one's sample is dropped: another is being compared
        encoded = mover.encode([move])
        assert encoded is not None and not encoded.wait()[0].is_refused
    slabs.zero_()  # the slot is another chunk's by now
    assert mover.heads_compared == 0 and mover.comparison is not None
    may_decode.set()
    mover.comparison.result(30.0)
    assert (mover.heads_bad, mover.heads_compared) == (0, 2 * HEADS * LAYERS_AT_ONCE)


@pytest.mark.parametrize("codec", [Int8Codec(), Turboquant("k4v4", 1e4)])
def test_all_operations_of_the_check_ran_before_the_first_chunk(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the first call of each loads a kernel, which must not happen in an engine's step."""
    called: set[str] = set()

    class Calls(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.add(func.__name__)
            return func(*args, **(kwargs or {}))

    def begin_recorded(name: str, work: Callable[[], None]) -> Future[None]:
        def run() -> None:
            with Calls():
                work()

        return begin(name, run)

    monkeypatch.setattr(error_watch, "begin", begin_recorded)
    pages = pages_with(0.0, 0)
    codec.prepare(pages, GEOMETRY, EXTENT)
    in_prepare = called.copy()
    assert encode(codec, pages, 1).heads_compared and called and called == in_prepare


@pytest.mark.parametrize("where", ["copy", "thread", "comparison"])
def test_a_fault_of_the_check_ends_the_check_and_no_save(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault raised by `wait` would end all loads and saves of the transfer loop, one raised by `encode` a step's."""

    def fail(*args: Any) -> Any:
        raise TierUnavailable("no relaxed mode") if where == "comparison" else RuntimeError("no memory, or no thread")

    pages, codec = pages_with(30.0, 0), Turboquant("k4v4")
    codec.prepare(pages, GEOMETRY, EXTENT)
    mover = codec._movers[id(pages)]
    assert isinstance(mover, WatchedMover)
    owner, name = {
        "copy": (WatchedMover, "_sample"),
        "thread": (error_watch, "begin"),
        "comparison": (WatchedMover, "_compare_layer"),
    }[where]
    monkeypatch.setattr(owner, name, fail)
    slabs = torch.zeros(HEADS, padded(codec.layers_bytes(GEOMETRY, range(LAYERS))), dtype=torch.uint8)
    for _ in range(3):
        encoded = mover.encode([Move(Patch(0, 0, LAYERS, 0, HEADS), (2, 0, 3, 1), slabs)])
        assert encoded is not None and not encoded.wait()[0].is_refused
        if mover.comparison is not None:
            mover.comparison.result(30.0)
    assert mover.heads_compared == 0 and caplog.text.count("the error of codec k4v4 could not be measured: no ") == 1


@pytest.mark.parametrize("at_start", [True, False])
def test_no_save_ends_where_no_thread_can_be_started(
    at_start: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pages, codec = pages_with(30.0, 0), Turboquant("k4v4")
    if at_start:
        refuse_threads(monkeypatch)
    codec.prepare(pages, GEOMETRY, EXTENT)
    refuse_threads(monkeypatch)
    slabs = torch.zeros(HEADS, padded(codec.layers_bytes(GEOMETRY, range(LAYERS))), dtype=torch.uint8)
    encoded = codec.encode(pages, [Move(Patch(0, 0, LAYERS, 0, HEADS), (2, 0, 3, 1), slabs)])
    assert encoded is not None and not encoded.wait()[0].is_refused
    assert caplog.text.count("raise `ulimit -u`") == 1
