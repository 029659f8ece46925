"""Check of the first chunks that a lossy codec encodes: heads whose error is large beside their signal.

A codec may suit one model and not another: where K is almost only a bias, an error that follows the bias can be larger
than what differs between tokens. Decoding a sample shows that without running the model. A thread of its own compares,
because it waits for the GPU, and the transfer loop never does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from kvtier.codecs.base import Encoded, EncodeResult, Mover
from kvtier.codecs.turboquant.turns import turned
from kvtier.codecs.vectors import VectorPages
from kvtier.errors import ConfigError, TierUnavailable
from kvtier.format.geometry import Extent
from kvtier.io import cuda
from kvtier.kernels.launch import on_device
from kvtier.kernels.paged import Move
from kvtier.runtime.threads import begin

log = logging.getLogger("kvtier")

ERROR_MAX = 0.3  # error of a head, as a share of its signal, above which the head is bad
# Least signal of a head, as a share of its norm, for which it can be bad: less is rounding by the engine itself.
SIGNAL_MIN = 2.0**-8
LAYERS_AT_ONCE = 4  # layers of one chunk that a call of `encode` adds to the sample
BETTER = {"k4v4": "k6v5 or int8", "k6v5": "int8", "int8": "raw"}  # presets to use instead


class _Layer(NamedTuple):
    """Copies of K and V of one layer of a chunk, (heads, tokens, size), and of its encoded bytes, (heads, n)."""

    k: torch.Tensor
    v: torch.Tensor
    data: torch.Tensor
    cells: Extent


@dataclass(frozen=True, slots=True)
class _Watched:
    """kvtier.codecs.base.Encoded that begins to compare layers of the first move once they are encoded. copied: event
    after their copies; None on the CPU."""

    inner: Encoded
    watch: WatchedMover
    layers: Sequence[_Layer]
    copied: torch.cuda.Event | None

    def wait(self) -> list[EncodeResult]:
        verdicts = self.inner.wait()
        if not verdicts[0].is_refused:
            self.watch.begin_to_compare(self.layers, self.copied)
        return verdicts


class WatchedMover:
    """kvtier.codecs.base.Mover that samples each layer of one engine's pages once. Thread-safe.

    heads_compared, heads_bad: heads of K and V so far. A head is bad if its error exceeds ERROR_MAX times its signal.
    """

    def __init__(self, mover: Mover, preset: str, vectors: VectorPages, rope_base: float = 0.0) -> None:
        """vectors: the pages that `mover` encodes, with their coder. preset: name of the codec. rope_base: base of the
        rotary embedding of K, which hides a bias; 0: unknown."""
        self.heads_compared = self.heads_bad = 0
        self._mover, self._preset, self._vectors, self._rope_base = mover, preset, vectors, rope_base
        self._lock = threading.Lock()
        self._missing = set(range(vectors.held.first_layer, vectors.held.end_layer))
        self.comparison: Future[None] | None = None  # the last one
        self._stream: torch.cuda.Stream | None = None
        self._warm_up()

    def encode(self, moves: Sequence[Move]) -> Encoded | None:
        """Encode, and add layers of the first move to the sample: copied behind the launch, on its stream."""
        encoded = self._mover.encode(moves)
        if encoded is None or not moves or not self._missing or self._is_comparing:
            return encoded
        try:
            layers, copied = self._sample(moves[0])
        except RuntimeError as fault:  # of torch: memory, for example
            self._give_up(fault)
            return encoded
        return _Watched(encoded, self, layers, copied) if layers else encoded

    def decode(self, moves: Sequence[Move]) -> None:
        self._mover.decode(moves)

    def begin_to_compare(self, layers: Sequence[_Layer], copied: torch.cuda.Event | None) -> None:
        """Compare these layers on a thread, unless it still compares others: then a later move brings them again."""
        with self._lock:
            if not self._is_comparing:
                try:
                    self.comparison = begin("compare", partial(self._compare, self._compare_layer, layers, copied))
                except (ConfigError, RuntimeError) as fault:  # no thread can be started
                    self._give_up(fault)

    @property
    def _is_comparing(self) -> bool:
        return self.comparison is not None and not self.comparison.done()

    def _give_up(self, fault: Exception) -> None:
        """Compare nothing from now on. A fault of this check must not end a save: it would end the transfer loop."""
        self._missing.clear()
        log.warning("the error of codec %s could not be measured: %s", self._preset, fault)

    def _warm_up(self) -> None:
        """Load the kernels of a comparison, and allocate its memory, which must not happen in an engine's step."""
        vectors = self._vectors
        try:
            layers, copied = self._sample(vectors.blank_move())
            # On a thread as later, because it relaxes its capture mode.
            begin("compare", partial(self._compare, self._n_bad, layers, copied)).result()
        except (ConfigError, RuntimeError) as fault:
            self._give_up(fault)

    def _compare(
        self, compare: Callable[[_Layer], object], layers: Sequence[_Layer], copied: torch.cuda.Event | None
    ) -> None:
        try:
            with on_device(layers[0].k.device), self._beside_engine(copied):
                for layer in layers:
                    compare(layer)
        except (RuntimeError, TierUnavailable) as fault:  # of torch, and of the thread's capture mode
            self._give_up(fault)

    @contextmanager
    def _beside_engine(self, copied: torch.cuda.Event | None) -> Iterator[None]:
        """Launch what runs inside on a stream of this check, behind `copied`. On the default stream, which is the
        engine's, each result would wait for the forwards in its queue. copied: None on the CPU."""
        if copied is None:
            yield
            return
        cuda.relax_this_thread()  # else it would spoil a graph that the engine is recording
        # One stream for all comparisons: torch caches memory for each.
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_event(copied)
        with torch.cuda.stream(self._stream):
            try:
                yield
            finally:  # after a fault it may still read the copies, which are freed next
                self._stream.synchronize()

    def _compare_layer(self, layer: _Layer) -> None:
        """Count the heads of one layer; log once all layers are compared."""
        with self._lock:
            if layer.cells.first_layer not in self._missing:
                return
            self._missing.discard(layer.cells.first_layer)
            is_last = not self._missing
        n_bad = self._n_bad(layer)
        with self._lock:
            self.heads_compared += 2 * layer.cells.n_heads
            self.heads_bad += n_bad
        if is_last and self.heads_bad:
            log.warning(
                "codec %s does not suit this model: in %d of %d heads of K and V its error is more than %.0f %% of "
                "what differs between tokens; set codec to %s",
                self._preset,
                self.heads_bad,
                self.heads_compared,
                100 * ERROR_MAX,
                BETTER[self._preset],
            )

    def _n_bad(self, layer: _Layer) -> int:
        """Return the number of bad heads of a layer."""
        decoded = self._vectors.coder.decode(layer.data, layer.cells, layer.k.dtype)
        n_bad = 0
        for x, back, base in zip((layer.k, layer.v), decoded, (self._rope_base, 0.0), strict=True):
            flat = turned(x.float(), base, False)
            signal = (flat - flat.mean(1, keepdim=True)).norm(dim=(1, 2))
            error = (back.float() - x.float()).norm(dim=(1, 2))
            n_bad += int(((error > ERROR_MAX * signal) & (signal > SIGNAL_MIN * flat.norm(dim=(1, 2)))).sum())
        return n_bad

    def _sample(self, move: Move) -> tuple[list[_Layer], torch.cuda.Event | None]:
        """Copy layers of a move that are missing in the sample, on the current stream. Return the event behind that."""
        vectors, blocks = self._vectors, self._vectors.blocks(move)
        parts = vectors.parts(move, move.patch.n_heads)
        missing = [(cells, data) for cells, data in parts if cells.first_layer in self._missing]
        layers = [
            _Layer(*vectors.vectors(cells, blocks), data.clone(), cells) for cells, data in missing[:LAYERS_AT_ONCE]
        ]
        return layers, torch.cuda.current_stream(blocks.device).record_event() if blocks.is_cuda else None
