"""The contract of SGLang's storage backends, without SGLang: what comes back is what was set, or is a miss."""

import inspect
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.connectors import sglang
from kvtier.connectors.sglang import KVTierHiCache
from kvtier.errors import ConfigError
from kvtier.runtime import metrics
from tests.objects.rig import flip_byte_of
from tests.sglang.hicache_rig import (
    PAGE_TOKENS,
    ROOM,
    Config,
    Engine,
    Hybrid,
    MHATokenToKVPoolHost,
    MLATokenToKVPoolHost,
    engine_at,
    extra,
    key,
    keys,
)

KEYS = keys(range(8))
ABSTRACT = {
    "get": ["key", "target_location", "target_sizes"],
    "batch_get": ["keys", "target_locations", "target_sizes"],
    "set": ["key", "value", "target_location", "target_sizes"],
    "batch_set": ["keys", "values", "target_locations", "target_sizes"],
    "exists": ["key"],
}
OVERRIDDEN = {
    "batch_exists": ["keys", "extra_info"],
    "batch_get_v1": ["keys", "host_indices", "extra_info"],
    "batch_set_v1": ["keys", "host_indices", "extra_info"],
    "register_mem_pool_host": ["mem_pool_host"],
    "register_mem_host_pool_v2": ["host_pool", "host_pool_name"],
    "clear": [],
}
"""Methods of HiCacheStorage and their parameters, in SGLang 0.5.23's wheel, srt/mem_cache/hicache_storage.py. All that
are abstract there, and others; test_with_sglang.py compares them with an SGLang that is installed."""


@pytest.fixture(params=[True, False], ids=["v1", "generic"])
def engine(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Engine]:
    with engine_at(tmp_path, with_v1=request.param) as made:
        yield made


def test_it_has_the_methods_that_sglang_calls() -> None:
    for name, parameters in (ABSTRACT | OVERRIDDEN).items():
        own = KVTierHiCache.__dict__[name]
        assert list(inspect.signature(own).parameters)[1:] == parameters
    assert list(inspect.signature(KVTierHiCache).parameters) == ["storage_config", "kwargs"]


def test_set_looked_up_and_got(engine: Engine) -> None:
    assert engine.backend.batch_exists(KEYS) == 0 and engine.load(KEYS) == [None] * 8
    assert engine.store(KEYS[:5])
    assert engine.backend.batch_exists(KEYS) == 5
    assert engine.load(KEYS) == [*engine.expected(KEYS[:5]), None, None, None]
    assert engine.store(KEYS) and engine.load(KEYS) == engine.expected(KEYS)


def test_one_page(engine: Engine) -> None:
    page = torch.arange(engine.page_bytes // 2).to(torch.bfloat16)
    assert engine.backend.set(key(1), page) and engine.backend.exists(key(1)) and not engine.backend.exists(key(2))
    into = torch.zeros_like(page)
    assert engine.backend.get(key(1), into) is into and torch.equal(into, page)
    new = engine.backend.get(key(1))
    assert torch.equal(new, page) and new.dtype is torch.bfloat16
    assert engine.backend.get(key(2), into) is None


def test_prefixes_end_at_the_first_that_is_not_there(engine: Engine) -> None:
    engine.store([KEYS[0], KEYS[1], KEYS[3]])
    assert [engine.backend.batch_exists(KEYS[first:]) for first in range(5)] == [2, 1, 0, 1, 0]
    assert engine.backend.batch_exists([]) == 0
    assert engine.load(KEYS[:4]) == [*engine.expected(KEYS[:2]), None, *engine.expected(KEYS[3:4])]
    assert engine.load([KEYS[1], KEYS[1]]) == engine.expected([KEYS[1], KEYS[1]])


def test_after_a_restart_and_with_a_flipped_byte(tmp_path: Path) -> None:
    with engine_at(tmp_path) as first:
        first.store(KEYS)
    flip_byte_of(tmp_path, first.content(KEYS[3]))
    with engine_at(tmp_path) as second:
        assert second.backend.batch_exists(KEYS) == 8, "the index knows nothing of what happens to files"
        assert second.load(KEYS) == [*second.expected(KEYS[:3]), None, *second.expected(KEYS[4:])]
        assert second.backend.counters()[metrics.CHECKSUM_FAILURES] == 1
        assert second.backend.batch_exists(KEYS) == 3
        assert second.store(KEYS[3:4]) and second.load(KEYS) == second.expected(KEYS)


OTHERS: dict[str, Any] = {
    "tp_rank": {"config": Config(tp_rank=1, tp_size=2)},
    "tp_size": {"config": Config(tp_size=2)},
    "pp_rank": {"config": Config(pp_rank=1, pp_size=2)},
    "attn_cp_rank": {"config": Config(attn_cp_rank=1, attn_cp_size=2)},
    "mla": {"config": Config(is_mla_model=True)},
    "model": {"config": Config(model_name="org/other")},
    "dtype": {"pool": MHATokenToKVPoolHost(dtype=torch.float16)},
    "layout": {"pool": MHATokenToKVPoolHost("page_first")},
    "kind of pool": {"pool": MLATokenToKVPoolHost()},
    "model_tag": {"model_tag": "weights-2"},
    "epoch": {"epoch": 1},
}
"""Pages of equal size, which only what is told of them tells apart."""


def test_what_differs_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_at(tmp_path) as one:
        one.store(KEYS[:1])
        for what, differs in OTHERS.items():
            with engine_at(tmp_path, **differs) as other:
                assert other.page_bytes == one.page_bytes
                assert other.load(KEYS[:1]) == [None], what
        for name, value in (("page_size", 8), ("head_num", 8), ("start_layer", 3), ("head_group_num", 2)):
            pool = MHATokenToKVPoolHost()
            with engine_at(tmp_path, pool) as other:
                setattr(pool, name, value)
                other.backend.register_mem_pool_host(pool)
                assert other.backend.batch_exists(KEYS[:1]) == 0, name
        monkeypatch.setattr(sglang, "installed", lambda name: "0.5.24")
        with engine_at(tmp_path) as other:
            assert other.load(KEYS[:1]) == [None]


def test_of_mla_all_ranks_share_the_pages_of_one(tmp_path: Path) -> None:
    ranks = [Config(tp_rank=rank, tp_size=2, is_mla_model=True) for rank in range(2)]
    with (
        engine_at(tmp_path, MLATokenToKVPoolHost(), config=ranks[0]) as writer,
        engine_at(tmp_path, MLATokenToKVPoolHost(), config=ranks[1]) as reader,
    ):
        writer.store(KEYS)
        assert reader.load(KEYS) == reader.expected(KEYS)
        assert reader.store(KEYS) and not reader.backend.counters().get(metrics.SAVE_BYTES), "they are there"


def test_clear_leaves_behind_what_there_was_for_this_process(tmp_path: Path) -> None:
    with engine_at(tmp_path) as one, engine_at(tmp_path) as other:
        one.store(KEYS)
        one.backend.clear()
        assert one.backend.batch_exists(KEYS) == 0 and one.load(KEYS) == [None] * 8
        assert other.load(KEYS) == other.expected(KEYS), "it is others' as well"
        assert one.store(KEYS[:2]) and one.load(KEYS[:3]) == [*one.expected(KEYS[:2]), None]


def test_what_is_no_page_is_a_miss_and_harms_nothing(engine: Engine) -> None:
    engine.store(KEYS)
    n = engine.page_bytes // 2
    for target in (torch.zeros(n - 1), torch.zeros(n, 2, dtype=torch.bfloat16)[:, 0], 4711):
        assert engine.backend.get(KEYS[0], target) is None
    assert engine.backend.set("new", torch.zeros(n - 1)) is False
    assert engine.backend.batch_set(["new"], None, [4711], [n]) is False
    assert engine.backend.batch_get_v1(KEYS, torch.arange(7 * PAGE_TOKENS)) == [False] * 8
    assert engine.backend.batch_set_v1(["new"], torch.arange(1)) == [False]
    assert not engine.backend.exists("new") and engine.load(KEYS) == engine.expected(KEYS)


def test_a_fault_is_a_miss(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.store(KEYS)
    with monkeypatch.context() as patch:
        for name in ("get", "put", "exists"):
            patch.setattr(engine.backend._tier, name, lambda what: 1 / 0)
        assert engine.backend.batch_exists(KEYS) == 0 and engine.load(KEYS) == [None] * 8
        assert engine.store(KEYS) is False
    assert engine.load(KEYS) == engine.expected(KEYS)
    engine.backend.close()
    engine.backend.close()
    assert engine.backend.batch_exists(KEYS) == 0 and engine.load(KEYS) == [None] * 8 and not engine.store(KEYS)
    assert engine.backend.counters() == {}


def made_with(config: Config, pool: Any = None) -> None:
    backend = KVTierHiCache(config)
    try:
        backend.register_mem_pool_host(pool or MHATokenToKVPoolHost())
    finally:
        backend.close()


def test_what_cannot_work_stops_the_start(tmp_path: Path) -> None:
    good = extra(tmp_path)
    settings = good["settings"]
    made_with(Config(extra_config=good))
    for changes, says in (
        ({"root": str(tmp_path)}, r"extra_config = .*'root'.*unknown keys of --hicache-storage-backend-extra-config"),
        ({"settings": 5}, "settings = 5: must be an object"),
        ({"settings": settings | {"model_tag": None}}, "model_tag = None: .*the model.s served name"),
        ({"settings": settings | {"codec": "int8"}}, "codec = 'int8': objects of sglang-hicache are kept as they are"),
        ({"settings": settings | {"capcity_bytes": "1GiB"}}, "capcity_bytes = .*unknown key; did you mean"),
    ):
        with pytest.raises(ConfigError, match=says):
            made_with(Config(extra_config=good | changes))
    with pytest.raises(ConfigError, match="root = None: not set"):
        made_with(Config())
    with pytest.raises(ConfigError, match="tp_lcm_size = 8"):
        made_with(Config(extra_config=good, tp_lcm_size=8))
    with pytest.raises(ConfigError, match="dcp_size = 2"):
        made_with(Config(extra_config=good, dcp_size=2))
    with pytest.raises(ConfigError, match="host_pool = 'Hybrid'"):
        made_with(Config(extra_config=good), Hybrid())
    with engine_at(tmp_path) as engine, pytest.raises(ConfigError, match="host_pool = 'mamba'"):
        engine.backend.register_mem_host_pool_v2(engine.pool, "mamba")


def test_pools_that_cannot_be_kept_stop_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(self: Any) -> torch.Tensor:
        raise NotImplementedError("head_dim != v_head_dim")

    config = Config(extra_config=extra(tmp_path))
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="no flat pages .head_dim != v_head_dim"):
        patch.setattr(MHATokenToKVPoolHost, "get_dummy_flat_data_page", refuses)
        made_with(config)
    monkeypatch.setattr(MHATokenToKVPoolHost, "_layer_shard_enabled", True, raising=False)
    with pytest.raises(ConfigError, match="divided among ranks"):
        made_with(config)


@pytest.mark.parametrize(("found", "warns"), [("0.5.23", False), ("0.5.24", True)])
def test_an_untested_release_is_named(
    found: str, warns: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sglang, "installed", lambda name: found)
    assert sglang._sglang_version() == found
    assert (f"SGLang is {found}; kvtier was tested with 0.5.23" in caplog.text) is warns
    caplog.clear()
    made_with(Config(extra_config=extra(tmp_path)))
    assert caplog.text.count(f"SGLang is {found}") == int(warns), "once a start"


def test_the_example_makes_a_backend(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "configs" / "sglang"
    words = shlex.split((folder / "serve.sh").read_text(), comments=True)
    assert words[words.index("--hicache-storage-backend") + 1] == "dynamic"
    given = json.loads(words[words.index("--hicache-storage-backend-extra-config") + 1])
    example = folder / Path(given["config"]).name
    assert {name: given[name] for name in sglang.OF_SGLANG} == {
        name: extra(tmp_path)[name] for name in sglang.OF_SGLANG
    }
    small = {name: value for name, value in ROOM.items() if name != "model_tag"} | {"root": str(tmp_path)}
    made_with(Config(extra_config=given | {"config": str(example), "settings": small}))
