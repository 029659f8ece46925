"""Size class: objects of another host that take equally many pages, in a namespace of their own. One Store plans and
one Transfer moves them, as for an engine's chunks; the calls here wait for both."""

import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvtier.build import open_store, open_transfer
from kvtier.config.settings import HostSettings, Settings
from kvtier.connectors.objects.codec import ObjectCodec, Octets, stand_in_pages
from kvtier.format.geometry import share_of_rank
from kvtier.format.namespace import Namespace
from kvtier.plan import LoadPlan, SaveOutcome
from kvtier.runtime.metrics import summed
from kvtier.scheduler.engine_report import About
from kvtier.scheduler.store import WantedChunk
from kvtier.worker.context import arena_slot_bytes

ARENA_BYTES, ARENA_SLOTS = 256 << 20, 16  # default size of the host arena: the larger of these bytes and slots
# Limits of one plan: many small objects are published together; a large one is written while others are copied.
PLAN_OBJECTS, PLAN_BYTES = 16, 64 << 20
SPARE_SETS = 2  # segment sets kept ready beside the one being filled: `put` waits for a set
POLL_S = 0.001  # interval between two polls for answers, seconds
STORED = (SaveOutcome.SAVED, SaveOutcome.PRESENT)


class Wanted(NamedTuple):
    """An object: its key in the index, and the host's memory to read it from or write it to. tenant: its label."""

    key: bytes
    memory: Octets
    tenant: str = ""


class FoundObject(NamedTuple):
    """An object to load, and its entry in the index."""

    wanted: Wanted
    entry: bytes


@dataclass(slots=True)
class _Answer:
    """Answer to one attempt to store an object; outcome: None until it arrives."""

    outcome: SaveOutcome | None = None


# key, set and slot: a deleted object may be stored again before the first answer is read
_Place = tuple[bytes, int, int]


class SizeClass:
    """Waiting calls over one Store and one Transfer. Thread-safe: the lock makes many callers the single thread that
    these two need. A call returns when all of it is done or its deadline has passed, and touches no memory later."""

    def __init__(self, settings: Settings, namespace: Namespace, about: About) -> None:
        """Open the Store and the Transfer. Raises ConfigError."""
        self.namespace = namespace
        self.codec = ObjectCodec()
        self._timeout_s = settings.io.timeout_s
        self._drain_s = settings.shutdown_drain_s
        share = share_of_rank(namespace.geometry, 0, 1, 0, range(1))
        slot_bytes = arena_slot_bytes(namespace.geometry, self.codec, share)
        host = settings.host
        arena_bytes = host.arena_bytes or max(ARENA_BYTES, ARENA_SLOTS * slot_bytes)
        admit = host.admit or "never"  # the host has caches of its own above this
        settings = settings.model_copy(
            update={
                "chunk_tokens": namespace.geometry.chunk_tokens,
                "host": HostSettings(arena_bytes=arena_bytes, admit=admit),
            }
        )
        self._store = open_store(settings, namespace, [share], about, self.codec, SPARE_SETS)
        try:
            self._transfer = open_transfer(settings, namespace, share, stand_in_pages(), codec=self.codec)
        except BaseException:
            self._store.close()
            raise
        # A save holds a slot until it is answered, and half of them stay for loads (kvtier.worker.arenas).
        self._room = settings.queues.saves_within(max(1, arena_bytes // slot_bytes // 2))
        self._plan_objects = max(1, min(PLAN_OBJECTS, PLAN_BYTES // slot_bytes))
        self._lock = threading.Lock()
        self._awaited: dict[_Place, _Answer] = {}
        self._failed: dict[str, frozenset[int]] = {}

    def put(self, objects: Sequence[Wanted], absent: Sequence[bytes]) -> list[bool]:
        """Return for each object True if it is stored, or being stored by another caller.

        absent: keys that the index has just reported absent.
        """
        deadline_s = time.monotonic() + self._timeout_s
        with self._lock:
            self._store.forget_lost(absent)
        is_stored = [False] * len(objects)
        ours: dict[int, _Answer] = {}
        first = 0
        while first < len(objects) and time.monotonic() < deadline_s:
            begun = self._begin_put(objects[first : first + self._plan_objects])
            for number, how in enumerate(begun, first):
                if isinstance(how, _Answer):
                    ours[number] = how
                else:
                    is_stored[number] = how
            first += len(begun)
            if not begun:
                self._collect()
        for number, answer in ours.items():
            is_stored[number] = self._outcome(answer, deadline_s) in STORED
        return is_stored

    def get(self, objects: Sequence[FoundObject]) -> tuple[list[Wanted], list[FoundObject]]:
        """Return (objects loaded into their memory, objects stored in another length). The memory of the others is
        undefined."""
        deadline_s = time.monotonic() + self._timeout_s
        numbers = [self.codec.hold(found.wanted.memory) for found in objects]
        keys, found_entries = [found.wanted.key for found in objects], [found.entry for found in objects]
        with self._lock:
            plan = self._store.plan_load(uuid.uuid4().hex, keys, found_entries, numbers, 0)
        landed: set[int] = set()
        while plan.chunks and time.monotonic() < deadline_s:
            n_landed = self._load(plan)
            landed.update(chunk.block_ids[0] for chunk in plan.chunks[:n_landed])
            plan = replace(plan, chunks=plan.chunks[n_landed + 1 :])  # a load ends at its first failure
        got: list[Wanted] = []
        others: list[FoundObject] = []
        for found, number in zip(objects, numbers, strict=True):
            is_other = self.codec.release(number)
            if number in landed and is_other:
                others.append(found)
            elif number in landed:
                got.append(found.wanted)
        return got, others

    def forget(self, keys: Sequence[bytes]) -> None:
        """Note keys that were removed from the index."""
        with self._lock:
            self._store.forget_lost(keys)
            self._transfer.forget(keys)

    def counters(self) -> dict[str, float]:
        """Return the counters of both halves (kvtier.runtime.metrics); a token there is an object."""
        return summed([self._store.metrics.total(), self._transfer.metrics.total()])

    def close(self) -> None:
        """Close both halves; every wait is bounded. No call may be under way."""
        self._transfer.drain(self._drain_s)
        self._transfer.close()
        self._collect()
        self._store.close()

    def _begin_put(self, batch: Sequence[Wanted]) -> list[_Answer | bool]:
        """Begin to store the first of the batch, as many as there is room for; none: not now. Return for each of them
        the pending answer, or True if it is stored or being stored already."""
        with self._lock:
            if any(self._waits_for_set(wanted) for wanted in batch):
                return []
            batch = batch[: self._room]
            there = {wanted.key for wanted in batch if self._store.is_known(wanted.key)}
            numbers = [self.codec.hold(wanted.memory) for wanted in batch]
            try:
                ours = self._save(
                    [
                        WantedChunk(wanted.key, self.namespace.id, (number,), wanted.tenant)
                        for wanted, number in zip(batch, numbers, strict=True)
                    ]
                )
            finally:
                for number in numbers:
                    self.codec.release(number)
        begun: list[_Answer | bool] = []
        for wanted in batch:
            answer = ours.pop(wanted.key, None)
            if answer is not None:
                there.add(wanted.key)  # if it is in the batch once more
            begun.append(answer or wanted.key in there)
        return begun

    def _waits_for_set(self, wanted: Wanted) -> bool:
        if self._store.is_known(wanted.key) or not self._store.is_set_coming(wanted.tenant):
            return False
        self._store.expect(wanted.tenant)
        return True

    def _save(self, chunks: Sequence[WantedChunk]) -> dict[bytes, _Answer]:
        """Submit a save. Return the pending answers by key."""
        plan = self._store.plan_save(chunks)
        if plan is None:
            return {}
        ours = {chunk.key: _Answer() for chunk in plan.chunks}
        self._room -= len(ours)
        self._awaited.update(((chunk.key, chunk.set_id, chunk.slot), ours[chunk.key]) for chunk in plan.chunks)
        self._transfer.save(plan)
        return ours

    def _outcome(self, answer: _Answer, deadline_s: float) -> SaveOutcome | None:
        """Wait for an outcome. Return None if it is late."""
        while answer.outcome is None and time.monotonic() < deadline_s:
            self._collect()
        return answer.outcome

    def _load(self, plan: LoadPlan) -> int:
        """Load the objects of a plan. Return the number of leading ones that were loaded."""
        with self._lock:
            self._transfer.load(plan)
        while plan.request_id not in self._failed:
            self._collect()
        with self._lock:
            failed = self._failed.pop(plan.request_id)
        return next(
            (place for place, chunk in enumerate(plan.chunks) if chunk.block_ids[0] in failed), len(plan.chunks)
        )

    def _collect(self) -> None:
        """Take the answers that arrived, for all callers."""
        progress = self._transfer.poll(POLL_S)
        with self._lock:
            for lost in self._store.saved(progress.saves):
                self._store.count_dropped(lost)
            self._room += len(progress.saves)
            for save in progress.saves:
                answer = self._awaited.pop((save.key, save.set_id, save.slot), None)
                if answer is not None:
                    answer.outcome = save.outcome
            for load in progress.loads:
                self._failed[load.request_id] = load.failed_blocks
