"""Tenants with different cache salts share nothing, and what one asks for is answered the same whatever others
stored."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.format.namespace import chunk_keys, join_extras, lora_extra, salt_extra
from kvtier.runtime import metrics as names
from tests.support.rig import Engine

TOKENS = list(range(1000, 1000 + 64 * 3))
BLOCKS, TARGET = list(range(12)), list(range(100, 112))
SALTS = ("", "a", "b", "ab", "a\0", "A", "\u00e1", "a\u0301")


class SaltedEngine(Engine):
    """Whose requests bring `salt`."""

    salt = ""

    def keys(self, tokens: Sequence[int]) -> list[bytes]:
        extras = {0: join_extras([salt_extra(self.salt)])} if self.salt else {}
        return chunk_keys(self.store.namespace_id, tokens, self.shape.chunk_tokens, extras)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[SaltedEngine]:
    engine = SaltedEngine(tmp_path)
    yield engine


@pytest.mark.parametrize(("owner", "other"), [*itertools.permutations(("", "a", "b"), 2)])
def test_the_same_prompt_of_another_tenant_is_not_found(engine: SaltedEngine, owner: str, other: str) -> None:
    engine.salt = owner
    assert len(engine.save(TOKENS, BLOCKS)) == 3
    engine.salt = other
    for first in range(3):
        assert engine.store.lookup(engine.keys(TOKENS)[first:]) == [], "nor is a part of it, wherever one begins"
    assert engine.load(TOKENS, TARGET) == (0, [])
    found = engine.transfers[0].metrics.total()
    assert names.ARENA_HIT_CHUNKS not in found and names.FILE_READ_BYTES not in found
    assert len(engine.save(TOKENS, BLOCKS)) == 3, "it is stored again, not joined with the other's"
    for salt in (owner, other):
        engine.salt = salt
        assert engine.load(TOKENS, TARGET)[1][0].failed_blocks == frozenset()


def test_what_others_store_changes_no_answer(engine: SaltedEngine) -> None:
    for salt in ("a", "b"):
        engine.salt = salt
        engine.save(TOKENS[:64], BLOCKS[:4])
    engine.salt = "a"
    before = engine.store.lookup(engine.keys(TOKENS))
    engine.salt = "b"
    engine.save(TOKENS, BLOCKS)
    engine.salt = "a"
    assert engine.store.lookup(engine.keys(TOKENS)) == before and before is not None and len(before) == 1


@given(st.lists(st.tuples(st.text(max_size=6), st.text(max_size=6)), min_size=2, max_size=6, unique=True))
def test_no_two_salts_and_adapters_make_a_common_key(pairs: list[tuple[str, str]]) -> None:
    """Also where a salt looks like what else may stand in a key."""
    found = [
        set(chunk_keys(b"n" * 16, TOKENS, 64, {0: join_extras([salt_extra(salt), lora_extra("", adapter)])}))
        for salt, adapter in pairs
    ]
    assert len(set().union(*found)) == 3 * len(pairs)


def test_salts_are_taken_letter_by_letter() -> None:
    found = [chunk_keys(b"n" * 16, TOKENS, 64, {0: join_extras([salt_extra(salt)])} if salt else {}) for salt in SALTS]
    assert len({key for keys in found for key in keys}) == 3 * len(SALTS), "no case or form of Unicode is folded"
    forged = lora_extra("", "f") + salt_extra("x")
    assert forged not in {join_extras([salt_extra(text)]) for text in ("x", "f", forged.decode("latin-1"))}
