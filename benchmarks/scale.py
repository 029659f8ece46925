"""What does an index of one million chunks cost: to fill, to open, to look up in, in memory?

    python -m benchmarks.scale --out RESULT.json [--chunks N] [--redis] [--folder FOLDER]

Chunks are records of one rank with 8 heads, 256 in a segment set. Filling, opening and asking are processes of their
own, so that opening is what an engine's start pays and memory is that of one process. Lookups are of 391 chunks (a
prompt of 100,000 tokens), all hits and at random places of the index. Beside them, in turn and of the same keys, the
ceiling: bare gets in the same LMDB file without kvtier; with --redis, which starts a server of its own, redis-py's
bare MGET. The same with a hundredth of the chunks shows what the size itself costs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import lmdb

from benchmarks.gpu.report import table
from benchmarks.lookup import SET_SLOTS, WHOLE, checksums
from benchmarks.serving import result
from benchmarks.serving.arguments import at_least, run
from kvtier.geometry import Extent
from kvtier.index.base import Index, Location, NewRecord, SetInfo
from kvtier.index.embedded import LmdbIndex

QUESTION = "what an index of so many chunks costs"
N_CHUNKS, N_LEAST = 1_000_000, 1000
SMALLER = 100
"""Divides the chunks of the run beside it."""
PROMPT_CHUNKS = 391
SLAB_BYTES = 32 * 2 * 128 * 2 * 256
RUNS = 200
SEED = 7
MAP_BYTES = 16 << 30
PAGE_BYTES = 4096
RSS_FIELD = 1  # of /proc/self/statm


def keys_of(count: int) -> Iterator[bytes]:
    """The same in every process."""
    rng = random.Random(SEED)
    return (rng.randbytes(16) for _ in range(count))


def prompts(count: int) -> list[list[bytes]]:
    """Keys of lookups: chunks that are there, from all over the index."""
    rng = random.Random(SEED + 1)
    wanted = sorted({rng.randrange(count) for _ in range(RUNS * PROMPT_CHUNKS)})
    places = iter(enumerate(keys_of(count)))
    keys = []
    for place in wanted:
        keys.append(next(key for number, key in places if number == place))
    rng.shuffle(keys)
    return [rng.sample(keys, min(PROMPT_CHUNKS, len(keys))) for _ in range(RUNS)]


def records(count: int) -> Iterator[tuple[int, list[NewRecord]]]:
    """Set after set: its id and its whole records."""
    rng, keys = random.Random(SEED + 2), keys_of(count)
    for first in range(0, count, SET_SLOTS):
        set_id = first // SET_SLOTS
        slots = range(min(SET_SLOTS, count - first))
        yield (
            set_id,
            [
                NewRecord(key, Location(set_id, 0, slot, SLAB_BYTES, WHOLE, checksums(rng)), Extent(0, 32, 0, 8))
                for slot, key in zip(slots, keys, strict=False)
            ],
        )


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[RSS_FIELD]) * PAGE_BYTES


def publish_all(index: Index, count: int) -> float:
    """Seconds in the index."""
    spent_s = 0.0
    for set_id, part in records(count):
        begin_s = time.perf_counter()
        index.create_set(SetInfo(set_id, bytes(16), "benchmark", 1 << 30, 0.0, 0.0))
        assert index.publish(part) == len(part), "every key is new"
        spent_s += time.perf_counter() - begin_s
    return spent_s


def first_lookup(index: Index, keys: Sequence[bytes]) -> float:
    """Seconds, of a process that has asked for nothing before."""
    begin_s = time.perf_counter()
    found = index.resolve(keys)
    first_s = time.perf_counter() - begin_s
    assert len(found) == len(keys), "all chunks are hits"
    return first_s


# --- embedded: each of these is a process of its own ---


def fill(folder: str, count: int) -> dict[str, Any]:
    index = LmdbIndex(f"{folder}/index", MAP_BYTES)
    spent_s = publish_all(index, count)
    index.close()
    size = sum(path.stat().st_blocks * 512 for path in Path(f"{folder}/index").iterdir())
    return {"publish_s": spent_s, "file_bytes": size}


def ask(folder: str, count: int) -> dict[str, Any]:
    asked = prompts(count)
    before_bytes, begin_s = resident_bytes(), time.perf_counter()
    index = LmdbIndex(f"{folder}/index", MAP_BYTES)
    open_s = time.perf_counter() - begin_s
    first_s = first_lookup(index, asked[0])
    seconds = [timed(lambda keys=keys: index.resolve(keys)) for keys in asked]  # type: ignore[misc]
    looked_up_bytes = resident_bytes() - before_bytes
    list_s = timed(index.sets)
    counts = index.counts()
    index.close()
    return {
        "chunks": counts.chunks, "sets": counts.sets, "open_s": open_s, "first_lookup_s": first_s,
        "list_sets_s": list_s, "lookup": result.spread(seconds), "resident_bytes": looked_up_bytes,
    }  # fmt: skip


def ask_bare(folder: str, count: int) -> dict[str, Any]:
    asked = prompts(count)
    env = lmdb.open(f"{folder}/index", readonly=True, max_dbs=16, lock=False)
    entries = env.open_db(b"entries", create=False)

    def get(keys: Sequence[bytes]) -> list[bytes | None]:
        with env.begin(db=entries) as txn:
            return [txn.get(key) for key in keys]

    assert None not in get(asked[0]), "it is the index that was filled"
    return {"lookup": result.spread([timed(lambda keys=keys: get(keys)) for keys in asked])}  # type: ignore[misc]


def timed(work: Callable[[], object]) -> float:
    begin_s = time.perf_counter()
    work()
    return time.perf_counter() - begin_s


def apart(work: Callable[[str, int], dict[str, Any]], folder: str, count: int) -> dict[str, Any]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, (folder, count))


def embedded(count: int, parent: str | None) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="kvtier-scale-", dir=parent) as folder:
        found = apart(fill, folder, count) | apart(ask, folder, count)
        return found | {"ceiling": apart(ask_bare, folder, count)["lookup"]}


# --- Redis ---


def in_redis(count: int) -> dict[str, Any]:
    """On a server of this machine, which is stopped at the end."""
    from benchmarks import redis_index as own

    with tempfile.TemporaryDirectory(prefix="kvtier-scale-") as folder, own.servers(Path(folder), 1) as ports:
        empty_bytes, index = own.used_bytes(ports), own.open_index(ports)
        spent_s = publish_all(index, count)
        index.close()
        asked = prompts(count)
        begin_s = time.perf_counter()
        index = own.open_index(ports)
        open_s = time.perf_counter() - begin_s
        first_s = first_lookup(index, asked[0])
        beside = own.lookup(ports, index, asked[0])
        seconds = [timed(lambda keys=keys: index.resolve(keys)) for keys in asked]  # type: ignore[misc]
        found = {
            "chunks": count, "publish_s": spent_s, "open_s": open_s, "first_lookup_s": first_s,
            "list_sets_s": timed(index.sets), "lookup": result.spread(seconds),
            "server_bytes": own.used_bytes(ports) - empty_bytes,
            "ceiling": {"p50": beside["bare MGET"].p50_ms / 1e3, "p99": beside["bare MGET"].p99_ms / 1e3},
            "ping": {"p50": beside["PING"].p50_ms / 1e3},
        }  # fmt: skip
        index.close()
        return found


# --- report ---


def table_rows(whole: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows, one for each index. start: opening it and the first lookup."""
    columns = ["index, chunks", "published/s", "start ms", "lookup p50 ms", "p99", "bare p50", "times it",
               "list sets ms", "bytes a chunk"]  # fmt: skip
    rows = []
    for name, found in whole["systems"].items():
        size = found.get("file_bytes", found.get("server_bytes", 0))
        lookup, bare = found["lookup"], found["ceiling"]["p50"]
        rows.append([
            name, f"{found['chunks'] / found['publish_s']:,.0f}",
            f"{1e3 * (found['open_s'] + found['first_lookup_s']):.1f}", f"{1e3 * lookup['p50']:.2f}",
            f"{1e3 * lookup['p99']:.2f}", f"{1e3 * bare:.2f}", f"{lookup['p50'] / bare:.2f}",
            f"{1e3 * found['list_sets_s']:.1f}", f"{size / found['chunks']:.0f}",
        ])  # fmt: skip
    return columns, rows


def show(whole: dict[str, Any]) -> None:
    table(*table_rows(whole))
    print("start: opening the index and the first lookup")
    for name, found in whole["systems"].items():
        if "resident_bytes" in found:
            more = found["resident_bytes"] / 2**20
            print(f"{name}: {more:.0f} MiB more are resident in a process after {RUNS} lookups, pages of the file")


def main(arguments: Sequence[str] | None = None) -> int:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--chunks", type=at_least(1), default=N_CHUNKS)
    made.add_argument("--redis", action="store_true", help="also in Redis, on a server that is started for it")
    made.add_argument("--folder", help="where the embedded index is made (default: the temporary folder)")
    made.add_argument("--out", type=Path, default=Path("scale.json"), help="it is replaced")
    options = made.parse_args(arguments)
    result.writable(options.out).unlink()
    settings = {"chunks": options.chunks, "prompt_chunks": PROMPT_CHUNKS, "runs": RUNS, "set_slots": SET_SLOTS}
    whole: dict[str, Any] = {}
    for count in (max(N_LEAST, options.chunks // SMALLER), options.chunks):
        kinds: dict[str, Callable[[], dict[str, Any]]] = {"embedded": lambda n=count: embedded(n, options.folder)}  # type: ignore[misc]
        if options.redis:
            kinds["redis"] = lambda n=count: in_redis(n)  # type: ignore[misc]
        for kind, work in kinds.items():
            whole = result.add(options.out, QUESTION, settings, f"{kind}, {count:,}", work())
    show(whole)
    print(f"written: {options.out}")
    return 0


if __name__ == "__main__":
    run(main)
