"""Signed namespaces: an attacker who can write to the share or the index, but does not have the secret, cannot make an
engine load forged KV. Optional (`signing.key_file`).

    key          = blake3 derive_key("kvtier 2026-11 tags of slabs", secret)                    32 bytes
    fingerprint  = blake3 derive_key("kvtier 2026-11 fingerprint of a secret", secret), hex     in the namespace
    tag of slab  = blake3 keyed by key (
        namespace id 16 || key of the chunk 16 || bytes of a slab u64 || first layer u16 || layers u16 || head u16 ||
        zero u16 || the slab's bytes), the first 16 bytes; integers little-endian

The fingerprint is part of the namespace's id, so KV of other secrets, or of none, is never looked up. A tag covers
everything that identifies a slab, so it is invalid for another chunk, head, layers, model or codec. It does not cover
the slab's location (set, slot, rank), so a copied record stays valid. An older record of the same key is the same KV.

The checksum (kvtier.format.checksum) is no signature: anyone can compute it. Tags are computed and verified in host
memory.
"""

import hmac
import struct
from collections.abc import Iterable
from typing import Any

from blake3 import blake3

from kvtier.format.geometry import Extent
from kvtier.format.record import TAG_BYTES

SECRET_BYTES_MIN = 32  # shortest secret, bytes

_KEY_CONTEXT = "kvtier 2026-11 tags of slabs"
_FINGERPRINT_CONTEXT = "kvtier 2026-11 fingerprint of a secret"
_WHAT = struct.Struct("<16s16sQ4H")


class Signer:
    """Signer with one secret, which its repr does not contain. Thread-safe.

    5.4 GB/s of slabs of 4 MiB on one core of an AMD EPYC (Zen 5), with the interpreter lock released.
    """

    def __init__(self, secret: bytes) -> None:
        assert len(secret) >= SECRET_BYTES_MIN
        self._key = blake3(secret, derive_key_context=_KEY_CONTEXT).digest()
        self.fingerprint = blake3(secret, derive_key_context=_FINGERPRINT_CONTEXT).hexdigest(length=16)

    def tags(self, namespace: bytes, key: bytes, extent: Extent, slabs: Iterable[Any]) -> tuple[bytes, ...]:
        """Return the tag of each slab of a record, or of the heads in `extent`. slabs: buffers of equal sizes, in head
        order."""
        return tuple(
            self._tag(namespace, key, extent, head, slab) for head, slab in enumerate(slabs, start=extent.first_head)
        )

    def bad_slabs(
        self, namespace: bytes, key: bytes, extent: Extent, slabs: Iterable[Any], tags: Iterable[bytes]
    ) -> list[int]:
        """Return the positions of the slabs whose tags differ from `tags`."""
        made = self.tags(namespace, key, extent, slabs)
        pairs = enumerate(zip(made, tags, strict=True))
        return [number for number, (ours, theirs) in pairs if not hmac.compare_digest(ours, theirs)]

    def _tag(self, namespace: bytes, key: bytes, extent: Extent, head: int, slab: Any) -> bytes:
        what = _WHAT.pack(namespace, key, len(slab), extent.first_layer, extent.n_layers, head, 0)
        return blake3(what, key=self._key).update(slab).digest(length=TAG_BYTES)
