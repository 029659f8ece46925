"""kvtier as a tier of vLLM 0.32's own TieringOffloadingManager: what is promoted is what was stored, or it is computed.

OffloadingConnector's workers need a GPU; its manager and what is below are real here, from the spec to the region.
"""

import importlib.util
import json
import os
import random
import shlex
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from vllm.config import KVTransferConfig
from vllm.utils import hashing
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.engine.core import EngineCore
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtier.connectors.vllm_tiering import tier as tier_module
from kvtier.connectors.vllm_tiering.tier import PREFIX, KVTierSecondaryTier
from kvtier.errors import ConfigError
from tests.damage import flip
from tests.objects.rig import content, flip_byte_of, segments
from tests.vllm_tiering.rig import ROW_BYTES, Offloader, expected, key, keys, offloader, offloader_at, tier_config
from tests.waiting import threads_named, wait_until

KEYS = keys(range(8))


@pytest.fixture(autouse=True)
def hashes() -> Iterator[None]:
    """vLLM sets these when an engine starts."""
    init_none_hash(hashing.sha256)
    yield
    init_none_hash(hashing.sha256)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Offloader]:
    with offloader_at(tmp_path) as made:
        yield made


def counted(of: Offloader) -> dict[str, float]:
    """kvtier's own of what vLLM exports."""
    return {name.removeprefix(PREFIX): by for name, by in of.exported().items() if name.startswith(PREFIX)}


def test_what_left_the_cpu_tier_comes_back(engine: Offloader) -> None:
    assert type(engine.tier) is KVTierSecondaryTier and engine.tier.tier_type == "KVTierSecondaryTier"
    engine.store(KEYS)
    engine.empty_cpu_tier()
    wanted = [key(100), *reversed(KEYS), key(101)]
    assert engine.load(wanted) == [None, *reversed(expected(KEYS)), None]
    assert counted(engine) == {}


def test_a_step_asks_the_index_once_and_never_waits(engine: Offloader, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.store(KEYS)
    engine.empty_cpu_tier()
    asked: list[int] = []
    may_answer = threading.Event()
    exists = engine.tier._tier.exists

    def slow_exists(wanted: Sequence[bytes]) -> list[bool]:
        asked.append(len(wanted))
        assert may_answer.wait(30)
        return exists(wanted)

    monkeypatch.setattr(engine.tier._tier, "exists", slow_exists)
    one, other = engine.begin(), engine.begin()
    for _ in range(3):
        found = [engine.manager.lookup(wanted, context) for context in (one, other) for wanted in KEYS]
        assert set(found) == {LookupResult.RETRY}
        engine.step()
    may_answer.set()
    assert engine.load(KEYS, one) == engine.load(KEYS, other) == expected(KEYS)
    assert asked == [8]


def test_a_flipped_byte_is_computed_again(tmp_path: Path) -> None:
    with offloader_at(tmp_path) as first:
        first.store(KEYS)
    flip_byte_of(tmp_path, content(KEYS[3], ROW_BYTES))
    with offloader_at(tmp_path) as second:
        request = second.begin()
        good = [*expected(KEYS[:3]), None, *expected(KEYS[4:])]
        assert second.load(KEYS, request) == good
        assert second.load(KEYS, request) == good, "it is not sent there again"
        assert counted(second) == {"checksum_failures": 1, "load_failures": 1}
        assert second.manager.primary_tier.lookup(KEYS[3], request) is LookupResult.MISS
        second.store(KEYS[3:4])
        second.manager.on_request_finished(request)
        second.empty_cpu_tier()
        assert second.load(KEYS) == expected(KEYS), "what was computed is stored anew"


def test_tenants_by_what_a_request_says(tmp_path: Path) -> None:
    tenants = [{"name": "search", "cache_salts": ["search-*"], "quota_bytes": "4MiB"}]
    with offloader_at(tmp_path, capacity={"tenants": tenants}) as engine:
        engine.store(KEYS)
        engine.store(keys(range(20), "of search"), salt="search-7")
        assert all(engine.tier._tier.usage_bytes()[tenant] > 0 for tenant in ("", "search"))


def test_engines_that_hash_otherwise_share_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    for hash_function in (hashing.sha256, hashing.sha256_cbor):
        for seed in ("1", "2"):
            monkeypatch.setenv("PYTHONHASHSEED", seed)
            init_none_hash(hash_function)
            with offloader_at(tmp_path) as engine:
                assert engine.load(KEYS[:1]) == [None]
                engine.store(KEYS[:1])
                engine.empty_cpu_tier()
                assert engine.load(KEYS[:1]) == expected(KEYS[:1])
    monkeypatch.delenv("PYTHONHASHSEED")


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_promoted_bytes_are_those_that_were_stored(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    names = keys(range(20))
    loaded = 0
    with offloader_at(tmp_path) as lasting:
        for _ in range(3):
            with offloader_at(tmp_path, touch_interval_s=0.1) as passing:
                for _ in range(12):
                    engine, wanted = rng.choice((lasting, passing)), rng.sample(names, rng.randrange(1, 9))
                    what = rng.choice(("store", "store", "load", "load", "load", "empty", "flip", "cut"))
                    if what == "store":
                        engine.store(wanted)
                    elif what == "load":
                        for got, want in zip(engine.load(wanted), expected(wanted), strict=True):
                            assert got in (None, want)
                            loaded += got is not None
                    elif what == "empty":
                        engine.empty_cpu_tier()
                    else:
                        damage(tmp_path, rng, what)
        lasting.empty_cpu_tier()
        lasting.load(names)  # finds what is bad
        lasting.empty_cpu_tier()
        lasting.store(names)
        lasting.empty_cpu_tier()
        assert lasting.load(names) == expected(names) and loaded


def damage(root: Path, rng: random.Random, what: str) -> None:
    """To one segment: a byte anywhere, or its second half."""
    found = segments(root)
    if not found:
        return
    path = rng.choice(found)
    size = path.stat().st_size
    if what == "cut":
        os.truncate(path, size // 2)
    elif size:
        flip(path, rng.randrange(size))


def test_a_task_too_many_fails_at_once_and_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with offloader_at(tmp_path) as first:
        first.store(KEYS)
    monkeypatch.setattr(tier_module, "TASKS_MAX", 0)
    with offloader_at(tmp_path) as full:
        assert full.load(KEYS) == [None] * 8
        full.store(keys(range(3), "new"))
        assert counted(full) == {"refused_chunks_queue_full": 3}, "what is not looked up yet is asked again"
        assert not full.manager.has_pending_work(), "what vLLM pinned for it is free again"


def test_faults_are_misses(engine: Offloader, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.store(KEYS)
    engine.empty_cpu_tier()
    for broken in ("exists", "get", "put"):
        with monkeypatch.context() as patch:
            patch.setattr(engine.tier._tier, broken, lambda objects: 1 / 0)
            if broken == "put":
                engine.store(keys(range(3), "new"))
            else:
                assert engine.load(KEYS) == [None] * 8
        assert counted(engine) == {"faults": 1}
    assert engine.load(KEYS) == expected(KEYS)


@pytest.mark.parametrize("how", ["reset", "weights"])
def test_after_a_reset_nothing_of_before_is_found_and_nothing_of_before_is_stored(engine: Offloader, how: str) -> None:
    """New weights are in no key of vLLM's own. It resets its cache for them, or its user forgets to."""
    engine.store(KEYS)
    running = engine.begin()
    engine.look_up([key(100)], running)
    if how == "weights":
        core = EngineCore.__new__(EngineCore)
        core.model_executor = SimpleNamespace(collective_rpc=lambda *call: [])
        core.collective_rpc("reload_weights")
        engine.manager.primary_tier.reset_cache()
    else:
        engine.reset()
    assert engine.load(KEYS) == [None] * 8
    engine.store([key(100)], context=running)
    engine.manager.on_request_finished(running)
    engine.store(KEYS[:4])
    engine.manager.primary_tier.reset_cache()
    assert engine.load([key(100), *KEYS]) == [None, *expected(KEYS[:4]), None, None, None, None]


def test_a_reset_waits_for_what_is_under_way(engine: Offloader, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows are vLLM's to hand on after it."""
    put = engine.tier._tier.put
    ended: list[bool] = []
    begun, may_end = threading.Semaphore(0), threading.Event()

    def slow_put(objects: Sequence[object]) -> list[bool]:
        begun.release()
        assert may_end.wait(30)
        stored = put(objects)  # type: ignore[arg-type]
        ended.append(True)
        return stored

    monkeypatch.setattr(engine.tier._tier, "put", slow_put)
    engine.tier._drain_s = 0.1
    context = engine.begin()
    for name in KEYS[:4]:  # of four tasks two wait, and fail when it takes too long
        prepared = engine.manager.prepare_store([name], context)
        assert prepared is not None
        engine.rows[prepared.store_spec.block_ids[0]] = np.frombuffer(content(name, ROW_BYTES), dtype=np.int8)
        engine.manager.complete_store([name], context)
    assert begun.acquire(timeout=30) and begun.acquire(timeout=30)

    def end_late() -> None:
        wait_until(lambda: engine.tier._is_hurried, "the end of patience")
        may_end.set()

    ending = threading.Thread(target=end_late)
    ending.start()
    engine.reset()
    ending.join()
    assert len(ended) == 2 and not engine.manager.has_pending_work()


def test_the_end_leaves_nothing_behind(tmp_path: Path) -> None:
    with offloader_at(tmp_path) as engine:
        region = Path(engine.manager.primary_tier._mmap_region.mmap_path)
        assert region.exists()
        engine.store(KEYS)
    assert not region.exists() and region.name not in Path("/proc/self/maps").read_text()
    wait_until(lambda: not threads_named("kvtier-tiering-"), "the threads' end")


def test_what_cannot_work_stops_the_start(tmp_path: Path) -> None:
    right = tier_config(tmp_path / "root")
    (tmp_path / "file").touch()
    refused = [
        (right | {"root": "/mnt/kv"}, TypeError, "unexpected keyword argument 'root'"),
        (tier_config(tmp_path / "root", capcity_bytes="1GiB"), ConfigError, "capcity_bytes = .*did you mean"),
        (
            tier_config(tmp_path / "root", codec="int8"),
            ConfigError,
            "codec = 'int8': objects of vllm-offloading are kept",
        ),
        (tier_config(tmp_path / "file"), ConfigError, "a file, not a folder"),
        (tier_config(tmp_path / "root", segment_bytes="16KiB"), ConfigError, "segment_bytes = 16384"),
        (right | {"settings": {}}, ConfigError, "root = None: not set"),
    ]
    for tier, error, message in refused:
        with pytest.raises(error, match=message), offloader(tier):
            pass
    with offloader(right):
        pass


def test_a_vllm_without_tiers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    place = "vllm.v1.kv_offload.tiering.base"
    monkeypatch.setitem(sys.modules, place, ModuleType(place))  # 0.25.1 has it without TransferJob
    source = importlib.util.spec_from_file_location("tier_of_another_vllm", str(tier_module.__file__))
    assert source is not None and source.loader is not None
    with pytest.raises(ConfigError, match="vllm = '.*': its tiers are not those of 0.32.0; use that or a later"):
        source.loader.exec_module(importlib.util.module_from_spec(source))


def test_an_untested_release_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for release, warns in (("0.32.0+cpu", False), ("0.99.0", True)):
        monkeypatch.setattr(tier_module.vllm, "__version__", release)
        with offloader_at(tmp_path):
            assert (f"vLLM {release} is not tested as a host of tiers" in caplog.text) is warns


def test_vllm_knows_each_metric_before_it_comes(tmp_path: Path) -> None:
    """One that it was not told of ends its front end."""
    tier = tier_config(tmp_path)
    known = TieringOffloadingSpec.build_metric_definitions({"cpu_bytes_to_use": 1, "secondary_tiers": [tier]})
    assert {PREFIX + name for name in tier_module.HELP} <= known.keys()
    with offloader(tier) as engine:
        total = engine.tier._tier.counters()
        engine.tier._tier.counters = lambda: total | dict.fromkeys(tier_module.HELP, 2.0)  # type: ignore[method-assign]
        assert {PREFIX + name for name in counted(engine)} <= known.keys()
        assert counted(engine) == {}, "what was told is not told again"


def test_the_example_makes_a_tier(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "configs" / "vllm-tiering"
    words = shlex.split((folder / "serve.sh").read_text(), comments=True)
    transfer = KVTransferConfig(**json.loads(words[words.index("--kv-transfer-config") + 1]))
    extra = transfer.kv_connector_extra_config
    assert transfer.kv_connector == "OffloadingConnector"
    assert OffloadingSpecFactory.get_spec_cls(extra) is TieringOffloadingSpec
    (tier,) = extra["secondary_tiers"]
    example = folder / Path(tier.pop("config")).name
    assert tier == {"type": KVTierSecondaryTier.__name__, "module_path": "kvtier.connectors.vllm_tiering"}
    assert getattr(importlib.import_module(tier["module_path"]), tier["type"]) is KVTierSecondaryTier
    small = tier_config(tmp_path)["settings"]
    with offloader(tier | {"config": str(example), "settings": small}) as engine:
        engine.store(KEYS)
        engine.empty_cpu_tier()
        assert engine.load(KEYS) == expected(KEYS)
