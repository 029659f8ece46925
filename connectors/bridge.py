"""Bridge between any engine and the library: tokens to keys, keys to plans, faults to misses. Imports no engine.

SchedulerBridge decides in the engine's scheduler process, through Store; WorkerBridge moves data in each worker,
through Transfer; a Step, frozen and picklable, passes between them once per engine step. A fault of the tier becomes a
miss and never ends a request (I9; kvtier.connectors.faults).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from kvtier.connectors.faults import Faults, catch_faults
from kvtier.connectors.lookup_deadline import LookupDeadline
from kvtier.connectors.pending_saves import PendingSaves
from kvtier.connectors.tracked_request import BlockShape, IndexAnswer, IndexQuestion, Offer, RequestView, TrackedRequest
from kvtier.index.async_lookup import ANSWER_KEPT_S
from kvtier.plan import LoadDone, LoadPlan, SaveDone, SavePlan
from kvtier.runtime import switch_interval
from kvtier.scheduler.load_threshold import LoadThreshold
from kvtier.scheduler.shared_loads import SharedLoads
from kvtier.scheduler.store import Store
from kvtier.worker.transfer import Progress, Transfer

log = logging.getLogger("kvtier")

ANSWER_GOOD_S = 1.0  # a request that waits for blocks does not query the index again for so long, seconds

LOADS_MAX = 256  # requests with loads under way, unless the settings limit them

# Longest pause of an idle engine step while a load is under way, seconds; a new request waits that long at worst. Every
# step in between takes the interpreter lock from the load: on an H200 host, pauses of 2 ms halved the load rate.
IDLE_WAIT_S = 0.01

# While requests decode and other loads are under way, ended loads are answered in groups: a step that also computes the
# last tokens of newcomers takes an engine several times as long as one that only decodes, for one newcomer or for ten.
# The time between two groups is GROUP_STEPS times that of the longest step since the last group but one, and at most
# queues.load_group_s. Beside 16 loads of 12,000 tokens and with 0.05 s, each of 16 decoding requests got 67 tokens a
# second instead of 41, and the requests of the loads had their first tokens sooner, the median one after 463 ms instead
# of 558 (one H200, means of four in turns; results/gpu/under_load_reads.json).
GROUP_STEPS = 2

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Step:
    """Work of the workers in one engine step.

    before: save these before the engine touches any block: their requests ended, and their blocks may be reused.
    after: save these after the step's forward.
    refused: loads that the engine waits for but that cannot be made; answered as failed.
    is_idle: the engine computes nothing in this step. waits_for_room: workers refused chunks of ended requests; the
    engine makes steps until these are taken or lost. decodes: requests decode in this step.
    """

    before: SavePlan | None = None
    after: SavePlan | None = None
    loads: tuple[LoadPlan, ...] = ()
    refused: tuple[LoadDone, ...] = ()
    is_idle: bool = False
    waits_for_room: bool = False
    decodes: bool = False


class ActiveLoads:
    """Requests with loads under way, at most `loads_max`; `shared`: requests that wait for another request's load."""

    def __init__(self, shared: SharedLoads) -> None:
        self.shared = shared
        self.loads_max = LOADS_MAX
        self.planned: list[LoadPlan] = []  # for the next step
        self.under_way: set[str] = set()
        self._holds_interval = False

    @property
    def is_full(self) -> bool:
        return len(self.under_way) >= self.loads_max

    def expect(self) -> None:
        """Shorten Python's switch interval until workers have begun the load of a hit. While vLLM hashes other prompts
        on a thread of its own, each wait for the interpreter lock takes up to 5 ms otherwise, in all up to 30 ms."""
        if not self._holds_interval:
            self._holds_interval = True
            switch_interval.hold()

    def take_planned(self) -> tuple[LoadPlan, ...]:
        """Return the loads that were planned since the last step."""
        planned, self.planned = tuple(self.planned), []
        if self._holds_interval and not planned:  # those of the step before have begun, and hold the interval
            self._holds_interval = False
            switch_interval.release()
        return planned


class SchedulerBridge:
    """Turns requests into hits, load plans and save plans. Called from the engine's scheduler thread only."""

    def __init__(
        self,
        store: Store,
        shape: BlockShape,
        limit: LoadThreshold,
        lookup_timeout_s: float,
        faults: Faults,
        clock: Clock = time.monotonic,
    ) -> None:
        self._store = store
        self._shape = shape
        self._limit = limit
        self._deadline = LookupDeadline(lookup_timeout_s)
        self._faults = faults
        self._clock = clock
        self.active_loads = ActiveLoads(SharedLoads(store.metrics, clock))
        self._requests: dict[str, TrackedRequest] = {}
        self.saves = PendingSaves(store, shape, self._requests, faults)
        self._n_tracked = 0
        # At the latest reset: number of requests that had come (-1: no reset yet), and of those that had not ended.
        self._at_reset = -1, 0
        self._is_stopped = False
        self._has_old_blocks = False
        self._has_foreign_kv = False
        self._refused: list[LoadDone] = []

    def track(self, view: RequestView) -> None:
        """Begin to follow a request."""
        may_load, may_save = view.may_load and not self._is_stopped, view.may_save and not self._is_stopped
        request = TrackedRequest(view, self._store.namespace_id, may_load, may_save, self._n_tracked)
        self._requests[view.request_id] = request
        self._n_tracked += 1
        if view.tenant and may_save:
            with self._faults.contained("expecting a tenant's chunks"):
                self._store.expect(view.tenant)

    @catch_faults("a lookup", default=0)
    def hit_tokens(self, request_id: str, computed_tokens: int) -> int | None:
        """Return how many tokens past `computed_tokens` can be loaded; None: ask again in the next step."""
        request = self._requests[request_id]
        request.offer = None
        request.computed_tokens = request.own_tokens = computed_tokens
        if computed_tokens and (self._has_old_blocks or self._has_foreign_kv):
            request.may_save = False
        if not request.may_load:
            return 0
        return self._look_up(request, computed_tokens)

    def begin_load(self, request_id: str, block_ids: Sequence[int], n_tokens: int) -> None:
        """Plan the load of the last offered hit, for which the engine now waits.

        block_ids: all blocks of the request, in order; n_tokens: tokens that the engine expects to be loaded.
        """
        request = self._requests[request_id]
        offer, request.offer, request.answer = request.offer, None, None
        # Never the blocks of local hits: other requests use them too.
        request.load_blocks = block_ids[request.computed_tokens // self._shape.block_tokens :]
        plan = None
        if offer is not None and offer.n_tokens == n_tokens:
            plan = self._plan_load(request, offer, block_ids)
        if plan is not None:
            self.active_loads.planned.append(plan)
            self.active_loads.under_way.add(request_id)
            self.active_loads.shared.begin(request_id, (chunk.key for chunk in plan.chunks), n_tokens)
            request.own_tokens += n_tokens
        else:
            self._refused.append(LoadDone(request_id, frozenset(request.load_blocks)))

    def landed(self, request_id: str) -> None:
        """Note that the engine has the blocks of a request's load, if there was one, in its own cache."""
        self.active_loads.shared.end(request_id)

    def begin(self, request_id: str, computed_tokens: int) -> None:
        """Note the first step of a request since it was given blocks; it computes from `computed_tokens` on.

        If neither the engine nor this tier supplied all KV before that token, another connector did. Its KV may be
        lossy or incomplete, so the request is not saved. From then on the engine's own cache has that KV without a
        mark, so requests that begin with a hit there are not saved either, until a reset while no block is in use."""
        self.landed(request_id)
        request = self._requests.get(request_id)
        if request is None or computed_tokens <= request.own_tokens:
            return
        if computed_tokens < request.own_tokens + self._shape.block_tokens:
            # The engine's own hit has grown since, by a part of the next block.
            request.may_save &= not (self._has_old_blocks or self._has_foreign_kv)
            return
        request.may_save = False
        if not self._has_foreign_kv:
            self._has_foreign_kv = True
            for other in self._requests.values():  # requests admitted in the same step may have hit these blocks
                other.may_save &= not other.computed_tokens
            log.warning(
                "requests whose KV comes from another connector are not saved, nor, until "
                "reset_prefix_cache(reset_connector=True), are those that begin with a hit in vLLM's own cache"
            )

    def advance(self, request_id: str, frontier_tokens: int, block_ids: Sequence[int]) -> None:
        """Plan to save chunks of a running request: after this step the KV of its first `frontier_tokens` tokens, in
        `block_ids`, is final. What cannot be saved yet is taken in a later step of the request, or at its end."""
        self.saves.advance(self._requests[request_id], frontier_tokens, block_ids)

    def chunks_pending(self, request_id: str, frontier_tokens: int) -> bool:
        """Return True if `advance` with this frontier could find a chunk to save. Cheap: called for every request."""
        request = self._requests.get(request_id)
        return request is not None and self.saves.is_due(request, frontier_tokens)

    def finish(self, request_id: str, frontier_tokens: int, block_ids: Sequence[int]) -> None:
        """Plan to save the remaining whole chunks of an ended request: its blocks are reused from the next step on,
        after these are gathered."""
        self.active_loads.shared.forget(request_id)
        ended = self._requests.pop(request_id, None)
        if ended is not None:
            self.saves.finish(ended, frontier_tokens, block_ids)

    def loads_ended(self, received: Iterable[str], failed_blocks: AbstractSet[int]) -> None:
        """Take the workers' answers. Blocks may fail in an earlier step than the one that reports their request."""
        if failed_blocks:
            for request_id, request in self._requests.items():
                request.answer = None  # it may name the failed records
                if request.load_blocks is not None and not failed_blocks.isdisjoint(request.load_blocks):
                    request.may_load = False  # I11
                    self.active_loads.shared.end(request_id, has_failed=True)
                    # Chunks of a failed load are saved again once they are computed: workers skip those that are there.
                    with self._faults.contained("noting a failed load"):
                        self._store.forget_lost(request.keys)
        for request_id in received:
            self.active_loads.under_way.discard(request_id)
            if request_id in self._requests:
                self._requests[request_id].load_blocks = None

    def saved(self, done: Sequence[SaveDone]) -> None:
        self.saves.saved(done)

    def has_pending_gathers(self) -> bool:
        """Return True while chunks of ended requests wait for a step that takes them to the workers."""
        return self.saves.has_pending_gathers

    def take_step(
        self, is_idle: bool = False, rewritten: AbstractSet[int] | None = frozenset(), decodes: bool = False
    ) -> Step:
        """Return the work planned since the last step.

        is_idle: the engine computes nothing in this step. rewritten: blocks that the engine may write to before the
        gather; None: unknown. decodes: requests decode in this step.
        """
        waits_for_room = self.saves.late.are_waiting
        before, after = self.saves.take_plans(rewritten)
        loads = self.active_loads.take_planned()
        step = Step(before, after, loads, tuple(self._refused), is_idle, waits_for_room, decodes)
        self._refused = []
        self._deadline.end_step()
        return step

    def reset(self, blocks_in_use: bool) -> bool:
        """Begin an epoch after new weights or an emptied cache: no KV that is in the engine now may enter it.

        blocks_in_use: requests hold blocks, so the engine could not empty its own cache and may still find old KV in
        it. Until a reset without blocks in use, requests that begin with a hit of the engine's own cache are not saved.
        Return False when a load of the old epoch is under way (its bytes are as old as the engine's own), and when no
        epoch could be begun; then nothing is loaded or saved any more, because the weights may have changed.
        """
        has_begun = False
        with self._faults.contained("beginning an epoch"):
            self._store.reset()
            self.saves.watcher.forget()
            has_begun = True
        self._is_stopped |= not has_begun
        self._has_old_blocks = blocks_in_use
        self._has_foreign_kv &= blocks_in_use
        self._at_reset = self._n_tracked, len(self._requests)
        self.saves.clear()
        self.active_loads.shared.clear()
        loading = False
        for request in self._requests.values():
            request.may_load = request.may_save = False
            loading |= request.load_blocks is not None
        return has_begun and not loading

    def weights_changed(self) -> bool:
        """Begin an epoch, if a request came since the last one: a trainer sends weights in many parts. The engine's own
        cache may hold KV of the old weights, unless it was emptied before. Return True if one was begun."""
        n_before, n_left = self._at_reset
        is_due = n_before != self._n_tracked
        if is_due:
            self.reset(blocks_in_use=True)
        self._has_old_blocks |= n_left > 0  # these may have computed since
        return is_due

    def _look_up(self, request: TrackedRequest, computed_tokens: int) -> int | None:
        size = self._shape.chunk_tokens
        first = computed_tokens // size
        end = len(request.view.tokens) // size
        shortest = max(1, self._limit.min_tokens)
        if end * size - computed_tokens < shortest or computed_tokens % self._shape.block_tokens:
            return 0  # a load that begins within an engine block would write into one that others may share
        if self.active_loads.shared.is_waiting(request.view.request_id, computed_tokens):
            return None
        # Without room among the workers' loads a request waits here, where it holds no blocks and has no deadline.
        waits = self.active_loads.is_full
        entries = self._find(request, first, end, waits)
        if entries is None:
            assert request.question is not None
            if not self._deadline.is_over(request.question, self._clock()):
                return None
            request.may_load = False
            self._store.gave_up(end - first)
            return 0
        n_tokens = (first + len(entries)) * size - computed_tokens
        if n_tokens < shortest:
            return 0
        if waits or self._must_wait(request, first, len(entries), computed_tokens):
            return None
        request.offer = Offer(computed_tokens, first, entries, n_tokens)
        self.active_loads.expect()
        return n_tokens

    def _must_wait(self, request: TrackedRequest, first: int, n_chunks: int, computed_tokens: int) -> bool:
        size = self._shape.chunk_tokens
        keys = request.keys_to(first + n_chunks, size)[first:]
        return self.active_loads.shared.must_wait(request.view.request_id, keys, size, computed_tokens)

    def _find(self, request: TrackedRequest, first: int, end: int, waits: bool) -> tuple[bytes, ...] | None:
        """Return the entries of the leading chunks of [first, end); None while a remote index has not answered.

        waits: the request waits for room; an older answer will do, because it asks again once there is room.
        """
        now, last, asked = self._clock(), request.answer, request.question
        self._deadline.ask(now)
        if last is not None and last.covers(first, end) and (waits or now - last.at_s < ANSWER_GOOD_S):
            return last.entries[first - last.first_chunk :]
        is_same = asked is not None and asked.first_chunk <= first and asked.end_chunk == end
        begin = asked.first_chunk if asked is not None and is_same else first
        keys = request.keys_to(end, self._shape.chunk_tokens)[begin:]
        entries = self._store.lookup(keys, request.view.request_id)
        if entries is None:
            # An older answer was discarded by now: the timeout starts again.
            since_s = asked.since_s if asked is not None and now - asked.at_s <= ANSWER_KEPT_S else now
            request.question = IndexQuestion(begin, end, since_s, now)
            return None
        self._deadline.answered(now)
        request.question, request.answer = None, IndexAnswer(begin, end, tuple(entries), now)
        self.saves.watcher.found(request.view.request_id, begin, keys, entries)
        return tuple(entries)[first - begin :]

    @catch_faults("planning a load")
    def _plan_load(self, request: TrackedRequest, offer: Offer, block_ids: Sequence[int]) -> LoadPlan | None:
        shape = self._shape
        end = offer.first_chunk + len(offer.entries)
        keys = request.keys_to(end, shape.chunk_tokens)[offer.first_chunk :]
        blocks = shape.blocks_of(block_ids, offer.first_chunk, end)
        first_token = offer.computed_tokens - offer.first_chunk * shape.chunk_tokens
        return self._store.plan_load(request.view.request_id, keys, offer.entries, blocks, first_token)


class AnswerPace:
    """Time between groups of answers beside decoding requests, at most `longest_s`."""

    def __init__(self, longest_s: float, clock: Clock = time.monotonic) -> None:
        self._longest_s = longest_s
        self._clock = clock
        self._polled_s, self._answered_s = clock(), -math.inf
        self._step_s = 0.0  # the longest since the last group
        self._step_before_s = 0.0  # the longest between the last two groups

    def polled(self, decodes: bool) -> bool:
        """Note the end of a step. Return False if answers wait for the next group. decodes: requests decoded in it."""
        now_s = self._clock()
        if decodes:
            self._step_s = max(self._step_s, now_s - self._polled_s)
        else:
            self._step_s = self._step_before_s = 0.0
        self._polled_s = now_s
        apart_s = GROUP_STEPS * max(self._step_s, self._step_before_s)
        return now_s - self._answered_s >= min(apart_s, self._longest_s)

    def answered(self) -> None:
        """Note that this poll returns a group of answers."""
        self._answered_s = self._polled_s
        self._step_before_s, self._step_s = self._step_s, 0.0


class WorkerBridge:
    """Carries out steps in one worker. Answers every load exactly once; a fault is a failed load."""

    def __init__(self, transfer: Transfer, shape: BlockShape, faults: Faults, pace: AnswerPace) -> None:
        self._transfer = transfer
        self._shape = shape
        self._faults = faults
        self._waiting: set[str] = set()
        self._is_idle = self._waits_for_room = self._decodes = self._has_answered = False
        self._pace = pace
        self._answers: list[LoadDone] = []
        self._saves: list[SaveDone] = []
        self._timings: list[tuple[int, float]] = []

    def before_forward(self, step: Step) -> None:
        """Call before the engine zeroes, loads into or computes on any block."""
        self._is_idle, self._waits_for_room, self._decodes = step.is_idle, step.waits_for_room, step.decodes
        self._save(step.before)
        self._transfer.step_begins(computes=not step.is_idle, decodes=step.decodes)

    def after_forward(self, step: Step) -> None:
        self._save(step.after)

    def start_loads(self, step: Step) -> None:
        self._answers += step.refused
        for plan in step.loads:
            with self._faults.contained("starting a load"):
                self._transfer.load(plan)
                self._waiting.add(plan.request_id)
            if plan.request_id not in self._waiting:
                self._answers.append(LoadDone(plan.request_id, self._written_blocks(plan)))

    def poll(self) -> list[LoadDone]:
        """Return the loads that ended, each once; in groups while requests decode and other loads are under way. A
        failed one is not held back, because it may have taken all its time already.

        In an idle step, wait a moment for a load, or for the copies of saves: an engine that spins would hold the
        interpreter lock that these need. Do not wait right after answers: vLLM's asynchronous scheduling takes the
        results of a step up only after the next one.
        """
        may_wait = self._is_idle and not (self._has_answered or self._answers)
        wait_s = IDLE_WAIT_S if may_wait and (self._waiting or self._waits_for_room) else 0.0
        progress = Progress([], [], [])
        with self._faults.contained("asking for progress"):
            progress = self._transfer.poll(wait_s)
        self._saves += progress.saves
        self._timings += progress.timings
        for done in progress.loads:
            if done.request_id in self._waiting:
                self._waiting.remove(done.request_id)
                self._answers.append(done)
        is_due = self._pace.polled(self._decodes)
        is_due |= not self._waiting or any(done.failed_blocks for done in self._answers)
        self._has_answered = bool(self._answers) and is_due
        if not self._has_answered:
            return []
        self._pace.answered()
        answers, self._answers = self._answers, []
        return answers

    def take_over(self, before: WorkerBridge) -> None:
        """Return the answers of a closed bridge with the next ones: the engine still waits for them."""
        self._answers += before.poll()
        self._saves += before.take_saves()

    def take_saves(self) -> list[SaveDone]:
        """Return the answers to saves since the last take."""
        saves, self._saves = self._saves, []
        return saves

    @property
    def are_all_answered(self) -> bool:
        """Return True while no save or load is under way."""
        return self._transfer.are_all_answered

    def take_timings(self) -> list[tuple[int, float]]:
        """Return (tokens, seconds) of the loads since the last take."""
        timings, self._timings = self._timings, []
        return timings

    def close(self, drain_s: float) -> None:
        """Wait at most `drain_s` for saves under way, then stop. The next poll returns all answers."""
        self._decodes = False
        with self._faults.contained("draining saves"):
            self._transfer.drain(drain_s)
        with self._faults.contained("closing the transfer"):
            self._transfer.close()

    @catch_faults("a save")
    def _save(self, plan: SavePlan | None) -> None:
        if plan is not None:
            self._transfer.save(plan)

    def _written_blocks(self, plan: LoadPlan) -> frozenset[int]:
        """Return the blocks that a load of this plan would have written."""
        return frozenset(
            block for chunk in plan.chunks for block in chunk.block_ids[chunk.first_token // self._shape.block_tokens :]
        )
