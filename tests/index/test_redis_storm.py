"""Four engines and a sweeper on one root while their Redis fails at random, drawn from a seed: what is loaded was saved
under its key, what counts as saved is found again, and soon after the last fault all engines save and load."""

import json
import logging
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.errors import KVTierError
from kvtier.format.namespace import chunk_keys
from kvtier.index.open import open_redis_to_mend
from kvtier.maintenance.consistency_check import check_consistency, drop_lost
from kvtier.maintenance.sweeper import Sweeper
from kvtier.runtime import metrics as names
from kvtier.storage.root import namespace_folders, open_root, read_namespace
from tests.redis_server import Server, has_redis, standalone
from tests.support.rig import Engine, geometry, settings
from tests.waiting import wait_until

from index_data import join, start

SEED, TURNS, ENGINES = 20261127, 60, 4
PROMPTS, FRESH = 40, 10_000  # prompts that all save and load; numbers of those that show that an engine works again
BLOCKS, TARGET, TRUTH = range(12), range(20, 32), range(40, 52)
SLOT_BYTES = 4096 + 2 * 2 * 2 * 64 * 32 * 4
NEW_PASSWORD = "acl setuser default resetpass >secret"


def changes(url: str) -> dict[str, Any]:
    breaker = {"failures": 2, "pause_first_ms": 200.0, "pause_max_ms": 2000.0}
    index = {"kind": "redis", "url": url, "reply_timeout_ms": 500, "connect_timeout_ms": 500, "breaker": breaker}
    return {"index": index, "writer_lease_s": 4.0, "segment_bytes": 4096 + 8 * SLOT_BYTES, "capacity_bytes": 2 << 30}


def put(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)


def prompt(number: int, chunks: int) -> list[int]:
    return [1000 * number + token for token in range(64 * chunks)]


def serve(folder: Path, url: str, number: int) -> None:
    """Do as `state` says. Write keys of what was saved to `saved<number>`, counters to `status<number>`."""
    logging.basicConfig(filename=folder / f"log{number}", level=logging.INFO)
    rng = random.Random(SEED + number)
    engine = Engine(folder / "kv", geometry(layers=2, kv_heads=2), n_blocks=64, changes=changes(url))
    with open(folder / f"saved{number}", "a", buffering=1) as saved:
        while (doing := (folder / "state").read_text()) != "end":
            engine.transfers[0].tidy()
            if doing.startswith("rest"):
                tell(folder / f"status{number}", engine, int(doing.split()[1]))
            elif doing.startswith("probe"):
                fresh = prompt(FRESH + int(doing.split()[1]) * ENGINES + number, 1)
                load(engine, fresh)  # a lookup that finds nothing allows the next save
                save(engine, fresh, saved.write)
            elif rng.random() < 0.5:
                save(engine, prompt(rng.randrange(PROMPTS) + int(doing), rng.choice([1, 2, 3])), saved.write)
            else:
                load(engine, prompt(rng.randrange(PROMPTS) + int(doing), rng.choice([1, 2, 3])))
            time.sleep(0.2 if doing.startswith(("rest", "probe")) else 0.01)
    engine.close()


def save(engine: Engine, tokens: list[int], tell_saved: Callable[[str], object]) -> None:
    engine.prefill(tokens, BLOCKS[: len(tokens) // 16])
    if plan := engine.plan_if_new(tokens, BLOCKS[: len(tokens) // 16]):
        with torch.inference_mode():
            engine.transfers[0].save(plan)
            assert engine.transfers[0].drain(60)
            done = engine.transfers[0].poll().saves
        engine.store.saved(done)
        tell_saved("".join(f"{answer.key.hex()}\n" for answer in done if answer.outcome.value == "saved"))


def load(engine: Engine, tokens: list[int]) -> None:
    n_chunks, done = engine.load(tokens, TARGET[: len(tokens) // 16])
    n_blocks = n_chunks * engine.chunk_blocks
    loaded = engine.blocks(TARGET[:n_blocks])
    engine.prefill(tokens[: n_blocks * 16], TRUTH[:n_blocks])
    pairs = list(zip(loaded, engine.blocks(TRUTH[:n_blocks]), strict=True))
    for place in range(n_blocks):
        is_same = all(torch.equal(one[place], other[place]) for one, other in pairs)
        assert is_same or TARGET[place] in done[0].failed_blocks, "loaded, and not what was saved"


def tell(path: Path, engine: Engine, turn: int) -> None:
    counters = Counter(engine.transfers[0].metrics.total())
    refused = counters[names.PUBLISH_QUEUED] - counters[names.PUBLISH_SENT_LATE]
    waiting = engine.transfers[0]._worker.index.n_waiting  # type: ignore[attr-defined]  # it is guarded
    status = {"turn": turn, "waiting": waiting, "refused": refused, "threads": threading.active_count()}
    put(path, json.dumps(status))


def sweep(folder: Path, url: str) -> None:
    logging.basicConfig(filename=folder / "log-sweeper", level=logging.INFO)
    found, rng = settings(folder / "kv", **changes(url)), random.Random(SEED)
    while (doing := (folder / "state").read_text()) != "end":
        with suppress(KVTierError), closing(open_redis_to_mend(found, open_root(found))) as index:
            if not doing.startswith("rest"):
                keeper = Sweeper(index, folder / "kv/v2", "a sweeper")
                rng.choice([keeper.sweep, keeper.rebuild])()
        time.sleep(rng.random())


def restart(server: Server, rng: random.Random, *before: str) -> None:
    server.cli(*before) if before else None
    time.sleep(rng.uniform(0.0, 4.0) if before else 0.0)  # what is written then is not in the snapshot
    server.kill()
    time.sleep(rng.uniform(0.0, 4.0))
    server.start()
    wait_until(lambda: server.cli("ping") == "PONG", "Redis")
    (server.folder / "dump.rdb").unlink(missing_ok=True)


def for_a_while(do: str, undo: str, server: Server, rng: random.Random) -> None:
    for command in do.split("; "):
        server.cli(*command.split())
    time.sleep(rng.uniform(0.5, 5.0))
    server.cli(*undo.split())


def lose_keys(server: Server, rng: random.Random) -> None:
    some = rng.choice(["kvtier:e:*", "kvtier:{????????????????}", "kvtier:{kvtier}:*"])
    script = "for i, k in ipairs(redis.call('KEYS', ARGV[1])) do if i % 3 == 0 then redis.call('DEL', k) end end"
    server.cli("eval", script, "0", some)


FAULTS: list[Callable[[Server, random.Random], object]] = [
    lambda server, rng: (server.pause(), time.sleep(rng.uniform(0.2, 6.0)), server.go_on()),
    restart,
    lambda server, rng: restart(server, rng, "save"),
    lambda server, rng: server.cli("client", "kill", "type", "normal"),
    lambda server, rng: server.cli("debug", "sleep", f"{rng.uniform(0.1, 2.0):.2f}"),
    lambda server, rng: server.cli("flushall"),
    lose_keys,
    partial(for_a_while, "config set maxmemory 1mb", "config set maxmemory 0"),
    partial(for_a_while, "acl setuser default -@write", "acl setuser default +@all"),
    partial(for_a_while, "replicaof 127.0.0.1 1", "replicaof no one"),
    partial(for_a_while, f"{NEW_PASSWORD}; -a secret client kill type normal", "-a secret acl setuser default nopass"),
]


def look(folder: Path, url: str, turn: int) -> None:
    root = open_root(found := settings(folder / "kv", **changes(url)))
    with closing(open_redis_to_mend(found, root)) as index:
        put(folder / "state", f"probe {turn}")
        of, first = read_namespace(namespace_folders(root.folder)[0]).id, FRESH + turn * ENGINES
        wanted = [chunk_keys(of, prompt(first + number, 1), 64, {}) for number in range(ENGINES)]
        wait_until(lambda: all(map(index.resolve, wanted)), "a save of each engine")
        put(folder / "state", f"rest {turn}")
        wait_until(lambda: sum(one["turn"] == turn and not one["waiting"] for one in told(folder)) == ENGINES, "rest")
        keeper = Sweeper(index, root.folder, "the test")
        wait_until(keeper.rebuild, "a rebuild")
        drop_lost(index)
        assert not check_consistency(root, index).disagreements
        saved = {bytes.fromhex(key) for path in folder.glob("saved*") for key in path.read_text().split()}
        lost = [key for key, value in zip(saved, index.find(list(saved)), strict=True) if value is None]
        assert len(lost) <= sum(one["refused"] for one in told(folder)), "chunks that count as saved are in no index"
        assert index.counts().n_bytes == sum(info.n_bytes for info in index.sets())
    assert max(one["threads"] for one in told(folder)) <= 24  # they have 15


def told(folder: Path) -> list[dict[str, int]]:
    return [json.loads(path.read_text()) for path in folder.glob("status?")]


@has_redis
@pytest.mark.soak
def test_a_storm_on_redis_costs_no_saved_chunk(tmp_path: Path) -> None:
    rng, state = random.Random(SEED), tmp_path / "state"
    put(state, "rest 0")
    with standalone(tmp_path / "redis", ["--enable-debug-command", "yes"]) as server:
        processes = [start(serve, tmp_path, server.url, number) for number in range(ENGINES)]
        processes.append(start(sweep, tmp_path, server.url))
        try:
            wait_until(lambda: len(told(tmp_path)) == ENGINES, "all engines")
            for turn in range(1, TURNS + 1):
                put(state, str(turn * 10))
                for fault in rng.choices(FAULTS, k=rng.choice([1, 1, 2, 3])):
                    time.sleep(rng.uniform(0.5, 3.0))
                    fault(server, rng)
                look(tmp_path, server.url, turn)
                assert all(process.is_alive() for process in processes), "an engine ended"
        finally:
            put(state, "end")
            join(*processes)
    assert not any("Traceback" in path.read_text() for path in tmp_path.glob("log*"))
