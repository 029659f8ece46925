"""CONTRACT tests of the load format: what it calls in vLLM's loaders, and what it offers them, by release.

The installed release is read itself. 0.25.1 and 0.27.1 answer `_prepare_weights` with three values, 0.32 with four;
0.33 calls the same methods as 0.32 (taken from its published source).
"""

import dataclasses
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm.envs
from vllm.config import LoadConfig
from vllm.distributed import parallel_state
from vllm.model_executor import model_loader
from vllm.model_executor.model_loader import base_loader, default_loader, sharded_state_loader, utils, weight_utils

from kvtier.connectors.vllm.weights_loader import KvtierModelLoader


def test_what_is_called_exists_in_the_installed_release() -> None:
    prepare = inspect.signature(default_loader.DefaultModelLoader._prepare_weights)
    assert len(prepare.parameters) == 6, "self and the five values of a source"
    fields = {field.name for field in dataclasses.fields(default_loader.DefaultModelLoader.Source)}
    wanted = {"model_or_path", "subfolder", "revision", "fall_back_to_pt", "allow_patterns_overrides", "prefix"}
    assert wanted <= fields
    assert {"model", "loaded_weights"} <= set(
        inspect.signature(default_loader.DefaultModelLoader.track_weights_loading).parameters
    )
    assert {"vllm_config", "model_config"} <= set(inspect.signature(utils.initialize_model).parameters)
    coordinator = inspect.signature(parallel_state.GroupCoordinator.__init__).parameters
    assert {"use_device_communicator", "use_message_queue_broadcaster"} <= set(coordinator)
    assert callable(weight_utils._natural_sort_key) and callable(vllm.envs.compile_factors)
    assert callable(sharded_state_loader.ShardedStateLoader._filter_subtensors)
    assert "auto" in model_loader._LOAD_FORMAT_TO_MODEL_LOADER and callable(model_loader.register_model_loader)
    assert "load_config" in inspect.signature(model_loader.get_model_loader).parameters


@pytest.mark.parametrize("answer", [3, 4])
def test_answers_of_all_releases_are_taken(answer: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [str(tmp_path / f"model-{number}.safetensors") for number in (10, 9)]
    values = (str(tmp_path), names, True, "model.safetensors.index.json")[:answer]
    monkeypatch.setattr(KvtierModelLoader, "_prepare_weights", lambda self, *five: values)
    model_config: Any = SimpleNamespace(model=str(tmp_path), revision=None)
    found = KvtierModelLoader(LoadConfig(load_format="kvtier"))._collect(SimpleNamespace(), model_config)
    assert [path.name for path in found] == ["model-9.safetensors", "model-10.safetensors"]


def test_it_takes_what_vllm_calls() -> None:
    """The same methods in all releases since 0.25.1."""
    for name in ("load_weights", "get_all_weights", "download_model"):
        ours = list(inspect.signature(getattr(KvtierModelLoader, name)).parameters)
        theirs = getattr(default_loader.DefaultModelLoader, name)
        assert ours == list(inspect.signature(theirs).parameters), name
    assert not KvtierModelLoader.__abstractmethods__
    assert issubclass(KvtierModelLoader, base_loader.BaseModelLoader)


def test_the_configuration_of_others_is_not_changed() -> None:
    """Draft models and vLLM's own code read the same object."""
    config = LoadConfig(load_format="kvtier", model_loader_extra_config={"plan_cache": False})
    assert KvtierModelLoader(config).load_config.load_format == "auto"
    assert config.load_format == "kvtier" and config.model_loader_extra_config == {"plan_cache": False}
