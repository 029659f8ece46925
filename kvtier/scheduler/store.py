"""Store: planner of loads and saves. It looks chunks up and assigns slots to those to save. It moves no bytes.

It runs in the engine's scheduler process. Its methods are called from the scheduler's thread and never wait for
storage. Work that may wait (registering sets, eviction, recording uses) runs on the Keeper's thread.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvtier.index.async_lookup import Lookups
from kvtier.index.base import Index
from kvtier.plan import LoadChunk, LoadPlan, SaveChunk, SaveDone, SaveOutcome, SavePlan
from kvtier.runtime import metrics as names
from kvtier.runtime import switch_interval
from kvtier.runtime.backoff import Backoff
from kvtier.scheduler.background import Keeper
from kvtier.scheduler.cost_history import CostHistory

KNOWN_KEYS_MAX = 262_144  # keys remembered as stored or being saved: 64 million tokens, about 30 MiB
REST_S = 1.0  # pause in planning saves after a worker backed off, seconds; workers themselves back off for longer
ANSWER_LOST_S = 60.0  # time after which a save without an answer counts as lost, seconds
REFUSED_KEYS_MAX = 4096  # keys remembered of chunks that the codec refused, because their prompts may come again
REFUSED_S = 600.0  # time until a refused chunk is tried again, seconds: only one request may have caused the refusal

# Outcomes that workers do not count, because most of these chunks are planned again.
_BUSY = {SaveOutcome.QUEUE_FULL: names.SKIPPED_QUEUE_FULL, SaveOutcome.RESTING: names.SKIPPED_RESTING}

_LOSSES = tuple(SaveOutcome)  # if ranks have different outcomes, the last one in this order counts

Clock = Callable[[], float]


class WantedChunk(NamedTuple):
    """A whole chunk whose KV the engine has, or will have after this step. tenant: label, or "" without one.

    owner, number: its request, and its place in the prompt. is_late: it was whole in an earlier step.
    """

    key: bytes
    parent: bytes
    block_ids: tuple[int, ...]
    tenant: str = ""
    owner: str = ""
    number: int = 0
    is_late: bool = False


class SaveSelection(NamedTuple):
    """Result of `select_saves`. left: chunks that cannot be saved now, each with the counter that names the cause."""

    plan: SavePlan | None
    left: list[tuple[WantedChunk, str]]


class LostSave(NamedTuple):
    """A planned chunk that some rank did not save. outcome: its reason. is_blank: no rank wrote into its slot."""

    owner: str
    number: int
    key: bytes
    outcome: SaveOutcome
    is_blank: bool


@dataclass(slots=True)
class _Known:
    """A chunk that is stored or being saved.

    missing: ranks that have not answered yet. is_blank: no rank wrote anything so far. took_s: time of the slowest
    rank. wanted: the chunk, until it is stored. loss: the worst outcome so far.
    """

    set_id: int
    slot: int
    since_s: float
    missing: int
    is_blank: bool = True
    took_s: float = 0.0
    wanted: WantedChunk | None = None
    loss: SaveOutcome = SaveOutcome.SAVED

    @property
    def is_stored(self) -> bool:
        return self.missing == 0


class Store:
    """Planner of one engine.

    Args:
        namespace_id: 16 bytes; `reset` changes it.
        chunk_tokens: tokens of a chunk.
        writers: number of ranks that write a part of each chunk.
        keeper: provides the sets for saved chunks and records which sets were used.
        clock: seconds since the epoch (I6).
    """

    costs: CostHistory | None = None
    """Costs that earlier engines of this kind measured; None where they are not used."""

    def __init__(
        self,
        namespace_id: bytes,
        chunk_tokens: int,
        writers: int,
        lookups: Lookups,
        keeper: Keeper,
        clock: Clock = time.time,
    ) -> None:
        self.namespace_id = namespace_id
        self.metrics = keeper.metrics
        self.reporter = keeper.reporter
        self._chunk_tokens = chunk_tokens
        self._writers = writers
        self._rest = Backoff()
        self._lookups = lookups
        self._keeper = keeper
        self._clock = clock
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._refused_until_s: OrderedDict[bytes, float] = OrderedDict()

    @property
    def index(self) -> Index:
        """Return the index. Its calls may wait, so the scheduler's thread must not make them."""
        return self._keeper.index

    def lookup(self, keys: Sequence[bytes], asker: str = "") -> list[bytes] | None:
        """Return the index entries of the longest prefix of `keys` that is stored whole; none if the index fails (I5).
        None: the index has not answered yet, so ask again in a moment.

        `keys` are consecutive chunks of one prompt, from any chunk on. asker: id of the request; the answer to an
        earlier question is returned to the same asker only.
        """
        with switch_interval.held():
            found = self._lookups.resolve(keys, asker)
        if found is None:
            return None
        if found.is_answer:
            self.forget_lost(keys[len(found.entries) :])
        else:
            self.metrics.add(names.INDEX_ERRORS)
        self.metrics.add(names.LOOKUPS)
        self.metrics.add(names.LOOKUP_SECONDS, found.took_s)
        self.reporter.took("lookup", found.took_s)
        self.metrics.add(names.LOOKUP_TOKENS, len(keys) * self._chunk_tokens)
        return found.entries

    def gave_up(self, n_chunks: int) -> None:
        """Count a lookup of `n_chunks` chunks that was not answered in time as a miss."""
        self.metrics.add(names.INDEX_ERRORS)
        self.metrics.add(names.LOOKUPS)
        self.metrics.add(names.LOOKUP_TOKENS, n_chunks * self._chunk_tokens)

    def plan_load(
        self,
        request_id: str,
        keys: Sequence[bytes],
        entries: Sequence[bytes],
        block_ids: Sequence[int],
        first_token: int,
    ) -> LoadPlan:
        """Plan a load of consecutive chunks.

        block_ids: the engine's blocks of exactly these chunks, in order.
        first_token: number of tokens of the first chunk that the engine has already; a multiple of its block size.
        """
        n_blocks, rest = divmod(len(block_ids), len(keys))
        assert rest == 0 and len(entries) == len(keys)
        now = self._clock()
        chunks = []
        stored = _Known(0, 0, now, missing=0)
        for number, (key, entry) in enumerate(zip(keys, entries, strict=True)):
            blocks = tuple(block_ids[number * n_blocks : (number + 1) * n_blocks])
            chunks.append(LoadChunk(key, entry, blocks, first_token if number == 0 else 0))
            if key not in self._known:
                self._remember(key, stored)
        self._keeper.book_load(entries, now)
        self.metrics.add(names.HIT_TOKENS, len(keys) * self._chunk_tokens - first_token)
        self.reporter.saw_hit(keys[-1], len(keys) * self._chunk_tokens)
        return LoadPlan(request_id, self.namespace_id, tuple(chunks))

    def plan_save(self, wanted: Sequence[WantedChunk]) -> SavePlan | None:
        """Plan a save of chunks that the caller does not offer again. Count those that cannot be saved as skipped."""
        plan, left = self.select_saves(wanted)
        for _, cause in left:
            self.metrics.add(cause)
        return plan

    def select_saves(self, wanted: Sequence[WantedChunk]) -> SaveSelection:
        """Allocate slots for the chunks of `wanted` that are not stored, not being saved and not refused by the codec
        lately. A chunk behind a left one is left too, because a lookup ends at the first missing chunk.

        No index I/O: the worker skips chunks that another engine has stored before it writes.
        """
        now = self._clock()
        chunks: list[SaveChunk] = []
        left: dict[bytes, tuple[WantedChunk, str]] = {}
        for chunk in wanted:
            if chunk.key in self._known:
                continue
            before = left.get(chunk.parent)
            place = self._place_of(chunk, now) if before is None else before[1]
            if isinstance(place, str):
                left[chunk.key] = chunk, place
                continue
            set_id, slot = place
            known = _Known(set_id, slot, now, self._writers, wanted=chunk._replace(block_ids=()))
            self._remember(chunk.key, known)
            chunks.append(SaveChunk(chunk.key, chunk.parent, set_id, slot, chunk.block_ids, chunk.tenant, chunk.number))
        self._keeper.refill()
        plan = SavePlan(self.namespace_id, self._keeper.allocators.slots, tuple(chunks)) if chunks else None
        return SaveSelection(plan, list(left.values()))

    def _place_of(self, chunk: WantedChunk, now_s: float) -> tuple[int, int] | str:
        """Take a slot. Return (set, slot), or the counter that names why there is none."""
        if 0 < self._refused_until_s.get(chunk.key, now_s) - now_s <= REFUSED_S:
            return names.SKIPPED_REFUSED
        if self._rest.is_resting(now_s):
            return names.SKIPPED_RESTING
        allocator = self._keeper.allocators.of(chunk.tenant, now_s)
        place = allocator.take(now_s)
        if place is not None:
            return place
        is_refused = bool(chunk.tenant) and allocator.backoff.is_resting(now_s)
        return names.SKIPPED_QUOTA if is_refused else names.SKIPPED_NO_SPACE

    def expect(self, tenant: str) -> None:
        """Request a set for chunks of this tenant, which will be computed soon."""
        self._keeper.allocators.of(tenant, self._clock())
        self._keeper.refill()

    def is_set_coming(self, tenant: str) -> bool:
        """Return True if no set is ready for chunks of this tenant but one is expected soon."""
        now = self._clock()
        allocator = self._keeper.allocators.of(tenant, now)
        return allocator.is_coming(now) and not allocator.backoff.is_resting(now)

    def is_known(self, key: bytes) -> bool:
        """Return True if the chunk is believed to be stored or being saved."""
        return key in self._known

    def is_stored(self, key: bytes) -> bool:
        """Return True if the chunk is believed to be stored, not if it is still being saved."""
        known = self._known.get(key)
        return known is not None and known.is_stored

    def saved(self, done: Sequence[SaveDone]) -> list[LostSave]:
        """Record the workers' answers. A chunk counts as stored once all ranks that write it have saved it. Return the
        chunks that all ranks have answered and some have not saved."""
        lost = []
        for answer in done:
            if answer.outcome is SaveOutcome.NO_SPACE:
                self._keeper.report_full_disk()
            elif answer.outcome is SaveOutcome.SAVED:
                self._keeper.report_saved()
            if answer.outcome in (SaveOutcome.NO_SPACE, SaveOutcome.RESTING):
                self._rest.pause(self._clock(), REST_S)
            known = self._known.get(answer.key)
            if known is None or not known.missing or (known.set_id, known.slot) != (answer.set_id, answer.slot):
                continue  # an answer to an older plan
            if answer.outcome is SaveOutcome.REFUSED:
                self._refuse(answer.key)
            known.missing -= 1
            known.took_s = max(known.took_s, answer.took_s)
            known.is_blank &= answer.outcome.wrote_nothing
            known.loss = max(known.loss, answer.outcome, key=_LOSSES.index)
            if known.missing == 0:
                lost += self._settle(answer.key, known)
        return lost

    def _settle(self, key: bytes, known: _Known) -> list[LostSave]:
        """End a save that all ranks have answered."""
        wanted, known.wanted = known.wanted, None
        assert wanted is not None, "only a chunk that is being saved has answers missing"
        self._keeper.allocators.answered(wanted.tenant, known.set_id, known.slot, known.is_blank)
        if known.loss not in (SaveOutcome.SAVED, SaveOutcome.PRESENT):
            del self._known[key]
            return [LostSave(wanted.owner, wanted.number, key, known.loss, known.is_blank)]
        if wanted.is_late:
            self.metrics.add(names.SAVED_LATER)
        if not known.is_blank:
            self.reporter.took("save", known.took_s)
        return []

    def count_dropped(self, lost: LostSave) -> bool:
        """Count a chunk that is not planned again. Return True if workers had no room for it; they count the other
        outcomes themselves."""
        cause = _BUSY.get(lost.outcome)
        if cause is not None:
            self.metrics.add(cause)
        return cause is not None

    def reset(self) -> None:
        """Switch to a namespace that no other engine has: weights changed in place, or the engine's cache was reset."""
        self.namespace_id = self._keeper.begin_epoch()
        self._known.clear()
        self._refused_until_s.clear()

    def forget_lost(self, keys: Sequence[bytes]) -> None:
        """Allow chunks that the index has lost to be saved again, unless their first save is still under way."""
        now = self._clock()
        for key in keys:
            known = self._known.get(key)
            if known is not None and (known.is_stored or now - known.since_s > ANSWER_LOST_S):
                del self._known[key]

    def close(self) -> None:
        """End the background duties. Every wait in it is bounded (I10)."""
        self._keeper.close()
        self._lookups.close()

    def _remember(self, key: bytes, known: _Known) -> None:
        self._known[key] = known
        self._known.move_to_end(key)
        if len(self._known) > KNOWN_KEYS_MAX:
            self._known.popitem(last=False)

    def _refuse(self, key: bytes) -> None:
        self._refused_until_s[key] = self._clock() + REFUSED_S
        self._refused_until_s.move_to_end(key)
        if len(self._refused_until_s) > REFUSED_KEYS_MAX:
            self._refused_until_s.popitem(last=False)
