"""The quality benchmark: its tasks can be solved, its protocol sees wrong KV, its controls are the paper's; it runs."""

from __future__ import annotations

import json
import math
import sys
import sysconfig
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor

from benchmarks import plots
from benchmarks.quality import __main__ as quality
from benchmarks.quality import data, evaluate, tasks
from benchmarks.quality.evaluate import CONDITIONS, CodecMethod, EvaluationSize, LoadedChunks, methods
from benchmarks.quality.model import KVCache, ModelShape, SmallLlama, with_offset
from benchmarks.quality.tasks import TaskSource
from kvtier.codecs.round_trip import round_trip

SHAPE = ModelShape(layers=2, width=32, heads=4, kv_heads=2, mlp=64, vocabulary=data.VOCABULARY, head_size=64)
SIZE = EvaluationSize(1, 2, text_prefix_tokens=256, text_tokens=8, pairs=(8,), pairs_asked=4, recall_rows=2)


@pytest.fixture(autouse=True)
def little_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own library: to list all packages takes seconds."""
    monkeypatch.setattr(data, "folders", lambda: [Path(sysconfig.get_paths()["stdlib"])])


@pytest.fixture
def source() -> TaskSource:
    random = torch.Generator().manual_seed(0)
    return TaskSource(torch.randint(0, 256, (5000,), generator=random, dtype=torch.uint8), random)


@pytest.fixture
def model() -> SmallLlama:
    """Random weights, large enough for attention to matter."""
    torch.manual_seed(0)
    model = SmallLlama(SHAPE)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval().requires_grad_(False)


# --- tasks ---


def test_copies_are_of_what_stood_before(source: TaskSource) -> None:
    rows = tasks.copy(source, 8, 60, (5, 20))
    starts = rows.is_judged.int().argmax(dim=1)
    assert len(set(starts.tolist())) > 1
    for tokens, start in zip(rows.tokens, starts.tolist(), strict=True):
        period = start - 2
        assert torch.equal(tokens[start:], tokens[2:-period])


def test_asked_pairs_were_given_and_each_is_asked_before_any_is_again(source: TaskSource) -> None:
    rows = tasks.recall(source, 4, 100, n_pairs=6, n_asked=8)
    assert rows.tokens.shape == (4, 100)
    for tokens, judged in zip(rows.tokens, rows.is_judged, strict=True):
        start = (tokens == data.PAIRS).nonzero().item() + 1
        given = dict(tokens[start : start + 12].view(-1, 2).tolist())
        asked = tokens[start + 13 :].view(-1, 2).tolist()
        assert len(given) == 6 and {key for key, _ in asked[:6]} == set(given)
        assert all(given[key] == value for key, value in asked)
        assert judged[start + 13 :].tolist() == [False, True] * 8
        assert not judged[start - 1 : start + 12].any()


def test_held_out_text_is_of_other_files() -> None:
    training, held_out = data.read(2 << 20)
    assert held_out.numel() > 1 << 15
    lines = set(bytes(training.tolist()).splitlines())
    ours = [line for line in bytes(held_out.tolist()).splitlines() if len(line) > 60]
    assert sum(line in lines for line in ours) < len(ours) / 4


# --- the model and the protocol ---


def test_pieces_on_a_cache_are_the_whole(model: SmallLlama, source: TaskSource) -> None:
    tokens = tasks.text(source, 2, 40).tokens
    hidden, cache = model.extend(tokens[:, :25], None)
    more, cache = model.extend(tokens[:, 25:], cache)
    torch.testing.assert_close(model.logits(torch.cat((hidden, more), dim=1)), model(tokens), rtol=1e-4, atol=1e-4)
    assert cache.k.shape == (2, 2, 2, 40, 64)


def test_softmax_does_not_see_an_offset_on_all_keys(model: SmallLlama, source: TaskSource) -> None:
    tokens = tasks.text(source, 2, 40).tokens
    _, cache = model.extend(tokens[:, :32], None)
    offset = evaluate.offset_of(cache, 10.0)
    assert offset is not None
    shifted = KVCache(with_offset(cache.k, offset[:, None]), cache.v)
    expected, _ = model.extend(tokens[:, 32:], cache)
    same, _ = model.extend(tokens[:, 32:], shifted, offset)
    other, _ = model.extend(tokens[:, 32:], shifted)
    torch.testing.assert_close(same, expected, rtol=1e-3, atol=1e-3)
    assert (other - expected).abs().max() > 0.1


def the_same(k: Tensor, v: Tensor) -> LoadedChunks:
    return LoadedChunks(k, v, torch.zeros(len(k), dtype=torch.bool))


def other_values(k: Tensor, v: Tensor) -> LoadedChunks:
    return the_same(k, v.flip(3))


def judged(model: SmallLlama, source: TaskSource, how: CodecMethod, times: float = 0.0) -> dict[str, Tensor]:
    case = next(evaluate.cases(source, SIZE))
    return evaluate.judge(model, case, times, [how])[how.name]


def test_kv_that_comes_back_costs_nothing(model: SmallLlama, source: TaskSource) -> None:
    found = judged(model, source, CodecMethod("same", 0, the_same))
    assert found["kl"].max() < 1e-6 and found["top1"].all()


def test_other_kv_is_seen(model: SmallLlama, source: TaskSource) -> None:
    found = judged(model, source, CodecMethod("other", 0, other_values))
    assert found["kl"].mean() > 1e-3 and not found["top1"].all()


def test_what_bf16_loses_by_an_offset_is_not_the_codecs(model: SmallLlama, source: TaskSource) -> None:
    """In bf16, where the offset costs something: the same KV costs nothing beside a reference that has it too."""
    found = judged(model.for_evaluation(), source, CodecMethod("same", 0, the_same), 100.0)
    assert found["kl"].max() < 1e-6


def test_raw_is_computed_in_other_steps(model: SmallLlama, source: TaskSource, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[int, int]] = []
    prefill = evaluate.prefill

    def noted(model: SmallLlama, tokens: Tensor, step_tokens: int, step_rows: int) -> KVCache:
        steps.append((step_tokens, step_rows))
        return prefill(model, tokens, step_tokens, step_rows)

    monkeypatch.setattr(evaluate, "prefill", noted)
    judged(model, source, CodecMethod("raw", 0, None))
    assert len(set(steps)) == 2


def test_right_answers_are_counted(source: TaskSource) -> None:
    _, case = evaluate.cases(source, SIZE)
    log_p = torch.nn.functional.one_hot(case.continuation[:, 1:], data.VOCABULARY).float()
    assert case.right(log_p).shape[1] == 4 and case.right(log_p).all()
    log_p[0, -1] = log_p[0, -1].roll(1)
    assert case.right(log_p).logical_not().sum() == 1


# --- methods ---


def test_chunks_go_through_the_tiers_codec_and_back_to_their_places() -> None:
    random = torch.Generator().manual_seed(3)
    cache = KVCache(*(torch.randn(2, 3, 2, 512, 64, generator=random).bfloat16() for _ in range(2)))
    by_name = {method.name: method for method in methods(64)}
    for name in ("k4v3", "fp8"):
        back, n_refused = by_name[name].apply(cache)
        assert n_refused == 0
        for row in range(3):
            k, v = round_trip(cache.k[:, row], cache.v[:, row], name)
            assert torch.equal(back.k[:, row], k) and torch.equal(back.v[:, row], v)
    error = {
        name: (method.apply(cache)[0].k.float() - cache.k.float()).square().sum() for name, method in by_name.items()
    }
    assert error["raw"] == 0 < error["k6v4"] < error["fp8"] * 1.5 < error["k4v4"] < error["k3v3"] < error["k2v2"]


@pytest.mark.parametrize("name", ["k4v4", "fp8"])
def test_a_refused_chunk_is_computed_again(name: str) -> None:
    """One vector with infinity: its chunk stays as it was, the others are encoded."""
    random = torch.Generator().manual_seed(3)
    cache = KVCache(*(torch.randn(2, 2, 1, 512, 64, generator=random).bfloat16() for _ in range(2)))
    cache.v[1, 0, 0, 300, 5] = math.inf
    back, n_refused = next(method for method in methods(64) if method.name == name).apply(cache)
    assert n_refused == 1
    for plane, saved in ((back.k, cache.k), (back.v, cache.v)):
        is_same = (plane == saved).unflatten(3, (2, 256)).all(dim=-1).all(dim=-1)
        assert is_same.all(dim=0).squeeze(-2).tolist() == [[False, True], [False, False]]


def test_bytes_of_a_vector_pair_are_the_layouts() -> None:
    sizes = {method.name: method.vector_bytes for method in methods(128)}
    assert sizes["raw"] == 512 and sizes["k4v4"] == sizes["k5v3"] == 133 and sizes["k4v2"] == 101


# --- figures ---


def test_a_hundred_percent_is_not_certain() -> None:
    figure = evaluate.share([torch.ones(3, 4)])
    assert figure["value"] == figure["high"] == 1 and 0.7 < figure["low"] < 0.8


def test_a_mean_counts_rows_not_tokens() -> None:
    rows = torch.tensor([[1.0], [2.0], [3.0], [6.0]])
    narrow, wide = (evaluate.mean([rows.expand(4, n)]) for n in (100, 1))
    assert narrow == wide and narrow["value"] == 3


@pytest.mark.parametrize(("kl", "is_seen"), [(2.4, False), (2.5, True)])
def test_a_control_is_seen_only_when_it_is_clearly_worse(kl: float, is_seen: bool) -> None:
    rows = [
        {"condition": "as trained", "method": name, "kl_mean": {"low": value * 0.9, "high": value * 1.1}}
        for name, value in (("k4v4", 1.0), ("k2v2", kl))
    ]
    assert evaluate.is_control_seen(rows) is is_seen


def test_all_of_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "quality.json"
    monkeypatch.setattr(sys, "argv", ["quality", "--tiny", "--device", "cpu", "--minutes", "0.03", "--out", str(out)])
    quality.main()
    result = json.loads(out.read_text())
    expected = [(condition, method.name) for condition in CONDITIONS for method in methods(128)]
    assert [(row["condition"], row["method"]) for row in result["rows"]] == expected
    assert result["model"]["training"]["steps"] > 0 and set(result["reference"]) == set(CONDITIONS)
    plots.kl(tmp_path / "quality.svg", result)
    ElementTree.fromstring((tmp_path / "quality.svg").read_text())
    assert "before any codec" in capsys.readouterr().out
