"""The namespace: every part of it matters, and its JSON is exact."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from kvtier.errors import Corrupt
from kvtier.format.geometry import Geometry, LayerForm
from kvtier.format.namespace import CodecId, Namespace, canonical_text

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


MIXED = dataclasses.replace(
    NAMESPACE,
    geometry=Geometry(8, 4, 134, 0, "turboquant_4bit_nc", 1, "heads", 256, (0, 7), LayerForm(128, 128, "bfloat16", 2)),
)
"""Of an engine that leaves its first and last layer out when it quantizes its KV."""


def other(value: object) -> Any:
    return {"heads": "mla"}.get(value, value + "x") if isinstance(value, str) else value + 1  # type: ignore[operator]


def every_change() -> list[tuple[str, Namespace]]:
    found = []
    for field in dataclasses.fields(Namespace):
        value = getattr(NAMESPACE, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            for below in dataclasses.fields(value):
                if below.name in ("plain_layers", "plain"):
                    continue  # neither without the other: below
                changed = dataclasses.replace(value, **{below.name: other(getattr(value, below.name))})
                found.append((f"{field.name}.{below.name}", dataclasses.replace(NAMESPACE, **{field.name: changed})))
        else:
            found.append((field.name, dataclasses.replace(NAMESPACE, **{field.name: other(value)})))
    return found


def test_every_part_changes_the_id() -> None:
    changed = every_change()
    assert len(changed) == 11 + 8 + 3  # its own fields, those of the geometry, those of the codec
    ids = {namespace.id for _, namespace in changed} | {NAMESPACE.id}
    assert len(ids) == len(changed) + 1


def test_every_part_of_plain_layers_changes_the_id() -> None:
    geometry, form = MIXED.geometry, MIXED.geometry.plain
    assert form is not None
    forms = [
        dataclasses.replace(form, **{field.name: other(getattr(form, field.name))})
        for field in dataclasses.fields(form)
    ]
    changed = [dataclasses.replace(geometry, plain=changed) for changed in forms]
    changed.append(dataclasses.replace(geometry, plain_layers=(0, 6)))
    changed.append(dataclasses.replace(geometry, plain_layers=(), plain=None))
    assert len({dataclasses.replace(MIXED, geometry=each).id for each in [geometry, *changed]}) == 4 + 3


def test_id_is_pinned() -> None:
    """A change of the canonical form would orphan everything that is stored: it needs a new format version."""
    assert NAMESPACE.id.hex() == "8b2a1470bc7c2d8e1635528cdc1e3840"


def test_plain_settings_are_not_in_the_canonical_form() -> None:
    """Or every namespace from before there were any would be another one."""
    assert "settings" not in NAMESPACE.canonical_json()
    explicit = canonical_text(json.loads(NAMESPACE.canonical_json()) | {"settings": ""})
    with pytest.raises(Corrupt, match="canonical form"):
        Namespace.from_json(explicit)


def test_equal_values_have_one_canonical_form() -> None:
    assert canonical_text({"b": 1, "a": [1.0, None, "é"]}) == canonical_text({"a": [1.0, None, "é"], "b": 1})
    assert canonical_text({"b": 1, "a": "é"}) == '{"a":"\\u00e9","b":1}'
    with pytest.raises(ValueError):
        canonical_text(float("nan"))


@pytest.mark.parametrize("namespace", [NAMESPACE, MIXED, *(namespace for _, namespace in every_change())])
def test_round_trip(namespace: Namespace) -> None:
    assert Namespace.from_json(namespace.canonical_json()) == namespace


DAMAGES: list[Callable[[dict[str, Any]], object]] = [
    lambda values: values.pop("epoch"),
    lambda values: values.update(colour="red"),
    lambda values: values["geometry"].pop("layers"),
    lambda values: values["geometry"].update(layers="8"),
    lambda values: values["geometry"].update(layers=True),
    lambda values: values["codec"].update(version=1.0),
    lambda values: values.update(codec="raw"),
    lambda values: values.update(weights=None),
]
OF_PLAIN_LAYERS: list[Callable[[dict[str, Any]], object]] = [
    lambda values: values["geometry"].pop("plain"),
    lambda values: values["geometry"].pop("plain_layers"),
    lambda values: values["geometry"].update(plain=None),
    lambda values: values["geometry"].update(plain_layers=[]),
    lambda values: values["geometry"].update(plain_layers=[], plain=None),
    lambda values: values["geometry"].update(plain_layers="07"),
    lambda values: values["geometry"].update(plain_layers=[0, "7"]),
    lambda values: values["geometry"].update(plain=[128, 128, "bfloat16", 2]),
    lambda values: values["geometry"]["plain"].pop("dtype"),
    lambda values: values["geometry"]["plain"].update(k_head_size="128"),
]


@pytest.mark.parametrize(
    ("of", "damage"), [*((NAMESPACE, damage) for damage in DAMAGES), *((MIXED, damage) for damage in OF_PLAIN_LAYERS)]
)
def test_damaged_json_is_corrupt(of: Namespace, damage: Callable[[dict[str, Any]], object]) -> None:
    values = json.loads(of.canonical_json())
    damage(values)
    with pytest.raises(Corrupt):
        Namespace.from_json(canonical_text(values))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", NAMESPACE.canonical_json() + " ", "\ud800"])
def test_other_text_is_corrupt(text: str) -> None:
    with pytest.raises(Corrupt):
        Namespace.from_json(text)
