"""Real vLLM engines on two nodes of a network file system: equal answers, hits on the other node, faults under load."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.engines.conftest import lab as lab  # a fixture
from tests.engines.fleet import (
    START_TIMEOUT_S,
    Judge,
    Member,
    hit_ratio,
    index_of,
    kvtier,
    settings_file,
)
from tests.network_fs.bed import Bed
from tests.network_fs.beds import BEDS
from tests.network_fs.run import harm
from tests.redis_server import has_redis, standalone
from tests.waiting import wait_until

pytestmark = [has_redis, pytest.mark.soak]

PROMPTS = list(range(1000, 17000, 1000))  # no two share a beginning
POOL = list(range(24))  # prompts of the load
FRESH = 1_000_000  # the first new prompt of the load of engine 1; of engine 2 twice that
RECOVERY_TIMEOUT_S = 60.0  # until all is found again after a fault, seconds
IO_TIMEOUT_S = 10.0


@contextmanager
def engines(bed: Bed, folder: Path, model: Path, url: str) -> Iterator[list[Member]]:
    """Start an engine on each mount and one without the tier."""
    folder.mkdir()
    members: list[Member] = []
    try:
        for number, mount in enumerate((bed.m1, bed.m2)):
            own = {"io": {"timeout_s": IO_TIMEOUT_S}, "host": {"arena_bytes": "16MiB", "admit": "never"}}
            config = settings_file(folder / f"{number}.yaml", mount / "engines", index_of(url), own)
            members.append(Member(folder, f"engine-{number}", model, config, {}))
        members.append(Member(folder, "alone", model, None, {}))
        for member in members:
            member.answer(0, START_TIMEOUT_S)
        yield members
    finally:
        for member in members:
            member.end()


@pytest.mark.parametrize("kind", ["gluster", "ceph", "moose"])
def test_engines_on_two_nodes(kind: str, lab: Any, tmp_path: Path) -> None:
    if reason := BEDS[kind].missing():
        pytest.skip(f"{BEDS[kind].kind}: {reason}")
    with (
        standalone(tmp_path / "redis") as server,
        BEDS[kind](tmp_path / "bed") as bed,
        engines(bed, tmp_path / "engines", lab.model("llama"), server.url) as (first, second, alone),
    ):
        judge = Judge(alone)
        judge.check(first.ask("ask", numbers=PROMPTS))
        answers = second.ask("ask", numbers=PROMPTS)
        judge.check(answers)
        print(f"{len(answers)} of {len(PROMPTS)} answers are equal, hits on node 2: {hit_ratio(answers):.0%}")
        assert len(answers) == len(PROMPTS) and hit_ratio(answers) > 0.9
        for place, engine in enumerate((first, second), start=1):
            engine.ask("load", pool=POOL, fresh=FRESH * place)
        harm(bed)
        for engine in (first, second):
            engine.ask("stop")
        for engine in (first, second):
            print(f"{engine.name}: {len(engine.requests())} requests under faults")
            judge.check(engine.requests())
        wait_until(lambda: whole(first, judge) and whole(second, judge), "all hits", RECOVERY_TIMEOUT_S)
        rebuilt = kvtier("index", "rebuild", "--config", str(first.config), "--json")
        failed = sum(engine.ask("counters").get("skipped_chunks_failed", 0) for engine in (first, second))
        print(f"failed saves: {failed:.0f}; index rebuild: {rebuilt.stdout}")
        assert json.loads(rebuilt.stdout)["records"] == 0, rebuilt.stdout
        tracebacks = [text for each in (first, second) for text in each.log().split("Traceback")[1:]]
        assert not tracebacks, tracebacks[0][:3000]


def whole(engine: Member, judge: Judge) -> bool:
    """Return whether the engine gets all prompts from the tier."""
    answers = engine.ask("ask", numbers=PROMPTS)
    judge.check(answers)
    return hit_ratio(answers) > 0.9
