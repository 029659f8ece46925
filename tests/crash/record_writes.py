"""Saves and evicts while record_writes.c is preloaded, which records what that changes below the root.

    python -m tests.crash.record_writes ROOT

Two ranks fill three segment sets with one prompt each; the fourth prompt needs the place of the first. Between these
steps a folder `mark-<step>` is made, for the reader of the record.
"""

import os
import sys
from pathlib import Path

import torch

from kvtier.format.geometry import PAGE_BYTES
from kvtier.plan import SaveOutcome
from tests.support.rig import Engine, geometry

SHAPE = geometry(layers=2, chunk_tokens=16)
SLAB_BYTES = 2 * PAGE_BYTES
RANKS = 2
SLOTS = 3
SEGMENT_BYTES = PAGE_BYTES + SLOTS * (PAGE_BYTES + 2 * SLAB_BYTES)
CAPACITY_SETS = 3
CHUNKS = (3, 3, 2, 2)  # of each prompt. The third leaves its set unfinished, so that its writer's end cuts it.


def tokens_of(number: int) -> list[int]:
    first = 10_000 * number
    return list(range(first, first + SHAPE.chunk_tokens * CHUNKS[number]))


def main(root: Path) -> None:
    torch.set_num_threads(1)
    changes = {"segment_bytes": SEGMENT_BYTES, "capacity_bytes": CAPACITY_SETS * RANKS * SEGMENT_BYTES}
    for number, n_chunks in enumerate(CHUNKS):
        engine = Engine(root, shape=SHAPE, tensor_size=RANKS, n_blocks=8, changes=changes)
        answers = engine.save(tokens_of(number), range(n_chunks))
        assert [answer.outcome for answer in answers] == [SaveOutcome.SAVED] * n_chunks * RANKS, answers
        os.mkdir(root / f"mark-saved-{number}")
        engine.close()
        os.mkdir(root / f"mark-closed-{number}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
