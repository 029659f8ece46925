"""One node of a two-node run: an engine of tests.support.rig in a forked process, asked through a pipe.

The processes are forked, because importing torch takes minutes in an emulated guest.
"""

import multiprocessing
import os
import random
import time
import traceback
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from kvtier.scheduler.store import WantedChunk
from tests.support.rig import BLOCK_TOKENS, Engine, geometry

CHUNKS = 5  # chunks of one prompt
ANSWER_TIMEOUT_S = 180.0  # for one command, seconds
REQUEST_TIMEOUT_S = 60.0  # until a save or a load counts as unanswered, seconds
WATCH_TIMEOUT_S = 90.0  # until a prompt is published by the other node, seconds
SHAPE = {"layers": 4, "k_head_size": 128, "v_head_size": 128}
CHUNK_BYTES = 1 << 20  # of 64 tokens in SHAPE
PER_CHUNK = 64 // BLOCK_TOKENS
BLOCKS = list(range(PER_CHUNK * CHUNKS))


def settings(url: str, **changes: Any) -> dict[str, Any]:
    """Return settings over those of the rig: an index in Redis, and every load reads from files."""
    index = {"kind": "redis", "url": url, "reply_timeout_ms": 5000, "connect_timeout_ms": 5000}
    own = {"index": index, "segment_bytes": 8 << 20, "capacity_bytes": 1 << 30}
    return own | {"host": {"arena_bytes": 16 << 20, "admit": "never"}} | changes


def tokens(number: int) -> list[int]:
    return list(range(10_000 * number, 10_000 * number + PER_CHUNK * BLOCK_TOKENS * CHUNKS))


class Work:
    """Commands of a node, run in its process."""

    def __init__(self, root: Path, changes: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        self.engine = Engine(root, shape=geometry(**SHAPE), n_blocks=64, changes=changes)
        for transfer in self.engine.transfers:
            transfer.start()
        self._acknowledged: list[bytes] = []

    def prepare(self, number: int) -> None:
        self.engine.prefill(tokens(number), BLOCKS)

    def save(self, number: int, is_prepared: bool = False) -> dict[str, Any]:
        """Save a prompt's chunks. Counts by outcome, and the seconds until all were answered."""
        engine = self.engine
        if not is_prepared:
            self.prepare(number)
        keys = engine.keys(tokens(number))
        parents = [engine.store.namespace_id, *keys]
        began = time.monotonic()
        while engine.store._keeper.allocators.common.wants_set() and time.monotonic() - began < 5:
            time.sleep(0.01)
        wanted = [
            WantedChunk(key, parents[i], tuple(BLOCKS[PER_CHUNK * i : PER_CHUNK * (i + 1)]))
            for i, key in enumerate(keys)
        ]
        began = time.monotonic()
        plan = engine.store.plan_save(wanted)
        n_planned = len(plan.chunks) if plan else 0
        outcomes = {"NOT_PLANNED": CHUNKS - n_planned}
        if plan:
            engine.transfers[0].save(plan)
            done = []
            while len(done) < n_planned and time.monotonic() - began < REQUEST_TIMEOUT_S:
                done += engine.transfers[0].poll(0.005).saves
            engine.store.saved(done)
            self._acknowledged += [one.key for one in done if one.outcome.name == "SAVED"]
            outcomes["UNANSWERED"] = n_planned - len(done)
            for one in done:
                outcomes[one.outcome.name] = outcomes.get(one.outcome.name, 0) + 1
        return {"outcomes": {k: n for k, n in outcomes.items() if n}, "seconds": time.monotonic() - began}

    def save_until(self, first: int, seconds: float, pause_s: float = 0.0) -> dict[str, Any]:
        """Save one prompt after the other for so long; those that were saved whole."""
        end, number, whole, slowest, outcomes = time.monotonic() + seconds, first, [], 0.0, Counter[str]()
        while time.monotonic() < end:
            done = self.save(number)
            if done["outcomes"] == {"SAVED": CHUNKS}:
                whole.append(number)
            outcomes.update(done["outcomes"])
            slowest = max(slowest, done["seconds"])
            number += 1
            time.sleep(pause_s)
        return {"saved": whole, "tried": number - first, "slowest_s": slowest, "outcomes": dict(outcomes)}

    def load(self, number: int) -> dict[str, Any]:
        """Load what the index offers of a prompt and compare it with what was computed."""
        engine = self.engine
        self.prepare(number)
        truth = engine.blocks(BLOCKS)
        engine.prefill(tokens(number + 1), BLOCKS)  # other bytes in the blocks
        return self._load(number, truth)

    def watch(self, number: int, ready: Connection) -> dict[str, Any]:
        """Load a prompt at the moment when the index has its chunks."""
        engine = self.engine
        self.prepare(number)
        truth = engine.blocks(BLOCKS)
        engine.prefill(tokens(number + 1), BLOCKS)
        keys, end = engine.keys(tokens(number)), time.monotonic() + WATCH_TIMEOUT_S
        ready.send("watching")
        while len(engine.store.lookup(keys) or ()) < CHUNKS and time.monotonic() < end:
            time.sleep(0.001)
        return self._load(number, truth)

    def _load(self, number: int, truth: list[torch.Tensor]) -> dict[str, Any]:
        engine, began = self.engine, time.monotonic()
        keys = engine.keys(tokens(number))
        while (entries := engine.store.lookup(keys)) is None and time.monotonic() - began < REQUEST_TIMEOUT_S:
            time.sleep(0.001)
        n = len(entries or ())
        if not n:
            return {"offered": 0, "failed": 0, "wrong": 0, "unanswered": 0, "seconds": time.monotonic() - began}
        plan = engine.store.plan_load(f"r{random.random()}", keys[:n], entries, BLOCKS[: PER_CHUNK * n], 0)
        engine.transfers[0].load(plan)
        done: list[Any] = []
        while not done and time.monotonic() - began < REQUEST_TIMEOUT_S:
            done += engine.transfers[0].poll(0.005).loads
        seconds = time.monotonic() - began
        failed = set().union(*(one.failed_blocks for one in done))
        good = [block for block in BLOCKS[: PER_CHUNK * n] if block not in failed] if done else []
        pairs = list(zip(engine.blocks(BLOCKS), truth, strict=True))
        wrong = {block // PER_CHUNK for block in good if any(not torch.equal(a[block], b[block]) for a, b in pairs)}
        return {
            "offered": n,
            "failed": len(failed) // PER_CHUNK,
            "wrong": len(wrong),
            "unanswered": int(not done),
            "seconds": seconds,
        }

    def load_until(self, numbers: list[int], seconds: float) -> dict[str, Any]:
        """Load prompts at random for so long."""
        rng, end = random.Random(7), time.monotonic() + seconds
        total = {"loads": 0, "offered": 0, "failed": 0, "wrong": 0, "unanswered": 0, "seconds": 0.0}
        while time.monotonic() < end:
            found = self.load(rng.choice(numbers))
            for name in ("offered", "failed", "wrong", "unanswered"):
                total[name] += found[name]
            total["seconds"] = max(total["seconds"], found["seconds"])
            total["loads"] += 1
        return total

    def indexed_bytes(self) -> int:
        return int(self.engine.store._keeper.index.counts().n_bytes)

    def lost(self) -> int:
        """Count chunks that were answered "saved" and are not in the index."""
        keys = self._acknowledged
        index = self.engine.store._keeper.index
        pieces = (keys[first : first + 256] for first in range(0, len(keys), 256))
        return sum(entry is None for piece in pieces for entry in index.find(piece))

    def counters(self) -> dict[str, float]:
        found = {**self.engine.store.metrics.total(), **self.engine.transfers[0].metrics.total()}
        return {name: value for name, value in sorted(found.items()) if value}


class Node:
    """A node's process, seen from the one that asks."""

    def __init__(self, root: Path, changes: dict[str, Any], log: Path) -> None:
        fork = multiprocessing.get_context("fork")
        self._pipe, theirs = fork.Pipe()
        self.process = fork.Process(target=_serve, args=(root, changes, theirs, log), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, name: str, *arguments: Any) -> None:
        self._pipe.send((name, arguments))

    def answer(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"a node did not answer within {timeout_s} s")
        found = self._pipe.recv()
        if isinstance(found, Exception):
            raise found
        return found

    def ask(self, name: str, *arguments: Any, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        self.send(name, *arguments)
        return self.answer(timeout_s)

    def close(self) -> None:
        if self.process.is_alive():
            self.send("close")
        self.process.join(30)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(root: Path, changes: dict[str, Any], pipe: Connection, log: Path) -> None:
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        work = Work(root, changes)
        pipe.send("ready")
        # The end is said, not seen: later nodes inherit the other end of this pipe.
        while (asked := pipe.recv())[0] != "close":
            name, arguments = asked
            extra = (pipe,) if name == "watch" else ()
            pipe.send(getattr(work, name)(*arguments, *extra))
        work.engine.close()
    except Exception as error:
        traceback.print_exc()
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
