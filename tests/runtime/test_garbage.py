"""Pausing Python's garbage collector."""

import gc
import json
from typing import Any

import pytest

from kvtier.model.safetensors import parse_header
from kvtier.runtime.garbage import paused_collection


def test_it_goes_on_afterwards() -> None:
    with pytest.raises(KeyError), paused_collection():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_it_stays_off_where_it_was_off() -> None:
    gc.disable()
    try:
        with paused_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_headers_of_many_tensors_are_read_without_a_full_collection(monkeypatch: pytest.MonkeyPatch) -> None:
    header = {f"t{n}": {"dtype": "U8", "shape": [1], "data_offsets": [n, n + 1]} for n in range(20_000)}
    text = json.dumps(header).encode()
    seen: list[dict[str, Any]] = []

    def collected(phase: str, info: dict[str, Any]) -> None:
        seen.append(info)

    gc.collect()  # what earlier tests left might be due for a full collection
    gc.callbacks.append(collected)
    try:
        parse_header(text, None)
    finally:
        gc.callbacks.remove(collected)
    assert not [info for info in seen if info["generation"] == 2]
