"""benchmarks.quality on a model with random weights: presets lose in the order of their bits, and rows are distinct."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks import quality
from benchmarks.quality import Amount, PrefixKV, interval, measure, rows_of, uniform
from benchmarks.round_trip import bits_of
from kvtier.codecs.transform import model_statistics, texts


class ByteModel(quality.Model):
    """A Llama of two layers that reads bytes."""

    def __init__(self) -> None:
        transformers = pytest.importorskip("transformers")
        torch.manual_seed(0)
        sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
        config = transformers.LlamaConfig(vocab_size=256, num_key_value_heads=1, initializer_range=0.15, **sizes)
        self.folder, self._make_cache = Path("bytes"), transformers.DynamicCache
        self._model, self._needs_bos = transformers.LlamaForCausalLM(config).eval(), False
        self._model.requires_grad_(False)
        self.tokenizer, self.device = None, "cpu"
        self.rope_base = 10_000.0

    def ids(self, text: str, is_start: bool = False) -> list[int]:
        return list(text.encode())


@pytest.fixture(autouse=True)
def short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality, "PREFIX_TOKENS", 256)
    monkeypatch.setattr(quality, "RECALL_TOKENS", (256 * 12,))
    monkeypatch.setattr(quality, "TEXT_TOKENS", 16)
    monkeypatch.setattr(quality, "GREEDY_TOKENS", 4)
    monkeypatch.setattr(quality, "KINDS", ("code", "prose"))
    monkeypatch.setattr(quality, "RESAMPLES", 200)
    monkeypatch.setattr(texts, "KINDS", dict.fromkeys(("code", "prose", "dialogue"), (".py",)))
    monkeypatch.setattr(texts, "GRAM", 30)  # of bytes
    monkeypatch.setattr(model_statistics, "PREFIX_TOKENS", 256)
    monkeypatch.setattr(model_statistics, "TEXT_TOKENS", 16)


def test_presets_lose_in_the_order_of_their_bits() -> None:
    presets = ("raw", "int8", "k4v4")
    found = measure(ByteModel(), presets, Amount(2, 1, 2))["presets"]
    raw, int8, k4v4 = (found[preset]["kl_mean"]["value"] for preset in presets)
    assert 0 < raw < k4v4 and int8 < k4v4 / 10
    assert [found[preset]["greedy"]["answers"] for preset in presets] == [4, 4, 4]
    assert found["raw"]["recall"]["3072"]["asked"] == 8
    assert found["int8"]["bits"] == bits_of("int8", 64) < 8.4
    again = measure(ByteModel(), ("int8",), Amount(2, 0, 0))["presets"]
    assert again["int8"]["kl_mean"] == found["int8"]["kl_mean"], "the same rows"


def test_controls_lose_more_than_their_presets(tmp_path: Path) -> None:
    """The second run takes its rows from the file that the first wrote."""
    amount, file = Amount(1, 0, 0, 1), tmp_path / "rows"
    found = measure(ByteModel(), ("tc4", "k4v4", *quality.ALL_CONTROLS), amount, file)["presets"]
    losses = {name: one["kl_mean"]["value"] for name, one in found.items()}
    assert len(set(losses.values())) == len(losses)
    assert losses["tc4 no-gradients"] > losses["tc4"]
    again = measure(ByteModel(), ("k4v4",), Amount(2, 2, 0, 2), file)
    assert again["rows_of_a_kind"] == 1 and again["presets"]["k4v4"]["kl_mean"]["value"] == losses["k4v4"]


def test_rows_share_no_run_of_tokens() -> None:
    seen: set[tuple[int, ...]] = set()
    rows = rows_of("code", ByteModel(), 3, 300, seen)
    grams = [{tuple(row[i : i + texts.GRAM]) for i in range(len(row) - texts.GRAM + 1)} for row in rows]
    assert not grams[0] & grams[1] and not grams[1] & grams[2] and set.union(*grams) == seen


def test_an_interval_holds_its_value_and_narrows_with_rows() -> None:
    draw = np.random.default_rng(1)
    few, many = (interval(list(draw.normal(1, 1, (n, 8))), lambda x: float(x.mean())) for n in (4, 100))
    assert few["low"] < few["value"] < few["high"] and many["high"] - many["low"] < few["high"] - few["low"]


def test_kivi_has_sixteen_levels_a_group() -> None:
    x = torch.randn(1, 1, 32, 64)
    back: Tensor = uniform(x, 2)
    assert all(len(back[0, 0, :, n].unique()) <= 16 for n in range(64))
    assert float((back - x).abs().max()) < 0.3


def test_raw_is_what_bf16_holds() -> None:
    x = torch.randn(1, 1, 256, 64)
    assert torch.equal(PrefixKV(x, x).through("raw", 0.0).k, x.bfloat16().float())
