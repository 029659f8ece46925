"""Plans: messages from the Store (engine's scheduler process) to the Transfer (its workers), and their answers.

Frozen and picklable: a plan travels in the engine's per-step metadata, in a queue or over a socket unchanged. What is
made for each chunk is a NamedTuple: one is pickled in half of a frozen dataclass's time, on the engine's own thread.
"""

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class SaveChunk(NamedTuple):
    """One chunk to save: its blocks in the engine, and the slot for the record of each rank.

    tenant: label of the set's tenant; "" without one. number: its place in the prompt.
    """

    key: bytes
    parent: bytes
    set_id: int
    slot: int
    block_ids: tuple[int, ...]
    tenant: str = ""
    number: int = 0


@dataclass(frozen=True, slots=True)
class SavePlan:
    """Chunks to save in this step. slots: number of slots of each segment of their sets."""

    namespace: bytes
    slots: int
    chunks: tuple[SaveChunk, ...]


class LoadChunk(NamedTuple):
    """One chunk to load.

    entry: the index's value for the key (kvtier.index.entry): the places of its records, with their checksums.
    block_ids: the engine's blocks of the whole chunk, in order; those before `first_token` are never touched.
    first_token: tokens of the chunk that the engine already has, in blocks that other requests may share.
    """

    key: bytes
    entry: bytes
    block_ids: tuple[int, ...]
    first_token: int


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """All chunks of one request's load, in the order of the prompt."""

    request_id: str
    namespace: bytes
    chunks: tuple[LoadChunk, ...]


@dataclass(frozen=True, slots=True)
class LoadDone:
    """A rank's one answer to a LoadPlan. `failed_blocks`: from the first bad chunk on, to be recomputed."""

    request_id: str
    failed_blocks: frozenset[int]


class SaveOutcome(Enum):
    """Outcome of saving one chunk on one rank, the worst last."""

    SAVED = "saved"
    PRESENT = "present"  # another writer had stored it already
    QUEUE_FULL = "queue_full"  # skipped: a forward never waits for storage
    RESTING = "resting"  # skipped: the storage refused lately
    NO_SPACE = "no_space"  # the disk is full
    FAILED = "failed"
    REFUSED = "refused"  # skipped: the codec cannot keep what it holds

    @property
    def wrote_nothing(self) -> bool:
        """Return True if the slot is still blank, so that another chunk may take it."""
        return self in (SaveOutcome.PRESENT, SaveOutcome.QUEUE_FULL, SaveOutcome.RESTING, SaveOutcome.REFUSED)


class SaveDone(NamedTuple):
    """One answer to a SaveChunk, by each rank that has something of it to write.

    took_s: from its gather to this answer, seconds; the wait in the queue is in it, the wait for the engine's next
    step, which takes the answer, is not.
    """

    key: bytes
    set_id: int
    slot: int
    outcome: SaveOutcome
    took_s: float = 0.0
