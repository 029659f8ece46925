"""The index's value for one note, as bytes. No index is opened here.

offset size
     0    8  when it expires, f64 seconds since the epoch, little-endian; infinity: never
     8    -  the note
"""

from __future__ import annotations

import math
import struct

from kvtier.errors import Corrupt

_EXPIRES = struct.Struct("<d")


def pack(value: bytes, expires_s: float | None) -> bytes:
    return _EXPIRES.pack(math.inf if expires_s is None else expires_s) + value


def unpack(packed: bytes) -> tuple[bytes, float]:
    """(the note, when it expires). Raises Corrupt on what `pack` does not write."""
    if len(packed) < _EXPIRES.size:
        raise Corrupt(f"note: {len(packed)} bytes, its head has {_EXPIRES.size}")
    return packed[_EXPIRES.size :], _EXPIRES.unpack_from(packed)[0]


def has_expired(packed: bytes, now_s: float) -> bool:
    """Also of what is no note: it is forgotten with the others."""
    try:
        return now_s >= unpack(packed)[1]
    except Corrupt:
        return True
