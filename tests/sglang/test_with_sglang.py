"""kvtier in the hands of SGLang's own factory and abstract class, where these are installed; else this is skipped.

No engine is needed, no GPU, and few of SGLang's dependencies beside those of kvtier's tests:

    pip install --no-deps --target FOLDER sglang==0.5.23 orjson IPython traitlets
    PYTHONPATH=FOLDER python -m pytest tests/sglang
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvtier.connectors.sglang import KVTierHiCache
from kvtier.connectors.sglang_weights import CONTROLLER, END, RESET, UPDATER, UPDATES
from kvtier.errors import ConfigError
from tests.objects.rig import flip_byte_of
from tests.sglang.hicache_rig import Config, Engine, MHATokenToKVPoolHost, extra, keys
from tests.sglang.test_hicache_contract import ABSTRACT, OVERRIDDEN

storage = pytest.importorskip("sglang.srt.mem_cache.hicache_storage", exc_type=ImportError)
KEYS = keys(range(8))


@contextmanager
def engine_of_the_factory(root: Path, **changes: object) -> Iterator[Engine]:
    """As --hicache-storage-backend dynamic makes it."""
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    values = dataclasses.asdict(Config(extra_config=extra(root, **changes)))
    pool = MHATokenToKVPoolHost()
    backend: Any = StorageBackendFactory.create_backend("dynamic", storage.HiCacheStorageConfig(**values), pool)
    try:
        yield Engine(backend, pool)
    finally:
        backend.close()


def test_the_recorded_interface_is_sglangs() -> None:
    host = storage.HiCacheStorage
    assert issubclass(KVTierHiCache, host) and host.__abstractmethods__ == ABSTRACT.keys()
    for name, parameters in (ABSTRACT | OVERRIDDEN).items():
        assert list(inspect.signature(getattr(host, name)).parameters)[1:] == parameters
    fields = {field.name for field in dataclasses.fields(storage.HiCacheStorageConfig)}
    assert fields == {field.name for field in dataclasses.fields(Config)}


def test_the_observed_methods_are_sglangs() -> None:
    """Read from its source: to import these modules takes all that SGLang depends on."""
    for (module, name), methods in ((UPDATER, (*UPDATES, END)), (CONTROLLER, (RESET,))):
        folder, *rest = module.split(".")
        path = Path(importlib.import_module(folder).__path__[0], *rest).with_suffix(".py")
        (found,) = (
            node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name
        )
        made = {node.name: node for node in found.body if isinstance(node, ast.FunctionDef)}
        assert made.keys() >= set(methods)
        if module == UPDATER[0]:
            (only,) = made["end_weight_update"].args.kwonlyargs
            assert only.arg == "run_post_load"
            public = {name for name in made if not name.startswith("_")}
            assert public - set(methods) == {
                "init_weights_update_group",
                "destroy_weights_update_group",
                "receive_weights_from_distributed",
            }


def test_stored_restarted_loaded_and_damaged(tmp_path: Path) -> None:
    with engine_of_the_factory(tmp_path) as first:
        assert type(first.backend) is KVTierHiCache
        first.backend.on_host_pools_registered()
        assert first.store(KEYS[:6]) and first.backend.get_stats() is None
    flip_byte_of(tmp_path, first.content(KEYS[2]))
    with engine_of_the_factory(tmp_path) as second:
        second.backend.register_mem_host_pool_v2(second.pool, storage.PoolName.KV)
        assert second.backend.batch_exists(KEYS, storage.HiCacheStorageExtraInfo()) == 6
        good = second.expected(KEYS[:6])
        assert second.load(KEYS) == [*good[:2], None, *good[3:], None, None]


def test_what_cannot_work_stops_the_factory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model_tag"), engine_of_the_factory(tmp_path, model_tag=None):
        pass
    with engine_of_the_factory(tmp_path) as engine, pytest.raises(ConfigError, match="host_pool = 'mamba'"):
        engine.backend.register_mem_host_pool_v2(engine.pool, storage.PoolName.MAMBA)
