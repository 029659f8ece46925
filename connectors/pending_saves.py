"""PendingSaves: planner of a step's saves, and of further attempts for chunks that could not be saved. Imports no
engine.

A chunk that cannot be taken now (a worker's queue is full, the storage is backing off, no set is ready) is planned
again in later steps of its request and at the request's end. A chunk that a full queue refuses after that is planned
again while its blocks keep their content (late_saves). The chunks of a prompt are planned in order, and none behind one
that could not be planned, so only the tail of a prompt can be missing in the end. The oldest requests are served first,
so the newest lose their tails.
"""

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from operator import attrgetter
from typing import NamedTuple

from kvtier.connectors.faults import Faults, catch_faults
from kvtier.connectors.kv_events import Watcher
from kvtier.connectors.late_saves import LateSaves
from kvtier.connectors.tracked_request import BlockShape, TrackedRequest
from kvtier.plan import SaveDone, SaveOutcome, SavePlan
from kvtier.runtime import metrics as names
from kvtier.scheduler.save_pacing import SavePacing
from kvtier.scheduler.store import LostSave, SaveSelection, Store, WantedChunk

FAILURES_MAX = 3  # failed saves of a chunk after which it is given up, with those behind it
CUT_OFF_MAX = 4096  # limit of the requests that are remembered as counted (I4)

_NOTHING = SaveSelection(None, [])


class _Frontier(NamedTuple):
    """Tokens of a running request whose KV is final after this step, and all its blocks."""

    tokens: int
    block_ids: Sequence[int]


class PendingSaves:
    """Called from the engine's scheduler thread only.

    requests: all requests that the engine has.
    """

    def __init__(self, store: Store, shape: BlockShape, requests: Mapping[str, TrackedRequest], faults: Faults) -> None:
        self.watcher = Watcher()
        self.late = LateSaves()
        self._store = store
        self._shape = shape
        self._requests = requests
        self._faults = faults
        self._pacing = SavePacing()
        self._advanced: dict[str, _Frontier] = {}
        self._cut_off: dict[str, None] = {}  # requests that were counted
        self._ended: dict[int, list[WantedChunk]] = {}  # chunks by arrival of their request

    @property
    def has_pending_gathers(self) -> bool:
        """Return True while chunks of ended requests wait for a step that takes them to the workers."""
        return bool(self._ended) or self.late.are_waiting

    def is_due(self, request: TrackedRequest, frontier_tokens: int) -> bool:
        """Return True if there may be a chunk to save. Cheap: called for every request in every step."""
        whole = min(frontier_tokens // self._shape.chunk_tokens, request.progress.end_chunk)
        return request.may_save and whole > request.progress.planned_chunks

    def advance(self, request: TrackedRequest, frontier_tokens: int, block_ids: Sequence[int]) -> None:
        """Note that after this step the KV of the first `frontier_tokens` tokens, in `block_ids`, is final.

        While no segment set is ready yet, as for a tenant's first request in a while, the chunks stay in their blocks.
        """
        if len(block_ids) * self._shape.block_tokens < frontier_tokens:
            return  # not all of its blocks are known; `finish` gets them all
        if not request.may_save or request.load_blocks is not None:
            return
        is_set_coming = False
        with self._faults.contained("looking for a set"):
            is_set_coming = self._store.is_set_coming(request.view.tenant)
        if is_set_coming:
            whole = frontier_tokens // self._shape.chunk_tokens
            request.progress.whole_chunks = max(request.progress.whole_chunks, whole)
        else:
            self._advanced[request.view.request_id] = _Frontier(frontier_tokens, block_ids)

    def finish(self, request: TrackedRequest, frontier_tokens: int, block_ids: Sequence[int]) -> None:
        """Take all chunks of an ended request that are neither stored nor being saved, because the engine may reuse its
        blocks from the next step on. Chunks that another request was to save, and could not, are among them."""
        self._advanced.pop(request.view.request_id, None)
        if not request.may_save or request.load_blocks is not None:
            return
        request.progress.plan_again(0)
        wanted = self._take(request, _Frontier(frontier_tokens, block_ids), None)
        if not request.may_save:
            return
        with self._faults.contained("noting chunks that may be refused"):
            unsaved = request.unsaved(frontier_tokens, block_ids, self._shape, self._store.is_stored)
            self.late.keep(request.arrival, unsaved)
        if wanted:
            self._ended[request.arrival] = wanted

    def take_plans(self, rewritten: AbstractSet[int] | None) -> tuple[SavePlan | None, SavePlan | None]:
        """Return the saves (before, after) the forward of this step.

        rewritten: blocks that the engine may write to before the gather; None: unknown.
        """
        window = self._pacing.next_window()
        before = self._plan_ended(rewritten, window)
        if window is not None and before is not None:
            window = max(0, window - len(before.chunks))
        after = self._plan_advanced(window)
        self._pacing.planned(chunk.key for plan in (before, after) if plan is not None for chunk in plan.chunks)
        return before, after

    def saved(self, done: Sequence[SaveDone]) -> None:
        """Take the workers' answers."""
        left: Sequence[LostSave] = ()
        with self._faults.contained("taking the answers to saves"):
            left = self._store.saved(done)
        slots_lost = {lost.key for lost in left if not lost.is_blank}
        for answer in done:
            is_stored = self._store.is_stored(answer.key)
            is_pending = not is_stored and self._store.is_known(answer.key)
            if not is_pending:
                self._pacing.answered(answer.key)
            if is_stored:
                self.late.stored(answer.key)
                self._pacing.stored()
            elif answer.outcome is SaveOutcome.QUEUE_FULL and (answer.key in slots_lost or is_pending):
                # Another rank wrote the chunk, or has not answered yet and will probably write it.
                self.late.refused(answer.key)
                self._pacing.slot_lost()
        for lost in left:
            request = self._requests.get(lost.owner)
            if request is not None and request.may_save:
                self.late.forget(lost.key)
                self._plan_again(request, lost)
            elif lost.outcome is SaveOutcome.QUEUE_FULL and self.late.plan_again(lost.key):
                self._pacing.refused()
            else:
                self.late.forget(lost.key)
                if self._store.count_dropped(lost):
                    self._count_tail(lost.owner)
        with self._faults.contained("announcing saved chunks"):
            self.watcher.saved(done)

    def clear(self) -> None:
        """Drop what is planned: no KV that is in the engine now may be saved."""
        self._advanced.clear()
        self._ended.clear()
        self.late.clear()

    def _plan_again(self, request: TrackedRequest, lost: LostSave) -> None:
        if lost.outcome is SaveOutcome.REFUSED:
            request.progress.give_up(lost.number)
            return
        progress = request.progress
        if lost.outcome is SaveOutcome.FAILED:
            progress.failures[lost.number] += 1
        if progress.failures[lost.number] > FAILURES_MAX:
            progress.give_up(lost.number)
            return
        progress.plan_again(lost.number)
        self._pacing.refused()

    def _plan_ended(self, rewritten: AbstractSet[int] | None, window: int | None) -> SavePlan | None:
        """Plan the remaining chunks of ended requests, and late chunks (see `LateSaves.take`; window: its limit).

        A chunk that cannot be planned now is lost, unless a set is coming and the chunk's blocks are alive until then.
        """
        wanted: list[WantedChunk] = []
        ended, self._ended = self._ended, {}
        for arrival, due in self.late.take(window).items():
            ended.setdefault(arrival, []).extend(due.chunks)
            if due.lost:
                self._lose(due.lost, names.SKIPPED_QUEUE_FULL)
        for arrival in sorted(ended):
            chunks = sorted(ended[arrival], key=attrgetter("number"))
            n_whole = 0
            if rewritten is not None:
                overwritten = (i for i, chunk in enumerate(chunks) if not rewritten.isdisjoint(chunk.block_ids))
                n_whole = next(overwritten, len(chunks))
            if n_whole < len(chunks):
                self._lose(chunks[n_whole:], names.SKIPPED_OVERWRITTEN)
            wanted += chunks[:n_whole]
        plan, left = self._select(wanted)
        for chunk, cause in left:
            is_set_coming = cause == names.SKIPPED_NO_SPACE and self._store.is_set_coming(chunk.tenant)
            if is_set_coming and self.late.plan_again(chunk.key):
                self._pacing.refused()
            else:
                self._lose([chunk], cause)
        return plan

    def _lose(self, chunks: Sequence[WantedChunk], cause: str) -> None:
        """Count chunks of an ended request that are not saved."""
        self._store.metrics.add(cause, len(chunks))
        for chunk in chunks:
            self.late.forget(chunk.key)
            self._count_tail(chunk.owner)

    def _count_tail(self, owner: str) -> None:
        """Count an ended request of which a chunk is not saved, at its first such chunk."""
        if owner in self._cut_off:
            return
        self._store.metrics.add(names.DROPPED_TAILS)
        self._cut_off[owner] = None
        if len(self._cut_off) > CUT_OFF_MAX:
            del self._cut_off[next(iter(self._cut_off))]

    def _plan_advanced(self, window: int | None) -> SavePlan | None:
        """Plan the next chunks of running requests, at most `window`, in the order in which the requests came."""
        wanted: list[WantedChunk] = []
        advanced = [(self._requests[name], frontier) for name, frontier in self._advanced.items()]
        self._advanced.clear()
        for request, frontier in sorted(advanced, key=lambda of: of[0].arrival):
            wanted += self._take(request, frontier, None if window is None else window - len(wanted))
        plan, left = self._select(wanted)
        for chunk, cause in left:
            request = self._requests[chunk.owner]
            if cause == names.SKIPPED_REFUSED:
                request.progress.give_up(chunk.number)
                self._store.metrics.add(cause)
            else:
                request.progress.plan_again(chunk.number)
                self._pacing.refused()
        return plan

    def _take(self, request: TrackedRequest, frontier: _Frontier, limit: int | None) -> list[WantedChunk]:
        wanted = None
        with self._faults.contained("choosing what to save"):
            known = self._store.is_known
            wanted = request.take_wanted(frontier.tokens, frontier.block_ids, self._shape, known, limit)
        if wanted is None:
            request.may_save = False
            return []
        if wanted:
            with self._faults.contained("announcing chunks to be saved"):
                self.watcher.wanted(request.view.request_id, wanted[0].number, [chunk.key for chunk in wanted])
        return wanted

    @catch_faults("planning a save", default=_NOTHING)
    def _select(self, wanted: list[WantedChunk]) -> SaveSelection:
        return self._store.select_saves(wanted) if wanted else _NOTHING
