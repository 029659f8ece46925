"""What a policy is: an order in which sets go, and what it must remember from one eviction to the next."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from kvtier.index.base import SetInfo

_MARK = struct.Struct("<QQQB")
PLACE_MAX = (1 << 64) - 1
"""Only what others wrote comes near: sets that stand there go in the order of their ids."""


class Mark(NamedTuple):
    """What a policy remembers of a set. place: where it stands in a queue. seen: its uses when it was put there.
    left: how often it may still be passed over without a further use."""

    place: int
    seen: int
    left: int


State = dict[int, Mark]
"""By set id. It lives in the index, so that whoever evicts next goes on from it; losing it costs hits only."""


class Policy(Protocol):
    """Safe to share between threads: what it remembers is in the State."""

    def victims(self, sets: Sequence[SetInfo], state: State) -> Iterator[SetInfo]:
        """All of `sets`, which may all go, the least valuable first. `state` is changed as far as they were taken."""
        ...


def pack(state: State) -> bytes:
    """For each set: its id u64, place u64, seen u64, left u8, little-endian."""
    return b"".join(
        _MARK.pack(set_id, min(mark.place, PLACE_MAX), mark.seen, mark.left) for set_id, mark in sorted(state.items())
    )


def unpack(value: bytes, sets: Sequence[SetInfo]) -> State:
    """The marks of those of `sets` that have one. What another version wrote is no state."""
    if len(value) % _MARK.size:
        return {}
    known = {info.set_id for info in sets}
    return {set_id: Mark(*mark) for set_id, *mark in _MARK.iter_unpack(value) if set_id in known}
