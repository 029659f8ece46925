"""Four writers far beyond the capacity, with evictors killed: the budget and the quotas hold at every moment, and in
the end files and index agree."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash.overload import CAPACITY_SETS, QUOTA_SETS
from tests.redis_server import has_redis, standalone

SEED = 20261121


@pytest.fixture(params=["embedded", pytest.param("redis", marks=has_redis)])
def index_settings(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    if request.param == "embedded":
        yield {"kind": "embedded"}
        return
    with standalone(tmp_path / "redis") as server:
        yield {"kind": "redis", "url": server.url, "reply_timeout_ms": 5000, "connect_timeout_ms": 5000}


def overload(root: Path, seconds: float, n_sets: int, kills: int, index: dict[str, Any]) -> dict[str, Any]:
    root.mkdir()
    words = map(str, (root, seconds, n_sets, kills, SEED, json.dumps(index)))
    command = [sys.executable, "-m", "tests.crash.overload", *words]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 600, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["disk_sets_max"] <= CAPACITY_SETS
    for tenant, sets in QUOTA_SETS.items():
        assert found["tenant_sets_max"][tenant] <= sets, tenant
    assert (found["in_no_index"], found["without_files"], found["pending"]) == (0, 0, 0)
    assert found["bad"] == []
    return found


def test_writers_beyond_the_capacity_keep_to_it(tmp_path: Path, index_settings: dict[str, Any]) -> None:
    found = overload(tmp_path / "root", 2.0, 2 * CAPACITY_SETS, 1, index_settings)
    assert found["kills"] == 1
    assert found["sets_made"] > CAPACITY_SETS, "nothing was evicted; the test proves nothing"


@pytest.mark.soak
def test_ten_minutes_of_writers_beyond_the_capacity(tmp_path: Path, index_settings: dict[str, Any]) -> None:
    found = overload(tmp_path / "root", 600.0, 20 * CAPACITY_SETS + 1, 10, index_settings)
    print(found)
    assert found["kills"] == 10
    assert found["sets_made"] > 20 * CAPACITY_SETS
