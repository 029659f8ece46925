"""Calibration of the transform codec on models with random weights, and the text it takes."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.round_trip import bits_of, round_trip
from kvtier.cli import main
from kvtier.codecs.transform import model_statistics, texts
from kvtier.codecs.transform.calibrate import table_tensors
from kvtier.codecs.transform.model_statistics import CalibratedModel, turned_back
from kvtier.codecs.transform.table import read_table, write_table
from kvtier.codecs.transform.texts import rows_of, texts_of
from kvtier.model.weights_fingerprint import weights_fingerprint

transformers = pytest.importorskip("transformers")
SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"vocab_size": 256, "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 4096}


@pytest.fixture(autouse=True)
def short_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_statistics, "PREFIX_TOKENS", 192)
    monkeypatch.setattr(model_statistics, "TEXT_TOKENS", 16)
    monkeypatch.setitem(texts.KINDS, "prose", (".py",))


class Bytes:
    """A tokenizer of bytes."""

    def __call__(self, text: str) -> Any:
        return transformers.BatchEncoding({"input_ids": list(text.encode())})


def made(kind: str, **changes: object) -> CalibratedModel:
    torch.manual_seed(0)
    config = getattr(transformers, "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config")(
        **(SIZES | {"initializer_range": 0.15} | changes)
    )
    return CalibratedModel(getattr(transformers, f"{kind}ForCausalLM")(config).eval(), Bytes())


def base_frequencies(base: float) -> Tensor:
    return base ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)


ROW = list(Path(__file__).read_bytes()[:208])


def test_frequencies_are_measured_from_k() -> None:
    """Models have one base, or two, or K that does not turn in pairs of halves."""
    assert torch.allclose(made("Llama").frequencies(ROW), base_frequencies(1e4).expand(2, -1), atol=1e-6)
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
    bases = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
    bases["sliding_attention"] = {"rope_type": "default", "rope_theta": 1e4}
    two = made("Gemma3", **kinds, rope_parameters=bases)
    wanted = torch.stack([base_frequencies(1e4), base_frequencies(1e6)])
    assert torch.allclose(two.frequencies(ROW), wanted, atol=1e-6)
    assert not made("Cohere").frequencies(ROW).any(), "it turns neighbouring elements"


def test_k_without_its_rotary_embedding_is_that_of_any_place() -> None:
    model = made("Llama")
    frequencies = model.frequencies(ROW)
    at_0, at_500 = (turned_back(model._prefill(ROW, place)[0], frequencies, place) for place in (0, 500))
    assert (at_0 - at_500).norm() < 1e-3 * at_0.norm()


def test_a_table_of_a_model_serves_its_kv(tmp_path: Path) -> None:
    """Errors that matter little are large, so the loss is what counts: here the likelihood of what follows."""
    model = made("Llama")
    frequencies = model.frequencies(ROW)
    statistics = model.statistics([ROW, ROW[::-1]], frequencies, lambda done, total: None)
    assert statistics.k.metric.shape == (2, 1, 64, 64) and (statistics.v.power > 0).all()
    write_table(tmp_path / "table", table_tensors(*statistics, frequencies), "m", "w")
    k, v = model._prefill(ROW[:192], 0)
    errors = {}
    for preset in ("tc4", "tc3"):
        back = round_trip(k, v, preset, chunk_tokens=64, table=tmp_path / "table")
        errors[preset] = [float((x - y).norm() / x.norm()) for x, y in zip((k, v), back, strict=True)]
    assert all(high < 1.0 for high in errors["tc3"]) and errors["tc4"] < errors["tc3"]
    assert bits_of("tc3", 64) < bits_of("tc4", 64) - 0.99


def test_rows_of_each_kind_share_no_run_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "GRAM", 30)  # of bytes
    seen: set[tuple[int, ...]] = set()
    model = made("Llama")
    for kind in ("code", "dialogue"):
        rows = rows_of(texts_of(kind, model.chat), model.tokens, 2, 300, seen)
        assert [len(row) for row in rows] == [300, 300]
        assert not rows_of([bytes(row).decode() for row in rows], model.tokens, 2, 300, seen), "they were seen"
        assert (b"\nAssistant: " in bytes(rows[0])) == (kind == "dialogue")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "model"
    made("Llama")._model.save_pretrained(folder)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda folder: Bytes())
    (tmp_path / "text").write_text("".join(texts_of("code", lambda turns: "").__next__()))
    command = ["calibrate", str(folder), "--text", str(tmp_path / "text"), "--rows", "2", "--out"]
    assert main([*command, str(tmp_path / "table")]) == 0
    assert "table of model from 2 rows" in capsys.readouterr().out
    table = read_table(tmp_path / "table", "tc3")
    assert (table.model, table.weights) == ("model", weights_fingerprint(folder, None))
    (tmp_path / "text").write_text("short")
    assert main([*command, str(tmp_path / "none")]) != 0
    assert "1,280 tokens" in capsys.readouterr().err
    (bare := tmp_path / "bare").mkdir()
    (bare / "config.json").write_text("{}")
    for wrong, said in (
        ([str(tmp_path), "--out", "x"], "model = .*no config.json"),
        ([str(bare), "--out", "x"], "model = .*no weight files; name"),
        ([str(folder), "--out", str(tmp_path / "absent" / "x")], "--out = .*no folder"),  # after minutes of work
        ([str(folder), "--out", str(tmp_path)], "--out = .*it is a folder"),  # this also failed late
        ([str(folder), "--out", str(tmp_path / "x"), "--device", "cuda:99"], "--device = 'cuda:99'"),
        (
            [str(folder), "--out", str(tmp_path / "x"), "--text", str(tmp_path / "absent")],
            "'--text': file .* not",
        ),
    ):
        assert main(["calibrate", *wrong]) == 2
        assert re.search(said, capsys.readouterr().err), wrong
