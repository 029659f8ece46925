"""Binary format of the index's values: segment sets, notes and leases. All numbers are little-endian.

A segment set, without its id:

offset size
     0   16  namespace id
    16    8  n_bytes
    24    8  created, f64 seconds
    32    8  used, f64 seconds
    40    8  uses
    48    1  1: open; 2 is what earlier releases wrote for pinned, and is ignored
    49    1  bytes of the tenant's label
    50    -  the tenant's label, then the owner, both UTF-8

A note:

offset size
     0    8  when it expires, f64 seconds since the epoch; infinity: never
     8    -  the note

A lease:

offset size
     0    8  fencing token
     8    8  when it expires, f64 seconds since the epoch
    16    -  the owner, UTF-8; empty: released
"""

from __future__ import annotations

import math
import struct
from typing import NamedTuple

from kvtier.config.capacity import TENANT_BYTES_MAX
from kvtier.errors import Corrupt
from kvtier.index.base import SetInfo

_HEAD = struct.Struct("<16sQddQBB")
_OPEN = 1
_EXPIRES = struct.Struct("<d")
_LEASE = struct.Struct("<Qd")


def pack_set(info: SetInfo) -> bytes:
    tenant = info.tenant.encode()
    assert len(info.namespace) == 16, "a namespace id has 16 bytes"
    assert len(tenant) <= TENANT_BYTES_MAX, "a tenant's label is checked with the settings"
    flags = _OPEN if info.is_open else 0
    head = _HEAD.pack(info.namespace, info.n_bytes, info.created_s, info.used_s, info.uses, flags, len(tenant))
    return head + tenant + info.owner.encode()


def unpack_set(set_id: int, value: bytes) -> SetInfo:
    """Raise Corrupt for bytes that `pack_set` does not write."""
    try:
        namespace, n_bytes, created_s, used_s, uses, flags, n_tenant = _HEAD.unpack_from(value)
        tenant, owner = value[_HEAD.size :][:n_tenant].decode(), value[_HEAD.size + n_tenant :].decode()
    except (struct.error, UnicodeDecodeError) as fault:
        raise Corrupt(f"segment set {set_id:016x} in the index: {fault}") from None
    if n_tenant > min(TENANT_BYTES_MAX, len(value) - _HEAD.size):
        raise Corrupt(f"segment set {set_id:016x} in the index: a label of {n_tenant} bytes")
    return SetInfo(set_id, namespace, owner, n_bytes, created_s, used_s, bool(flags & _OPEN), tenant, uses)


def pack_note(value: bytes, expires_s: float | None) -> bytes:
    return _EXPIRES.pack(math.inf if expires_s is None else expires_s) + value


def unpack_note(packed: bytes) -> tuple[bytes, float]:
    """Return (note, expiry time). Raise Corrupt for bytes that `pack_note` does not write."""
    if len(packed) < _EXPIRES.size:
        raise Corrupt(f"note: {len(packed)} bytes, its head has {_EXPIRES.size}")
    return packed[_EXPIRES.size :], _EXPIRES.unpack_from(packed)[0]


def has_expired(packed: bytes, now_s: float) -> bool:
    """Return whether the note has expired. Malformed notes count as expired, so that they are removed."""
    try:
        return now_s >= unpack_note(packed)[1]
    except Corrupt:
        return True


class Lease(NamedTuple):
    """Lease of an index. The token stays when it is released, so that the next owner's is larger."""

    token: int = 0
    expires_s: float = 0.0
    owner: str = ""

    @classmethod
    def unpack(cls, value: bytes | None) -> Lease:
        """Return the lease; a released one where `value` is absent or damaged."""
        try:
            token, expires_s = _LEASE.unpack_from(value or b"")
            return cls(token, expires_s, (value or b"")[_LEASE.size :].decode())
        except (struct.error, UnicodeDecodeError):
            return cls()

    def pack(self) -> bytes:
        return _LEASE.pack(self.token, self.expires_s) + self.owner.encode()

    def owner_at(self, now_s: float) -> str | None:
        return self.owner if self.owner and now_s < self.expires_s else None

    def acquired(self, owner: str, now_s: float, ttl_s: float) -> Lease | None:
        """Return the lease as taken or renewed by `owner`, None while another owner holds it."""
        if self.owner == owner:
            return Lease(self.token, now_s + ttl_s, owner)
        return None if self.owner_at(now_s) else Lease(self.token + 1, now_s + ttl_s, owner)

    def released(self, owner: str) -> Lease:
        """Return the lease as released by `owner`; the same one where another owner has it."""
        return Lease(self.token) if self.owner == owner else self
