"""Report of an engine for the admin service: one small JSON record `worker/<owner>` in the index.

The Reporter runs in the engine's scheduler process and receives the workers' figures with their answers. The Keeper
writes the report whenever it renews the engine's lease. So each report in the index is of a living engine, and the
admin service connects to no engine.

A report has at most REPORT_BYTES_MAX bytes. It is untrusted input: any process with access to the index can write one.
All times are seconds since the epoch; all counters are sums since the engine's start.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvtier.errors import Corrupt
from kvtier.runtime import metrics as names
from kvtier.runtime.metrics import Metrics, summed
from kvtier.runtime.versions import installed

NOTE_PREFIX = "worker/"
REPORT_BYTES_MAX = 16 << 10
LABEL_CHARS_MAX = 200
TOP_PREFIXES = 16
# Prefixes whose hits are counted. A new one takes the place and the count of the one with the fewest hits.
COUNTED_PREFIXES_MAX = 256
# Upper bounds of the buckets of a Latency, seconds; a last bucket has none.
BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

Operation = Literal["lookup", "load", "save"]
Label = Annotated[str, Field(max_length=LABEL_CHARS_MAX)]
COUNT_MAX = 1 << 62
Count = Annotated[int, Field(ge=0, le=COUNT_MAX)]
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
HexId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Counters = Annotated[dict[Annotated[str, Field(pattern=r"^[a-z0-9_]{1,40}$")], Amount], Field(max_length=64)]
_FROZEN = ConfigDict(frozen=True, extra="ignore", strict=True)


class Latency(BaseModel):
    """Latency histogram: `counts[i]` events took at most BOUNDS_S[i], the last ones longer; not cumulative."""

    model_config = _FROZEN
    counts: Annotated[tuple[Count, ...], Field(min_length=len(BOUNDS_S) + 1, max_length=len(BOUNDS_S) + 1)] = (0,) * (
        len(BOUNDS_S) + 1
    )
    sum_s: Amount = 0.0

    def merged(self, other: Latency) -> Latency:
        counts = tuple(one + two for one, two in zip(self.counts, other.counts, strict=True))
        return Latency(counts=counts, sum_s=self.sum_s + other.sum_s)

    def quantile_s(self, fraction: float) -> float | None:
        """Interpolate a quantile within its bucket. None without events; the last bound for longer ones."""
        total = sum(self.counts)
        if not total:
            return None
        wanted, below, lower = fraction * total, 0, 0.0
        for count, bound in zip(self.counts, BOUNDS_S, strict=False):
            if count and below + count >= wanted:
                return lower + (bound - lower) * max(0.0, wanted - below) / count
            below, lower = below + count, bound
        return BOUNDS_S[-1]


class ArenaFill(BaseModel):
    """An arena, over all ranks of the engine. used_bytes: in slots that hold a chunk."""

    model_config = _FROZEN
    tier: Literal["hbm", "host"]
    size_bytes: Count
    used_bytes: Count


class TopPrefix(BaseModel):
    """The prefix that ends with chunk `key`. tokens: size of its last load. hits: number of its loads; too high where
    the prefix took over another's count (see COUNTED_PREFIXES_MAX)."""

    model_config = _FROZEN
    key: HexId
    tokens: Count
    hits: Count


class WorkerReport(BaseModel):
    """Report of one engine, over all its ranks.

    counters: see kvtier.runtime.metrics; recent: growth of each in the last `interval_s` seconds.
    read_ceiling_bytes_s: read rate of the storage at calibration; None: not measured (without a GPU it never is).
    prefill_token_s: time to compute a token, measured in the engine's own steps; None: no long prefill yet.
    capacity_bytes: of the root, by the engine's settings; None: not reported.
    ttft_saved_s: time to compute the loaded tokens, less the time of their loads, summed over loads; None: not known,
    because neither this engine nor an earlier one like it has timed a step of load_threshold.PREFILL_TOKENS_MIN tokens.
    ttft_saved_recent_s: its growth in the last `interval_s` seconds.
    """

    model_config = _FROZEN
    owner: Label
    host: Label
    pid: Count
    kvtier_version: Label
    engine: Label
    engine_version: Label
    model: Label
    tokenizer: Label = ""
    capacity_bytes: Count | None = None
    namespace: HexId
    ranks: Count
    started_s: Amount
    at_s: Amount
    interval_s: Amount
    counters: Counters = {}
    recent: Counters = {}
    lookup: Latency = Latency()
    load: Latency = Latency()
    save: Latency = Latency()
    read_ceiling_bytes_s: Amount | None = None
    prefill_token_s: Amount | None = None
    ttft_saved_s: Annotated[float, Field(allow_inf_nan=False)] | None = None
    ttft_saved_recent_s: Annotated[float, Field(allow_inf_nan=False)] | None = None
    arenas: Annotated[tuple[ArenaFill, ...], Field(max_length=4)] = ()
    top_prefixes: Annotated[tuple[TopPrefix, ...], Field(max_length=TOP_PREFIXES)] = ()

    def note(self) -> bytes:
        """Return the report as JSON of at most REPORT_BYTES_MAX bytes, without the top prefixes if it is too long, and
        then without the counters."""
        for kept in (self, self.model_copy(update={"top_prefixes": ()})):
            data = kept.model_dump_json().encode()
            if len(data) <= REPORT_BYTES_MAX:
                return data
        return self.model_copy(update={"top_prefixes": (), "counters": {}, "recent": {}}).model_dump_json().encode()

    @classmethod
    def read(cls, note: bytes) -> WorkerReport:
        """Parse a report. Raises Corrupt if `note` is none."""
        if len(note) > REPORT_BYTES_MAX:
            raise Corrupt(f"worker report: {len(note)} bytes")
        try:
            return cls.model_validate_json(note)
        except ValidationError as error:
            raise Corrupt(f"worker report: {error.error_count()} fields are not as they should be") from None


@dataclass(frozen=True, slots=True)
class About:
    """Description of an engine. ranks: number of workers. model: the name that it is served under. tokenizer: folder or
    name on the hub. device: the device that computes, "" where costs are not reported. capacity_bytes: from the
    settings, COUNT_MAX at most; None where it is not reported."""

    ranks: int = 1
    engine: str = ""
    engine_version: str = ""
    model: str = ""
    tokenizer: str = ""
    device: str = ""
    capacity_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class RankFigures:
    """Figures that a worker sends to the scheduler process; picklable. counters: increments since the last ones."""

    counters: Mapping[str, float]
    arenas: tuple[ArenaFill, ...] = ()
    read_ceiling_bytes_s: float | None = None

    def merged(self, other: RankFigures) -> RankFigures:
        """Merge the figures of two ranks. Each measured the shared mount alone, so their ceilings are not added."""
        ceilings = [figures.read_ceiling_bytes_s or 0.0 for figures in (self, other)]
        counters = summed((self.counters, other.counters))
        sums = arena_sums((*self.arenas, *other.arenas)).items()
        arenas = tuple(ArenaFill(tier=tier, size_bytes=n_bytes, used_bytes=used) for tier, (n_bytes, used) in sums)
        return RankFigures(counters, arenas, max(ceilings) or None)


@dataclass(slots=True)
class Times:
    """Mutable form of Latency, cheap to update: the scheduler's thread adds the time of each saved chunk."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    sum_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.sum_s += max(0.0, seconds)

    def latency(self) -> Latency:
        return Latency(counts=tuple(self.counts), sum_s=self.sum_s)


@dataclass(slots=True)
class _EngineFigures:
    """Figures gathered since the engine's start."""

    counters: dict[str, float] = field(default_factory=dict)
    arenas: tuple[ArenaFill, ...] = ()
    ceiling_bytes_s: float | None = None
    times: dict[Operation, Times] = field(default_factory=lambda: {name: Times() for name in get_args(Operation)})
    prefill_token_s: float | None = None
    expected_token_s: float | None = None  # prefill_token_s of an earlier engine like this one
    saved_s: float | None = None
    load_tokens: float = 0.0  # tokens of loads that are not in saved_s yet; mean of the ranks
    load_s: float = 0.0  # time of these loads, seconds; mean of the ranks
    hits: dict[bytes, tuple[int, int]] = field(default_factory=dict)


class Reporter:
    """Thread-safe. `metrics`: those of the scheduler's process. `clock`: seconds since the epoch (I6)."""

    def __init__(self, owner: str, about: About, metrics: Metrics, clock: Callable[[], float] = time.time) -> None:
        self._owner = owner
        self._about = about
        self._metrics = metrics
        self._lock = threading.Lock()
        self._seen = _EngineFigures()
        self._started_s = clock()
        self._last_s = self._started_s
        self._last_counters: Mapping[str, float] = {}
        self._last_saved_s = 0.0

    def took(self, operation: Operation, seconds: float) -> None:
        with self._lock:
            self._seen.times[operation].add(seconds)

    def add(self, figures: RankFigures) -> None:
        """Add the merged figures of all ranks."""
        with self._lock:
            self._seen.counters = summed((self._seen.counters, figures.counters))
            self._seen.arenas = figures.arenas or self._seen.arenas
            self._seen.ceiling_bytes_s = figures.read_ceiling_bytes_s or self._seen.ceiling_bytes_s

    def saw_load(self, tokens: int, seconds: float) -> None:
        """Record that one rank's part of a load ended."""
        self.took("load", seconds)
        with self._lock:
            self._seen.load_tokens += tokens / self._about.ranks
            self._seen.load_s += seconds / self._about.ranks
            self._count_loads()

    def saw_prefill(self, token_s: float) -> None:
        """Record a prefill. token_s: time to compute a token by the last ones (LoadThreshold.saw_step), seconds."""
        with self._lock:
            self._seen.prefill_token_s = token_s
            self._count_loads()

    def expect(self, prefill_token_s: float) -> None:
        """Set the time to compute a token in an earlier engine like this one. It applies until this one has timed a
        prefill."""
        with self._lock:
            self._seen.expected_token_s = prefill_token_s
            self._count_loads()

    def _count_loads(self) -> None:
        """Add the loads to the time saved, once the time to compute a token is known."""
        seen = self._seen
        token_s = seen.prefill_token_s or seen.expected_token_s
        if token_s is not None:
            seen.saved_s = (seen.saved_s or 0.0) + seen.load_tokens * token_s - seen.load_s
            seen.load_tokens = seen.load_s = 0.0

    def saw_hit(self, key: bytes, tokens: int) -> None:
        """Record that a load of the prefix that ends with chunk `key` was planned. tokens: size of the load."""
        with self._lock:
            hits, count = self._seen.hits, 0
            if key in hits:
                count = hits[key][1]
            elif len(hits) >= COUNTED_PREFIXES_MAX:
                fewest = min(hits, key=lambda counted: hits[counted][1])
                count = hits.pop(fewest)[1]
            hits[key] = (tokens, count + 1)

    def report(self, now_s: float, namespace: bytes) -> WorkerReport:
        """Return the report. Its recent figures count from the last call. Call it on one thread.

        namespace: id of the current one.
        """
        with self._lock:
            seen = replace(self._seen, hits=dict(self._seen.hits))
            latencies = {name: times.latency() for name, times in seen.times.items()}
        # The rest reads files of the installation: under the lock, the scheduler's thread would wait for them.
        about = self._about
        counters = summed((self._metrics.total(), seen.counters))
        recent = {name: max(0.0, value - self._last_counters.get(name, 0.0)) for name, value in counters.items()}
        top = sorted(seen.hits.items(), key=lambda hit: hit[1][1], reverse=True)[:TOP_PREFIXES]
        made = WorkerReport(
            owner=self._owner[:LABEL_CHARS_MAX],
            host=socket.gethostname()[:LABEL_CHARS_MAX],
            pid=os.getpid(),
            kvtier_version=installed("kvtier"),
            engine=about.engine[:LABEL_CHARS_MAX],
            engine_version=about.engine_version[:LABEL_CHARS_MAX],
            model=about.model[:LABEL_CHARS_MAX],
            tokenizer=about.tokenizer[:LABEL_CHARS_MAX],
            capacity_bytes=about.capacity_bytes,
            namespace=namespace.hex(),
            ranks=about.ranks,
            started_s=self._started_s,
            at_s=now_s,
            interval_s=max(0.0, now_s - self._last_s),
            counters=counters,
            recent={name: value for name, value in recent.items() if value},
            **latencies,
            read_ceiling_bytes_s=seen.ceiling_bytes_s,
            prefill_token_s=seen.prefill_token_s,
            ttft_saved_s=seen.saved_s,
            ttft_saved_recent_s=None if seen.saved_s is None else seen.saved_s - self._last_saved_s,
            arenas=seen.arenas,
            top_prefixes=tuple(TopPrefix(key=key.hex(), tokens=n, hits=hits) for key, (n, hits) in top),
        )
        self._last_s, self._last_counters, self._last_saved_s = now_s, counters, seen.saved_s or 0.0
        return made


def hit_ratio(counters: Mapping[str, float]) -> float | None:
    """Return the share of looked-up tokens for which a load was planned, even if it failed; None without lookups."""
    asked = counters.get(names.LOOKUP_TOKENS, 0.0)
    return min(1.0, counters.get(names.HIT_TOKENS, 0.0) / asked) if asked else None


def arena_sums(arenas: Iterable[ArenaFill]) -> dict[Literal["hbm", "host"], tuple[int, int]]:
    """Return tier -> (size, used) in bytes, summed over arenas."""
    sums: dict[Literal["hbm", "host"], tuple[int, int]] = {}
    for arena in arenas:
        size, used = sums.get(arena.tier, (0, 0))
        sums[arena.tier] = size + arena.size_bytes, used + arena.used_bytes
    return sums
