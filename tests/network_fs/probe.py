"""Measurements of kvtier on two mounts of one file system, printed as JSON.

    python -m tests.network_fs.probe M1 M2 MEASUREMENT... [--disks FOLDER...] [--out FILE]

MEASUREMENT is fresh[=ROUNDS], rate[=BATCHES], capacity[=PROMPTS], full[=PERCENT] or faults[=SECONDS], each once; see
the functions.
The index is in a Redis of its own. Nothing is imported from pytest, so that it runs in a guest.
"""

import argparse
import ctypes
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from kvtier.build import STRIPE_SLOTS_MIN
from kvtier.io.ring import THREADS
from kvtier.scheduler.store import WantedChunk
from kvtier.storage.filesystem import file_system_of, stripes_for
from tests.network_fs.node import ANSWER_TIMEOUT_S, CHUNK_BYTES, CHUNKS, Node, settings
from tests.redis_server import standalone
from tests.support.rig import Engine, geometry

REREAD_AFTER_S = 3.0  # second look at what was read fresh, seconds after the last round
FREED_WITHIN_S = 10.0  # time that the file system has to show what was evicted, seconds
CAPACITY_SETS = 12  # capacity_bytes of the capacity measurement, segment sets
POOL = 80  # prompts that are loaded under faults; most are not open on node 2 when the first fault comes
STARTED = "started"  # line that says that faults may begin
WHOLE_AFTER_S = 5.0  # pause between the end of all faults and the look for losses, seconds
PROGRESS_PROMPTS = 20  # prompts between two lines that report how a long measurement goes on
SEGMENT_MIN = 8 << 20  # least segment_bytes of all nodes, bytes
RATE_BATCH = 8  # chunks of a batch
RATE_CHUNK_BYTES = 4 << 20  # by RATE_SHAPE
RATE_SEGMENT = 1 << 30  # segment_bytes as by default; all batches lie in one set
RATE_SHAPE = {"layers": 2, "kv_heads": 8, "k_head_size": 128, "v_head_size": 128, "chunk_tokens": 256}
PIECE = 1 << 20  # one plain direct write, bytes
WRITERS = THREADS  # of plain writes; kvtier has as many as by default


@dataclass(frozen=True)
class Place:
    """Two mounts, the server's disks (empty: unknown), an index, and a folder for logs.

    stripes: files of a segment set, as by default on this file system.
    """

    m1: Path
    m2: Path
    disks: Sequence[Path]
    url: str
    folder: Path
    stripes: int = 1

    @property
    def segment_bytes(self) -> int:
        """Return segment_bytes with which a set has all its stripes: a file holds at least STRIPE_SLOTS_MIN chunks."""
        return max(SEGMENT_MIN, (self.stripes * STRIPE_SLOTS_MIN + 1) * CHUNK_BYTES)

    @contextmanager
    def nodes(self, name: str, **changes: Any) -> Iterator[list[Node]]:
        """Start two nodes on a root of this name, and end them."""
        every = settings(self.url, **{"segment_bytes": self.segment_bytes} | changes)
        every["index"] = every["index"] | {"prefix": name}
        made: list[Node] = []
        try:
            for mount in (self.m1, self.m2):
                made.append(Node(mount / name, every, self.folder / f"{name}-{len(made) + 1}.log"))
                assert made[-1].answer() == "ready"
            yield made
        finally:
            for node in made:
                node.close()
            shutil.rmtree(self.m1 / name, ignore_errors=True)

    def stored_bytes(self) -> int:
        """Return what files take, on the servers if their disks are known."""
        if self.disks:  # files that are unlinked and still open count as well
            found = [os.statvfs(disk) for disk in self.disks]
            return sum((one.f_blocks - one.f_bfree) * one.f_frsize for one in found)
        total = 0
        for path in self.m2.rglob("*"):
            with suppress(OSError):
                total += path.lstat().st_blocks * 512
        return total

    def available(self) -> int:
        found = os.statvfs(self.m1)
        return found.f_bavail * found.f_frsize


def fresh(place: Place, rounds: int) -> dict[str, Any]:
    """Load on node 2 what node 1 saved at the moment when it is published, and all of it again later."""
    at_once, later = Counter[str](), Counter[str]()
    with place.nodes("fresh") as (writer, reader):
        saved = 0
        for number in range(1, rounds + 1):
            reader.send("watch", number)
            writer.ask("prepare", number)
            assert reader.answer() == "watching"
            writer.send("save", number, True)
            at_once.update(_sums(reader.answer()))
            saved += writer.answer()["outcomes"].get("SAVED", 0)
        time.sleep(REREAD_AFTER_S)
        for number in range(1, rounds + 1):
            later.update(_sums(reader.ask("load", number)))
        counters = reader.ask("counters")
    return {
        "saved": saved,
        "offered": at_once["offered"],
        "failed": at_once["failed"],
        "wrong": at_once["wrong"],
        "retracted": saved - later["offered"],
        "later_failed": later["failed"],
        "later_wrong": later["wrong"],
        "reader_counters": counters,
    }


def rate(place: Place, batches: int) -> dict[str, Any]:
    """Write batches of chunks through kvtier and plain direct writes with one fdatasync a batch, in turn.

    The first batch, in which kvtier creates the files of the set, is not part of the rates.
    """
    torch.set_num_threads(1)  # as nodes do: OpenMP's threads wait for each other where processors are busy
    every = settings(
        place.url,
        segment_bytes=RATE_SEGMENT,
        capacity_bytes=4 * RATE_SEGMENT,
        host={"arena_bytes": 96 << 20, "admit": "never"},
        io={"timeout_s": 30.0},
    )
    every["index"] = every["index"] | {"prefix": "rate"}
    engine = Engine(place.m1 / "rate", shape=geometry(**RATE_SHAPE), n_blocks=16 * RATE_BATCH, changes=every)
    plain_writer = PlainWriter(place.m1 / "plain", batches + 1, place.stripes)
    seconds: dict[str, list[float]] = {"kvtier": [], "plain": []}
    try:
        for transfer in engine.transfers:
            transfer.start()
        engine.prefill(range(16 * 16), range(16))
        for number in range(batches + 1):
            seconds["kvtier"].append(_save_batch(engine, number))
            seconds["plain"].append(plain_writer.write(number))
    finally:
        engine.close()
        plain_writer.close()
        shutil.rmtree(place.m1 / "rate")
        shutil.rmtree(place.m1 / "plain")
    n_bytes = RATE_BATCH * RATE_CHUNK_BYTES
    speed = {name: batches * n_bytes / sum(found[1:]) / 1e6 for name, found in seconds.items()}  # the first one warms
    median = {name: n_bytes / sorted(found[1:])[batches // 2] / 1e6 for name, found in seconds.items()}
    return {
        "files": place.stripes,
        "first_batch_s": seconds["kvtier"][0],
        "kvtier_mb_s": speed["kvtier"],
        "plain_mb_s": speed["plain"],
        "share": speed["kvtier"] / speed["plain"],
        "median_share": median["kvtier"] / median["plain"],
    }


def _save_batch(engine: Engine, number: int) -> float:
    """Save one batch of new chunks, whatever is in the blocks. Seconds until all are saved."""
    engine.wait_for_set()
    size = engine.shape.chunk_tokens
    keys = engine.keys(range(number << 20, (number << 20) + RATE_BATCH * size))
    parents = [engine.store.namespace_id, *keys]
    per = engine.chunk_blocks
    wanted = [WantedChunk(key, parents[i], tuple(range(per * i, per * (i + 1)))) for i, key in enumerate(keys)]
    transfer, done = engine.transfers[0], []
    began = time.monotonic()
    plan = engine.store.plan_save(wanted)
    assert plan is not None and len(plan.chunks) == RATE_BATCH
    transfer.save(plan)
    while len(done) < RATE_BATCH and time.monotonic() - began < 60:
        done += transfer.poll(0.002).saves
    seconds = time.monotonic() - began
    engine.store.saved(done)
    assert [one.outcome.name for one in done] == ["SAVED"] * RATE_BATCH, done
    return seconds


class PlainWriter:
    """As many files as a segment set has, grown by direct writes of several threads, each flushed once a batch."""

    def __init__(self, folder: Path, batches: int, n_files: int) -> None:
        folder.mkdir()
        flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT
        self._fds = [os.open(folder / str(n), flags, 0o600) for n in range(n_files)]
        self._share = RATE_BATCH * RATE_CHUNK_BYTES // n_files  # of one batch in each file
        libc = ctypes.CDLL(None, use_errno=True)  # not os.posix_fallocate: glibc emulates it by small writes
        for fd in self._fds:
            libc.fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(batches * self._share))
        self._page = mmap.mmap(-1, PIECE)
        self._page.write(os.urandom(PIECE))
        self._pool = ThreadPoolExecutor(WRITERS)

    def write(self, number: int) -> float:
        began = time.monotonic()
        offsets = range(number * self._share, (number + 1) * self._share, PIECE)
        pieces = [(fd, offset) for offset in offsets for fd in self._fds]
        list(self._pool.map(lambda piece: os.pwritev(piece[0], [self._page], piece[1]), pieces))
        list(self._pool.map(os.fdatasync, self._fds))
        return time.monotonic() - began

    def close(self) -> None:
        self._pool.shutdown()
        for fd in self._fds:
            os.close(fd)


def capacity(place: Place, prompts: int) -> dict[str, Any]:
    """Save more than capacity_bytes from both nodes, and sample what the servers' disks hold."""
    before, limit = place.stored_bytes(), CAPACITY_SETS * place.segment_bytes
    outcomes, most, indexed = Counter[str](), 0, 0
    with place.nodes("capacity", capacity_bytes=limit) as nodes:
        for number in range(1, prompts + 1):
            outcomes.update(nodes[number % 2].ask("save", number)["outcomes"])
            if number % 2:
                nodes[0].ask("load", number)  # both hold files of the same sets
                most = max(most, place.stored_bytes() - before)
                indexed = max(indexed, nodes[0].ask("indexed_bytes"))
            if number % PROGRESS_PROMPTS == 0:
                now = place.stored_bytes() - before
                print(f"capacity: {number} prompts, {now >> 20} MiB stored, {dict(outcomes)}", flush=True)
        bound = limit + 2 * place.segment_bytes
        _wait_for(lambda: place.stored_bytes() - before <= bound)
        idle = place.stored_bytes() - before
    return {
        "files": place.stripes,
        "capacity_mib": limit >> 20,
        "limit_mib": bound >> 20,
        "most_stored_mib": most >> 20,
        "stored_idle_mib": idle >> 20,
        "most_indexed_mib": indexed >> 20,
        "outcomes": dict(outcomes),
    }


def full(place: Place, percent: int) -> dict[str, Any]:
    """Save so many percent of what fits on the disk, then evict everything while the engines are open."""
    fits = place.available()
    outcomes, indexed = Counter[str](), []
    with place.nodes("full", capacity_bytes=4 * fits) as nodes:
        for number in range(1, percent * fits // 100 // (CHUNKS << 20) + 1):
            outcomes.update(nodes[number % 2].ask("save", number)["outcomes"])
            if number % 4 == 0:
                nodes[0].ask("load", number)
                indexed.append(nodes[0].ask("indexed_bytes"))
            if number % PROGRESS_PROMPTS == 0:
                print(f"full: {number} prompts, {indexed[-1] >> 20} MiB indexed, {dict(outcomes)}", flush=True)
        before = place.available()
        freed, evict = _evict_all(place, "full")
        shown = _wait_for(lambda: place.available() - before >= 0.9 * freed)
        room = place.available() - before
        log = {node: (place.folder / f"full-{node}.log").read_text()[-1500:] for node in (1, 2)}
    second_half = indexed[len(indexed) // 2 :]
    return {
        "fits_mib": fits >> 20,
        "most_indexed_mib": max(indexed) >> 20,
        "least_indexed_mib": min(second_half) >> 20,
        "last_indexed_mib": indexed[-1] >> 20,
        "least_share": min(second_half) / fits,
        "outcomes": dict(outcomes),
        "evicted_mib": freed >> 20,
        "freed_mib": room >> 20,
        "freed_after_s": shown,
        "evict": evict,
        "log": log,
    }


def faults(place: Place, seconds: int) -> dict[str, Any]:
    """Save on one node and load on the other while the parent breaks parts of the storage; then look for losses.

    STARTED is printed when the parent may begin; it must have mended everything within `seconds`.
    """
    with place.nodes("faults", capacity_bytes=2 << 30) as (writer, reader):
        pool = [n for n in range(1, POOL + 1) if writer.ask("save", n)["outcomes"] == {"SAVED": CHUNKS}]
        print(STARTED, flush=True)
        writer.send("save_until", 101, seconds, 0.4)
        reader.send("load_until", pool, seconds)
        loads, saves = reader.answer(seconds + ANSWER_TIMEOUT_S), writer.answer(seconds + ANSWER_TIMEOUT_S)
        began, number = time.monotonic(), 10_000
        while writer.ask("save", number)["outcomes"] != {"SAVED": CHUNKS} and time.monotonic() - began < 90:
            number += 1
        recovered = time.monotonic() - began
        claimed = [*pool, *saves.pop("saved")]
        time.sleep(WHOLE_AFTER_S)
        after = Counter[str]()
        for one in claimed:
            after.update(_sums(reader.ask("load", one)))
        lost = writer.ask("lost")
        rebuilt = subprocess.run(
            kvtier("index", "rebuild", "--json", str(config(place, "faults"))),
            capture_output=True,
            text=True,
            timeout=300,
        )
        rebuild = json.loads(rebuilt.stdout) if rebuilt.stdout.startswith("{") else {"error": rebuilt.stderr}
        lost_for_good = writer.ask("lost")
        counters = reader.ask("counters")
    return {
        "loads": loads,
        "saves": saves,
        "claimed": CHUNKS * len(claimed),
        "saves_whole_after_s": recovered,
        "offered": after["offered"],
        "failed": after["failed"],
        "wrong": after["wrong"] + loads["wrong"],
        "lost": lost,
        "lost_for_good": lost_for_good,
        "rebuild": rebuild,
        "reader_counters": counters,
        "log_lines": sum(path.read_text().count("\n") for path in place.folder.glob("faults-*.log")),
    }


def _evict_all(place: Place, name: str) -> tuple[int, str]:
    """Run `kvtier evict --all`. (bytes that it says are free, its output)"""
    done = subprocess.run(
        kvtier("evict", "--all", "--yes", "--json", "--config", str(config(place, name))),
        capture_output=True,
        text=True,
        timeout=300,
    )
    try:
        found = json.loads(done.stdout)
    except json.JSONDecodeError:
        return 0, done.stdout + done.stderr
    return found["n_bytes"], done.stderr


def config(place: Place, name: str) -> Path:
    """Write the settings file of a root, for the command line."""
    path = place.folder / f"{name}.yaml"
    index = settings(place.url)["index"] | {"prefix": name}
    own = {"root": str(place.m1 / name), "index": index, "segment_bytes": place.segment_bytes}
    own["capacity_bytes"] = 1 << 30
    path.write_text(yaml.safe_dump(own))
    return path


def kvtier(*words: str) -> list[str]:
    return [sys.executable, "-c", "import sys; from kvtier.cli import main; sys.exit(main())", *words]


def _sums(found: dict[str, Any]) -> dict[str, int]:
    return {name: found[name] for name in ("offered", "failed", "wrong", "unanswered")}


def _wait_for(is_so: Callable[[], bool]) -> float | None:
    """Return the seconds until it is so; None if it is not within FREED_WITHIN_S."""
    began = time.monotonic()
    while time.monotonic() - began < FREED_WITHIN_S:
        if is_so():
            return time.monotonic() - began
        time.sleep(0.2)
    return None


MEASUREMENTS = {
    "fresh": (fresh, 100),
    "rate": (rate, 24),
    "capacity": (capacity, 200),
    "full": (full, 250),
    "faults": (faults, 70),
}


def tracebacks(folder: Path) -> list[str]:
    """Return the tracebacks in the nodes' logs, without repetitions."""
    found: dict[str, None] = {}
    for log in folder.glob("*.log"):
        before, *each = log.read_text().split("Traceback (most recent call last):\n")
        for above, text in zip([before, *each], each, strict=False):
            found[above[-200:].rpartition("\n\n")[2] + text[:2000]] = None
    return list(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("m1", type=Path)
    parser.add_argument("m2", type=Path)
    parser.add_argument("measurements", nargs="+")
    parser.add_argument("--disks", nargs="*", type=Path, default=[])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    stripes = stripes_for(file_system_of(options.m1).kind, "auto")
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, standalone(Path(folder) / "redis") as redis:
        place = Place(options.m1, options.m2, options.disks, redis.url, Path(folder), stripes)
        for text in options.measurements:
            name, _, number = text.partition("=")
            measure, usual = MEASUREMENTS[name]
            began = time.monotonic()
            results[name] = measure(place, int(number or usual))
            results[name]["took_s"] = round(time.monotonic() - began, 1)
            results[name]["tracebacks"] = tracebacks(Path(folder))
            print(name, json.dumps(results[name]), flush=True)
            if options.out:
                options.out.write_text(json.dumps(results))
    if threading.active_count() > 1:
        os._exit(0)


if __name__ == "__main__":
    main()
