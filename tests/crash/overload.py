"""Four writers save far more than a root may take, for three tenants, while the evicting writer is killed now and then.
Run by test_overload.py; prints one line of JSON with the results.

    python -m tests.crash.overload ROOT SECONDS SETS KILLS SEED INDEX

They write for SECONDS, and until SETS were made. INDEX: settings of the index, as JSON. Writers are forked from this
process before it opens anything.
"""

import json
import os
import random
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from kvtier.eviction.choice import Selection
from kvtier.eviction.evictor import Evictor
from kvtier.eviction.set_removal import PREFIX
from kvtier.format.geometry import PAGE_BYTES
from kvtier.index.base import EVICT_LEASE, Index
from kvtier.index.open import open_index
from kvtier.maintenance.scrub import verify
from kvtier.maintenance.sweeper import Sweeper
from kvtier.scheduler.store import WantedChunk
from kvtier.storage.root import find_root, open_root
from tests.support.rig import BLOCK_TOKENS, Engine, settings

WRITERS = 4
SLOTS = 4
RECORD_BYTES = 4096 + 4 * 64 * 4 * 32 * 2 * 4
SET_BYTES = PAGE_BYTES + SLOTS * RECORD_BYTES
CAPACITY_SETS = 36
QUOTA_SETS = {"red": 8, "blue": 6}
LEASE_S = 1.5
STOP_TIMEOUT_S = 60.0
ENOUGH_TIMEOUT_S = 240.0  # for the sets and the kills after SECONDS, on a machine that runs more than it can


def changes(index: dict[str, Any]) -> dict[str, object]:
    tenants = [
        {"name": name, "cache_salts": [name], "quota_bytes": sets * SET_BYTES} for name, sets in QUOTA_SETS.items()
    ]
    return {
        "segment_bytes": SET_BYTES,
        "capacity_bytes": CAPACITY_SETS * SET_BYTES,
        "index": index,
        "capacity": {"tenants": tenants},
        "writer_lease_s": LEASE_S,
    }


def write_until(root: Path, seed: float, index: dict[str, Any], stop: Path) -> None:
    """Saves one sequence after another without waiting for any; ends in good order when `stop` is there."""
    engine = Engine(root, n_blocks=64, changes=changes(index))
    rng = random.Random(seed)
    blocks = list(range(20))
    engine.prefill(list(range(20 * BLOCK_TOKENS)), blocks)
    while not stop.exists():
        tenant = rng.choice(["", "", "red", "blue"])
        first = rng.randrange(10**9)
        keys = engine.keys(range(first, first + 64 * 5))
        engine.store.expect(tenant)
        engine.store.lookup(keys)
        wanted = [WantedChunk(key, bytes(16), tuple(blocks[i * 4 : i * 4 + 4]), tenant) for i, key in enumerate(keys)]
        plan = engine.store.plan_save(wanted)
        if plan is not None:
            engine.transfers[0].save(plan)
        engine.store.saved(engine.transfers[0].poll().saves)
        time.sleep(0.002 if plan is not None else 0.02)
    engine.close()


@dataclass
class Overload:
    """The writers, and the most that was seen."""

    root: Path
    index: dict[str, Any]
    rng: random.Random
    writers: list[int] = field(default_factory=list)
    kills: int = 0
    disk_bytes_max: int = 0
    tenants: dict[int, str] = field(default_factory=dict)  # of every set that was seen in the index
    tenant_bytes_max: dict[str, int] = field(default_factory=lambda: dict.fromkeys(QUOTA_SETS, 0))

    @property
    def stop(self) -> Path:
        return self.root.with_name("stop")

    def start_writer(self) -> None:
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                write_until(self.root, self.rng.random(), self.index, self.stop)
                status = 0
            finally:
                os._exit(status)
        self.writers.append(pid)

    def look(self, index: Index) -> None:
        """At what files take, in all and each tenant's. The sum is of one moment: of files that were there both before
        it and after it, for between two looks a set may go and another come."""
        self._note_tenants(index)
        before = self._file_bytes()
        self._note_tenants(index)
        after = self._file_bytes()
        there = {path: min(n_bytes, after[path]) for path, n_bytes in before.items() if path in after}
        self.disk_bytes_max = max(self.disk_bytes_max, sum(there.values()))
        for tenant in QUOTA_SETS:
            n_bytes = sum(size for path, size in there.items() if self.tenants.get(int(path.name[:16], 16)) == tenant)
            self.tenant_bytes_max[tenant] = max(self.tenant_bytes_max[tenant], n_bytes)

    @property
    def tenant_sets_max(self) -> dict[str, float]:
        return {tenant: n_bytes / SET_BYTES for tenant, n_bytes in self.tenant_bytes_max.items()}

    def _note_tenants(self, index: Index) -> None:
        self.tenants |= {info.set_id: info.tenant for info in index.sets()}

    def _file_bytes(self) -> dict[Path, int]:
        found = {}
        for path in self.root.glob("v2/*/*.kvseg"):
            with suppress(FileNotFoundError):
                status = path.stat()
                found[path] = min(status.st_size, status.st_blocks * 512)  # without what the file system has of its own
        return found

    def kill_evictor(self, index: Index) -> bool:
        """Whoever evicts at this very moment; False when nobody does."""
        owner = index.lease_owner(EVICT_LEASE, time.time())
        pid = int(owner.rsplit("-", 2)[-2]) if owner else 0
        if pid not in self.writers:
            return False
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        self.writers.remove(pid)
        self.kills += 1
        return True

    def run(self, seconds: float, n_sets: int, kills: int) -> Index:
        for _ in range(WRITERS):
            self.start_writer()
        own = settings(self.root, **changes(self.index))
        index = open_index(own, open_root(own))
        began = time.monotonic()
        ends = began + seconds + ENOUGH_TIMEOUT_S
        next_kill = began + min(4.0, seconds / 4)
        while (now := time.monotonic()) < began + seconds or (
            now < ends and (len(self.tenants) < n_sets or self.kills < kills)
        ):
            self.look(index)
            if self.kills < kills and now >= next_kill:
                while not self.kill_evictor(index) and time.monotonic() < ends:
                    pass  # a lease is held for milliseconds: poll as fast as it goes
                next_kill = time.monotonic() + seconds / (kills + 1)
                self.start_writer()
            time.sleep(0.02)
        self.stop.touch()
        self._wait_for_writers()
        self.look(index)
        return index

    def _wait_for_writers(self) -> None:
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while self.writers and time.monotonic() < deadline:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                self.writers.remove(pid)
                assert status == 0, f"a writer ended with {status}"
            time.sleep(0.05)
        assert not self.writers, "a writer does not end"


def settle(root: Path, index: Index) -> None:
    """As an engine does that comes later: what dead writers and evictors left is taken care of. No file may wait for
    the grace time of those that are in no index."""
    deadline = time.monotonic() + STOP_TIMEOUT_S
    while time.monotonic() < deadline:
        Sweeper(index, root / "v2", "later").sweep()
        Evictor(index, root / "v2", "later").evict(Selection(set_ids=()), 0)
        if not index.notes(PREFIX, time.time()) and not any(info.is_open for info in index.sets()):
            return
        time.sleep(0.3)


def main(root: Path, seconds: float, n_sets: int, kills: int, seed: int, index_settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    overload = Overload(root, index_settings, random.Random(seed))
    try:
        index = overload.run(seconds, n_sets, kills)
    finally:
        for pid in overload.writers:  # an error of this process must not wait for the writers
            os.kill(pid, signal.SIGKILL)
    settle(root, index)
    on_disk = {int(path.name[:16], 16) for path in root.glob("v2/*/*.kvseg")}
    indexed = {info.set_id for info in index.sets()}
    found = verify(find_root(root), index)
    print(
        json.dumps(
            {
                "kills": overload.kills,
                "sets_made": len(overload.tenants),
                "records": found.records,
                "disk_sets_max": overload.disk_bytes_max / SET_BYTES,
                "tenant_sets_max": overload.tenant_sets_max,
                "in_no_index": len(on_disk - indexed),
                "without_files": len(indexed - on_disk),
                "bad": [f"{finding.segment} slot {finding.slot}: {finding.what}" for finding in found.bad],
                "pending": len(index.notes(PREFIX, time.time())),
            }
        )
    )
    index.close()


if __name__ == "__main__":
    path, duration, *numbers, index_text = sys.argv[1:]
    main(Path(path), float(duration), *map(int, numbers), json.loads(index_text))
