"""The benchmark of loading weights: the checkpoints it makes, and loaders that are compared by the parameters' sums."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from benchmarks.gpu.weights_files import MODELS, make, parameters_of, position_sum, tensors_of
from benchmarks.gpu.weights_rate import Found, figures, load, loader_rows, rank_rows, show_manifest, written
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


def test_loaders_fill_the_same_parameters(tmp_path: Path) -> None:
    files = make(tmp_path, TINY)
    with WeightReader() as reader:
        manifest.write(tmp_path, files, reader)
    with safe_open(files[0], "pt") as file:
        assert set(file.keys()) < {tensor.name for tensor in tensors_of(TINY)}
    job = {"folder": str(tmp_path), "model": "tiny", "layers": None, "rank": 0, "ranks": 1, "device": "cpu"}
    runs: dict[str, list[dict[str, Any]]] = {}
    for loader in ("kvtier", "kvtier-verified", "auto"):
        runs[loader] = [{"ranks": [json.loads(json.dumps(load(job | {"loader": loader}, lambda: 0)))]}]
    assert [one["equal"] for one in figures(runs).values()] == [True, True, True]
    runs["auto"][0]["ranks"][0]["sums"][0] += 1
    assert [one["equal"] for one in figures(runs).values()] == [True, True, False]
    result = {"models": {"tiny": {"bytes": 1, "tensors": 45, "runs": written(runs, 1)}}}
    assert [row[1] for row in loader_rows(result)[1]] == ["kvtier", "kvtier-verified", "auto"]


def test_70b_has_the_bytes_of_the_model() -> None:
    assert round(2 * sum(tensor.elements for tensor in tensors_of(MODELS["70b"])) / 1e9) == 141
    fewer = tensors_of(replace(MODELS["70b"], layers=36))
    assert round(2 * sum(tensor.elements for tensor in fewer) / 1e9) == 66


def test_halves_of_a_large_tensor_differ(tmp_path: Path) -> None:
    shapes = replace(MODELS["tiny"], files=1, vocabulary=1 << 20, layers=0, tied=True)  # one tensor of 128 MiB
    (path,) = make(tmp_path, shapes)
    with safe_open(path, "pt") as file:
        first, second = file.get_tensor("model.embed_tokens.weight").chunk(2)
    assert not torch.equal(first, second)


def test_a_sum_knows_the_order() -> None:
    words = torch.arange(9 << 20, dtype=torch.int64)
    moved = words.clone()
    moved[[3, 8 << 20]] = moved[[8 << 20, 3]]
    assert position_sum(words) == position_sum(words.clone()) != position_sum(moved)


def test_the_manifest_is_seen_or_not(tmp_path: Path) -> None:
    path = tmp_path / "kvtier-checksums.json"
    path.touch()
    for is_shown in (False, False, True, True):
        show_manifest(tmp_path, is_shown)
        assert path.exists() is is_shown


def run(first_s: float, second_s: float, sums: int = 1) -> Found:
    ranks = [
        {"start_s": 10.0, "end_s": 10.0 + seconds, "seconds": seconds, "bytes": 40e9, "sums": sums}
        for seconds in (first_s, second_s)
    ]
    return {"ranks": ranks}


def test_figures_of_two_ranks() -> None:
    found = {"auto": [run(10.0, 10.0)], "kvtier": [run(1.0, 0.8), run(1.0, 0.96)], "peer": [run(1.0, 1.0, 2)]}
    judged = figures(found | {"broken": [{"failed": "out of memory"}]})
    assert [one["equal"] for one in judged.values()] == [True, True, False]
    assert judged["kvtier"]["last_s"] == [1.0, 1.0]
    assert round(judged["kvtier"]["spread"], 3) == 0.12
    assert rank_rows({"figures": judged})[1][1] == ["kvtier", "42.7", "1.000", "12.0%", "equal"]
    assert "sums" not in written(found, 2)["peer"][0]["ranks"][0]
