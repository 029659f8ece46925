"""Prefix lookups of the scheduler: synchronous for an index on this machine, else on background threads.

The scheduler's thread waits WAIT_S for a remote index, and otherwise repeats the call in its next step. Its waits
take WAIT_SHARE of the time at most, after WAIT_BURST_S: many new requests at once, or a slow index, delay new
requests and not running ones. How quickly answers come without a wait says nothing about the index: while the
scheduler's thread computes, the other thread gets the interpreter lock late. The deadline, after which a request is
computed, is index.lookup_timeout_s (see connectors/lookup_deadline.py).
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from kvtier.errors import IndexUnavailable
from kvtier.index.base import Index
from kvtier.runtime.threads import ThreadJobs

WAIT_S = 0.002  # seconds; a step of an engine takes ten times as long, a lookup over a network a fraction of it
WAIT_SHARE = 0.02  # share of the scheduler's time that its waits may take
WAIT_BURST_S = 0.01  # waits that it may make at once after a time without any, seconds
PENDING_MAX = 1024  # lookups that are kept until their request polls again
ANSWER_KEPT_S = 30.0  # seconds; a request polls again after a step of seconds or other requests' prefills

Clock = Callable[[], float]


class LookupResult(NamedTuple):
    """Entries of the longest stored prefix. is_answer: False where the index did not answer."""

    entries: list[bytes]
    took_s: float
    is_answer: bool = True


class Lookups:
    """Synchronous lookups on the calling thread."""

    def __init__(self, index: Index, clock: Clock = time.perf_counter) -> None:
        self._index = index
        self._clock = clock

    def resolve(self, keys: Sequence[bytes], asker: str = "") -> LookupResult | None:
        """Return the result, or None while it is pending: call again with the same arguments.

        asker: id of the request; a result of another request for the same keys may be old.
        """
        return self._resolve(keys)

    def _resolve(self, keys: Sequence[bytes]) -> LookupResult:
        started_s = self._clock()
        try:
            return LookupResult(self._index.resolve(keys), self._clock() - started_s)
        except IndexUnavailable:
            return LookupResult([], self._clock() - started_s, is_answer=False)

    def close(self) -> None:
        self._index.close()


@dataclass(slots=True, eq=False)
class _Lookup:
    keys: tuple[bytes, ...]
    asked_s: float
    found: LookupResult | None = None
    answered_s: float = 0.0
    is_answered: threading.Event = field(default_factory=threading.Event)


class InBackground(Lookups):
    """Lookups on the threads of `jobs`. `resolve` is called from one thread, and waits WAIT_S at most."""

    def __init__(self, index: Index, jobs: ThreadJobs, clock: Clock = time.perf_counter) -> None:
        super().__init__(index, clock)
        self._jobs = jobs
        self._lookups: OrderedDict[tuple[str, bytes, bytes], _Lookup] = OrderedDict()
        self._may_wait_s = WAIT_BURST_S  # time left for waits, as of `_counted_s`
        self._counted_s = clock()

    def resolve(self, keys: Sequence[bytes], asker: str = "") -> LookupResult | None:
        name = (asker, keys[0], keys[-1])  # keys are chained: the last one implies all before it
        lookup = self._lookups.get(name)
        if lookup is None or self._is_old(lookup):
            lookup = _Lookup(tuple(keys), self._clock())
            if not self._jobs.submit(partial(self._run, lookup)):
                return None  # the job queue is full: the request polls again
            self._lookups[name] = lookup
            self._lookups.move_to_end(name)
            # Requests that ended or were aborted never poll again.
            while len(self._lookups) > PENDING_MAX or self._is_old(next(iter(self._lookups.values()))):
                self._lookups.popitem(last=False)
            self._wait(lookup)
        found = lookup.found  # read once: a result that arrives between two reads would be returned twice
        if found is not None:
            self._lookups.pop(name, None)
        return found

    def _wait(self, lookup: _Lookup) -> None:
        earned_s = WAIT_SHARE * (lookup.asked_s - self._counted_s)
        self._may_wait_s = min(WAIT_BURST_S, self._may_wait_s + earned_s)
        self._counted_s = lookup.asked_s
        if self._may_wait_s > 0:
            is_answered = lookup.is_answered.wait(WAIT_S)
            self._may_wait_s -= self._clock() - lookup.asked_s if is_answered else WAIT_S

    def _is_old(self, lookup: _Lookup) -> bool:
        return lookup.is_answered.is_set() and self._clock() - lookup.answered_s > ANSWER_KEPT_S

    def _run(self, lookup: _Lookup) -> None:
        found = LookupResult([], 0.0, is_answer=False)
        try:
            found = self._resolve(lookup.keys)
        finally:
            lookup.answered_s = self._clock()
            lookup.found = found._replace(took_s=lookup.answered_s - lookup.asked_s)
            lookup.is_answered.set()

    def close(self) -> None:
        self._jobs.close()
        super().close()
