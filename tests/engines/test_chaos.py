"""Real vLLM engines under mixed load while their files, their disk, their Redis and they themselves are done harm: no
wrong token, no failed request, nothing lost that was published and not itself destroyed.

`make soak` goes on for CHAOS_MINUTES (30); with CHAOS_RESULT=FILE the table's figures are written there.
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engines.chaos import Chaos, table, to_json
from tests.engines.disk import disk
from tests.engines.flat import CONTROL, grown
from tests.engines.fleet import ENGINES, START_TIMEOUT_S, Judge, Member, index_of, settings_file
from tests.engines.harms import ON_REDIS, possible
from tests.engines.test_real_engine import assert_loads_equal_saves
from tests.measured import about
from tests.redis_server import has_redis, standalone

pytestmark = has_redis

SEED = 20261122
DISK_BYTES = 6 << 30
SETTINGS = {
    "capacity_bytes": "5500MiB",
    "capacity": {"pinned_max_fraction": 1.0},
    "io": {"timeout_s": 1.0},
    "writer_lease_s": 10.0,
    "touch_interval_s": 2.0,
}
LONG_FORM_ONLY = ("every file operation hangs", "reads fail (EIO)")
PATIENCE_MS = 1000.0  # of the index: Redis shares this machine's cores with all engines
BLOCKS = 512  # of each engine: all are touched within a minute, so that its memory grows no more


@contextmanager
def chaos_of(folder: Path, model: Path, n_engines: int, has_alone: bool, pause_s: float) -> Iterator[Chaos]:
    folder.mkdir(parents=True, exist_ok=True)
    with standalone(folder / "redis") as server, disk(folder / "disk", DISK_BYTES) as own_disk:
        members: list[Member] = []

        def begin(place: int, name: str) -> Member:
            own = ENGINES[place]
            config = folder / f"{place}.yaml"
            if not config.exists():
                index = index_of(server.url, connect_timeout_ms=PATIENCE_MS, reply_timeout_ms=PATIENCE_MS)
                settings_file(config, own_disk.root, index, own["settings"] | SETTINGS)
            llm = own["llm"] | {"num_gpu_blocks_override": BLOCKS}
            members.append(Member(folder, name, model, config, llm))
            return members[-1]

        def ready(member: Member) -> Member:
            member.answer(0, START_TIMEOUT_S)
            return member

        try:
            engines = [begin(place, f"engine-{place}") for place in range(n_engines)]
            alone = Member(folder, CONTROL, model, None, {"num_gpu_blocks_override": BLOCKS}) if has_alone else None
            members += [alone] if alone else []
            for member in members:
                ready(member)
            again: Callable[[int], Member] = lambda life: ready(begin(n_engines - 1, f"again-{life}"))  # noqa: E731
            judge = Judge(alone or engines[0])
            yield Chaos(engines, again, judge, server, own_disk, random.Random(SEED), pause_s)
        finally:
            for member in members:
                if member.process.poll() is None:
                    member.end()


def check(chaos: Chaos, left_out: list[str]) -> None:
    print(table(chaos.tallies, left_out), flush=True)
    for name, tally in chaos.tallies.items():
        assert (tally.wrong, tally.failed_requests, tally.lost) == (0, 0, 0), (name, chaos.complaints[:5])
    total = sum((tally.requests for tally in chaos.tallies.values()), 0)
    assert chaos.judge.n_unsure < total / 10
    facts = chaos.facts()
    assert_loads_equal_saves(facts)
    assert sum(len(found["loaded"]) for found in facts) > 100


def test_each_fault_once(lab: Any, tmp_path: Path) -> None:
    """In short: without those of Redis, which test_shared_redis has, and what is like another one."""
    with chaos_of(tmp_path, lab.model("llama"), n_engines=2, has_alone=False, pause_s=0.3) as chaos:
        chaos.fill()
        harms, left_out = possible(chaos.disk)
        for harm in harms:
            if harm not in ON_REDIS and harm.name not in LONG_FORM_ONLY:
                chaos.try_out(harm, 1.5)
        check(chaos, left_out)
        assert sum(tally.met for tally in chaos.tallies.values()) > 0, "no fault was met"


@pytest.mark.soak
def test_half_an_hour_of_faults(lab: Any, tmp_path: Path) -> None:
    minutes = float(os.environ.get("CHAOS_MINUTES", "30"))
    with chaos_of(tmp_path, lab.model("llama"), n_engines=3, has_alone=True, pause_s=1.0) as chaos:
        began = time.monotonic()
        chaos.fill()
        harms, left_out = possible(chaos.disk)
        try:
            while time.monotonic() < began + 60 * minutes:
                for harm in chaos.rng.sample(harms, len(harms)):
                    if time.monotonic() < began + 60 * minutes:
                        chaos.try_out(harm, chaos.rng.uniform(3.0, 6.0))
                        write_result(chaos, (time.monotonic() - began) / 60, left_out)
        finally:
            print(table(chaos.tallies, left_out), *chaos.complaints, sep="\n", flush=True)
        figures = chaos.watch.figures()
        print("\n".join(f"{name}: {one}" for name, one in figures.items()))
        check(chaos, left_out)
        assert minutes < 15 or len(figures) >= 2, "engines that live all the time are looked at"
        assert grown(figures) == []
        assert all(tally.tried for tally in chaos.tallies.values())


def write_result(chaos: Chaos, minutes: float, left_out: list[str]) -> None:
    result = os.environ.get("CHAOS_RESULT")
    if result:
        head = about("pytest -m soak tests/engines/test_chaos.py") | {"minutes": round(minutes, 1)}
        Path(result).write_text(to_json(chaos, head, left_out))
