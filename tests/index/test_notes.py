"""The bytes of a note: round trips, and what is no note."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import Corrupt
from kvtier.index import values


@given(st.binary(max_size=50), st.none() | st.floats(0, 1e12))
def test_round_trip(value: bytes, expires_s: float | None) -> None:
    packed = values.pack_note(value, expires_s)
    assert values.unpack_note(packed) == (value, math.inf if expires_s is None else expires_s)
    for now_s in (0.0, 1e6, 1e12):
        assert values.has_expired(packed, now_s) == (expires_s is not None and now_s >= expires_s)


def test_the_bytes_are_those_of_the_table() -> None:
    """A change of these bytes is a change of the format."""
    assert values.pack_note(b"it", 1.0).hex() == "000000000000f03f" + b"it".hex()
    assert values.pack_note(b"", None).hex() == "000000000000f07f"


@pytest.mark.parametrize("packed", [b"", b"x", bytes(7)])
def test_what_is_too_short_is_no_note_and_goes_with_the_expired(packed: bytes) -> None:
    with pytest.raises(Corrupt):
        values.unpack_note(packed)
    assert values.has_expired(packed, 0.0)
