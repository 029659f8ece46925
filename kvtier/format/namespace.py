"""Identity of a chunk: its namespace (everything that must match before bytes may be reused) and its chained key.

    namespace id = blake3-128(canonical JSON of Namespace)                                    16 bytes
    key of chunk i = blake3-128(key of chunk i-1 || token ids, u32 little-endian || extras)   16 bytes
                     chunk 0 chains from the namespace id

Every part of a key's input has a fixed width except the last (a namespace fixes how many tokens a chunk has), so two
different prefixes never hash the same bytes. Extras are the inputs of the engine beside tokens. A chunk's extras are
items, each

    offset size
         0    1  kind: 1 LoRA adapter, 2 multimodal item, 3 cache salt
         1    4  bytes of the fields that follow
         5    n  fields; a text field is its length (u32) and its UTF-8

in ascending order of their bytes. Keys do not depend on the engine's own block hashes.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from blake3 import blake3

from kvtier.errors import Corrupt
from kvtier.format.geometry import Geometry, LayerForm
from kvtier.format.record import FORMAT_VERSION

ID_BYTES = 16  # length of a namespace id and of a chunk key, bytes

# Fields added later: left out of the JSON when they have these values, so that ids of older namespaces stay valid.
_NO_PLAIN: dict[str, Any] = {"plain_layers": [], "plain": None}
_LATER = ("settings", "signing")  # ""
_TOKEN_BYTES = 4
_KIND_LORA, _KIND_MULTIMODAL, _KIND_SALT = 1, 2, 3


@dataclass(frozen=True, slots=True)
class CodecId:
    """Identity of a codec: equal ids encode the same KV to the same bytes."""

    name: str
    version: int
    seed: int


@dataclass(frozen=True, slots=True)
class Namespace:
    """Everything that must be equal before one engine may use KV bytes of another.

    It leaves out what does not change a chunk's KV: parallel sizes, rank, engine version, block size.

    engine: family of engines with these KV semantics ("vllm").
    weights: kvtier.model.weights_fingerprint.weights_fingerprint, or the configured model_tag.
    model_dtype: dtype of the activations; quantization: of the weights, "" for none. Both change the KV's values.
    positions: canonical_text of the positional-encoding settings (rope scaling, theta, maximum length that changes it).
    hf_overrides: canonical_text of the overrides of the model's own configuration, "" for none.
    draft: fingerprint of the draft model if its layers are cached, else "".
    epoch: changed by the user when weights change in place.
    settings: canonical_text of the engine's other settings that change KV and are not the default; "" for none.
    signing: fingerprint of the secret that signs its records (kvtier.format.signing); "" for none.
    """

    engine: str
    weights: str
    geometry: Geometry
    model_dtype: str
    quantization: str
    positions: str
    hf_overrides: str
    codec: CodecId
    draft: str
    epoch: str
    format_version: int = FORMAT_VERSION
    settings: str = ""
    signing: str = ""

    def canonical_json(self) -> str:
        """Return the text that is hashed and stored: sorted keys, no spaces, ASCII, without unused later fields."""
        values = asdict(self)
        for name in _LATER:
            if not values[name]:
                del values[name]
        if self.geometry.plain is None:
            values["geometry"] = {name: value for name, value in values["geometry"].items() if name not in _NO_PLAIN}
        return canonical_text(values)

    @property
    def id(self) -> bytes:
        """Return the 16 bytes whose hex is the name of the namespace's folder."""
        return blake3(self.canonical_json().encode("ascii")).digest(length=ID_BYTES)

    @classmethod
    def from_json(cls, text: str) -> Namespace:
        """Parse the result of canonical_json. Raises Corrupt for any other text."""
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Corrupt(f"namespace: not JSON: {error}") from None
        if isinstance(values, dict):
            values = dict.fromkeys(_LATER, "") | values
        _check_fields("namespace", cls, values)
        _check_fields("codec", CodecId, values["codec"])
        parts = {"geometry": _geometry(values["geometry"]), "codec": CodecId(**values["codec"])}
        namespace = cls(**{**values, **parts})
        if namespace.canonical_json() != text:
            raise Corrupt("namespace: its JSON is not in canonical form")
        return namespace


def canonical_text(value: Any) -> str:
    """Return JSON that is the same for equal values: sorted keys, no spaces, ASCII. Raises ValueError on NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def chunk_keys(
    namespace_id: bytes,
    tokens: Sequence[int],
    chunk_tokens: int,
    extras: Mapping[int, bytes],
    first: int = 0,
    parent: bytes | None = None,
) -> list[bytes]:
    """Return the keys of the whole chunks `first`, `first` + 1, ... of `tokens`; a partial last chunk has none.

    Args:
        tokens: all token ids of the prompt from its start, each in [0, 2^32).
        extras: chunk number -> join_extras of its items; absent: none.
        first, parent: to continue a chain: number of the first chunk, and the key of the chunk before it.

    100,000 tokens (390 chunks of 256) take 2.0 ms on one core of an AMD EPYC, most of it for converting ints to u32.
    """
    if (first == 0) != (parent is None):
        raise ValueError("a chain continues with both `first` and `parent`, or starts with neither")
    end = len(tokens) // chunk_tokens
    if first >= end:
        return []
    data = _token_bytes(tokens[first * chunk_tokens : end * chunk_tokens])
    width = chunk_tokens * _TOKEN_BYTES
    key = namespace_id if parent is None else parent
    keys = []
    for chunk in range(first, end):
        offset = (chunk - first) * width
        content = key + data[offset : offset + width]
        if chunk in extras:
            content += extras[chunk]
        key = blake3(content).digest(length=ID_BYTES)
        keys.append(key)
    return keys


def lora_extra(name: str, fingerprint: str) -> bytes:
    """Pack the item of a LoRA adapter. Only the first chunk needs it: later keys chain from that chunk."""
    return _item(_KIND_LORA, _text(name) + _text(fingerprint))


def multimodal_extra(identifier: str, offset_tokens: int, length_tokens: int) -> bytes:
    """Pack the item of one image, audio or video whose placeholders overlap the chunk.

    Args:
        identifier: hash of the content and of the options of its processing.
        offset_tokens: of its first placeholder from the chunk's first token; negative if it is in an earlier chunk.
        length_tokens: number of its placeholders.
    """
    return _item(_KIND_MULTIMODAL, _text(identifier) + struct.pack("<qq", offset_tokens, length_tokens))


def salt_extra(salt: str) -> bytes:
    """Pack the item of a cache salt (a tenant). Only the first chunk needs it: later keys chain from that chunk."""
    return _item(_KIND_SALT, _text(salt))


def join_extras(items: Iterable[bytes]) -> bytes:
    """Join the items of a chunk, in any order. No items: b""."""
    return b"".join(sorted(items))


def _token_bytes(tokens: Sequence[int]) -> bytes:
    words = array("I", tokens)
    if sys.byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _text(text: str) -> bytes:
    data = text.encode("utf-8")
    return struct.pack("<I", len(data)) + data


def _item(kind: int, body: bytes) -> bytes:
    return struct.pack("<BI", kind, len(body)) + body


def _geometry(values: object) -> Geometry:
    """Build a geometry from its part of canonical_json. Raises Corrupt for any other value."""
    is_alike = isinstance(values, dict) and values.keys().isdisjoint(_NO_PLAIN)
    found: Any = {**values, **_NO_PLAIN} if is_alike else values  # type: ignore[dict-item]
    _check_fields("geometry", Geometry, found)
    layers, plain = found["plain_layers"], found["plain"]
    if not isinstance(layers, list) or any(type(number) is not int for number in layers):
        raise Corrupt("geometry: plain_layers are not whole numbers")
    if plain is not None:
        _check_fields("plain", LayerForm, plain)
        plain = LayerForm(**plain)
    try:
        return Geometry(**{**found, "plain_layers": tuple(layers), "plain": plain})
    except ValueError as error:
        raise Corrupt(f"geometry: {error}") from None


def _check_fields(what: str, cls: Any, values: object) -> None:
    """Raise Corrupt unless `values` is a mapping with exactly the fields of the dataclass, ints and strings typed."""
    if not isinstance(values, dict):
        raise Corrupt(f"{what}: not a mapping")
    expected = {field.name: field.type for field in fields(cls)}
    if set(values) != set(expected):
        raise Corrupt(f"{what}: fields {sorted(set(values) ^ set(expected))} are missing or not known")
    for name, kind in expected.items():
        if kind == "int" and type(values[name]) is not int:
            raise Corrupt(f"{what}: {name} is not a whole number")
        if kind in ("str", "AttentionKind") and not isinstance(values[name], str):
            raise Corrupt(f"{what}: {name} is not a text")
