"""One chunk that several loads want at a time: one of them reads it, whichever of them gives up meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvtier.io.engines import Engines
from kvtier.io.ring import Batch, ReadOp, Ring, WriteOp
from kvtier.plan import LoadChunk
from kvtier.worker.fetch import Fetch, Fetcher
from kvtier.worker.fetch_files import FetchFailed
from tests.support.rig import Engine, reader_of_saved

TOKENS = list(range(1000, 1064))
BLOCKS = list(range(4))
SOON_S = 5.0


class CountingRing:
    def __init__(self, inner: Ring) -> None:
        self._inner = inner
        self.n_reads = 0

    def submit(self, ops: Sequence[ReadOp | WriteOp]) -> Batch:
        self.n_reads += len(ops)
        return self._inner.submit(ops)

    def close(self, timeout_s: float = 1.0) -> bool:
        return self._inner.close(timeout_s)


class Readers:
    """The loads of one worker, a step at a time: one chunk, stored and in no arena."""

    def __init__(self, engine: Engine) -> None:
        worker = engine.transfers[0]._worker
        self.ring = CountingRing(worker.io.ring)
        object.__setattr__(worker, "io", Engines(self.ring, self.ring))  # type: ignore[arg-type]
        self.arena = worker.arena
        self._tidy = engine.transfers[0].tidy
        self.fetcher: Fetcher = engine.transfers[0]._loader._fetcher
        self._namespace = engine.store.namespace_id
        (key,) = engine.keys(TOKENS)
        (entry,) = engine.store.lookup([key])
        self.chunk = LoadChunk(key, entry, tuple(BLOCKS), 0)

    def begin(self) -> Fetch:
        fetch = self.fetcher.begin(self._namespace, self.chunk, 0.0)
        assert fetch is not None
        return fetch

    def complete(self, fetch: Fetch, within_s: float = SOON_S) -> None:
        assert self.fetcher.complete(self._namespace, fetch, time.monotonic() + within_s, 0.0)
        assert self.fetcher.check([fetch]) == 1

    def end(self, *fetches: Fetch) -> None:
        """All is given back: no slot, no claim."""
        for fetch in fetches:
            self.fetcher.abandon(fetch)
        self._tidy()
        assert self.arena._table.available == self.arena.n_slots
        assert not self.fetcher._reading and not self.fetcher._wanted_twice


@pytest.fixture(name="readers")
def _readers(tmp_path: Path) -> Iterator[Readers]:
    engine = reader_of_saved(tmp_path, TOKENS, BLOCKS)
    yield Readers(engine)
    engine.close()


def test_when_the_reader_gives_up_one_of_those_who_waited_reads_for_all(readers: Readers) -> None:
    first, second, third = readers.begin(), readers.begin(), readers.begin()
    readers.fetcher.abandon(first)
    readers.complete(second)
    assert readers.ring.n_reads == 2
    late = readers.begin()
    waiting = [threading.Thread(target=readers.complete, args=(fetch,)) for fetch in (third, late)]
    for thread in waiting:
        thread.start()
    time.sleep(0.05)
    assert all(thread.is_alive() for thread in waiting), "they wait for the second reader"
    readers.fetcher.keep_or_free(second)
    for thread in waiting:
        thread.join(SOON_S)
    assert third.slot == late.slot >= 0 and readers.ring.n_reads == 2
    readers.end(third, late)


def test_who_gives_up_ends_no_other_loads_read(readers: Readers) -> None:
    """A copy in the arena is found bad while another load reads the chunk anew: there are two readers of one key."""
    reader, other = readers.begin(), readers.begin()
    readers.complete(reader)
    readers.fetcher.keep_or_free(reader)
    readers.complete(other)  # from the arena
    readers.arena.slabs(other.slot, other.sources[0].slot_offset, 4, other.sources[0].slab_bytes)[1, 77] ^= 1
    holder = readers.begin()
    assert holder.slot == other.slot and readers.fetcher.check([holder]) == 0
    readers.fetcher.reject(readers._namespace, holder)
    anew = readers.begin()
    assert readers.ring.n_reads == 2
    with pytest.raises(FetchFailed, match="takes too long"):
        readers.complete(holder, within_s=0.0)
    readers.fetcher.abandon(holder)
    late = readers.begin()
    assert late.awaited is not None and readers.ring.n_reads == 2, "it is being read"
    readers.complete(anew)
    readers.fetcher.keep_or_free(anew)
    readers.complete(late)
    assert readers.ring.n_reads == 2
    readers.end(other, late)
