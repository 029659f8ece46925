"""The index's value for one segment set: a SetInfo without its id, as bytes. No index is opened here.

offset size                                   (values little-endian)
     0   16  namespace id
    16    8  n_bytes
    24    8  created, f64 seconds
    32    8  used, f64 seconds
    40    8  uses
    48    1  1: open; 2 is what releases before wrote for pinned, and means nothing
    49    1  bytes of the tenant's label
    50    -  the tenant's label, then the owner, both UTF-8
"""

from __future__ import annotations

import struct

from kvtier.config_capacity import TENANT_BYTES_MAX
from kvtier.errors import Corrupt
from kvtier.index.base import SetInfo

_HEAD = struct.Struct("<16sQddQBB")
_OPEN = 1


def pack(info: SetInfo) -> bytes:
    tenant = info.tenant.encode()
    assert len(info.namespace) == 16, "a namespace id has 16 bytes"
    assert len(tenant) <= TENANT_BYTES_MAX, "a tenant's label is checked with the settings"
    flags = _OPEN if info.is_open else 0
    head = _HEAD.pack(info.namespace, info.n_bytes, info.created_s, info.used_s, info.uses, flags, len(tenant))
    return head + tenant + info.owner.encode()


def unpack(set_id: int, value: bytes) -> SetInfo:
    """Raises Corrupt on what `pack` does not write."""
    try:
        namespace, n_bytes, created_s, used_s, uses, flags, n_tenant = _HEAD.unpack_from(value)
        tenant, owner = value[_HEAD.size :][:n_tenant].decode(), value[_HEAD.size + n_tenant :].decode()
    except (struct.error, UnicodeDecodeError) as fault:
        raise Corrupt(f"segment set {set_id:016x} in the index: {fault}") from None
    if n_tenant > min(TENANT_BYTES_MAX, len(value) - _HEAD.size):
        raise Corrupt(f"segment set {set_id:016x} in the index: a label of {n_tenant} bytes")
    return SetInfo(
        set_id=set_id, namespace=namespace, owner=owner, n_bytes=n_bytes, created_s=created_s, used_s=used_s,
        is_open=bool(flags & _OPEN), tenant=tenant, uses=uses,
    )  # fmt: skip
