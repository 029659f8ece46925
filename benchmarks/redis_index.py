"""Lookup time, publishing rate and memory of a chunk in Redis.

    python -m benchmarks.redis_index [--seconds S]

Starts redis-server processes of its own on free ports: one, then a cluster of three masters. Records are those of one
rank with 8 heads. Lookup: 391 chunks (100,000 tokens), all hits among 100,000 others; in the same run and in turn the
ceiling, redis-py's bare MGET of the same keys (in the cluster: its own pipeline of GETs), and PING, a round trip that
carries nothing. Publishing: four processes, each into sets of its own, batches of 16 as a worker publishes them.
Memory: used_memory before and after, over chunks. Exit status 1 when a target (of one server) is missed. The servers
share this machine's cores with the clients.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import redis

from benchmarks import report
from benchmarks.lookup import N_CHUNKS, N_OTHERS, SET_SLOTS, fill, records_of
from benchmarks.processes import redis_server
from kvtier.config.index import IndexSettings
from kvtier.index.base import SetInfo
from kvtier.index.redis.index import RedisIndex
from kvtier.index.redis.keys import TAGS, Keys

RUNS = 300
PROCESSES, BATCH = 4, 16
FEW_SLOTS = 32  # chunks of a small segment set: a chunk's memory includes its share of its set
SEED = 7
LOOKUP_TARGET_MS, PUBLISH_TARGET_S = 2.0, 10_000  # of one server: median; chunks a second
RESULT = Path(__file__).parent / "results" / "redis_index.json"


@contextmanager
def servers(folder: Path, count: int) -> Iterator[list[int]]:
    """Start servers, a cluster when they are several; yield their ports, and kill them."""
    cluster = ["--cluster-enabled", "yes"] if count > 1 else []
    with ExitStack() as stack:
        ports = []
        for number in range(count):
            own = folder / f"{count}-{number}"
            own.mkdir()
            ports.append(stack.enter_context(redis_server(own, *cluster)))
        if count > 1:
            addresses = [f"127.0.0.1:{port}" for port in ports]
            create = ["redis-cli", "--cluster", "create", *addresses, "--cluster-yes"]
            subprocess.run(create, check=True, capture_output=True, timeout=60)
            wait_for(lambda: all(cluster_state(port) == "ok" for port in ports))
        yield ports


def cluster_state(port: int) -> str:
    return str(redis.Redis(port=port).cluster("info")["cluster_state"])


def wait_for(is_true: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            if is_true():
                return
        except redis.ConnectionError:
            pass
        assert time.monotonic() < deadline, "a server does not start"
        time.sleep(0.05)


def open_index(ports: Sequence[int]) -> RedisIndex:
    url = f"redis://127.0.0.1:{ports[0]}/0" if len(ports) == 1 else f"redis+cluster://127.0.0.1:{ports[0]}"
    return RedisIndex(IndexSettings(kind="redis", url=url, reply_timeout_ms=30_000))


def used_bytes(ports: Sequence[int]) -> int:
    return sum(int(redis.Redis(port=port).info("memory")["used_memory"]) for port in ports)


def lookup(ports: Sequence[int], index: RedisIndex, prompt: Sequence[bytes]) -> dict[str, dict[str, float]]:
    names = [Keys("kvtier", TAGS if len(ports) > 1 else 1).entry(key) for key in prompt]
    parts: dict[str, Callable[[], object]] = {"lookup": lambda: index.resolve(prompt)}
    if len(ports) == 1:
        bare = redis.Redis(port=ports[0])
        parts |= {"bare MGET": lambda: bare.mget(names), "PING": bare.ping}
        assert bare.mget(names) == index.resolve(prompt), "the same bytes"
    else:
        cluster = redis.RedisCluster(host="127.0.0.1", port=ports[0])

        def piped() -> Any:
            pipe = cluster.pipeline()
            for name in names:
                pipe.get(name)
            return pipe.execute()

        parts["redis-py's pipeline"] = piped
        assert piped() == index.resolve(prompt), "the same bytes"
    assert len(index.resolve(prompt)) == N_CHUNKS
    return {name: report.percentiles(values, "ms") for name, values in report.in_turn(parts, RUNS).items()}


def publisher(ports: Sequence[int], number: int, seconds: float, start: Any, counts: Any) -> None:
    """Publish for so many seconds in a process of its own, and put (chunks, seconds) into `counts`."""
    index, rng = open_index(ports), random.Random(SEED + number)
    set_id, slot, done = (number + 1) << 32, SET_SLOTS, 0
    index.create_set(SetInfo(set_id, bytes(16), "benchmark", 1, 0.0, 0.0))  # connects
    start.wait()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if slot == SET_SLOTS:
            set_id, slot = set_id + 1, 0
            index.create_set(SetInfo(set_id, bytes(16), "benchmark", 1 << 30, 0.0, 0.0))
        done += index.publish(records_of(set_id, [rng.randbytes(16) for _ in range(BATCH)], rng, slot))
        slot += BATCH
    counts.put((done, time.monotonic() - end + seconds))


def publishing(ports: Sequence[int], seconds: float) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    start, counts = context.Barrier(PROCESSES), context.Queue()
    arguments = [(ports, number, seconds, start, counts) for number in range(PROCESSES)]
    workers = [context.Process(target=publisher, args=one) for one in arguments]
    for worker in workers:
        worker.start()
    found = [counts.get(timeout=120 + seconds) for _ in workers]
    for worker in workers:
        worker.join()
    return {"chunks_per_s": sum(done / took for done, took in found), "chunks": sum(done for done, _ in found)}


def measure(folder: Path, count: int, seconds: float) -> dict[str, Any]:
    rng = random.Random(SEED)
    prompt, others = ([rng.randbytes(16) for _ in range(n)] for n in (N_CHUNKS, N_OTHERS))
    with servers(folder, count) as ports:
        index = open_index(ports)
        index.resolve(prompt)
        per_chunk = {}
        for slots in (FEW_SLOTS, SET_SLOTS):  # the last filling stays
            for port in ports:
                redis.Redis(port=port).flushall()
            empty = used_bytes(ports)
            fill(index, others, rng, slots=slots)
            per_chunk[str(slots)] = (used_bytes(ports) - empty) / len(others)
        fill(index, prompt, rng, 1 << 30)
        found = {"bytes_per_chunk": per_chunk, "lookup": lookup(ports, index, prompt)}
        found["publish"] = publishing(ports, seconds)
        index.close()
    return found


def table_rows(result: dict[str, Any]) -> report.Table:
    """Return columns and rows, one row a measure."""
    parts = result["one"], result["cluster"]
    lookups = (f"{part['lookup']['lookup']['p50_ms']:.2f} ms" for part in parts)
    rates = (f"{part['publish']['chunks_per_s']:,.0f}" for part in parts)
    return ["", "one server", "cluster of 3 masters"], [
        [f"lookup of {N_CHUNKS} chunks, median", *lookups],
        [f"published by {PROCESSES} processes, chunks/s", *rates],
        ["memory of a chunk, sets of 256", *(f"{part['bytes_per_chunk']['256']:.0f} B" for part in parts)],
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.redis_index", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="of publishing")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {name: measure(Path(folder), count, options.seconds) for name, count in (("one", 1), ("cluster", 3))}
    report.table(*table_rows(found))
    is_met = found["one"]["publish"]["chunks_per_s"] >= PUBLISH_TARGET_S
    is_met &= found["one"]["lookup"]["lookup"]["p50_ms"] <= LOOKUP_TARGET_MS
    print("targets met" if is_met else "TARGET MISSED")
    version = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=True).stdout
    content = {"redis": version.split("v=")[1].split()[0], "seconds": options.seconds, "is_met": is_met, **found}
    report.write(RESULT, "lookup, publishing and memory of a chunk in Redis", content, "redis")
    return int(not is_met)


if __name__ == "__main__":
    sys.exit(main())
