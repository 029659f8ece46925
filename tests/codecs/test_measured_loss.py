"""Figures of what the codecs lose, as `kvtier plan` and an engine's log give them: those of benchmarks/results."""

import json
from pathlib import Path
from typing import get_args

import pytest

from kvtier.codecs.measured_loss import KL_NATS, MODELS, loss_text, losses_line
from kvtier.config.settings import Settings

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "quality"


def test_each_lossy_codec_says_on_what_it_was_measured() -> None:
    assert {"raw", *KL_NATS} == set(get_args(Settings.model_fields["codec"].annotation))
    assert loss_text("raw") == "" == losses_line(["raw"])
    assert loss_text("int8").startswith("codec int8 is lossy") and "SmolLM2-135M" in loss_text("int8")
    assert all(len(figures) == len(MODELS) for figures in KL_NATS.values())


@pytest.mark.parametrize("codec", KL_NATS)
def test_losses_are_those_of_the_results(codec: str) -> None:
    results = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    found = {result["model"]: float(f"{result['presets'][codec]['kl_mean']['value']:.1e}") for result in results}
    assert dict(zip(MODELS, KL_NATS[codec], strict=True)) == found
