"""The contract of LMCache's `native_plugin` adapters, without LMCache: what comes back is what was put, or a miss."""

import json
import random
import select
import shlex
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from kvtier.connectors import lmcache
from kvtier.connectors.lmcache import Completion, LMCacheConnector
from kvtier.errors import ConfigError
from kvtier.runtime import metrics
from tests.lmcache.host import REQUIRED, Host, connector_at, key
from tests.objects.rig import SMALL, content, expected, flip_byte_of
from tests.waiting import threads_named, wait_until

ROOT = Path(__file__).parents[2]
KEYS = [key(number) for number in range(12)]


Connect = Callable[..., LMCacheConnector]


@pytest.fixture
def connect(tmp_path: Path) -> Iterator[Connect]:
    """Yield a function that makes connectors with given settings; they are closed after the test."""
    with ExitStack() as stack:
        yield lambda **changes: stack.enter_context(closing(connector_at(tmp_path, **changes)))


@pytest.fixture
def connector(connect: Connect) -> LMCacheConnector:
    return connect()


@pytest.fixture
def host(connector: LMCacheConnector) -> Host:
    return Host(connector)


def test_it_has_the_methods_that_lmcache_looks_for(connector: LMCacheConnector) -> None:
    assert all(callable(getattr(connector, name)) for name in (*REQUIRED, "submit_batch_delete"))


def test_stored_looked_up_loaded_and_deleted(host: Host) -> None:
    assert host.exists(KEYS) == [False] * 12 and host.get(KEYS) == [None] * 12
    assert host.put(KEYS[:8])[1:] == (True, "", [True] * 8)
    assert host.exists(KEYS) == [True] * 8 + [False] * 4
    assert host.get(KEYS) == [*expected(KEYS[:8]), *[None] * 4]
    assert host.delete(KEYS[6:]) == [True] * 2 + [False] * 4
    assert host.exists(KEYS) == [True] * 6 + [False] * 6
    assert host.put(KEYS).ok and host.get(KEYS) == expected(KEYS)


def test_every_part_of_the_key_counts(host: Host) -> None:
    near = [
        key(1),
        key(1, "a"),
        key(1, "b"),
        key(1, model="org/other"),
        key(1).replace("@0@", "@1@"),
        key(1).replace("01000100", "02000100"),
    ]
    for number, one in enumerate(near):
        assert host.exists(near) == [True] * number + [False] * (len(near) - number)
        assert host.put([one]).ok
    assert host.get(near) == expected(near)


def test_the_descriptor_is_readable_while_there_is_something_to_drain(connector: LMCacheConnector) -> None:
    poller = select.poll()
    poller.register(connector.event_fd(), select.POLLIN)
    assert not poller.poll(0) and connector.drain_completions() == []
    tasks = [connector.submit_batch_exists(KEYS) for _ in range(3)]
    drained: list[Completion] = []
    while len(drained) < 3:
        assert poller.poll(20_000), "it was never readable"
        drained += connector.drain_completions()
    assert sorted(done.future_id for done in drained) == tasks and not poller.poll(0)


def test_after_a_restart_and_with_a_flipped_byte(tmp_path: Path, connect: Connect) -> None:
    first = connect()
    assert Host(first).put(KEYS).ok
    first.close()
    flip_byte_of(tmp_path, content(KEYS[4], 5000))
    second = connect()
    host = Host(second)
    assert host.exists(KEYS) == [True] * 12, "the index knows nothing of what happens to files"
    assert host.get(KEYS) == [*expected(KEYS[:4]), None, *expected(KEYS[5:])]
    assert second.counters()[metrics.CHECKSUM_FAILURES] == 1
    assert host.exists(KEYS)[4] is False


@pytest.mark.parametrize("seed", range(3))
def test_tasks_of_all_kinds_at_once(host: Host, seed: int) -> None:
    """Whatever a load brings is what is put under that key; what was not deleted is there in the end."""
    rng = random.Random(seed)
    loads: dict[int, tuple[list[str], list[bytearray]]] = {}
    tasks, deleted = [], set()
    for _ in range(60):
        names = rng.sample(KEYS, rng.randrange(1, 8))
        what = rng.choice(("set", "get", "get", "exists", "delete"))
        if what == "set":
            tasks.append(host.connector.submit_batch_set(names, [memoryview(content(name, 5000)) for name in names]))
        elif what == "get":
            memory = [bytearray(5000) for _ in names]
            tasks.append(host.connector.submit_batch_get(names, [memoryview(into) for into in memory]))
            loads[tasks[-1]] = names, memory
        elif what == "exists":
            tasks.append(host.connector.submit_batch_exists(names))
        else:
            deleted.update(names)
            tasks.append(host.connector.submit_batch_delete(names))
    assert tasks == sorted(set(tasks)), "each has a number of its own"
    host.wait(tasks)
    for task, (names, memory) in loads.items():
        results = host.ended[task].results
        assert results is not None
        for name, into, is_here in zip(names, memory, results, strict=True):
            assert not is_here or bytes(into) == content(name, 5000)
    assert host.put(KEYS).ok and host.get(KEYS) == expected(KEYS)


def test_salts_are_accounted_by_the_tenants_of_the_settings(connect: Connect) -> None:
    tenants = [{"name": "search", "cache_salts": ["search-*"], "quota_bytes": "4MiB"}]
    connector = connect(capacity={"tenants": tenants})
    assert Host(connector).put([*KEYS, *(key(number, "search-7") for number in range(20))]).ok
    assert all(connector.usage_bytes()[tenant] > 0 for tenant in ("", "search"))


def test_a_fault_fails_its_task_and_no_other(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(host.connector._tier, "put", lambda objects: 1 / 0)
        assert host.put(KEYS[:2])[1:] == (False, "storing failed; kvtier's log says why", [False] * 2)
    assert host.put(["no key of LMCache's"]).ok is False
    not_contiguous = memoryview(bytes(100))[::2]
    task = host.connector.submit_batch_set(KEYS[:1], [not_contiguous])
    assert host.wait([task])[0].ok is False
    assert host.put(KEYS).ok and host.get(KEYS) == expected(KEYS)


def test_a_task_too_many_fails_at_once(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache, "TASKS_MAX", 0)
    connector = connect()
    task = connector.submit_batch_exists(KEYS)
    assert connector.drain_completions() == [(task, False, "looking up: too many tasks wait", [False] * 12)]


def test_a_burst_of_tasks_waits_for_its_turn(connector: LMCacheConnector, monkeypatch: pytest.MonkeyPatch) -> None:
    may_go_on, exists = threading.Event(), connector._tier.exists
    monkeypatch.setattr(connector._tier, "exists", lambda keys: may_go_on.wait(60) and exists(keys))
    tasks = {connector.submit_batch_exists(KEYS) for _ in range(3000)}
    may_go_on.set()
    ended: list[Completion] = []
    wait_until(lambda: ended.extend(connector.drain_completions()) or len(ended) == len(tasks))
    assert {done.future_id for done in ended} == tasks and all(done.ok for done in ended)


def test_closing_waits_for_what_is_under_way(connect: Connect) -> None:
    connector = connect()
    connector.submit_batch_set(KEYS, [memoryview(content(name, 5000)) for name in KEYS])
    connector.close()
    connector.drain_completions()
    connector.submit_batch_exists(KEYS)
    assert connector.drain_completions() == [], "nobody asks for its answer any more"
    wait_until(lambda: not threads_named("kvtier-lmcache-"), "the threads' end")
    assert Host(connect()).get(KEYS) == expected(KEYS)


def made_with(**parameters: Any) -> None:
    LMCacheConnector(**parameters).close()


def test_what_cannot_work_stops_the_start(tmp_path: Path) -> None:
    room = {"root": str(tmp_path / "root"), **SMALL}
    with pytest.raises(TypeError, match="unexpected keyword argument 'capacity_bytes'"):
        made_with(settings=room, capacity_bytes="1GiB")
    with pytest.raises(ConfigError, match="root = None: not set"):
        made_with()
    with pytest.raises(ConfigError, match="capcity_bytes = .*unknown key; did you mean"):
        made_with(settings=room | {"capcity_bytes": "1GiB"})
    with pytest.raises(ConfigError, match="codec = 'int8': objects of lmcache are kept as they are"):
        made_with(settings=room | {"codec": "int8"})
    with pytest.raises(ConfigError, match="object_bytes = .* must be a list of sizes"):
        made_with(settings=room, object_bytes=5000)
    with pytest.raises(ConfigError, match="segment_bytes = 2097152"):
        made_with(settings=room, object_bytes=[5000, 3 << 20])
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="a file, not a folder"):
        made_with(settings=room | {"root": str(tmp_path / "file")})


@pytest.mark.parametrize(("found", "warns"), [("0.5.3", False), ("0.5.6", False), ("0.5.7rc1", True), ("0.4.5", True)])
def test_an_untested_release_is_named(
    found: str, warns: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lmcache, "installed", lambda name: found)
    assert lmcache._lmcache_version() == found
    assert (f"LMCache is {found}; kvtier was tested with 0.5.3 and 0.5.6" in caplog.text) is warns


def test_the_example_makes_a_connector(tmp_path: Path) -> None:
    words = shlex.split((ROOT / "configs" / "lmcache" / "serve.sh").read_text(), comments=True)
    adapter = json.loads(words[words.index("--l2-adapter") + 1])
    assert adapter.pop("type") == "native_plugin"
    assert (adapter.pop("module_path"), adapter.pop("class_name")) == (LMCacheConnector.__module__, "KVTierConnector")
    parameters = adapter.pop("adapter_params")
    assert adapter == {} and parameters.keys() == {"config"}
    example = ROOT / "configs" / "lmcache" / Path(parameters["config"]).name
    quotas = {"capacity": {"tenants": []}}  # those of the example are larger than this test's capacity
    made_with(config=str(example), settings={"root": str(tmp_path), **SMALL, **quotas})
