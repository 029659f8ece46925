"""The bytes of an index entry: round trips, what add and remove leave, and every malformed value refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.errors import Corrupt
from kvtier.format.geometry import Extent, covers
from kvtier.index import entry
from kvtier.index.base import Location
from kvtier.index.memory import MemoryIndex

WHOLE = Extent(0, 6, 0, 4)
U64 = st.integers(0, 2**64 - 1)


@st.composite
def extents(draw: st.DrawFn) -> Extent:
    first_layer, first_head = draw(st.integers(0, 5)), draw(st.integers(0, 3))
    return Extent(first_layer, draw(st.integers(1, 6 - first_layer)), first_head, draw(st.integers(1, 4 - first_head)))


@st.composite
def locations(draw: st.DrawFn) -> Location:
    extent = draw(extents())
    return Location(
        draw(U64),
        draw(st.integers(0, 2**16 - 1)),
        draw(st.integers(0, 2**32 - 1)),
        draw(st.integers(1, 2**40)) * 4096,
        extent,
        tuple(draw(st.lists(U64, min_size=extent.n_heads, max_size=extent.n_heads))),
    )


ENTRIES = st.lists(locations(), min_size=1, max_size=6, unique_by=entry.place)


@given(ENTRIES)
def test_round_trip(written: list[Location]) -> None:
    value = entry.pack(written, WHOLE)
    assert entry.unpack(value) == written
    assert entry.is_complete(value) == covers([location.extent for location in written], WHOLE)
    assert entry.first_set(value) == written[0].set_id


def test_the_bytes_are_those_of_the_table() -> None:
    """A change of these bytes is a change of the format."""
    value = entry.pack(
        [Location(0x0102030405060708, 9, 0x0A0B0C0D, 4096, Extent(0, 2, 1, 1), (0x1122334455667788,))],
        Extent(0, 2, 1, 1),
    )
    assert value.hex() == (
        "010000020001000100080706050403020109000d0c0b0a001000000000000000000200010001008877665544332211"
    )


@given(ENTRIES)
def test_add_takes_what_covers_something_new(offered: list[Location]) -> None:
    value: bytes | None = None
    kept: list[Location] = []
    for location in offered:
        new = entry.add(value, location, WHOLE)
        if covers([other.extent for other in kept], location.extent):
            assert new is None
            continue
        kept.append(location)
        assert new is not None and entry.unpack(new) == kept
        assert entry.add(new, location, WHOLE) == new
        value = new


@given(ENTRIES, st.data())
def test_remove_is_the_inverse_of_add(written: list[Location], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(written))
    value = entry.pack(written, WHOLE)
    left = entry.remove(value, entry.place(gone))
    others = [location for location in written if location != gone]
    assert left == (entry.pack(others, WHOLE) if others else b"")
    if left:
        assert entry.remove(left, entry.place(gone)) is None


def test_add_refuses_contradictions() -> None:
    whole_record = Location(1, 0, 0, 4096, WHOLE, (1, 2, 3, 4))
    half = Location(1, 0, 1, 4096, Extent(0, 6, 0, 2), (1, 2))
    value = entry.pack([half], WHOLE)
    assert entry.add(None, whole_record, Extent(0, 6, 0, 2)) is None, "outside of the chunk"
    assert entry.add(value, whole_record, Extent(0, 6, 0, 5)) is None, "another whole"
    assert entry.add(value, whole_record._replace(slot=1), WHOLE) is None, "the place is taken"
    assert entry.add(value, half._replace(checksums=(5, 6)), WHOLE) is None, "other checksums at the same place"


@pytest.mark.parametrize("value", [b"", b"\x01", bytes(9), bytes(8), b"\x01" + bytes(38)])
def test_short_and_empty_values_are_corrupt(value: bytes) -> None:
    with pytest.raises(Corrupt):
        entry.unpack(value)
    assert entry.locations_of(value) == entry.locations_of(None) == []
    record = Location(1, 0, 0, 4096, WHOLE, (1, 2, 3, 4))
    assert entry.add(value, record, WHOLE) == entry.pack([record], WHOLE), "it is replaced"
    assert not entry.remove(value, entry.place(record))


def test_first_set_needs_a_record() -> None:
    with pytest.raises(Corrupt):
        entry.first_set(b"\x01" + bytes(10))


def test_a_damaged_entry_leaves_an_index_in_memory() -> None:
    """Its record is in no set, so there is none to take it from."""
    index = MemoryIndex()
    index._entries[b"key"] = b"damaged"
    assert index.retract(b"key", entry.NOWHERE) and index.find([b"key"]) == [None]
