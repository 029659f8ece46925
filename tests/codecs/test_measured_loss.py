"""Figures of what the codecs lose, as `kvtier plan` and an engine's log give them."""

from __future__ import annotations

from typing import get_args

from kvtier.codecs.measured_loss import KL_NATS, MODELS, loss_text, losses_line
from kvtier.config.settings import Settings


def test_each_lossy_codec_says_on_what_it_was_measured() -> None:
    assert {"raw", *KL_NATS} == set(get_args(Settings.model_fields["codec"].annotation))
    assert loss_text("raw") == "" == losses_line(["raw"])
    assert loss_text("int8").startswith("codec int8 is lossy") and "SmolLM2-135M" in loss_text("int8")
    assert all(len(figures) == len(MODELS) for figures in KL_NATS.values())
