"""Headers of safetensors files: what the library accepts is read alike, and every lie is refused."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from kvtier.errors import Corrupt
from kvtier.model.safetensors import (
    DTYPE_BITS,
    HEADER_BYTES_MAX,
    INDEX,
    Header,
    header_size,
    parse_header,
    read_header,
    read_index,
)


def file_of(header: object, n_bytes: int, pad: int = 0) -> bytes:
    text = (header if isinstance(header, bytes) else json.dumps(header).encode()) + b" " * pad
    return struct.pack("<Q", len(text)) + text + bytes(n_bytes)


def parse(content: bytes) -> Header:
    n_bytes = header_size(content[:8], len(content))
    return parse_header(content[8 : 8 + n_bytes], len(content))


def entry(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


A, B = entry("BF16", [2, 3], 0, 12), entry("F32", [], 12, 16)


@st.composite
def valid_files(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """A header of tensors of all dtypes, also empty and 0-d ones, in any order of names; and its data's size."""
    header: dict[str, Any] = {}
    at = 0
    for name in draw(st.lists(st.text(max_size=8).filter(lambda x: x != "__metadata__"), unique=True, max_size=6)):
        dtype = draw(st.sampled_from(sorted(DTYPE_BITS)))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        if DTYPE_BITS[dtype] < 8:
            shape.append(4)
        bits = DTYPE_BITS[dtype]
        for size in shape:
            bits *= size
        header[name] = entry(dtype, shape, at, at + bits // 8)
        at += bits // 8
    items = draw(st.permutations(list(header.items())))
    return dict(items), at


def taken_by_the_library(content: bytes) -> dict[str, tuple[str, tuple[int, ...], int]] | None:
    try:
        found = deserialize(content)
    except SafetensorError:
        return None
    return {name: (value["dtype"], tuple(value["shape"]), len(value["data"])) for name, value in found}


def taken_by_us(content: bytes) -> dict[str, tuple[str, tuple[int, ...], int]] | None:
    try:
        found = parse(content)
    except Corrupt:
        return None
    return {name: (tensor.dtype, tensor.shape, tensor.n_bytes) for name, tensor in found.tensors.items()}


@given(valid_files(), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_valid_files_are_read_as_the_library_does(file: tuple[dict[str, Any], int], pad: int) -> None:
    content = file_of(*file, pad)
    assert taken_by_us(content) == taken_by_the_library(content) is not None


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(valid_files(), st.data())
@settings(max_examples=150, deadline=None)
def test_nothing_is_taken_that_the_library_refuses(file: tuple[dict[str, Any], int], data: st.DataObject) -> None:
    """One value of a valid header is replaced by any JSON, or one byte by any other."""
    header, n_bytes = file
    content = bytearray(file_of(header, n_bytes))
    if header and data.draw(st.booleans()):
        tensor = header[data.draw(st.sampled_from(sorted(header)))]
        key = data.draw(st.sampled_from(sorted(tensor)))
        near = st.lists(st.integers(-2, 1 << 66) | st.integers(0, 64), max_size=3)
        tensor[key] = data.draw(JSON_VALUES | near | st.sampled_from(sorted(DTYPE_BITS)))
        content = bytearray(file_of(header, n_bytes))
    else:
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    ours = taken_by_us(bytes(content))
    assert ours is None or ours == taken_by_the_library(bytes(content))


LIES: dict[str, tuple[object, int]] = {
    "beyond the file": ({"a": A, "b": B}, 15),
    "bytes behind the last tensor": ({"a": A, "b": B}, 17),
    "overlap": ({"a": A, "b": entry("F32", [], 8, 12)}, 12),
    "hole": ({"a": A, "b": entry("F32", [], 16, 20)}, 20),
    "same bytes twice": ({"a": A, "b": A}, 12),
    "too few bytes for the shape": ({"a": entry("BF16", [2, 4], 0, 12)}, 12),
    "too many bytes for the shape": ({"a": entry("BF16", [5], 0, 12)}, 12),
    "half a byte": ({"a": entry("F4", [3], 0, 1)}, 1),
    "shape of 2^63": ({"a": entry("U8", [1 << 63], 0, 1 << 63)}, 0),
    "product of 2^64": ({"a": entry("U8", [1 << 32, 1 << 32], 0, 0)}, 0),
    "empty by 0 x 2^63": ({"a": entry("U8", [0, 1 << 63], 0, 0)}, 0),
    "empty by 2^62 x 2^62 x 0": ({"a": entry("U8", [1 << 62, 1 << 62, 0], 0, 0)}, 0),
    "offsets that decrease": ({"a": entry("U8", [], 1, 0)}, 1),
    "negative shape": ({"a": entry("U8", [-1, -4], 0, 4)}, 4),
    "float shape": ({"a": {"dtype": "U8", "shape": [4.0], "data_offsets": [0, 4]}}, 4),
    "true as a size": ({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, 1),
    "unknown dtype": ({"a": entry("F3", [8], 0, 3)}, 3),
    "a list as dtype": ({"a": {"dtype": [], "shape": [1], "data_offsets": [0, 1]}}, 1),
    "three offsets": ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1, 1]}}, 1),
    "no shape": ({"a": {"dtype": "U8", "data_offsets": [0, 1]}}, 1),
    "a string as a tensor": ({"a": "dtype"}, 0),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, 0),
    "key twice": (b'{"a":' + json.dumps(A).encode() + b',"a":' + json.dumps(A).encode() + b"}", 12),
    "key twice in a tensor": (b'{"a":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}}', 1),
    "a key twice, and a tensor without one": (
        b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[0]}}',
        1,
    ),
    "list": ([], 0),
    "list of numbers": ([1], 0),
    "metadata that is a list": ({"__metadata__": [1], "a": entry("U8", [1], 0, 1)}, 1),
    "not UTF-8": (b'{"\xff":{}}', 0),
    "half a surrogate pair": (b'{"\\ud800":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}', 1),
    "nothing": (b"", 0),
    "nested bomb": (b'{"a":' + b"[" * 1_000_000, 0),
    "number bomb": (b'{"a":{"dtype":"U8","shape":[' + b"9" * 1_000_000 + b'],"data_offsets":[0,1]}}', 1),
    "NaN beside": (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":NaN}}', 1),
    "infinity": (b'{"a":{"dtype":"U8","shape":[Infinity],"data_offsets":[0,1]}}', 1),
}


@pytest.mark.parametrize(("header", "n_bytes"), LIES.values(), ids=LIES)
def test_lies_are_refused(header: object, n_bytes: int) -> None:
    with pytest.raises(Corrupt):
        parse(file_of(header, n_bytes))


@pytest.mark.parametrize("n_bytes", [HEADER_BYTES_MAX + 1, 1 << 63, (1 << 64) - 1])
def test_the_length_of_a_header_is_not_believed(tmp_path: Path, n_bytes: int) -> None:
    (tmp_path / "x").write_bytes(struct.pack("<Q", n_bytes) + b"{}")
    with pytest.raises(Corrupt, match=f"x is not a whole safetensors file: a header of {n_bytes} bytes"):
        read_header(tmp_path / "x")


@pytest.mark.parametrize("content", [b"", b"\x02\0\0\0", struct.pack("<Q", 100) + b"{}"])
def test_short_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(Corrupt, match="x is not a whole safetensors file"):
        read_header(tmp_path / "x")


def test_errors_name_the_remedy(tmp_path: Path) -> None:
    """A clone without Git LFS has pointers in place of files. An error about a repeated key names the key."""
    (tmp_path / "x").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n")
    with pytest.raises(Corrupt, match="git lfs pull"):
        read_header(tmp_path / "x")
    with pytest.raises(Corrupt, match="the key b stands twice"):
        parse(file_of(b'{"a":' + json.dumps(A).encode() + b',"b":{},"b":{}}', 12))


def test_a_dtype_of_later_releases(tmp_path: Path) -> None:
    """The error names it: the file may be whole, and the same again is of no use."""
    (tmp_path / "x").write_bytes(file_of({"a": {"dtype": "I4", "shape": [2], "data_offsets": [0, 1]}}, 1))
    with pytest.raises(Corrupt, match="x cannot be read: tensor a is of dtype I4, which this kvtier does not know$"):
        read_header(tmp_path / "x")


def test_metadata_of_null(tmp_path: Path) -> None:
    content = file_of({"__metadata__": None, "a": A}, 12)
    assert parse(content).metadata == {} and taken_by_us(content) == taken_by_the_library(content) is not None


def test_offsets_count_from_the_beginning_of_the_file(tmp_path: Path) -> None:
    content = file_of({"b": B, "a": A, "__metadata__": {"format": "pt"}}, 16)
    (tmp_path / "x").write_bytes(content)
    tensors, metadata = read_header(tmp_path / "x")
    begin = len(content) - 16
    assert metadata == {"format": "pt"}
    assert list(tensors.items()) == [
        ("a", ("BF16", (2, 3), begin, begin + 12)),
        ("b", ("F32", (), begin + 12, begin + 16)),
    ]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{}",
        b'{"weight_map": []}',
        b'{"weight_map": {}, "metadata": []}',
        b'{"weight_map": {"a": "' + b"x" * 256 + b'"}}',
        b"[" * 100_000,
    ],
)
def test_an_index_that_is_malformed(tmp_path: Path, content: bytes) -> None:
    assert read_index(tmp_path) == {}
    (tmp_path / INDEX).write_bytes(content)
    with pytest.raises(Corrupt, match="not an index of safetensors files"):
        read_index(tmp_path)
