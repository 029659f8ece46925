"""Loss of int8 and tc4 on a trained model, with short rows: KVTIER_QUALITY_MODEL is the folder of SmolLM2-135M."""

import os
from pathlib import Path

import pytest
import torch

from benchmarks import quality
from benchmarks.quality import Amount, Model, measure
from kvtier.codecs.transform import model_statistics

FOLDER = os.environ.get("KVTIER_QUALITY_MODEL")


@pytest.mark.skipif(FOLDER is None, reason="no trained model here")
def test_losses_stay_what_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (quality, model_statistics):
        monkeypatch.setattr(module, "PREFIX_TOKENS", 256)
        monkeypatch.setattr(module, "TEXT_TOKENS", 64)
    with torch.no_grad():
        found = measure(Model(Path(str(FOLDER))), ("int8", "tc4"), Amount(1, 0, 0, 1))["presets"]
    losses = [found[preset]["kl_mean"]["value"] for preset in ("int8", "tc4")]
    assert losses[0] < 2e-4 and losses[1] < 5e-3, losses
