"""The real LMCache, both releases: its server, its client and its adapters, over kvtier. On the CPU, without vLLM: the
client registers KV of its own with the server, as an engine's worker does, and compares checksums."""

import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.config.settings import Settings
from kvtier.format.record import is_blank
from kvtier.index.open import open_index
from kvtier.storage.root import open_root
from kvtier.storage.segments import SegmentFiles
from tests.damage import flip_slab
from tests.lmcache.lmcache_environment import OUTSIDE, VERSIONS, environment
from tests.lmcache.servers import CHUNKS, Request, Server, adapter, server_on
from tests.lmcache.servers import OBJECT_BYTES as SERVER_OBJECT_BYTES
from tests.objects.rig import SMALL, segments
from tests.waiting import wait_until

pytestmark = pytest.mark.soak
HERE = Path(__file__).parent
N_KEYS, OBJECT_BYTES = 6, 10_000  # of adapter_calls


@pytest.fixture(scope="module", params=VERSIONS)
def programs(request: pytest.FixtureRequest) -> Path:
    return environment(request.param)


def chunks_at(root: Path) -> int:
    settings = Settings.load({"root": str(root), **SMALL})
    index = open_index(settings, open_root(settings))
    try:
        return index.counts().chunks
    finally:
        index.close()


def wait_for_chunks(root: Path, n: int) -> None:
    """LMCache stores in the background."""
    wait_until(lambda: chunks_at(root) >= n, f"{n} chunks in the tier", 60.0)


def is_whole_hit(request: Request, digest: str) -> bool:
    return (request.hits, request.retrieved, request.digest) == (CHUNKS, "retrieved", digest)


def test_store_restart_share_and_damage(programs: Path, tmp_path: Path) -> None:
    root = tmp_path / "tier"
    with server_on(root, programs, tmp_path, "first") as server:
        first = server.ask(0, 3)
        wait_for_chunks(root, 3 * CHUNKS)
    assert all(first[n, "cold"].hits == 0 and first[n, "cold"].stored == "stored" for n in range(3))
    digests = [first[n, "cold"].digest for n in range(3)]
    assert all(is_whole_hit(first[n, "warm"], digests[n]) for n in range(3)) and len(set(digests)) == 3

    with server_on(root, programs, tmp_path, "second") as one, server_on(root, programs, tmp_path, "third") as other:
        for server in (one, other):
            again = server.ask(0, 3)
            assert all(again[n, "cold"].hits == CHUNKS for n in range(3)), "after a restart it is all there"
            assert all(is_whole_hit(again[n, "warm"], digests[n]) for n in range(3))
            assert set(server.loaded()) == {(0, CHUNKS)}, "all of it came from kvtier"
        new = one.ask(3, 4)
        wait_for_chunks(root, 4 * CHUNKS)
        shared = other.ask(3, 4)
        assert shared[3, "cold"].hits == CHUNKS and is_whole_hit(shared[3, "warm"], new[3, "cold"].digest)
        assert other.loaded()[-2:] == [(0, CHUNKS)] * 2, "what one server stored the other one loads"
        digests.append(new[3, "cold"].digest)

    flip_slab(max(segments(root), key=lambda path: path.stat().st_blocks), 0)
    with server_on(root, programs, tmp_path, "fourth") as server:
        damaged = server.ask(0, 4)
        hits = sorted(damaged[n, "cold"].hits for n in range(4))
        assert hits[0] < CHUNKS and hits[1:] == [CHUNKS] * 3, "the flipped byte is a miss, and it alone"
        assert all(is_whole_hit(damaged[n, "warm"], digests[n]) for n in range(4)), "no wrong byte came to anybody"
        assert "a checksum does not match" in server.log


def test_what_the_server_evicts_is_deleted_in_the_tier(programs: Path, tmp_path: Path) -> None:
    root = tmp_path / "tier"
    # Room for five of the client's twelve chunks.
    limits = {"max_capacity_gb": 5 * SERVER_OBJECT_BYTES / (1 << 30), "eviction": {"eviction_policy": "LRU"}}
    spec = json.dumps(json.loads(adapter(root)) | limits)
    with server_on(root, programs, tmp_path, "evicting", spec) as server:
        server.ask(0, 3)
        wait_until(lambda: records_at(root) == 3 * CHUNKS, "all of it was stored once", 60.0)
        wait_until(lambda: 0 < chunks_at(root) <= 5, "what is too much is deleted", 60.0)


def records_at(root: Path) -> int:
    """In the segments, whatever became of them in the index."""
    folders = {path.parent for path in segments(root)}
    files = [SegmentFiles(folder, direct=False) for folder in folders]
    found = [page for one in files for at in one.ids() for _, page in one.pages(*at)]
    for one in files:
        one.close()
    return sum(not is_blank(page) for page in found)


def test_a_wrong_setting_stops_the_server(programs: Path, tmp_path: Path) -> None:
    spec = json.loads(adapter(tmp_path / "tier"))
    spec["adapter_params"]["settings"]["capacity_byte"] = "1GiB"
    server = Server(programs, json.dumps(spec), tmp_path, "misspelt")
    try:
        wait_until(lambda: server.process.poll() is not None, "the server's end", 180.0)
        assert server.process.returncode != 0
        assert "kvtier: capacity_byte = '***': unknown key; did you mean 'capacity_bytes'?" in server.log
    finally:
        server.stop()


@pytest.fixture(scope="module")
def called(programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What came of adapter_calls."""
    folder = tmp_path_factory.mktemp("calls")
    spec = json.loads(adapter(folder / "tier"))
    tenants = [{"name": "mine", "cache_salts": ["tenant"], "quota_bytes": "128MiB"}]
    spec["adapter_params"]["settings"]["capacity"] = {"tenants": tenants}
    (folder / "adapter.json").write_text(json.dumps(spec))
    command = [str(programs / "python"), str(HERE / "adapter_calls.py"), str(folder / "adapter.json")]
    started_s = time.monotonic()
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **OUTSIDE})
    assert ran.returncode == 0, ran.stderr[-4000:]
    print(f"{time.monotonic() - started_s:.0f} s")
    yield json.loads(ran.stdout.split("RESULT ")[1])


def test_lmcaches_own_adapter_stores_and_loads(called: dict[str, Any]) -> None:
    everything = N_KEYS * OBJECT_BYTES
    assert called["before"] == [False] * N_KEYS
    assert called["store"] == [[True, everything], [True, everything]]
    assert called["again"] == [True, 0], "what is there already is booked once"
    assert called["look_up"] == [True] * N_KEYS + [False]
    assert called["load"] == [[10 + n for n in range(N_KEYS)], [*(50 + n for n in range(N_KEYS)), None]]
    assert called["status"]["is_healthy"] is True and called["status"]["type"] == "LMCacheConnector"


def test_lmcaches_own_adapter_deletes_and_accounts_by_salt(called: dict[str, Any]) -> None:
    each = N_KEYS * OBJECT_BYTES
    assert called["usage"] == [2 * each, {"": each, "tenant": each}]
    left = {"": each - 2 * OBJECT_BYTES, "tenant": each - OBJECT_BYTES}
    assert called["usage_after"] == [sum(left.values()), left]
    assert called["look_up_after"] == [[False] * 2 + [True] * (N_KEYS - 2), [False] + [True] * (N_KEYS - 1)]
    assert called["load_after"] == [None, None, *(12 + n for n in range(N_KEYS - 2))]
    assert called["tier_usage"].keys() == {"", "mine"}, "the tier accounts by the tenants of its settings"
