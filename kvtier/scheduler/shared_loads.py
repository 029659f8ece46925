"""SharedLoads: loads under way, and the requests that wait for another request's load of the same chunks. Pure.

An engine puts loaded blocks into its own prefix cache when the load has ended. Until then a second request with the
same prefix would load the same chunks again, into blocks of its own. Instead it waits (the engine asks again in each
step, and the request holds no blocks) and then hits the engine's cache.

Waiting for every load makes convoys: a request that shares 1,000 tokens with a load of 100,000 tokens would wait for
all of them. So a request waits only for a load that is not much longer than what both share, or where its own copy
would leave the engine short of KV memory, and never for a load that is overdue.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvtier.runtime import metrics as names
from kvtier.runtime.metrics import Metrics

# Longest load that is worth the wait, as a multiple of the tokens that both requests share.
LENGTH_RATIO = 4.0
# Longest wait of a request for several loads in turn, as a multiple of the longest wait for one.
WAITS_MAX = 3.0
# Waits after which the engine's own cache had no more of the prompt: its blocks were evicted at once, or the engine's
# own key of the prompt differs. After so many, the request loads by itself.
VAIN_WAITS_MAX = 2

Clock = Callable[[], float]


@dataclass(eq=False, slots=True)
class _Load:
    """A load under way."""

    keys: frozenset[bytes]
    n_tokens: int
    began_s: float
    is_over: bool = False
    has_failed: bool = False


@dataclass(slots=True)
class _Follower:
    """A request that waits, or waited. since_s: start of its first wait.

    wait_s: start of this wait. computed_tokens: the engine's own hit then; end_tokens: its hit once the load has ended.
    """

    since_s: float
    load: _Load | None = None
    wait_s: float = 0.0
    computed_tokens: int = 0
    end_tokens: int = 0
    n_vain: int = 0


class SharedLoads:
    """Called from the scheduler's thread only.

    Attributes:
        wait_s: longest wait for one load, counted from its beginning, seconds; 0: no request waits.
        is_short: True if blocks for so many more tokens leave the engine short of KV memory.
    """

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self.wait_s = 0.0
        self.is_short: Callable[[int], bool] = lambda n_tokens: False
        self._metrics = metrics
        self._clock = clock
        self._loads: dict[str, _Load] = {}
        self._followers: dict[str, _Follower] = {}

    def begin(self, request_id: str, keys: Iterable[bytes], n_tokens: int) -> None:
        """Note a load of consecutive chunks of a prompt."""
        if self.wait_s:
            self.end(request_id)
            self._loads[request_id] = _Load(frozenset(keys), n_tokens, self._clock())

    def end(self, request_id: str, has_failed: bool = False) -> None:
        """Note that the engine has the loaded blocks in its own cache, or that it will not get all of them. Later calls
        do nothing."""
        load = self._loads.pop(request_id, None)
        if load is not None:
            load.is_over, load.has_failed = True, has_failed

    def forget(self, request_id: str) -> None:
        """Note that a request ended, or was aborted."""
        self.end(request_id, has_failed=True)
        self._followers.pop(request_id, None)

    def clear(self) -> None:
        """Note that no load under way will be in the engine's cache under its key."""
        for request_id in list(self._loads):
            self.end(request_id, has_failed=True)

    def is_waiting(self, request_id: str, computed_tokens: int) -> bool:
        """Return True if a request that waits must wait on. Cheap: called in every step.

        computed_tokens: the engine's own hit now.
        """
        follower = self._followers.get(request_id)
        if follower is None or follower.load is None:
            return False
        now, load = self._clock(), follower.load
        if computed_tokens < follower.end_tokens and not load.is_over and self._has_time(follower, load, now):
            return True
        self._metrics.add(names.SHARED_WAIT_SECONDS, now - follower.wait_s)
        self._metrics.add(names.SHARED_TOKENS, max(0, computed_tokens - follower.computed_tokens))
        is_vain = load.is_over and not load.has_failed and computed_tokens <= follower.computed_tokens
        follower.n_vain += is_vain
        follower.load = None
        return False

    def must_wait(self, request_id: str, keys: Sequence[bytes], chunk_tokens: int, computed_tokens: int) -> bool:
        """Return True if the request should wait for a load under way instead of loading these chunks by itself.

        keys: of its hit, from the first chunk on that the engine does not have whole.
        """
        now = self._clock()
        follower = self._followers.get(request_id) or _Follower(now)
        begin = computed_tokens // chunk_tokens * chunk_tokens
        follower.load, follower.end_tokens = None, computed_tokens
        for load in self._loads.values():
            end_tokens = begin + _shared(keys, load.keys) * chunk_tokens
            if end_tokens <= follower.end_tokens:
                continue
            shared_tokens = end_tokens - computed_tokens
            is_worth_it = load.n_tokens <= LENGTH_RATIO * shared_tokens or self.is_short(shared_tokens)
            if is_worth_it and self._has_time(follower, load, now):
                follower.end_tokens, follower.load = end_tokens, load
        if follower.load is None:
            return False
        if request_id not in self._followers:
            self._followers[request_id] = follower
            self._metrics.add(names.SHARED_WAITS)
        follower.wait_s, follower.computed_tokens = now, computed_tokens
        return True

    def _has_time(self, follower: _Follower, load: _Load, now_s: float) -> bool:
        """Return True unless the load is overdue, or the request has waited for too long or in vain."""
        return (
            now_s - load.began_s < self.wait_s
            and now_s - follower.since_s < WAITS_MAX * self.wait_s
            and follower.n_vain < VAIN_WAITS_MAX
        )


def _shared(keys: Sequence[bytes], others: frozenset[bytes]) -> int:
    """Return how many leading keys are in `others`. Keys are chained: if one is, so are all before it."""
    return bisect_left(keys, True, key=lambda key: key not in others)
