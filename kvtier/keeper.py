"""Keeper: an engine's background duties towards the root, on one thread, so that the scheduler never waits.

It says that this engine lives, makes and registers segment sets before they are needed (evicting others when the
root is full), closes the full ones, books what was used, and sweeps from time to time. `tick` does whatever is due.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from kvtier import metrics as names
from kvtier.backoff import PAUSE_FIRST_S, Backoff
from kvtier.errors import KVTierError
from kvtier.housekeeping import Housekeeper, writer_lease
from kvtier.identity import Namespace
from kvtier.index import entry as entries
from kvtier.index.base import Index, SetInfo
from kvtier.jobs import Ticker
from kvtier.metrics import Metrics
from kvtier.sets import SetSupply

log = logging.getLogger("kvtier")

RECENT_ENTRIES_MAX = 65_536
"""Hits whose use waits to be booked; further ones push out the oldest, which at worst evicts a set too soon."""
TICK_INTERVAL_S = 0.5
SPARES_MAX = 8
SWEEP_INTERVAL_S = 60.0
CLOSE_TIMEOUT_S = 5.0
FIRST_TICK_TIMEOUT_S = 1.0
"""Starting an engine waits so long at most for the first sets: what is computed before them is not saved."""
PRIVATE_EPOCH = "private-"
"""Starts the epoch of a namespace that one running engine has for itself."""


@dataclass(frozen=True, slots=True)
class KeeperPlan:
    """What a keeper works to.

    owner: name of this engine, unique among all that share the root.
    set_bytes: of one segment set of `slots` slots, over all ranks.
    writer_lease_s: how long the engine is believed to live without a sign of it.
    make_folder: makes a namespace's folder, if it is not there.
    """

    owner: str
    slots: int
    set_bytes: int
    capacity_bytes: int
    writer_lease_s: float
    touch_interval_s: float
    make_folder: Callable[[Namespace], object]

    @property
    def spares(self) -> int:
        """Sets kept ready: enough for a long prompt, and not more than an eighth of the capacity, but one."""
        return max(1, min(SPARES_MAX, self.capacity_bytes // self.set_bytes // 8))


@dataclass(slots=True)
class _Due:
    """When each duty is to be done next, seconds since the epoch."""

    beat_s: float = 0.0
    touch_s: float = 0.0
    sweep_s: float = 0.0
    relief_s: float = 0.0


@dataclass(slots=True)
class _DoneWith:
    """What this engine is done with but the index was not told yet: an id goes from here when it was."""

    epochs: deque[tuple[Namespace, SetSupply]] = field(default_factory=deque)
    to_close: deque[int] = field(default_factory=deque)
    to_drop: deque[int] = field(default_factory=deque)
    to_erase: deque[bytes] = field(default_factory=deque)


class Keeper:
    """`tick` and `close` are called from one thread at a time; the rest from any, and they never wait.

    The clock is the housekeeper's; `rng` draws set ids and the names of private epochs (I6).
    """

    def __init__(
        self, namespace: Namespace, plan: KeeperPlan, index: Index, housekeeper: Housekeeper, rng: random.Random
    ) -> None:
        self.metrics = Metrics()
        self._epoch = (namespace, SetSupply(plan.slots, plan.spares))
        self._plan = plan
        self._index = index
        self._housekeeper = housekeeper
        self._rng = rng
        self._ticker: Ticker | None = None
        self._has_ticked = threading.Event()
        self._is_leaving = False
        self._recent: deque[tuple[float, bytes]] = deque(maxlen=RECENT_ENTRIES_MAX)
        self._done_with = _DoneWith()
        self._due = _Due()
        self._room = Backoff()
        self._disk_is_full = False

    def start(self) -> None:
        """Ticks on a thread of its own until `close`; without it the caller ticks (simulation).

        Returns with sets ready, unless the index or the storage is slow to give them.
        """
        self._ticker = Ticker("keeper", TICK_INTERVAL_S, self.tick)
        self._has_ticked.wait(FIRST_TICK_TIMEOUT_S)

    def refill(self) -> None:
        """Slots were taken: makes further sets soon if they are needed."""
        is_time = not self._room.is_resting(self._housekeeper.clock())
        if self._ticker is not None and is_time and self.supply.wants_set():
            self._ticker.wake()

    def book_use(self, entry: bytes, now_s: float) -> None:
        """A hit on this index entry; its set's recency follows in the background."""
        self._recent.append((now_s, entry))

    def report_full_disk(self) -> None:
        """A save met a full disk although the capacity was not reached: space must be made."""
        self._disk_is_full = True

    def tick(self) -> None:
        """Does what is due. What fails is logged and tried again later; the other duties go on."""
        now = self._housekeeper.clock()
        for duty in (
            self._beat, self._rebuild_lost_index, self._close_sets, self._book_uses_in_time, self._relieve_full_disk,
            self._make_sets, self._sweep,
        ):  # fmt: skip
            if self._is_leaving:  # close() waits for this tick, or did so for long enough
                return
            try:
                duty(now)
            except (KVTierError, OSError) as fault:
                self.metrics.add(names.INDEX_ERRORS)
                log.warning("%s is put off: %s", duty.__name__.strip("_").replace("_", " "), fault)
        self._has_ticked.set()

    @property
    def supply(self) -> SetSupply:
        return self._epoch[1]

    def begin_epoch(self) -> bytes:
        """Leaves the namespace for a new one that no other engine has; returns its id."""
        left = self._epoch
        namespace = replace(left[0], epoch=f"{PRIVATE_EPOCH}{self._rng.getrandbits(64):016x}")
        self._epoch = (namespace, SetSupply(self._plan.slots, self._plan.spares))
        self._done_with.epochs.append(left)  # now: nobody makes another set for it
        self._room.clear()
        self.refill()
        return namespace.id

    def close(self) -> None:
        """Books the last uses, closes this engine's sets and says that it is gone. Beside a tick that hangs nothing is
        done, for it may be at the very same: when no sign of life comes any more, others take care of the sets."""
        self._is_leaving = True
        if self._ticker is not None and not self._ticker.close(CLOSE_TIMEOUT_S):
            log.warning("leaving without a word to the index: a background duty hangs")
            return
        self._done_with.epochs.append(self._epoch)
        try:
            self._book_uses()
            self._close_sets(self._housekeeper.clock())
            self._index.release_lease(writer_lease(self._plan.owner), self._plan.owner)
        except (KVTierError, OSError) as fault:
            log.warning("leaving without a word to the index: %s", fault)

    def _beat(self, now: float) -> None:
        if now >= self._due.beat_s:
            plan = self._plan
            self._index.acquire_lease(writer_lease(plan.owner), plan.owner, now, plan.writer_lease_s)
            self._due.beat_s = now + plan.writer_lease_s / 3
            self._leave_lost_sets()

    def _leave_lost_sets(self) -> None:
        """Others take over what a writer has open that gave no sign of life in time; and a lost index knows of no set.
        What would be written there would be refused."""
        ours = {info.set_id for info in self._index.sets() if info.owner == self._plan.owner}
        lost = self.supply.forget_all_but(ours)
        if lost:
            log.warning("%d segment sets of this engine are no longer its own; it goes on in new ones", len(lost))

    def _rebuild_lost_index(self, now: float) -> None:
        if self._index.was_reset:
            self._due.beat_s = 0.0  # this index knows of no sign of life
            rebuilt = self._housekeeper.rebuild(lambda done, total: self._beat(self._housekeeper.clock()))
            if rebuilt is None:
                return  # another engine is at it
            self._index.rebuilt()
            self._leave_lost_sets()
            for fault in rebuilt.unreadable:
                log.warning("not read back into the index: %s", fault)
            if rebuilt.segments:
                log.info("the index was empty: %d records of %d segments read", rebuilt.records, rebuilt.segments)

    def _close_sets(self, now: float) -> None:
        """Closes full sets, and all of namespaces that were left; each is forgotten only when it is done."""
        self._done_with.to_close += self.supply.take_settled(now)
        while self._done_with.epochs:
            namespace, supply = self._done_with.epochs.popleft()
            used, unused = supply.abandon()
            self._done_with.to_close += used
            self._done_with.to_drop += unused
            if namespace.epoch.startswith(PRIVATE_EPOCH):
                self._done_with.to_erase.append(namespace.id)
        for ids, settle in (
            (self._done_with.to_close, self._housekeeper.close_set), (self._done_with.to_drop, self._index.remove_set),
        ):  # fmt: skip
            while ids:
                settle(ids[0])
                ids.popleft()
        while self._done_with.to_erase:  # private: nobody can ask for it again
            self._housekeeper.erase_namespace(self._done_with.to_erase[0])
            self._done_with.to_erase.popleft()

    def _book_uses_in_time(self, now: float) -> None:
        if now >= self._due.touch_s:
            self._due.touch_s = now + self._plan.touch_interval_s
            self._book_uses()

    def _relieve_full_disk(self, now: float) -> None:
        """Evicts one set's worth after a save met a full disk or quota, at most once a pause."""
        if self._disk_is_full and now >= self._due.relief_s:
            self._disk_is_full = False
            self._due.relief_s = now + PAUSE_FIRST_S
            self._make_room(self._index.counts().n_bytes, now)

    def _make_sets(self, now: float) -> None:
        namespace, supply = self._epoch
        while supply.wants_set() and not self._room.is_resting(now):
            if not self._make_room(self._capacity_bytes(supply), now):
                return
            self._add_set(namespace, supply, now)

    def _capacity_bytes(self, supply: SetSupply) -> int:
        """The configured capacity, or less where the disk has no room for that: sets that are ready, but have no
        files yet, take theirs first."""
        unwritten_bytes = supply.n_unused * self._plan.set_bytes
        on_disk_bytes = self._index.counts().n_bytes - unwritten_bytes
        return min(self._plan.capacity_bytes, on_disk_bytes + self._housekeeper.free_bytes())

    def _sweep(self, now: float) -> None:
        if now >= self._due.sweep_s and not self._index.was_reset:
            self._due.sweep_s = now + SWEEP_INTERVAL_S
            self._housekeeper.sweep()

    def _make_room(self, capacity_bytes: int, now: float) -> bool:
        self._book_uses()  # or what was handed to a load a moment ago may be the longest unused
        evicted = self._housekeeper.make_room(self._plan.set_bytes, capacity_bytes)
        if evicted is None:
            log.warning("no room for another segment set; saving rests for %.0f s", self._room.refused(now))
            self._due.sweep_s = now  # what dead writers left open may be all that fills the root
            return False
        self.metrics.add(names.EVICTED_BYTES, evicted)
        self._room.worked()
        return True

    def _add_set(self, namespace: Namespace, supply: SetSupply, now: float) -> None:
        self._plan.make_folder(namespace)
        set_id = int(now * 1000) << 20 | self._rng.getrandbits(20)
        info = SetInfo(set_id, namespace.id, self._plan.owner, self._plan.set_bytes, now, now)
        if self._index.create_set(info):
            supply.offer(set_id)

    def _book_uses(self) -> None:
        used: dict[int, float] = {}
        while self._recent:
            at_s, entry = self._recent.popleft()
            used[entries.first_set(entry)] = at_s
        if used:
            self._index.touch(used)
