"""`kvtier check --model DIR`: check whether kvtier serves a model with these settings."""

from __future__ import annotations

from pathlib import Path

from kvtier.config.capacity import few_sets
from kvtier.config.settings import Settings
from kvtier.errors import ConfigError
from kvtier.format.geometry import share_of_rank
from kvtier.model.config_json import read_model
from kvtier.runtime.units import size
from kvtier.storage.root import check_space

ON_ONE_RANK = " on one rank"


def look_at_model(settings: Settings, folder: Path) -> tuple[str, str]:
    """Return the sizes of a chunk and a segment set of the model on one rank, and a warning or "". Raises ConfigError
    if an engine would not start."""
    from kvtier.build import make_codec, set_shape  # with torch, which takes seconds

    model = read_model(folder)
    if 0 < model.max_tokens < settings.chunk_tokens:
        fix = f"only whole chunks are stored, and the model's longest context is {model.max_tokens} tokens"
        raise ConfigError("chunk_tokens", settings.chunk_tokens, f"{fix}: set it to less")
    codec = make_codec(settings)
    geometry = model.geometry("auto", settings.chunk_tokens)
    codec.check(geometry)
    shares = (share_of_rank(geometry, 0, 1, 0, range(geometry.layers)),)
    shape = set_shape(settings, geometry, codec, shares)
    settings.check_capacity(shape.set_bytes, shape.slots)
    check_space(settings.root, shape.set_bytes)
    served = (
        f"{model.family} of {model.layers} layers, served: a segment set has {shape.slots} chunks of "
        f"{settings.chunk_tokens} tokens and {size(shape.set_bytes)}{ON_ONE_RANK}"
    )
    return served, few_sets(settings.capacity_bytes, shape.set_bytes, shape.slots, ON_ONE_RANK)
