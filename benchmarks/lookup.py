"""Time of the lookup of a 100,000-token prompt when all of it is stored.

    python -m benchmarks.lookup [--folder FOLDER]

391 chunks of 256 tokens, all hits, in an embedded index that also holds 100,000 other chunks (records of a rank with
8 heads). The token ids arrive as a list of ints, as engines have them. Parts: ids to bytes, hashing, index, total.
References, measured in the same run on the same bytes: for hashing the ceiling, one blake3 call over all of them (which
a chain of keys cannot reach: each waits for the one before); for the index the baseline, bare gets of the same keys in
an LMDB environment of its own. Exit status 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import lmdb
from blake3 import blake3

from benchmarks import report
from kvtier.format.geometry import Extent
from kvtier.format.namespace import chunk_keys
from kvtier.index.base import Index, Location, NewRecord, SetInfo
from kvtier.index.lmdb.index import LmdbIndex

CHUNK_TOKENS = 256
N_CHUNKS = 391
N_OTHERS = 100_000  # other chunks in the index
VOCABULARY = 128_256
RUNS = 200
SEED = 7
NAMESPACE = bytes(range(16))
WHOLE = Extent(0, 32, 0, 8)
SLAB_BYTES = 32 * 2 * 128 * 2 * CHUNK_TOKENS
SET_SLOTS = 256  # chunks of a segment set
TARGETS_US = {"total": 5000.0, "index": 1000.0}  # of the medians
RESULT = Path(__file__).parent / "results" / "lookup.json"


def records_of(set_id: int, keys: Sequence[bytes], rng: random.Random, first_slot: int = 0) -> list[NewRecord]:
    records = []
    for slot, key in enumerate(keys, start=first_slot):
        checksums = tuple(rng.getrandbits(64) for _ in range(WHOLE.n_heads))
        records.append(NewRecord(key, Location(set_id, 0, slot, SLAB_BYTES, WHOLE, checksums), WHOLE))
    return records


def fill(index: Index, keys: Sequence[bytes], rng: random.Random, first_id: int = 0, slots: int = SET_SLOTS) -> None:
    """Publish a whole record for each key, in segment sets of `slots` slots."""
    for first in range(0, len(keys), slots):
        set_id = first_id + first // slots
        index.create_set(SetInfo(set_id, NAMESPACE, "host-12345-0123abcd", 1 << 30, 0.0, 0.0))
        records = records_of(set_id, keys[first : first + slots], rng)
        assert index.publish(records) == len(records), "every key is new"


def measure(index: LmdbIndex, bare: lmdb.Environment, tokens: list[int]) -> dict[str, dict[str, float]]:
    """Run all parts in turn, RUNS times, so that noise of the machine meets all of them alike."""
    data = array("I", tokens).tobytes()
    keys = chunk_keys(NAMESPACE, tokens, CHUNK_TOKENS, {})

    def bare_gets() -> list[bytes]:
        with bare.begin() as txn:
            return list(map(txn.get, keys))  # type: ignore[arg-type]  # bytes: without buffers=True

    def total() -> list[bytes]:
        return index.resolve(chunk_keys(NAMESPACE, tokens, CHUNK_TOKENS, {}))

    parts: dict[str, Callable[[], object]] = {
        "ids to bytes": lambda: array("I", tokens).tobytes(),
        "ids to keys": lambda: chunk_keys(NAMESPACE, tokens, CHUNK_TOKENS, {}),
        "index": lambda: index.resolve(keys),
        "total": total,
        "one blake3 call": lambda: blake3(data).digest(),
        "bare LMDB gets": bare_gets,
    }
    assert total() == bare_gets(), "all chunks are hits, and LMDB holds what the index returns"
    seconds = report.in_turn(parts, RUNS)
    hashing = [whole - part for whole, part in zip(seconds["ids to keys"], seconds["ids to bytes"], strict=True)]
    return {name: report.percentiles(values, "us") for name, values in {**seconds, "hashing": hashing}.items()}


def table_rows(parts: dict[str, dict[str, float]]) -> report.Table:
    """Return columns and rows, one row a part."""
    cells = [[name, *(f"{part[key] / 1000:.2f} ms" for key in ("p50_us", "p99_us"))] for name, part in parts.items()]
    return ["part", "median", "99th percentile"], cells


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lookup", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--folder", help="folder of the index (default: the temporary folder)")
    options = parser.parse_args()
    rng = random.Random(SEED)
    tokens = [rng.randrange(VOCABULARY) for _ in range(N_CHUNKS * CHUNK_TOKENS)]
    keys = [rng.randbytes(16) for _ in range(N_OTHERS)] + chunk_keys(NAMESPACE, tokens, CHUNK_TOKENS, {})
    rng.shuffle(keys)
    with tempfile.TemporaryDirectory(prefix="kvtier-lookup-", dir=options.folder) as folder:
        index = LmdbIndex(f"{folder}/index")
        fill(index, keys, rng)
        bare = lmdb.open(f"{folder}/bare", map_size=4 << 30, sync=False, metasync=False)
        with bare.begin(write=True) as txn:
            for key in keys:
                txn.put(key, index.resolve([key])[0])
        found = measure(index, bare, tokens)
        chunks = index.counts().chunks
        index.close()
        bare.close()
    met = all(found[name]["p50_us"] <= target for name, target in TARGETS_US.items())
    report.table(*table_rows(found))
    print("targets met" if met else "TARGET MISSED", TARGETS_US)
    content = {"tokens": len(tokens), "chunks": N_CHUNKS, "chunks_in_index": chunks, "runs": RUNS}
    content |= {"targets_us": TARGETS_US, "targets_met": met, "parts": found}
    report.write(RESULT, "lookup of a 100,000-token prompt", content, "lmdb", "blake3")
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
