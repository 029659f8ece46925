"""The namespace: every part of it matters, and its JSON is exact."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from kvtier.errors import Corrupt
from kvtier.geometry import Geometry
from kvtier.identity import CodecId, Namespace, canonical_text

GEOMETRY = Geometry(8, 4, 128, 128, "bfloat16", 2, "heads", 256)
NAMESPACE = Namespace(
    engine="vllm",
    weights="5f1e",
    geometry=GEOMETRY,
    model_dtype="bfloat16",
    quantization="",
    positions=canonical_text({"rope_theta": 10000.0}),
    hf_overrides="",
    codec=CodecId("raw", 1, 0),
    draft="",
    epoch="0",
)


def other(value: object) -> Any:
    return {"heads": "mla"}.get(value, value + "x") if isinstance(value, str) else value + 1  # type: ignore[operator]


def every_change() -> list[tuple[str, Namespace]]:
    found = []
    for field in dataclasses.fields(Namespace):
        value = getattr(NAMESPACE, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            for below in dataclasses.fields(value):
                changed = dataclasses.replace(value, **{below.name: other(getattr(value, below.name))})
                found.append((f"{field.name}.{below.name}", dataclasses.replace(NAMESPACE, **{field.name: changed})))
        else:
            found.append((field.name, dataclasses.replace(NAMESPACE, **{field.name: other(value)})))
    return found


def test_every_part_changes_the_id() -> None:
    changed = every_change()
    assert len(changed) == 9 + 8 + 3  # its own fields, those of the geometry, those of the codec
    ids = {namespace.id for _, namespace in changed} | {NAMESPACE.id}
    assert len(ids) == len(changed) + 1


def test_id_is_pinned() -> None:
    """A change of the canonical form would orphan everything that is stored: it needs a new format version."""
    assert NAMESPACE.id.hex() == "390e4541ea1fd088e3b3f6bfde6a2b08"


def test_equal_values_have_one_canonical_form() -> None:
    assert canonical_text({"b": 1, "a": [1.0, None, "é"]}) == canonical_text({"a": [1.0, None, "é"], "b": 1})
    assert canonical_text({"b": 1, "a": "é"}) == '{"a":"\\u00e9","b":1}'
    with pytest.raises(ValueError):
        canonical_text(float("nan"))


@pytest.mark.parametrize("namespace", [NAMESPACE, *(namespace for _, namespace in every_change())])
def test_round_trip(namespace: Namespace) -> None:
    assert Namespace.from_json(namespace.canonical_json()) == namespace


@pytest.mark.parametrize(
    "damage",
    [
        lambda values: values.pop("epoch"),
        lambda values: values.update(colour="red"),
        lambda values: values["geometry"].pop("layers"),
        lambda values: values["geometry"].update(layers="8"),
        lambda values: values["geometry"].update(layers=True),
        lambda values: values["codec"].update(version=1.0),
        lambda values: values.update(codec="raw"),
        lambda values: values.update(weights=None),
    ],
)
def test_damaged_json_is_corrupt(damage: Any) -> None:
    values = json.loads(NAMESPACE.canonical_json())
    damage(values)
    with pytest.raises(Corrupt):
        Namespace.from_json(canonical_text(values))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", NAMESPACE.canonical_json() + " ", "\ud800"])
def test_other_text_is_corrupt(text: str) -> None:
    with pytest.raises(Corrupt):
        Namespace.from_json(text)
