"""Chunk keys: chained, continued and injective."""

import struct

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvtier.format.namespace import chunk_keys, join_extras, lora_extra, multimodal_extra, salt_extra

NAMESPACE = bytes(range(16))
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=200)


def reference(tokens: list[int], chunk_tokens: int, extras: dict[int, bytes]) -> list[bytes]:
    """The definition in the module's docstring, word by word."""
    keys, key = [], NAMESPACE
    for chunk in range(len(tokens) // chunk_tokens):
        words = tokens[chunk * chunk_tokens : (chunk + 1) * chunk_tokens]
        key = blake3(key + struct.pack(f"<{chunk_tokens}I", *words) + extras.get(chunk, b"")).digest()[:16]
        keys.append(key)
    return keys


@given(TOKENS, st.dictionaries(st.integers(0, 12), st.binary(max_size=20)))
def test_keys_are_as_defined(tokens: list[int], extras: dict[int, bytes]) -> None:
    assert chunk_keys(NAMESPACE, tokens, 16, extras) == reference(tokens, 16, extras)


@given(TOKENS, st.integers(0, 14))
def test_a_chain_is_continued(tokens: list[int], first: int) -> None:
    keys = chunk_keys(NAMESPACE, tokens, 16, {3: b"x"})
    if 0 < first <= len(keys):
        assert chunk_keys(NAMESPACE, tokens, 16, {3: b"x"}, first, keys[first - 1]) == keys[first:]


def test_pinned_key() -> None:
    """A change here would orphan everything that is stored: it needs a new format version."""
    extras = {0: join_extras([salt_extra("tenant"), lora_extra("a", "f")]), 1: multimodal_extra("img", -3, 40)}
    keys = chunk_keys(NAMESPACE, list(range(40)), 16, extras)
    assert [key.hex() for key in keys] == ["974d92d7fee638e3664f9e8c280f7a74", "cc5f11dc9078f7014a033e351d4bb38a"]


@given(TOKENS, TOKENS)
def test_keys_agree_exactly_on_the_common_prefix(left: list[int], right: list[int]) -> None:
    common = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    pairs = zip(chunk_keys(NAMESPACE, left, 16, {}), chunk_keys(NAMESPACE, right, 16, {}), strict=False)
    assert [a == b for a, b in pairs] == [
        (chunk + 1) * 16 <= common for chunk in range(min(len(left), len(right)) // 16)
    ]


def test_namespace_tokens_and_extras_all_matter() -> None:
    tokens = list(range(64))
    variants = [
        chunk_keys(NAMESPACE, tokens, 16, {}),
        chunk_keys(NAMESPACE[::-1], tokens, 16, {}),
        chunk_keys(NAMESPACE, [1, 0, *tokens[2:]], 16, {}),
        chunk_keys(NAMESPACE, tokens, 16, {0: salt_extra("a")}),
        chunk_keys(NAMESPACE, tokens, 16, {0: salt_extra("b")}),
        chunk_keys(NAMESPACE, tokens, 16, {0: lora_extra("a", "")}),
    ]
    assert len({keys[-1] for keys in variants}) == len(variants)  # also far behind the difference
    late = chunk_keys(NAMESPACE, tokens, 16, {2: salt_extra("a")})
    assert late[:2] == variants[0][:2] and not set(late[2:]) & set(variants[0])


ITEMS = st.one_of(
    st.builds(lora_extra, st.text(max_size=4), st.text(max_size=4)),
    st.builds(multimodal_extra, st.text(max_size=4), st.integers(-99, 99), st.integers(0, 99)),
    st.builds(salt_extra, st.text(max_size=4)),
)


@given(st.lists(ITEMS, max_size=4), st.lists(ITEMS, max_size=4))
def test_extras_are_injective_and_without_order(left: list[bytes], right: list[bytes]) -> None:
    assert (join_extras(left) == join_extras(right)) == (sorted(left) == sorted(right))


def test_fields_do_not_run_into_each_other() -> None:
    assert lora_extra("ab", "c") != lora_extra("a", "bc")
    assert join_extras([salt_extra("a"), salt_extra("b")]) != join_extras([salt_extra("ab")])
    assert multimodal_extra("i", 0, 5) != multimodal_extra("i", 5, 0)


def test_partial_chunks_have_no_key() -> None:
    assert chunk_keys(NAMESPACE, list(range(15)), 16, {}) == []
    assert len(chunk_keys(NAMESPACE, list(range(47)), 16, {})) == 2
    keys = chunk_keys(NAMESPACE, list(range(32)), 16, {})
    assert chunk_keys(NAMESPACE, list(range(40)), 16, {}, 2, keys[1]) == []


@pytest.mark.parametrize("tokens", [[-1] * 16, [2**32] * 16])
def test_tokens_out_of_range(tokens: list[int]) -> None:
    with pytest.raises(OverflowError):
        chunk_keys(NAMESPACE, tokens, 16, {})


def test_a_chain_is_not_continued_by_halves() -> None:
    with pytest.raises(ValueError):
        chunk_keys(NAMESPACE, list(range(32)), 16, {}, first=1)
    with pytest.raises(ValueError):
        chunk_keys(NAMESPACE, list(range(32)), 16, {}, parent=NAMESPACE)
