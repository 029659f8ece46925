"""Keeper: background thread of the scheduler process, for all duties that may wait for the index or the storage.

It renews the engine's lease, creates and registers segment sets before they are needed (and evicts others when the root
is full), closes full sets, records which sets were used, reads the root's limits and runs garbage collection. `tick`
carries out the duties that are due.
"""

import logging
import math
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

from kvtier.errors import Corrupt, IndexResting, IndexUnavailable, KVTierError
from kvtier.eviction.evictor import Evictor
from kvtier.eviction.limits import Need
from kvtier.eviction.room import Room
from kvtier.format.namespace import Namespace
from kvtier.format.record import new_set_id
from kvtier.index import entry as entries
from kvtier.index.base import Index, SetInfo, Use, writer_lease
from kvtier.maintenance.sweep_schedule import SweepTurns
from kvtier.maintenance.sweeper import Sweeper
from kvtier.runtime import metrics as names
from kvtier.runtime.metrics import Metrics
from kvtier.runtime.repeated_log import RepeatedLog
from kvtier.runtime.threads import Ticker, run_within
from kvtier.runtime.units import size
from kvtier.scheduler.engine_report import NOTE_PREFIX, About, Reporter
from kvtier.scheduler.segment_allocator import SlotAllocator, SlotAllocators

log = logging.getLogger("kvtier")

T = TypeVar("T")

# Limit of the loads that wait to be recorded in the index. Beyond it the oldest is dropped: at worst its set is evicted
# too soon.
RECENT_LOADS_MAX = 4096
TICK_INTERVAL_S = 0.5  # interval between two ticks, seconds
FAULTS_MAX = 8  # faults after which a tick leaves the other changes of a kind to the next one: each try asks the index
SPARES_MAX = 8  # empty segment sets kept ready
LIMITS_INTERVAL_S = 5.0  # interval between two reads of the root's limits, seconds
# A clock that goes back by more than this was set by hand, seconds. Duties that were planned by the old time would come
# due too late, and other nodes would take this engine for dead.
SET_BACK_S = 5.0
CLOSE_TIMEOUT_S = 5.0  # time that the end of an engine waits for the last tick, seconds
FIRST_TICK_TIMEOUT_S = 1.0  # longest wait of a start for the first sets, seconds; without a set no KV is saved
PRIVATE_EPOCH = "private-"  # prefix of the epoch of a namespace that only one running engine uses


@dataclass(frozen=True, slots=True)
class KeeperPlan:
    """Settings of a keeper.

    owner: name of this engine, unique among all that share the root.
    set_bytes: size of one segment set of `slots` slots, over all ranks.
    writer_lease_s: time after which an engine that did not renew its lease counts as dead.
    make_folder: checks the root and creates a namespace's folder where it is missing; called again now and then.
    about: description of the engine in its reports. spares_max: upper bound of the sets kept ready. on_renewal: called
        with the time, in seconds, at each renewal of the lease and when the engine ends; it may wait for the index and
        raise KVTierError. set_files: files of one set. stripes: files of one set and rank. reclaim_s: see Room.
    """

    owner: str
    slots: int
    set_bytes: int
    capacity_bytes: int
    writer_lease_s: float
    touch_interval_s: float
    make_folder: Callable[[Namespace], object]
    about: About = About()
    spares_max: int = SPARES_MAX
    on_renewal: Callable[[float], object] = lambda now_s: None
    set_files: int = 1
    stripes: int = 1
    reclaim_s: float = 0.0

    def spares(self, capacity_bytes: int) -> int:
        """Return how many sets are kept ready: enough for a long prompt, but at most an eighth of the capacity, and at
        least one."""
        return max(1, min(self.spares_max, capacity_bytes // self.set_bytes // 8))


@dataclass(slots=True)
class _Due:
    """Time at which each duty is due, seconds since the epoch; renew_s: the renewal of the lease.

    looked_s: time of the last tick. renewed_s: time of the last renewal of the lease. log: for duties that failed.
    """

    sweep: SweepTurns
    log: RepeatedLog
    renew_s: float = 0.0
    touch_s: float = 0.0
    limits_s: float = 0.0
    looked_s: float = 0.0
    renewed_s: float = -math.inf


@dataclass(slots=True)
class _Space:
    """State of the disk. was_refused, has_saved: a save met a full disk, or succeeded, since the last tick.
    refused_bytes: capacity at the last time when a set could not be created; None: there was none."""

    room: Room
    was_refused: bool = False
    has_saved: bool = False
    refused_bytes: int | None = None


@dataclass(slots=True)
class _Pending:
    """Changes that are not in the index yet. An id is removed once its change is there. uses: loads since the index
    last took any, by set; a save changes only the time."""

    epochs: deque[tuple[Namespace, SlotAllocators]] = field(default_factory=deque)
    to_trim: deque[int] = field(default_factory=deque)
    to_close: deque[int] = field(default_factory=deque)
    to_drop: deque[int] = field(default_factory=deque)
    to_erase: deque[bytes] = field(default_factory=deque)
    uses: dict[int, Use] = field(default_factory=dict)


class Keeper:
    """`tick` and `close` are called from one thread at a time; the rest from any, and they never wait.

    The clock is the sweeper's; `rng` draws set ids and the names of private epochs (I6).
    """

    def __init__(
        self,
        namespace: Namespace,
        plan: KeeperPlan,
        index: Index,
        sweeper: Sweeper,
        evictor: Evictor,
        rng: random.Random,
    ) -> None:
        self.metrics = Metrics()
        self.reporter = Reporter(plan.owner, plan.about, self.metrics, sweeper.clock)
        self._epoch = (namespace, SlotAllocators(plan.slots, plan.spares(plan.capacity_bytes)))
        self._plan = plan
        self._index = index
        self._sweeper = sweeper
        sweeper.look_at_root = lambda: plan.make_folder(self._epoch[0])
        self._evictor = evictor
        self._rng = rng
        self._ticker: Ticker | None = None
        self._has_ticked = threading.Event()
        self._is_leaving = False
        self._recent: deque[tuple[float, frozenset[int]]] = deque(maxlen=RECENT_LOADS_MAX)
        self._pending = _Pending()
        self._due = _Due(SweepTurns(plan.owner), RepeatedLog(sweeper.clock))
        self._space = _Space(Room(plan.reclaim_s))

    def start(self) -> None:
        """Call `tick` on a background thread until `close`. Simulations do not start it and call `tick` themselves.

        Wait for the first tick, which makes sets ready, for at most FIRST_TICK_TIMEOUT_S.
        """
        self._ticker = Ticker("keeper", TICK_INTERVAL_S, self.tick)
        self._has_ticked.wait(FIRST_TICK_TIMEOUT_S)

    def refill(self) -> None:
        """Wake the thread if it has to make sets ready in place of those that were taken."""
        if self._ticker is not None and self.allocators.want_sets(self._sweeper.clock()):
            self._ticker.wake()

    def book_load(self, load: Sequence[bytes], now_s: float) -> None:
        """Note a load of these index entries. A later tick records in the index that their sets were used."""
        with suppress(Corrupt):  # the worker's load of a damaged entry fails and retracts it
            self._recent.append((now_s, frozenset(map(entries.first_set, load))))

    def report_full_disk(self) -> None:
        """Note that a save met a full disk or quota, or a file system without a free inode."""
        self._space.was_refused = True

    def report_saved(self) -> None:
        """Note that a record was written."""
        self._space.has_saved = True

    def tick(self) -> None:
        """Carry out the duties that are due. A duty that fails is logged and tried again; the others go on."""
        now = self._sweeper.clock()
        if now < self._due.looked_s - SET_BACK_S:
            self._due = _Due(SweepTurns(self._plan.owner), RepeatedLog(self._sweeper.clock))
            for allocator in self.allocators.all():
                allocator.backoff.clear()
        self._due.looked_s = now
        for duty in (
            self._renew_lease,
            self._check_index,
            self._close_sets,
            self._record_uses,
            self._limit_to_disk,
            self._make_sets,
            self._sweep,
            self._keep_limits,
        ):
            if self._is_leaving:  # `close` waits for this tick, or has given up waiting
                return
            try:
                duty(self._sweeper.clock())  # the duties before it may have taken minutes
            except (KVTierError, OSError) as fault:
                self.metrics.add(names.INDEX_ERRORS)
                name = duty.__name__.strip("_").replace("_", " ")
                if not isinstance(fault, IndexResting):  # a Redis that is full refuses a duty in every tick
                    self._due.log.warning(
                        f"{name} {type(fault).__name__}", "the task '%s' failed and is tried again: %s", name, fault
                    )
        self._has_ticked.set()

    @property
    def index(self) -> Index:
        """Return the index. Its calls may wait, so the scheduler's thread must not make them."""
        return self._index

    @property
    def allocators(self) -> SlotAllocators:
        return self._epoch[1]

    def begin_epoch(self) -> bytes:
        """Switch to a new namespace that no other engine uses. Return its id."""
        left = self._epoch
        namespace = replace(left[0], epoch=f"{PRIVATE_EPOCH}{self._rng.getrandbits(64):016x}")
        self._epoch = (namespace, SlotAllocators(self._plan.slots, self._plan.spares(self._plan.capacity_bytes)))
        self._pending.epochs.append(left)  # at once, so that no further set is created for it
        self.refill()
        return namespace.id

    def close(self) -> None:
        """Record the last uses, close this engine's sets and release its lease.

        If the last tick hangs, do none of this, because that tick may be at the same work. Then the lease expires, and
        other engines close the sets.
        """
        self._is_leaving = True
        if self._ticker is not None and not self._ticker.close(CLOSE_TIMEOUT_S):
            log.warning(
                "the background thread did not stop in %.0f s: this engine's lease is left to expire", CLOSE_TIMEOUT_S
            )
        elif not run_within("leave", CLOSE_TIMEOUT_S, self._leave):
            log.warning(
                "closing this engine's segment sets took more than %.0f s, as on storage that does not answer: "
                "its lease is left to expire, and others close them",
                CLOSE_TIMEOUT_S,
            )

    def _leave(self) -> None:
        self._pending.epochs.append(self._epoch)
        try:
            self._record_uses_now()
            self._close_sets(self._sweeper.clock())
            self._index.release_lease(writer_lease(self._plan.owner), self._plan.owner)
            self._index.drop_note(NOTE_PREFIX + self._plan.owner)
            self._plan.on_renewal(self._sweeper.clock())
        except (KVTierError, OSError) as fault:
            log.warning("the index was not told that this engine ends, so its lease is left to expire: %s", fault)

    def _renew_lease(self, now: float) -> None:
        if now >= self._due.renew_s:
            plan = self._plan
            self._check_lease(now)
            self._index.acquire_lease(writer_lease(plan.owner), plan.owner, now, plan.writer_lease_s)
            self._due.renew_s = now + plan.writer_lease_s / 3
            report = self.reporter.report(now, self._epoch[0].id)
            shared = report.model_copy(update={"at_s": self._index.shared_s(now)})
            self._index.put_note(NOTE_PREFIX + plan.owner, shared.note(), now + 2 * plan.writer_lease_s)
            plan.on_renewal(now)
            self._due.renewed_s = now
            self._leave_lost_sets()

    def _check_lease(self, now: float) -> None:
        """Request a rebuild if the index has lost this engine's last lease renewal, and so the records since then, as a
        Redis that started from an old snapshot. Close the sets that are open again in such an index."""
        plan, renewed_s = self._plan, self._due.renewed_s
        if not 0.0 <= now - renewed_s < math.inf:  # the first one, or the clock was set back
            return
        until_s = renewed_s + plan.writer_lease_s * 2 / 3  # the other third allows for clocks that were set
        if self._index.lease_owner(writer_lease(plan.owner), until_s) == plan.owner:
            return
        opened = {info.set_id for info in self._index.sets() if info.is_open and info.owner == plan.owner}
        self._pending.to_close += opened - self.allocators.set_ids()
        if not self._index.was_reset and self._sweeper.rebuilt_s() < renewed_s:
            log.warning("the index went back to an earlier state: it is rebuilt from the segments")
            self._index.doubt()

    def _leave_lost_sets(self) -> None:
        """Stop using sets that the index does not list as this engine's, because it would refuse their records. Others
        take over a writer's open sets when its lease has expired, and a lost index lists none."""
        held = self.allocators.set_ids()
        ours = {info.set_id for info in self._index.some_sets(held) if info.owner == self._plan.owner}
        without_list = self._index.without_list(ours)
        self._pending.to_close += without_list  # a sweep reads their records back
        lost = self.allocators.forget(held - ours | without_list)
        if lost:
            log.warning("%d segment sets of this engine are no longer its own; it goes on in new ones", lost)

    def _check_index(self, now: float) -> None:
        loss = self._index.loss()
        if loss is not None:
            self._due.renew_s = 0.0  # the lease is lost with the index
            rebuilt = self._sweeper.rebuild(lambda done, total: self._renew_lease(self._sweeper.clock()))
            if rebuilt is None:
                return  # another engine rebuilds the index, or may have done so in between
            self._index.rebuilt(loss)
            self._leave_lost_sets()
            for fault in rebuilt.unreadable:
                log.warning(
                    "a segment could not be read for the rebuild of the index, so its records are misses: %s", fault
                )
            if rebuilt.segments:
                log.info("the index was empty: %d records of %d segments read", rebuilt.records, rebuilt.segments)

    def _close_sets(self, now: float) -> None:
        """Close full sets, those of idle tenants, and all sets of earlier epochs. Each stays listed until the index has
        the change."""
        self._pending.to_close += self.allocators.take_settled(now)
        answered, used, unused = self.allocators.leave_idle(now)
        self._pending.to_trim += answered
        self._pending.to_close += used
        self._pending.to_drop += unused
        while self._pending.epochs:
            namespace, allocators = self._pending.epochs.popleft()
            used, unused = allocators.abandon()
            self._note_saves(allocators)
            self._pending.to_close += used
            self._pending.to_drop += unused
            if namespace.epoch.startswith(PRIVATE_EPOCH):
                self._pending.to_erase.append(namespace.id)
        with ExitStack() as queues:  # It calls the last callback first, and the others although one raises.
            # Only private namespaces are erased, which no lookup can name again.
            queues.callback(self._settle, self._pending.to_erase, self._sweeper.erase_namespace)
            queues.callback(self._settle, self._pending.to_drop, self._index.remove_set)
            queues.callback(self._settle, self._pending.to_close, self._sweeper.close_set)
            queues.callback(self._settle, self._pending.to_trim, self._sweeper.close_early)
            if self._pending.to_close or self._pending.to_trim:  # closed sets may be evicted: first record their uses
                queues.callback(self._record_uses_now)

    def _record_uses(self, now: float) -> None:
        if now >= self._due.touch_s:
            self._due.touch_s = now + self._plan.touch_interval_s
            self._record_uses_now()

    def _limit_to_disk(self, now: float) -> None:
        """Lower the limit of all sets to the room that the disk had when it refused a save, and evict down to it. Raise
        the limit if saves wrote more than that."""
        was_refused, has_saved = self._space.was_refused, self._space.has_saved
        self._space.was_refused = self._space.has_saved = False
        room, set_bytes = self._space.room, self._plan.set_bytes
        if has_saved:
            room.worked(now, 0 if room.limit_bytes is None else self._written_bytes(), set_bytes)
        if not was_refused or self._index.was_reset:
            return
        is_first, space = room.limit_bytes is None, self._sweeper.free_space()
        self._capacity_bytes(now)  # shows `room` what other engines evicted since the last look
        if not room.refused(now, self._written_bytes(), space.for_sets(set_bytes, self._plan.set_files), set_bytes):
            return
        if is_first:
            log.warning(
                "%s: sets are evicted until they take %s, and saving goes on%s",
                space.why_full(set_bytes),
                size(room.limit_bytes or 0),
                " once their space is free, which takes minutes on this file system" if self._plan.reclaim_s else "",
            )
        self._due.limits_s = now + LIMITS_INTERVAL_S
        evicted = self._evictor.keep_limits(self._capacity_bytes(now))
        self._note_evicted()
        if not evicted:
            self._due.sweep.want()

    def _make_sets(self, now: float) -> None:
        """Make sets for each tenant in use. A tenant at its quota does not keep others from getting sets."""
        namespace, allocators = self._epoch
        if not any(allocator.wants_set() for allocator in allocators.all()):
            return
        # A lost index lists only some of the sets until it is rebuilt. Their sum is too small, so there always seems to
        # be room; and eviction would remove the newest sets, because the rebuild reads those first.
        if self._index.was_reset:
            for allocator in allocators.all():
                allocator.backoff.pause(now, TICK_INTERVAL_S)
            text = "the index was lost: nothing is saved until an engine has read all segments back into it"
            self._due.log.line(logging.INFO, "make sets lost index", text)
            return
        if self._plan.reclaim_s:
            free_bytes = self._sweeper.free_space().for_sets(self._plan.set_bytes, self._plan.set_files)
            if self._space.room.is_waiting(now, free_bytes):
                return
        refused_bytes = self._space.refused_bytes
        if (
            refused_bytes is not None
            and any(allocator.backoff.is_resting(now) for allocator in allocators.all())
            and self._capacity_bytes(now) >= refused_bytes + self._plan.set_bytes
        ):
            for allocator in allocators.all():
                allocator.backoff.clear()
        for allocator in allocators.all():
            while allocator.wants_set() and not allocator.backoff.is_resting(now):
                if not self._make_set(namespace, allocator, now):
                    break

    def _make_set(self, namespace: Namespace, allocator: SlotAllocator, now: float) -> bool:
        """Make room for a set and register it. Return True if it was offered to `allocator`.

        Another engine may have taken the same room, or the index may have been lost, so the limits are checked again,
        and a set that exceeds them is removed. Until then the sizes in the index may exceed a limit by one set. The
        files do not exceed it, because a set has no files before it is offered.
        """
        capacity_bytes = self._capacity_bytes(now)
        need = Need(self._plan.set_bytes, namespace.id, allocator.tenant)
        self._record_uses_now()  # or the eviction might take a set that a load was planned from a moment ago
        evicted = self._evictor.make_room(need, capacity_bytes)
        self._note_evicted()
        set_id = None if evicted is None else self._add_set(need, namespace, now)
        is_lost, added = set_id is not None and self._index.was_reset, replace(need, n_bytes=0)
        if set_id is not None and (is_lost or not self._evictor.fits(added, capacity_bytes)):
            self._index.remove_set(set_id)
            self._pending.to_drop.remove(set_id)
            set_id = None
        if is_lost:
            return False
        if evicted is None and self._evictor.waits_for_space(need, capacity_bytes):
            return False
        if set_id is None:
            self._space.refused_bytes = capacity_bytes
            self._due.sweep.want()  # the open sets of dead writers may fill the root; only a sweep closes them
            pause_s, full = allocator.backoff.refused(now), self._plan.capacity_bytes
            why = self._evictor.why_no_room(need, capacity_bytes, full)
            self._due.log.warning(
                f"no room {allocator.tenant}",
                "no room for another segment set: %s; saving pauses for %.0f s",
                why,
                pause_s,
            )
            return False
        allocator.backoff.worked()
        self._pending.to_drop.remove(set_id)
        allocator.offer(set_id)
        return True

    def _capacity_bytes(self, now: float) -> int:
        """Return the configured capacity, or less if the disk has no room for that beside capacity.reserve_bytes."""
        plan = self._plan
        free_bytes = self._sweeper.free_space().for_sets(plan.set_bytes, plan.set_files)
        free_bytes = max(0, free_bytes - self._evictor.rules.reserve_bytes)
        self._space.room.overbooked(self._sweeper.take_overbooked())
        room_bytes = self._space.room.bytes_for_sets(now, self._written_bytes(), free_bytes, plan.set_bytes)
        capacity_bytes = min(plan.capacity_bytes, room_bytes)
        # With a smaller capacity, fewer sets are kept ready. Surplus ones are removed before sets with records are.
        self._pending.to_drop += self.allocators.bound_spares(plan.spares(capacity_bytes))
        self._settle(self._pending.to_drop, self._index.remove_set)
        return capacity_bytes

    def _written_bytes(self) -> int:
        """Return the bytes of all sets, without those of this engine that have no files yet."""
        return self._index.counts().n_bytes - self.allocators.n_unused * self._plan.set_bytes

    def _keep_limits(self, now: float) -> None:
        if now >= self._due.limits_s and not self._index.was_reset:
            self._due.limits_s = now + LIMITS_INTERVAL_S
            self._evictor.keep_limits(self._capacity_bytes(now))
            self._note_evicted()

    def _sweep(self, now: float) -> None:
        if not self._due.sweep.is_due(now) or self._index.was_reset:
            return
        if self._due.sweep.takes(now, self._sweeper.swept_s()):
            self._due.limits_s = 0.0  # a sweep may add sets, or find them larger
            self._sweeper.sweep()

    def _note_evicted(self) -> None:
        n_bytes = self._evictor.take_evicted()
        if n_bytes:
            self.metrics.add(names.EVICTED_BYTES, n_bytes)

    def _add_set(self, need: Need, namespace: Namespace, now: float) -> int | None:
        """Register a new set and return its id; None when the id is taken.

        The set is in `to_drop` until its registration is confirmed: it may be registered although the answer was lost,
        and no other engine removes a set of a living engine.
        """
        self._plan.make_folder(namespace)
        created_ms = int(self._index.shared_s(now) * 1000)
        set_id = new_set_id(created_ms, self._plan.stripes, self._rng.getrandbits(16))
        info = SetInfo(set_id, namespace.id, self._plan.owner, need.n_bytes, now, now, tenant=need.tenant)
        self._pending.to_drop.append(set_id)
        if self._index.create_set(info):
            return set_id
        self._pending.to_drop.remove(set_id)  # the id is of another engine's set
        return None

    def _record_uses_now(self) -> None:
        used = self._pending.uses
        while self._recent:
            at_s, set_ids = self._recent.popleft()
            for set_id in set_ids:  # chunks of one load count as one use of their set
                used[set_id] = Use(at_s, used.get(set_id, Use(0.0, 0)).count + 1)
        self._note_saves(self.allocators)
        if used:
            self._index.touch(used)
            used.clear()

    def _note_saves(self, allocators: SlotAllocators) -> None:
        """Note when the last chunk of each set was saved. Without that, a set would count as old as its creation."""
        for set_id, at_s in allocators.take_filled():
            before = self._pending.uses.get(set_id, Use(0.0, 0))
            self._pending.uses[set_id] = replace(before, at_s=max(at_s, before.at_s))

    def _settle(self, ids: deque[T], settle: Callable[[T], object]) -> None:
        """Call `settle` for each id, also after faults. An id is removed once its call has returned. Stops at
        FAULTS_MAX faults, at one after TICK_INTERVAL_S, and where the index does not answer. Raises the first fault."""
        faults, until_s = list[KVTierError | OSError](), self._sweeper.clock() + TICK_INTERVAL_S
        for _ in range(len(ids)):
            try:
                settle(ids[0])
            except (KVTierError, OSError) as fault:
                faults.append(fault)
                ids.rotate(-1)  # The next call begins with the others.
                if isinstance(fault, IndexUnavailable) or len(faults) == FAULTS_MAX or self._sweeper.clock() > until_s:
                    break
            else:
                ids.popleft()
        if faults:
            raise faults[0]
