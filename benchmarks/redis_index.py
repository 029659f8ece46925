"""How long does a lookup in Redis take, how fast is publishing, and what does a chunk cost there?

    python benchmarks/redis_index.py [--seconds S]

Starts redis-server processes of its own on free ports: one, then a cluster of three masters. Records are those of one
rank with 8 heads. Lookup: 391 chunks (100,000 tokens), all hits among 100,000 others; beside it, in the same run and in
turn, the ceiling: redis-py's bare MGET of the same keys (in the cluster: its own pipeline of GETs), and the median of
PING, a round trip that carries nothing. Publishing: four processes, each into sets of its own, batches of 16 as a
worker's save jobs publish them; beside it what redis-benchmark writes (SET of the same number of bytes, pipelined 16,
four connections). Memory: used_memory before and after, over chunks. From these, a plan on paper for 100 million
chunks. Ends with status 1 when a target (of one server) is missed. The servers share this machine's cores with the
clients.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import redis

from kvtier.config.index import IndexSettings
from kvtier.format.geometry import Extent
from kvtier.index.base import Location, NewRecord, SetInfo
from kvtier.index.redis.index import RedisIndex
from kvtier.index.redis.keys import TAGS, Keys

N_CHUNKS, N_OTHERS = 391, 100_000
RUNS = 300
PROCESSES, BATCH = 4, 16
SET_SLOTS, FEW_SLOTS = 256, 32
"""Chunks of a segment set: the memory of a chunk includes its share of its set."""
WHOLE = Extent(0, 32, 0, 8)
SLAB_BYTES = 32 * 2 * 128 * 2 * 256
SEED = 7
LOOKUP_TARGET_MS, PUBLISH_TARGET_S = 2.0, 10_000
PLANNED_CHUNKS, SHARD_BYTES = 100_000_000, 8 << 30
RESULT = Path(__file__).parent / "results" / "redis_index.json"


@dataclass(frozen=True)
class Spread:
    """Milliseconds over all runs."""

    p50_ms: float
    p99_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        ordered = sorted(seconds)
        return cls(ordered[len(ordered) // 2] * 1e3, ordered[int(len(ordered) * 0.99)] * 1e3)


@contextmanager
def servers(folder: Path, count: int) -> Iterator[list[int]]:
    """Ports of `count` servers, a cluster when they are several."""
    ports, processes = [], []
    try:
        for number in range(count):
            with socket.create_server(("127.0.0.1", 0)) as free:
                ports.append(free.getsockname()[1] % 20_000 + 20_000)  # the bus takes the port 10000 above
            own = folder / f"{count}-{number}"
            own.mkdir()
            words = ["redis-server", "--port", str(ports[-1]), "--dir", str(own), "--save", "", "--bind", "127.0.0.1"]
            words += ["--cluster-enabled", "yes"] if count > 1 else []
            processes.append(subprocess.Popen(words, stdout=subprocess.DEVNULL))
        for port in ports:
            wait_for(lambda port=port: redis.Redis(port=port).ping())  # type: ignore[misc]
        if count > 1:
            addresses = [f"127.0.0.1:{port}" for port in ports]
            create = ["redis-cli", "--cluster", "create", *addresses, "--cluster-yes"]
            subprocess.run(create, check=True, capture_output=True, timeout=60)
            wait_for(lambda: all(b"cluster_state:ok" in told(port) for port in ports))
        yield ports
    finally:
        for process in processes:
            process.kill()
            process.wait()


def told(port: int) -> bytes:
    return subprocess.run(["redis-cli", "-p", str(port), "cluster", "info"], capture_output=True, check=True).stdout


def wait_for(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            if is_so():
                return
        except redis.ConnectionError:
            pass
        assert time.monotonic() < deadline, "a server does not start"
        time.sleep(0.05)


def open_index(ports: Sequence[int]) -> RedisIndex:
    url = f"redis://127.0.0.1:{ports[0]}/0" if len(ports) == 1 else f"redis+cluster://127.0.0.1:{ports[0]}"
    return RedisIndex(IndexSettings(kind="redis", url=url, reply_timeout_ms=30_000))


def records_of(set_id: int, keys: Sequence[bytes], rng: random.Random) -> list[NewRecord]:
    return [
        NewRecord(key, Location(set_id, 0, slot, SLAB_BYTES, WHOLE, sums(rng)), WHOLE) for slot, key in enumerate(keys)
    ]


def sums(rng: random.Random) -> tuple[int, ...]:
    return tuple(rng.getrandbits(64) for _ in range(WHOLE.n_heads))


def fill(index: RedisIndex, keys: Sequence[bytes], first_id: int, rng: random.Random, slots: int = SET_SLOTS) -> None:
    for first in range(0, len(keys), slots):
        set_id = first_id + first // slots
        index.create_set(SetInfo(set_id, bytes(16), "host-12345-0123abcd", 1 << 30, 0.0, 0.0))
        part = keys[first : first + slots]
        assert index.publish(records_of(set_id, part, rng)) == len(part)


def used_bytes(ports: Sequence[int]) -> int:
    return sum(int(redis.Redis(port=port).info("memory")["used_memory"]) for port in ports)


# --- lookup ---


def lookup(ports: Sequence[int], index: RedisIndex, prompt: Sequence[bytes]) -> dict[str, Spread]:
    """All in turn, so that the machine's noise meets them alike."""
    names = [Keys("kvtier", TAGS if len(ports) > 1 else 1).entry(key) for key in prompt]
    parts: dict[str, Callable[[], object]] = {"lookup": lambda: index.resolve(prompt)}
    if len(ports) == 1:
        bare = redis.Redis(port=ports[0])
        assert bare.mget(names) == index.resolve(prompt), "the same bytes"
        parts |= {"bare MGET": lambda: bare.mget(names), "PING": bare.ping}
    else:
        cluster = redis.RedisCluster(host="127.0.0.1", port=ports[0])

        def piped() -> Any:
            pipe = cluster.pipeline()
            for name in names:
                pipe.get(name)
            return pipe.execute()

        assert piped() == index.resolve(prompt), "the same bytes"
        parts["redis-py's pipeline"] = piped
    assert len(index.resolve(prompt)) == N_CHUNKS
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(RUNS):
        for name, part in parts.items():
            begin_s = time.perf_counter()
            part()
            seconds[name].append(time.perf_counter() - begin_s)
    return {name: Spread.of(values) for name, values in seconds.items()}


# --- publishing ---


def publisher(ports: Sequence[int], number: int, seconds: float, start: Any, counts: Any) -> None:
    index, rng = open_index(ports), random.Random(SEED + number)
    first_id, done = (number + 1) << 32, 0
    batches = [(slot // SET_SLOTS, slot % SET_SLOTS) for slot in range(0, SET_SLOTS * 4096, BATCH)]
    index.create_set(SetInfo(first_id - 1, bytes(16), "benchmark", 1, 0.0, 0.0))  # connects
    start.wait()
    end = time.monotonic() + seconds
    for set_number, slot in batches:
        if time.monotonic() >= end:
            break
        if slot == 0:
            index.create_set(SetInfo(first_id + set_number, bytes(16), "benchmark", 1 << 30, 0.0, 0.0))
        records = [
            NewRecord(
                rng.randbytes(16), Location(first_id + set_number, 0, slot + i, SLAB_BYTES, WHOLE, sums(rng)), WHOLE
            )
            for i in range(BATCH)
        ]
        done += index.publish(records)
    counts.put((done, time.monotonic() - end + seconds))


def publishing(ports: Sequence[int], seconds: float) -> dict[str, float]:
    context = multiprocessing.get_context("spawn")
    start, counts = context.Barrier(PROCESSES), context.Queue()
    workers = [
        context.Process(target=publisher, args=(ports, number, seconds, start, counts)) for number in range(PROCESSES)
    ]
    before_us = script_us(ports)
    for worker in workers:
        worker.start()
    found = [counts.get(timeout=120 + seconds) for _ in workers]
    for worker in workers:
        worker.join()
    chunks = sum(done for done, _ in found)
    return {
        "chunks_per_s": sum(done / took for done, took in found),
        "chunks": chunks,
        "server_us_per_chunk": (script_us(ports) - before_us) / chunks,
    }


def script_us(ports: Sequence[int]) -> float:
    """The servers' time in scripts so far, with what these call."""
    totals = 0.0
    for port in ports:
        stats = redis.Redis(port=port).info("commandstats")
        totals += sum(stats.get(f"cmdstat_{name}", {"usec": 0})["usec"] for name in ("eval", "evalsha"))
    return totals


def raw_sets_per_s(port: int) -> float:
    """What redis-benchmark writes in this minute: no script, no checks, no Python."""
    words = [
        "redis-benchmark",
        "-p",
        str(port),
        "-t",
        "set",
        "-d",
        "103",
        "-n",
        "400000",
        "-r",
        "1000000",
        "-P",
        str(BATCH),
        "-c",
        str(PROCESSES),
        "--csv",
    ]
    lines = subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()
    return float(lines[1].split(",")[1].strip('"'))


# --- the plan ---


def plan(bytes_per_chunk: float, publish: dict[str, float], lookup_us: float) -> dict[str, Any]:
    """100 million chunks in shards of 8 GiB: arithmetic, from what was measured here."""
    n_sets = PLANNED_CHUNKS / SET_SLOTS
    n_bytes = PLANNED_CHUNKS * bytes_per_chunk
    shards = math.ceil(n_bytes / (0.75 * SHARD_BYTES))
    return {
        "chunks": PLANNED_CHUNKS,
        "sets": round(n_sets),
        "bytes": round(n_bytes),
        "shard_bytes": SHARD_BYTES,
        "fill": 0.75,
        "shards": shards,
        "tag_spread_percent": 100 * math.sqrt(shards / TAGS),
        "published_per_s_and_shard": round(1e6 / publish["server_us_per_chunk"]),
        "looked_up_per_s_and_shard": round(1e6 / lookup_us),
    }


def server_us_per_get(ports: Sequence[int], index: RedisIndex, prompt: Sequence[bytes]) -> float:
    before = redis.Redis(port=ports[0]).info("commandstats").get("cmdstat_mget", {"usec": 0})["usec"]
    for _ in range(50):
        index.resolve(prompt)
    after = redis.Redis(port=ports[0]).info("commandstats")["cmdstat_mget"]["usec"]
    return float(after - before) / 50 / len(prompt)


def measure(folder: Path, seconds: float) -> dict[str, Any]:
    rng = random.Random(SEED)
    prompt, others = ([rng.randbytes(16) for _ in range(n)] for n in (N_CHUNKS, N_OTHERS))
    found: dict[str, Any] = {}
    for name, count in (("one", 1), ("cluster", 3)):
        with servers(folder, count) as ports:
            index = open_index(ports)
            index.resolve(prompt)
            per_chunk = {}
            for slots in (FEW_SLOTS, SET_SLOTS):  # the last filling stays
                for port in ports:
                    redis.Redis(port=port).flushall()
                empty = used_bytes(ports)
                fill(index, others, 0, rng, slots)
                per_chunk[str(slots)] = (used_bytes(ports) - empty) / len(others)
            fill(index, prompt, 1 << 30, rng)
            part: dict[str, Any] = {
                "bytes_per_chunk": per_chunk,
                "lookup": {key: asdict(value) for key, value in lookup(ports, index, prompt).items()},
            }
            if count == 1:
                part["server_us_per_get"] = server_us_per_get(ports, index, prompt)
            part["publish"] = publishing(ports, seconds)
            part["redis_benchmark_sets_per_s"] = raw_sets_per_s(ports[0]) if count == 1 else None
            found[name] = part
            index.close()
    one = found["one"]
    found["plan"] = plan(one["bytes_per_chunk"][str(SET_SLOTS)], one["publish"], one["server_us_per_get"])
    return found


def report(found: dict[str, Any]) -> bool:
    is_met = True
    for name in ("one", "cluster"):
        part = found[name]
        print(
            f"{name}: "
            + ", ".join(
                f"{key} {row['p50_ms']:.2f} ms (p99 {row['p99_ms']:.2f})" for key, row in part["lookup"].items()
            )
        )
        rate = part["publish"]["chunks_per_s"]
        print(f"  published {rate:,.0f} chunks/s; bytes a chunk by chunks of a set: {part['bytes_per_chunk']}")
    is_met &= found["one"]["publish"]["chunks_per_s"] >= PUBLISH_TARGET_S
    is_met &= found["one"]["lookup"]["lookup"]["p50_ms"] <= LOOKUP_TARGET_MS
    print(f"redis-benchmark: {found['one']['redis_benchmark_sets_per_s']:,.0f} SET/s\nplan: {found['plan']}")
    print("targets met" if is_met else "TARGET MISSED")
    return is_met


def about() -> dict[str, Any]:
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    git = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    version = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=True).stdout
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": git.stdout.strip(),
        "cpu": models[0].partition(":")[2].strip(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "redis": version.split("v=")[1].split()[0],
        "redis_py": redis.__version__,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="of publishing")
    options = parser.parse_args()
    head = about()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(Path(folder), options.seconds)
    is_met = report(found)
    RESULT.write_text(json.dumps({**head, "seconds": options.seconds, "is_met": is_met, **found}, indent=1) + "\n")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
