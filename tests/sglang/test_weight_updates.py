"""Updates of weights in a running SGLang: stand-ins of the classes that it makes them with."""

import gc
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvtier.connectors import sglang
from kvtier.connectors.sglang_weights import CONTROLLER, END, UPDATER, UPDATES
from tests.sglang.hicache_rig import Engine, engine_at, keys

KEYS = keys(range(8))


class SGLang:
    """One engine. updater, controller: objects of the stand-ins for SGLang's classes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[Any] = []

        def updates(name: str) -> Any:
            def update(updater: Any, *args: Any, **kwargs: Any) -> str:
                self.seen.append((name, args, kwargs))
                if "fails" in args:
                    raise RuntimeError("half of it is there")
                return name

            update.__name__ = name
            return update

        self.updater_class = type("WeightUpdater", (), {name: updates(name) for name in (*UPDATES, END)})
        self.controller_class = type("HiCacheController", (), {"reset": lambda controller: None})
        for (name, member), value in ((UPDATER, self.updater_class), (CONTROLLER, self.controller_class)):
            module = ModuleType(name)
            setattr(module, member, value)
            monkeypatch.setitem(sys.modules, name, module)
        self.updater: Any = self.updater_class()
        self.controller: Any = self.controller_class()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> SGLang:
    return SGLang(monkeypatch)


def is_off(one: Engine) -> bool:
    """Return True if nothing is found or stored."""
    return not one.backend.batch_exists(KEYS) and one.load(KEYS) == [None] * 8 and not one.store(KEYS)


@pytest.mark.parametrize("update", UPDATES)
def test_pages_of_old_weights_are_found_no_more(
    tmp_path: Path, engine: SGLang, update: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine_at(tmp_path) as one, engine_at(tmp_path) as other:
        assert one.store(KEYS)
        assert getattr(engine.updater, update)("path", load_format=None) == update
        assert engine.seen == [(update, ("path",), {"load_format": None})]
        assert is_off(one), "SGLang's own caches hold KV of the old weights"
        one.backend.clear()
        assert is_off(one)
        engine.controller.reset()
        assert one.load(KEYS) == [None] * 8
        assert one.store(KEYS[:2]) and one.load(KEYS[:3]) == [*one.expected(KEYS[:2]), None]
        engine.controller.reset()
        assert one.load(KEYS[:2]) == one.expected(KEYS[:2]), "a flush without an update leaves the storage as it is"
        with engine_at(tmp_path) as attached:
            assert is_off(attached), "storage that is attached to the engine after its update"
            engine.controller.reset()
            assert attached.load(KEYS) == [None] * 8
        SGLang(monkeypatch)  # the classes of another process
        with engine_at(tmp_path) as later:
            assert later.load(KEYS) == later.expected(KEYS), "a restarted process needs another epoch"
        assert other.load(KEYS) == [None] * 8, "it is in the same process, with an epoch of its own"


def test_an_update_that_fails_may_have_changed_weights(tmp_path: Path, engine: SGLang) -> None:
    with engine_at(tmp_path) as one:
        assert one.store(KEYS)
        with pytest.raises(RuntimeError):
            engine.updater.update_weights_from_disk("fails")
        assert is_off(one)


def test_the_end_of_an_update_counts_if_it_is_the_update(tmp_path: Path, engine: SGLang) -> None:
    with engine_at(tmp_path) as one:
        engine.updater.begin_weight_update()
        engine.updater.update_weights_from_tensor([])
        engine.controller.reset()
        assert one.store(KEYS)
        engine.updater.end_weight_update(run_post_load=False)
        assert one.load(KEYS) == one.expected(KEYS), "the flush came with the tensors"
        engine.updater.end_weight_update(run_post_load=True)
        assert engine.seen[-1] == ("end_weight_update", (), {"run_post_load": True})
        assert is_off(one), "another process has written the weights"


def test_methods_are_observed_once_and_by_living_engines_only(tmp_path: Path, engine: SGLang) -> None:
    with engine_at(tmp_path):
        method = engine.updater_class.__dict__["update_weights_from_disk"]
        with engine_at(tmp_path):
            assert engine.updater_class.__dict__["update_weights_from_disk"] is method
    gc.collect()
    engine.updater.update_weights_from_disk()


@pytest.mark.parametrize("lacking", ["updater", "update_weights_from_ipc", "reset"])
def test_an_sglang_that_cannot_be_observed_is_named(
    tmp_path: Path, engine: SGLang, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, lacking: str
) -> None:
    monkeypatch.setattr(sglang, "HiCacheStorage", type("HiCacheStorage", (), {}))
    if lacking == "updater":
        monkeypatch.delitem(sys.modules, UPDATER[0])
    else:
        delattr(engine.controller_class if lacking == "reset" else engine.updater_class, lacking)
    with caplog.at_level(logging.WARNING), engine_at(tmp_path) as one:
        assert "cannot observe updates of weights in this SGLang" in caplog.text
        assert one.store(KEYS)
