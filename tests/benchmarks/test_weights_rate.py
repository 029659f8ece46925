"""The benchmark of loading weights: the checkpoints it makes, and loaders that are compared by the parameters' sums."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from benchmarks.gpu.weights_files import MODELS, make, parameters_of, tensors_of
from benchmarks.gpu.weights_rate import load, rows_of
from kvtier.weights import manifest
from kvtier.weights.reader import WeightReader

TINY = MODELS["tiny"]


@pytest.mark.parametrize(
    ("model", "n_tensors", "n_bytes"), [("8b", 291, 16.06), ("0.6b", 310, 1.19), ("moe", 6291, 21.18)]
)
def test_dimensions_are_those_of_the_models(model: str, n_tensors: int, n_bytes: float) -> None:
    tensors = tensors_of(MODELS[model])
    assert len({tensor.name for tensor in tensors}) == len(tensors) == n_tensors
    elements = sum(tensor.elements for tensor in tensors)
    assert round(2 * elements / 1e9, 2) == n_bytes
    assert sum(parameters_of(tensors).values()) == elements  # no part of a parameter is left out, none filled twice


def test_loaders_fill_the_same_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = make(tmp_path, TINY)
    with WeightReader() as reader:
        manifest.write(tmp_path, files, reader)
    with safe_open(files[0], "pt") as file:
        assert set(file.keys()) < {tensor.name for tensor in tensors_of(TINY)}
    runs: dict[str, list[dict[str, Any]]] = {}
    for loader in ("kvtier", "kvtier-verified", "auto"):
        monkeypatch.setattr("sys.stdin", io.StringIO("go\n"))
        runs[loader] = [json.loads(json.dumps(load(loader, files, tensors_of(TINY), "cpu")))]
    assert [row[-1] for row in rows_of("tiny", runs, 1)] == ["equal"] * 3
    runs["auto"][0]["sums"][0] += 1
    assert [row[-1] for row in rows_of("tiny", runs, 1)] == ["equal", "equal", "DIFFER"]
