"""Weights by a plan against vLLM's own loader, on the CPU: every parameter bit-equal, for any rank, in this process."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models import registry

from kvtier.connectors.vllm.weights_loader import KvtierModelLoader, everything
from kvtier.connectors.vllm.weights_ranks import as_rank, build_model, engine_config

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
    ("awq", 2, 0),
    ("int8", 4, 1),
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
        # It imports vLLM in a process of its own for each class of models.
        patch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())
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
    assert list(ours) == list(theirs) and len(ours) > 10
    for name, tensor in theirs.items():
        same = (ours[name].shape, ours[name].stride(), ours[name].dtype)
        assert same == (tensor.shape, tensor.stride(), tensor.dtype), name
        assert torch.equal(raw_bytes(ours[name].data), raw_bytes(tensor.data)), name


def check_rank(folder: Path, size: int, rank: int, plans: Path) -> None:
    """Loads with vLLM's loader, with a new plan, and with the stored one if it was kept."""
    config = engine_config(str(folder), size)
    with as_rank(config, rank):
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


@pytest.mark.soak
@pytest.mark.parametrize(("kind", "size", "rank"), MATRIX)
def test_parameters_of_every_rank(kind: str, size: int, rank: int, checkpoints: Any, tmp_path: Path) -> None:
    check_rank(checkpoints(kind), size, rank, tmp_path)
