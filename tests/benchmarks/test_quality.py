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
from benchmarks.quality import cases, controls, data, measure, summary, tasks
from benchmarks.quality.cases import Plan
from benchmarks.quality.evaluation import CONDITIONS
from benchmarks.quality.methods import Loaded, Method, methods
from benchmarks.quality.model import Cache, Model, Shape, with_offset
from benchmarks.quality.tasks import Source
from kvtier.codecs.round_trip import round_trip

SHAPE = Shape(layers=2, width=32, heads=4, kv_heads=2, mlp=64, vocabulary=data.VOCABULARY, head_size=64)
PLAN = Plan(
    text_rows=2,
    text_prefix_tokens=256,
    text_tokens=8,
    greedy_tokens=3,
    copy_prefixes=(256,),
    copy_tokens=4,
    pairs=(8,),
    pairs_asked=4,
    recall_rows=2,
    needle_prefixes=(256,),
    needle_depths=(0.0, 1.0),
    needles=3,
    needle_rows=2,
)


@pytest.fixture(autouse=True)
def little_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own library: to list all packages takes seconds."""
    monkeypatch.setattr(data, "folders", lambda: [Path(sysconfig.get_paths()["stdlib"])])


@pytest.fixture
def source() -> Source:
    random = torch.Generator().manual_seed(0)
    return Source(torch.randint(0, 256, (5000,), generator=random, dtype=torch.uint8), random)


@pytest.fixture
def model() -> Model:
    """Random weights, large enough for attention to matter."""
    torch.manual_seed(0)
    model = Model(SHAPE)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval().requires_grad_(False)


# --- tasks ---


def test_copies_are_of_what_stood_before(source: Source) -> None:
    rows = tasks.copy(source, 8, 60, (5, 20))
    starts = rows.is_judged.int().argmax(dim=1)
    assert len(set(starts.tolist())) > 1
    for tokens, start in zip(rows.tokens, starts.tolist(), strict=True):
        period = start - 2
        assert torch.equal(tokens[start:], tokens[2:-period])


def test_asked_pairs_were_given_and_each_is_asked_before_any_is_again(source: Source) -> None:
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


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_the_asked_needle_lies_at_the_depth(source: Source, depth: float) -> None:
    rows = tasks.needles(source, 5, 262, (4, 1), depth)
    for tokens, judged in zip(rows.tokens, rows.is_judged, strict=True):
        assert tokens[256] == data.ASK and judged[-4:].all() and not judged[256:258].any()
        places = (tokens[:256] == data.NEEDLE).nonzero().flatten()
        right = [place for place in places if torch.equal(tokens[place + 1 : place + 6], tokens[257:])]
        assert len(places) == 4 and len(right) == 1
        assert right[0] == 1 + 16 * round(depth * 14) and not judged[right[0] : right[0] + 6].any()


def test_held_out_text_is_of_other_files() -> None:
    corpus = data.read(2 << 20)
    assert corpus.held_out.numel() > 1 << 15
    lines = set(bytes(corpus.training.tolist()).splitlines())
    ours = [line for line in bytes(corpus.held_out.tolist()).splitlines() if len(line) > 60]
    assert sum(line in lines for line in ours) < len(ours) / 4


# --- the model and the protocol ---


def test_pieces_on_a_cache_are_the_whole(model: Model, source: Source) -> None:
    tokens = tasks.text(source, 2, 40).tokens
    hidden, cache = model.extend(tokens[:, :25], None)
    more, cache = model.extend(tokens[:, 25:], cache)
    torch.testing.assert_close(model.logits(torch.cat((hidden, more), dim=1)), model(tokens), rtol=1e-4, atol=1e-4)
    assert cache.k.shape == (2, 2, 2, 40, 64)


def test_softmax_does_not_see_an_offset_on_all_keys(model: Model, source: Source) -> None:
    tokens = tasks.text(source, 2, 40).tokens
    _, cache = model.extend(tokens[:, :32], None)
    offset = measure.offset_of(cache, CONDITIONS[1])
    assert offset is not None
    shifted = Cache(with_offset(cache.k, offset[:, None]), cache.v)
    expected, _ = model.extend(tokens[:, 32:], cache)
    same, _ = model.extend(tokens[:, 32:], shifted, offset)
    other, _ = model.extend(tokens[:, 32:], shifted)
    torch.testing.assert_close(same, expected, rtol=1e-3, atol=1e-3)
    assert (other - expected).abs().max() > 0.1


def the_same(k: Tensor, v: Tensor) -> Loaded:
    return Loaded(k, v, torch.zeros(len(k), dtype=torch.bool))


def other_values(k: Tensor, v: Tensor) -> Loaded:
    return the_same(k, v.flip(3))


def judged(model: Model, source: Source, how: Method, of_case: int) -> dict[str, Tensor]:
    reference = measure.refer(model, cases.cases(source, PLAN)[of_case], PLAN.greedy_tokens)
    return measure.judge(model, reference, how, None)


def test_kv_that_comes_back_costs_nothing(model: Model, source: Source) -> None:
    found = judged(model, source, Method("same", 0, the_same), 0)
    assert found["kl"].max() < 1e-6 and found["top1"].all() and found["nll_change"].abs().max() < 1e-5
    assert found["greedy"].flatten().tolist() == [3, 3]


def test_other_kv_is_seen(model: Model, source: Source) -> None:
    found = judged(model, source, Method("other", 0, other_values), 0)
    assert found["kl"].mean() > 1e-3 and not found["top1"].all()


def test_what_bf16_loses_by_an_offset_is_not_the_codecs(model: Model, source: Source) -> None:
    """In bf16, where the offset costs something: the same KV costs nothing beside a reference that has it too."""
    model = model.for_evaluation()
    plain = measure.refer(model, cases.cases(source, PLAN)[0], PLAN.greedy_tokens)
    offset = measure.offset_of(plain.cache, CONDITIONS[2])
    assert offset is not None
    reference = measure.shifted(model, plain, offset)
    assert measure.of_reference(reference, plain)["kl"].mean() > 1e-3
    assert measure.judge(model, reference, Method("same", 0, the_same), offset)["kl"].max() < 1e-6
    assert "kl" not in measure.of_reference(plain, plain)


def test_raw_is_computed_in_other_steps(model: Model, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[int, int]] = []
    prefill = measure.prefill

    def noted(model: Model, tokens: Tensor, step_tokens: int, step_rows: int) -> Cache:
        steps.append((step_tokens, step_rows))
        return prefill(model, tokens, step_tokens, step_rows)

    monkeypatch.setattr(measure, "prefill", noted)
    judged(model, source, Method("raw", 0, None), 1)
    assert len(set(steps)) == 2


def test_right_answers_are_counted(source: Source) -> None:
    by_name = {case.name: case for case in cases.cases(source, PLAN)}
    for name, n_answers in (("copy 256", 3), ("recall 8", 4), ("needle 256", 1)):
        case = by_name[name]
        said = torch.nn.functional.one_hot(case.continuation[:, 1:], data.VOCABULARY).float()
        right = measure.answers(case, said)[name]
        assert right.shape[1] == n_answers and right.all()
        said[0, -1] = said[0, -1].roll(1)
        assert measure.answers(case, said)[name].logical_not().sum() == 1


# --- methods ---


def test_chunks_go_through_the_tiers_codec_and_back_to_their_places() -> None:
    random = torch.Generator().manual_seed(3)
    cache = Cache(*(torch.randn(2, 3, 2, 512, 64, generator=random).bfloat16() for _ in range(2)))
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
    cache = Cache(*(torch.randn(2, 2, 1, 512, 64, generator=random).bfloat16() for _ in range(2)))
    cache.v[1, 0, 0, 300, 5] = math.inf
    back, n_refused = next(method for method in methods(64) if method.name == name).apply(cache)
    assert n_refused == 1
    for plane, saved in ((back.k, cache.k), (back.v, cache.v)):
        is_same = (plane == saved).unflatten(3, (2, 256)).all(dim=-1).all(dim=-1)
        assert is_same.all(dim=0).squeeze(-2).tolist() == [[False, True], [False, False]]


def test_bytes_of_a_vector_pair_are_the_layouts() -> None:
    sizes = {method.name: method.vector_bytes for method in methods(128)}
    assert sizes["raw"] == 512 and sizes["k4v4"] == sizes["k5v3"] == 133 and sizes["k4v2"] == 101


@pytest.mark.parametrize(("bits", "error"), [(2, 0.1160), (3, 0.03397), (4, 0.00932)])
def test_algorithm_1_has_the_papers_error(bits: int, error: float) -> None:
    x = torch.randn(4096, 128, generator=torch.Generator().manual_seed(11))
    found = (controls.mse(x, bits) - x).square().sum() / x.square().sum()
    assert found.item() == pytest.approx(error, rel=0.02)


@pytest.mark.parametrize(("bits", "rough_error"), [(3, 0.1160), (4, 0.03397)])
def test_algorithm_2_is_unbiased_with_the_papers_variance(bits: int, rough_error: float) -> None:
    """Variance of <y, x'> for unit x and y: pi / (2 d) times the error of a bit less (theorem 2)."""
    random = torch.Generator().manual_seed(12)
    x, y = (torch.nn.functional.normalize(torch.randn(n, 128, generator=random), dim=-1) for n in (4096, 512))
    products, expected = controls.prod(x, bits) @ y.T, x @ y.T
    assert (products - expected).square().mean().item() == pytest.approx(math.pi / 256 * rough_error, rel=0.05)
    assert ((products * expected).mean() / expected.square().mean()).item() == pytest.approx(1, abs=0.01)
    biased = controls.mse(x, bits - 1) @ y.T
    assert ((biased * expected).mean() / expected.square().mean()).item() < 1 - rough_error / 2


# --- figures ---


def test_a_hundred_percent_is_not_certain() -> None:
    figure = summary.share([torch.ones(3, 4)])
    assert figure["value"] == figure["high"] == 1 and 0.7 < figure["low"] < 0.8


def test_a_mean_counts_rows_not_tokens() -> None:
    rows = torch.tensor([[1.0], [2.0], [3.0], [6.0]])
    narrow, wide = (summary.mean([rows.expand(4, n)]) for n in (100, 1))
    assert narrow == wide and narrow["value"] == 3


def test_a_control_is_seen_only_when_it_is_clearly_worse() -> None:
    def figures(method: str, kl: float) -> dict[str, object]:
        share = {"value": 1.0}
        return {
            "condition": "x",
            "method": method,
            "kl_mean": {"value": kl, "low": kl * 0.9, "high": kl * 1.1},
            "recall_all": share,
            "needle_all": share,
        }

    found = summary.power([figures("raw", 0.1), figures("k4v4", 1), figures("k2v2", 2.4)])
    assert [(row["method"], row["beside"], row["is_seen"]) for row in found] == [
        ("k4v4", "raw", True),
        ("k2v2", "k4v4", False),
    ]


def test_all_of_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "quality.json"
    times = ["--minutes", "0.03", "--evaluation-minutes", "20"]
    monkeypatch.setattr(sys, "argv", ["quality", "--tiny", "--device", "cpu", *times, "--out", str(out)])
    quality.main()
    result = json.loads(out.read_text())
    expected = [(condition.name, method.name) for condition in CONDITIONS for method in methods(128)]
    assert [(row["condition"], row["method"]) for row in result["rows"]] == expected
    assert result["model"]["training"]["steps"] > 0 and result["stopped"] == "" and result["reference"][0]["nll"]
    plots.kl(tmp_path / "quality.svg", result)
    ElementTree.fromstring((tmp_path / "quality.svg").read_text())
    assert "before any codec" in capsys.readouterr().out


def test_no_time_left_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "quality.json"
    times = ["--minutes", "0.01", "--evaluation-minutes", "0"]
    monkeypatch.setattr(sys, "argv", ["quality", "--tiny", "--device", "cpu", *times, "--out", str(out)])
    quality.main()
    assert json.loads(out.read_text())["stopped"].startswith("stopped for time before seed 0")
