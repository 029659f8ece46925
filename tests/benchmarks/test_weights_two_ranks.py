"""The benchmark of two ranks: its checkpoint, its sums and what it makes of the figures of runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open

from benchmarks.gpu.weights_files import MODELS, make, position_sum, tensors_of
from benchmarks.gpu.weights_two_ranks import Found, rows_of, show_manifest, summary


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
    ranks = [{"start_s": 10.0, "end_s": 10.0 + seconds, "bytes": 40e9, "sums": sums} for seconds in (first_s, second_s)]
    return {"ranks": ranks}


def test_figures() -> None:
    found = {"auto": [run(10.0, 10.0)], "kvtier": [run(1.0, 0.8), run(1.0, 0.96)], "peer": [run(1.0, 1.0, 2)]}
    figures = summary(found | {"broken": [{"failed": "out of memory"}]})
    assert [one["equal"] for one in figures.values()] == [True, True, False]
    assert figures["kvtier"]["last_s"] == [1.0, 1.0]
    assert round(figures["kvtier"]["spread"], 3) == 0.12
    rows = rows_of(figures)
    assert rows[1][:4] == ["kvtier", "42.7", "40.0", "1.000"]
    assert rows[1][-2:] == ["10.0", "equal"]
