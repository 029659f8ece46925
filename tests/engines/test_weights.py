"""Weights by a plan against vLLM's own loader, on the CPU: every parameter bit-equal, for any rank, in this process."""

import copy
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

import vllm
import vllm.envs
from safetensors.torch import load_file, save_file
from vllm.config import LoadConfig
from vllm.distributed import parallel_state
from vllm.model_executor import model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from kvtier.connectors.vllm import weights_key
from kvtier.connectors.vllm.weights_key import key_of
from kvtier.connectors.vllm.weights_loader import KvtierModelLoader, everything, reason_for_tensors
from kvtier.connectors.vllm.weights_ranks import as_rank, build_model, engine_config
from kvtier.errors import ConfigError, Corrupt

from . import weights_models

SAMPLE = [
    ("llama", 2, 1),
    ("qwen3_moe", 4, 2),
    ("gemma2", 1, 0),
    ("phi3", 2, 0),
    ("mamba2", 8, 3),
    ("granite", 2, 1),
    ("deepseek_v2", 4, 3),
    ("gpt_oss", 2, 1),
    ("embedding", 2, 1),
    ("awq", 2, 0),
    ("int8", 4, 1),
    ("fp8", 2, 1),
]
MATRIX = [(kind, size, rank) for kind in weights_models.KINDS for size in (1, 2, 4, 8) for rank in range(size)]
PATTERN = 0x55  # byte in parameters before a load: what both loads leave out is equal


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("checkpoints")

    def made(kind: str) -> Path:
        path = folder / kind
        return path if path.exists() else weights_models.make(kind, path)

    return made


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


def fresh_model(config: Any) -> torch.nn.Module:
    config.compilation_config.static_forward_context.clear()
    model = build_model(config)
    for tensor in model.parameters():
        raw_bytes(tensor.data).fill_(PATTERN)
    return model


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def loader(**extra: Any) -> KvtierModelLoader:
    config = LoadConfig(load_format="kvtier", use_tqdm_on_load=False, model_loader_extra_config=extra)
    return KvtierModelLoader(config)


def load_as_vllm(config: Any) -> torch.nn.Module:
    model = fresh_model(config)
    DefaultModelLoader(LoadConfig(use_tqdm_on_load=False)).load_weights(model, config.model_config)
    return model


def assert_equal(model: torch.nn.Module, expected: torch.nn.Module) -> None:
    ours, theirs = dict(everything(model)), dict(everything(expected))
    assert list(ours) == list(theirs) and len(ours) > 8
    for name, tensor in theirs.items():
        same = (ours[name].shape, ours[name].stride(), ours[name].dtype)
        assert same == (tensor.shape, tensor.stride(), tensor.dtype), name
        assert torch.equal(raw_bytes(ours[name].data), raw_bytes(tensor.data)), name


def check_rank(folder: Path, size: int, rank: int, plans: Path) -> None:
    """Loads with vLLM's loader, with a new plan, and with the stored one if it was kept."""
    config = engine_config(str(folder), size)
    with as_rank(config, rank):
        check_on_rank(config, plans)


def check_on_rank(config: Any, plans: Path) -> None:
    expected = load_as_vllm(config)
    for _ in range(2):
        model = fresh_model(config)
        loader(plan_cache=str(plans)).load_weights(model, config.model_config)
        assert_equal(model, expected)


@pytest.mark.parametrize(("kind", "size", "rank"), SAMPLE)
def test_parameters_are_those_of_vllm(
    kind: str, size: int, rank: int, checkpoints: Any, tmp_path: Path, caplog: Any
) -> None:
    with caplog.at_level(logging.INFO, "kvtier"):
        check_rank(checkpoints(kind), size, rank, tmp_path)
    lines = [line for line in caplog.messages if "loading weights took" in line]
    assert len(lines) == 2 and "plan traced" in lines[0], caplog.messages
    # Mamba's loaders compute with a parameter, gpt-oss's with tensors of the checkpoint: their plans are not kept.
    is_kept = "plan from the cache" in lines[1]
    assert is_kept == (kind not in ("mamba2", "granite", "gpt_oss")) == bool(list(tmp_path.iterdir()))


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_of_experts_reads_its_own(rank: int, checkpoints: Any, tmp_path: Path, caplog: Any) -> None:
    """Expert parallelism: other ranks' experts are not read, and each rank has a plan of its own."""
    config = engine_config(str(checkpoints("qwen3_moe")), 4)
    config.parallel_config.enable_expert_parallel = True
    with as_rank(config, rank), caplog.at_level(logging.INFO, "kvtier"):
        check_on_rank(config, tmp_path)
        (experts,) = {t.shape[0] for name, t in fresh_model(config).named_parameters() if "w13_weight" in name}
    assert experts == 2 and "plan from the cache" in caplog.messages[-1]


def test_a_pipeline_stage_reads_its_own(checkpoints: Any, tmp_path: Path) -> None:
    config = engine_config(str(checkpoints("llama")), 1)
    config.parallel_config.pipeline_parallel_size = config.parallel_config.world_size = 2
    for rank in range(2):
        with as_rank(config, rank):
            check_on_rank(config, tmp_path)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "size", "rank"), MATRIX)
def test_parameters_of_every_rank(kind: str, size: int, rank: int, checkpoints: Any, tmp_path: Path) -> None:
    check_rank(checkpoints(kind), size, rank, tmp_path)


def load_with_reason(model: torch.nn.Module, config: Any, caplog: Any, **extra: Any) -> str:
    """Loads, and returns why vLLM's own loader did it; "" if it did not."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "kvtier"):
        loader(plan_cache=False, **extra).load_weights(model, config.model_config)
    found = [line.split("own loader: ")[1] for line in caplog.messages if "own loader: " in line]
    return found[0] if found else ""


@pytest.fixture
def llama(checkpoints: Any) -> Iterator[tuple[Any, torch.nn.Module]]:
    """Yield the configuration of an engine with one rank, and its model as vLLM loads it."""
    config = engine_config(str(checkpoints("llama")), 1)
    with as_rank(config, 0):
        yield config, load_as_vllm(config)


def test_loaders_that_cannot_be_recorded_get_real_tensors(llama: Any, caplog: Any) -> None:
    """Also where some copies were recorded before."""
    config, expected = llama

    def computes(self: Any, weights: Any) -> Any:
        return type(self).load_weights(self, ((name, torch.stack([w, w])[0]) for name, w in weights))

    def indexes(self: Any, weights: Any) -> Any:
        return type(self).load_weights(self, ((name, w[list(range(len(w)))]) for name, w in weights))

    def calls_numpy(self: Any, weights: Any) -> Any:
        arrays = ((name, torch.from_numpy(w.view(torch.int16).numpy())) for name, w in weights)
        return type(self).load_weights(self, arrays)

    for load, reason in (
        (computes, ""),
        (indexes, "a loader made a tensor without data"),
        (calls_numpy, "the model's loaders cannot be recorded (TypeError: "),
    ):
        model = fresh_model(config)
        model.load_weights = load.__get__(model)
        found = load_with_reason(model, config, caplog)
        assert found.startswith(reason) and bool(found) == bool(reason)
        assert [record.exc_info for record in caplog.records if record.name == "kvtier"] == [None]
        del model.load_weights
        if load is not calls_numpy:
            assert_equal(model, expected)


def test_a_parameter_that_a_loader_replaces(llama: Any, caplog: Any, tmp_path: Path) -> None:
    """Its plan is not kept: without the loader nothing would replace it."""
    config, expected = llama

    def replaces(self: Any, weights: Any) -> Any:
        loaded = type(self).load_weights(self, weights)
        norm = self.model.norm
        norm.weight = torch.nn.Parameter(norm.weight.data.clone(), requires_grad=False)
        return loaded

    model = fresh_model(config)
    model.load_weights = replaces.__get__(model)
    with caplog.at_level(logging.INFO, "kvtier"):
        loader(plan_cache=str(tmp_path)).load_weights(model, config.model_config)
    assert "plan traced" in caplog.text and not list(tmp_path.iterdir())
    assert torch.equal(model.model.norm.weight, expected.model.norm.weight)


@pytest.mark.parametrize("of", ["module", "parameter"])
def test_a_note_that_a_loader_leaves(of: str, llama: Any, tmp_path: Path) -> None:
    """As GPTQ's experts note which biases came. Without the loader it would be missing, so the plan is not kept."""
    config, _ = llama
    model = fresh_model(config)
    place = model.model.norm if of == "module" else model.model.norm.weight
    place.came = set()

    def notes(self: Any, weights: Any) -> Any:
        place.came.add("w13_bias")
        return type(self).load_weights(self, weights)

    model.load_weights = notes.__get__(model)
    loader(plan_cache=str(tmp_path)).load_weights(model, config.model_config)
    assert not list(tmp_path.iterdir())


def test_why_vllm_loads_itself(llama: Any, checkpoints: Any, caplog: Any, tmp_path: Path) -> None:
    config, expected = llama
    model = fresh_model(config)
    model.model.norm.quant_method = SimpleNamespace(uses_meta_device=True)
    assert load_with_reason(model, config, caplog) == "it is quantized while it is loaded"
    model_config = SimpleNamespace(quantization="bitsandbytes")
    assert reason_for_tensors(model, [], model_config) == "bitsandbytes computes with them"
    for name in ("config.json", "generation_config.json"):
        shutil.copy(checkpoints("llama") / name, tmp_path / name)
    tensors = {}
    for path in checkpoints("llama").glob("*.safetensors"):
        tensors |= load_file(path)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    model, other = fresh_model(config), copy.copy(config.model_config)
    other.model = str(tmp_path)
    assert (
        load_with_reason(model, SimpleNamespace(model_config=other), caplog)
        == "the checkpoint's files are not safetensors"
    )
    assert_equal(model, expected)


def test_gguf_is_loaded_by_the_loader_of_its_own(caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's default loader would read safetensors of the folder that only has the configuration."""

    class OfPlugin(BaseModelLoader):
        def download_model(self, model_config: Any) -> None: ...

        def load_weights(self, model: Any, model_config: Any) -> None: ...

        def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
            return [self.load_config.load_format, self.load_config.model_loader_extra_config, vllm_config, prefix]

    monkeypatch.setitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, "gguf", OfPlugin)
    model_config: Any = SimpleNamespace(quantization="gguf", model="/m")
    with caplog.at_level(logging.INFO, "kvtier"):
        made = loader(plan_cache=False).load_model(vllm_config="v", model_config=model_config, prefix="p")
    assert made == ["gguf", {}, "v", "p"]
    assert "weights are loaded by load format gguf" in caplog.text


@pytest.mark.parametrize("quantization", ["bitsandbytes", "gguf"])
def test_a_load_format_that_vllm_lacks_is_not_used(quantization: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM 0.32 lacks bitsandbytes: the weights are read as tensors."""
    monkeypatch.delitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, quantization, raising=False)
    monkeypatch.setattr(DefaultModelLoader, "load_model", lambda self, **rest: "as before")
    model_config: Any = SimpleNamespace(quantization=quantization, model="/m")
    assert loader(plan_cache=False).load_model(vllm_config="v", model_config=model_config) == "as before"


def test_missing_parameters_are_refused_as_by_vllm(llama: Any, checkpoints: Any, tmp_path: Path) -> None:
    config, _ = llama
    shutil.copytree(checkpoints("llama"), tmp_path / "part")
    for path in (tmp_path / "part").glob("*.safetensors"):
        tensors = {name: tensor for name, tensor in load_file(path).items() if name != "model.norm.weight"}
        save_file(tensors, path, {"format": "pt"})
    model_config = copy.copy(config.model_config)
    model_config.model = str(tmp_path / "part")
    plans = str(tmp_path / "plans")
    loader(plan_cache=plans, enable_weights_track=False).load_weights(fresh_model(config), model_config)
    with pytest.raises(ValueError, match="not initialized from checkpoint"):
        loader(plan_cache=plans).load_weights(fresh_model(config), model_config)


def test_a_plan_of_other_parameters_is_not_used(llama: Any, caplog: Any, tmp_path: Path) -> None:
    config, expected = llama
    loader(plan_cache=str(tmp_path)).load_weights(fresh_model(config), config.model_config)
    model = fresh_model(config)
    other = torch.nn.Parameter(model.model.norm.weight.data.float(), requires_grad=False)
    other.__dict__.update(vars(model.model.norm.weight))
    model.model.norm.weight = other
    with caplog.at_level(logging.INFO, "kvtier"):
        loader(plan_cache=str(tmp_path)).load_weights(model, config.model_config)
    assert "recorded anew: parameter model.norm.weight" in caplog.text and "plan traced" in caplog.text
    assert torch.equal(model.model.norm.weight, expected.model.norm.weight.float())


def test_a_model_without_some_parameters_has_a_plan_of_its_own(llama: Any) -> None:
    """Engines with and without the vision tower of a model share the folder of plans."""
    config, _ = llama

    def key(model: torch.nn.Module) -> str:
        return key_of(model, list(everything(model)), config.model_config, [])

    whole, part = fresh_model(config), fresh_model(config)
    part.model.layers[1].mlp.down_proj.weight = None
    assert key(whole) == key(fresh_model(config)) != key(part)


def test_each_fact_has_a_plan_of_its_own(llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any of these may make the same files fill the same parameters in another way."""
    config, _ = llama
    model, model_config, parallel = fresh_model(config), config.model_config, config.parallel_config
    file, source = tmp_path / "model.safetensors", tmp_path / "source.py"
    source.touch()
    experts = {"map": [0, 1]}

    def key(is_tracked: bool | None = None) -> str:
        maps = [(name, torch.tensor(value, dtype=torch.int32)) for name, value in experts.items()]
        return key_of(model, maps, model_config, [file], is_tracked)

    save_file({"w": torch.zeros(4)}, file)
    keys = [key(), key(True), key(False)]
    group = SimpleNamespace(rank_in_group=1, world_size=2)
    facts = [
        (vllm, "__version__", "0"),
        (torch, "__version__", "0"),
        (weights_key.inspect, "getfile", lambda kind: str(source)),
        (model, "__class__", type("Other", (type(model),), {"__module__": type(model).__module__})),
        (model_config.hf_config, "head_dim", 7),
        (model_config, "dtype", torch.float16),
        (model_config, "quantization", "fp8"),
        (model_config, "quantization_config", {}),
        *((parallel, name, "other") for name in weights_key.EXPERTS),
        (config, "lora_config", "other"),
        (config, "engram_config", "other"),
        (vllm.envs, "compile_factors", dict),
        *((parallel_state, name, group) for name in weights_key.GROUPS),
    ]
    for owner, name, value in facts:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value, raising=False)
            keys.append(key())
    os.utime(source, (1, 1))
    monkeypatch.setattr(weights_key.inspect, "getfile", lambda kind: str(source))
    keys.append(key())
    experts["map"] = [1, 0]
    keys.append(key())
    for tensors in ({"w": torch.zeros(5)}, {"x": torch.zeros(5)}):
        save_file(tensors, file)
        keys.append(key())
    file = file.rename(tmp_path / "other.safetensors")
    keys.append(key())
    assert len(set(keys)) == len(keys)


def test_a_further_source_in_the_same_folder(llama: Any, caplog: Any, tmp_path: Path) -> None:
    """Its file is read once, and the plan is kept."""
    config, expected = llama
    for origin in ("traced", "from the cache"):
        model = fresh_model(config)
        model.secondary_weights = [DefaultModelLoader.Source(config.model_config.model, revision=None)]
        with caplog.at_level(logging.INFO, "kvtier"):
            loader(plan_cache=str(tmp_path)).load_weights(model, config.model_config)
        assert f"plan {origin}" in caplog.messages[-1]
        assert_equal(model, expected)


def test_reloads_get_real_tensors(llama: Any) -> None:
    config, expected = llama
    weights = dict(loader().get_all_weights(config.model_config, fresh_model(config)))
    assert torch.equal(weights["model.norm.weight"], expected.model.norm.weight)


@pytest.mark.parametrize("extra", [{"plan_cash": "/x"}, {"plan_cache": "x"}, {"num_threads": 2}])
def test_unknown_keys_stop(extra: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="model_loader_extra_config.*plan_cache"):
        loader(**extra)


def test_extra_settings_are_an_object() -> None:
    with pytest.raises(ConfigError, match="model_loader_extra_config.*JSON object"):
        KvtierModelLoader(LoadConfig(load_format="kvtier", model_loader_extra_config=["plan_cache"]))


def test_a_damaged_file_is_refused(llama: Any, checkpoints: Any, tmp_path: Path) -> None:
    """Not loaded by vLLM's loader instead: its header says more than there is."""
    config, _ = llama
    shutil.copytree(checkpoints("llama"), tmp_path / "cut")
    path = sorted((tmp_path / "cut").glob("*.safetensors"))[0]
    os.truncate(path, path.stat().st_size - 1)
    model_config = copy.copy(config.model_config)
    model_config.model = str(tmp_path / "cut")
    with pytest.raises(Corrupt, match=path.name):
        loader(plan_cache=False).load_weights(fresh_model(config), model_config)
