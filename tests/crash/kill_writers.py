"""Kills a writer at random moments and looks at what it left: all that it was told is saved, and nothing that is wrong.
Run by test_kill.py; prints one line of JSON.

    python -m tests.crash.kill_writers ROOT KILLS SEED

Writers and checkers are forked from this process, which itself opens nothing, so that a kill costs a second and not
an import of torch.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from kvtier.maintenance.scrub import verify
from kvtier.plan import SaveDone, SaveOutcome
from kvtier.storage.root import find_root
from tests.support.rig import Engine

SEQUENCES = 40
CHUNKS = 5
RANKS = 2
SAVE_TIMEOUT_S = 60.0  # seconds
SIZES: dict[str, object] = {"segment_bytes": 1 << 20, "capacity_bytes": 1 << 30}
"""Sets of 14 chunks, which fill all the time, and room for all that is written: nothing is evicted."""


def tokens_of(number: int) -> list[int]:
    return list(range(10_000 * number, 10_000 * number + 64 * CHUNKS))


class Claims:
    """Keys of the chunks that all ranks answered to be saved or present, a line each in a file that outlives us."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        self._answers: dict[tuple[bytes, int, int], int] = {}

    def note(self, saves: list[SaveDone]) -> None:
        for done in saves:
            if done.outcome in (SaveOutcome.SAVED, SaveOutcome.PRESENT):
                place = done.key, done.set_id, done.slot
                self._answers[place] = self._answers.get(place, 0) + 1
                if self._answers[place] == RANKS:
                    os.write(self._file, done.key.hex().encode() + b"\n")


def write_forever(root: Path, seed: int, ready: int) -> None:
    """Saves one sequence after another without waiting for any, as an engine does."""
    engine = Engine(root, tensor_size=RANKS, n_blocks=64, changes=SIZES)
    claims = Claims(root / "claims")
    engine.wait_for_set(30.0)  # one killed while it evicted holds the lease for a while
    order = random.Random(seed)
    blocks = list(range(20))
    os.write(ready, b"x")
    while True:
        tokens = tokens_of(order.randrange(SEQUENCES))
        engine.prefill(tokens, blocks)
        plan = engine.plan_if_new(tokens, blocks)
        for transfer in engine.transfers:
            if plan is not None:
                transfer.save(plan)
            saves = transfer.poll().saves
            claims.note(saves)
            engine.store.saved(saves)


def check(root: Path, report: int) -> None:
    """Loads everything that is offered, compares it with what was computed, and verifies the root."""
    engine = Engine(root, n_blocks=64, changes=SIZES)
    claimed = {bytes.fromhex(line) for line in (root / "claims").read_text().split()}
    lost = sum(not engine.store._keeper._index.resolve([key]) for key in claimed)
    loaded = wrong = failed = 0
    for number in range(SEQUENCES):
        tokens, blocks = tokens_of(number), list(range(20))
        n_chunks, answers = engine.load(tokens, blocks)
        failed += sum(len(answer.failed_blocks) for answer in answers)
        loaded += n_chunks
        wrong += not engine.holds(tokens, blocks[: n_chunks * 4])
    found = verify(find_root(root), engine.store._keeper._index)
    bad = [f"{finding.segment} slot {finding.slot}: {finding.what}" for finding in found.bad]
    engine.close()
    result = {
        "claimed": len(claimed),
        "lost": lost,
        "loaded": loaded,
        "wrong": wrong,
        "failed": failed,
        "bad": bad,
        "records": found.records,
    }
    os.write(report, json.dumps(result).encode())


def fork(work: Callable[[int], None]) -> tuple[int, int]:
    """Runs `work(pipe)` in a child; (pid, pipe to read from)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work(writer)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    return pid, reader


def n_claims(root: Path) -> int:
    path = root / "claims"
    return len(path.read_bytes().split()) if path.exists() else 0


def main(root: Path, kills: int, seed: int) -> None:
    """Kill writers. Every second one is killed only after it has saved something, however slow the machine is."""
    torch.set_num_threads(1)
    rng = random.Random(seed)
    results = []
    for number in range(kills):
        said = n_claims(root)
        writer_seed = rng.random()
        pid, pipe = fork(lambda ready, s=writer_seed: write_forever(root, s, ready))  # type: ignore[misc]
        assert os.read(pipe, 1), "the writer died by itself"
        deadline = time.monotonic() + SAVE_TIMEOUT_S
        while number % 2 and n_claims(root) < said + CHUNKS and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(rng.uniform(0.0, 0.5))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(pipe)
        pid, pipe = fork(lambda report: check(root, report))
        text = b""
        while part := os.read(pipe, 65536):
            text += part
        _, status = os.waitpid(pid, 0)
        assert status == 0 and text, "the checker failed"
        results.append(json.loads(text))
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
