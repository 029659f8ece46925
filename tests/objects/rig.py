"""What tests of objects share: settings of a small tier, objects whose bytes tell them apart, and damage to files."""

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvtier.config.settings import Settings
from kvtier.connectors.objects.store import Object, ObjectHost, ObjectTier
from kvtier.format.geometry import PAGE_BYTES
from tests.damage import flip

HOST = ObjectHost("host")
SMALL: Mapping[str, object] = {
    "capacity_bytes": "64MiB",
    "segment_bytes": "2MiB",
    "host": {"arena_bytes": "1MiB"},
    "io": {"threads": 2, "timeout_s": 20.0},
    "writer_lease_s": 30.0,
}
"""Settings of a tier; a root belongs to them."""


def settings(root: Path, **changes: object) -> Settings:
    return Settings.load({"root": str(root), **SMALL, "touch_interval_s": 0.2} | changes)


@contextmanager
def tier_at(root: Path, host: ObjectHost = HOST, **changes: object) -> Iterator[ObjectTier]:
    tier = ObjectTier(settings(root, **changes), host)
    try:
        yield tier
    finally:
        tier.close()


def content(seed: object, size: int) -> bytes:
    return random.Random(repr(seed)).randbytes(size)


def put(tier: ObjectTier, keys: Sequence[bytes], size: int = 5000, salt: str = "") -> list[bool]:
    """What is put under a key depends on key and size."""
    return tier.put([Object(key, memoryview(content(key, size)), salt) for key in keys])


def get(tier: ObjectTier, keys: Sequence[bytes], size: int = 5000) -> list[bytes | None]:
    """None: a miss."""
    memory = [bytearray(b"\xa5" * size) for _ in keys]
    got = tier.get([Object(key, memoryview(into)) for key, into in zip(keys, memory, strict=True)])
    return [bytes(into) if is_here else None for into, is_here in zip(memory, got, strict=True)]


def expected(keys: Sequence[bytes], size: int = 5000) -> list[bytes]:
    return [content(key, size) for key in keys]


def drained(tier: ObjectTier, timeout_s: float) -> bool:
    """Wait for the saves of all size classes."""
    return all(each._transfer.drain(timeout_s) for each in tier._size_classes.values())


def names(n: int, of: str = "k") -> list[bytes]:
    return [f"{of}{number}".encode() for number in range(n)]


def segments(root: Path) -> list[Path]:
    return sorted(root.glob("v2/*/*.kvseg"))


def flip_byte_of(root: Path, wanted: bytes) -> None:
    """One bit in the middle of the record that holds these bytes."""
    for path in segments(root):
        data = path.read_bytes()
        at = data.find(wanted[:64], PAGE_BYTES)
        if at >= 0:
            flip(path, at + len(wanted) // 2, 0x10)
            return
    raise AssertionError("no segment holds it")


def put_for_ever(root: str) -> None:
    """A process of its own, to be killed."""
    with tier_at(Path(root)) as tier:
        for number in itertools.count():
            put(tier, names(8, f"{number}-"), 30_000)
