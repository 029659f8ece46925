"""A small Store and Transfer in memory, with the library's signatures, for tests of the bridge alone; and vLLM's specs
of attention, which kvtier knows by the names of their classes."""

from collections.abc import Sequence
from types import SimpleNamespace

from kvtier.plan import LoadChunk, LoadDone, LoadPlan, SaveChunk, SaveDone, SaveOutcome, SavePlan
from kvtier.runtime.metrics import Metrics
from kvtier.scheduler.store import LostSave, SaveSelection, WantedChunk
from kvtier.worker.transfer import Progress


class FullAttentionSpec(SimpleNamespace):
    pass


class MLAAttentionSpec(SimpleNamespace):
    pass


def answer_to_save(key: bytes, outcome: SaveOutcome) -> SaveDone:
    """An answer about a chunk of which only the key and the outcome matter."""
    known = {"key": key, "outcome": outcome}
    return SaveDone(**{name: known.get(name, 0) for name in SaveDone._fields})  # type: ignore[arg-type]


class FakeStore:
    """Keys that are `stored` are found. `answers` False: a remote index that has not answered yet."""

    def __init__(self, namespace_id: bytes = b"n" * 16) -> None:
        self.namespace_id = namespace_id
        self.stored: set[bytes] = set()
        self.wanted: list[WantedChunk] = []
        self.answered: list[SaveDone] = []
        self.answers = True
        self.set_is_coming = False
        self.epoch = 0
        self.given_up: list[int] = []
        self.metrics = Metrics()
        self.n_lookups = 0

    def lookup(self, keys: Sequence[bytes], asker: str = "") -> list[bytes] | None:
        self.n_lookups += 1
        if not self.answers:
            return None
        entries = []
        for key in keys:
            if key not in self.stored:
                break
            entries.append(b"entry of " + key)
        return entries

    def gave_up(self, n_chunks: int) -> None:
        self.given_up.append(n_chunks)

    def plan_load(
        self,
        request_id: str,
        keys: Sequence[bytes],
        entries: Sequence[bytes],
        block_ids: Sequence[int],
        first_token: int,
    ) -> LoadPlan:
        size = len(block_ids) // len(keys)
        chunks = tuple(
            LoadChunk(key, entry, tuple(block_ids[i * size : (i + 1) * size]), 0 if i else first_token)
            for i, (key, entry) in enumerate(zip(keys, entries, strict=True))
        )
        return LoadPlan(request_id, self.namespace_id, chunks)

    def select_saves(self, wanted: Sequence[WantedChunk]) -> SaveSelection:
        self.wanted += wanted
        chunks = [SaveChunk(w.key, w.parent, 1, 0, w.block_ids) for w in wanted if w.key not in self.stored]
        self.stored.update(chunk.key for chunk in chunks)
        return SaveSelection(SavePlan(self.namespace_id, 1, tuple(chunks)) if chunks else None, [])

    def forget_lost(self, keys: Sequence[bytes]) -> None:
        pass

    def is_known(self, key: bytes) -> bool:
        return key in self.stored

    def is_stored(self, key: bytes) -> bool:
        return key in self.stored

    def is_set_coming(self, tenant: str) -> bool:
        return self.set_is_coming

    def saved(self, done: Sequence[SaveDone]) -> list[LostSave]:
        self.answered += done
        return []

    def reset(self) -> None:
        self.epoch += 1
        self.namespace_id = bytes([self.epoch]) * 16


class FakeTransfer:
    """Takes plans and answers when told to."""

    def __init__(self) -> None:
        self.saves: list[SavePlan] = []
        self.loads: list[LoadPlan] = []
        self.progress = Progress([], [], [])
        self.is_closed = False

    def save(self, plan: SavePlan) -> None:
        self.saves.append(plan)

    def load(self, plan: LoadPlan) -> None:
        self.loads.append(plan)

    def step_begins(self, *, computes: bool, decodes: bool) -> None:
        pass

    def poll(self, timeout_s: float = 0.0) -> Progress:
        progress, self.progress = self.progress, Progress([], [], [])
        return progress

    def answer(self, request_id: str, failed: Sequence[int] = ()) -> None:
        self.progress.loads.append(LoadDone(request_id, frozenset(failed)))

    def drain(self, timeout_s: float) -> bool:
        return True

    def close(self) -> None:
        self.is_closed = True
