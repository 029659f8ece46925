"""Damages segments of a root, each way by a function that returns how to mend it: what a disk or a stray write does."""

import os
from collections.abc import Callable
from pathlib import Path

from kvtier.format.geometry import PAGE_BYTES
from kvtier.format.record import SegmentHeader

Mend = Callable[[], None]


def segments(root: Path) -> list[Path]:
    return sorted(root.glob("v*/*/*.kvseg"))


def _rewrite(root: Path, change: Callable[[bytearray], bytearray]) -> Mend:
    """Changes every segment's bytes in place (the same inode, as a fault of the disk would)."""
    kept = {path: path.read_bytes() for path in segments(root)}
    for path, content in kept.items():
        _write(path, bytes(change(bytearray(content))))
    return lambda: [_write(path, content) for path, content in kept.items()] and None


def _write(path: Path, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.write(content)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())


def _slots(content: bytearray) -> tuple[SegmentHeader, list[slice]]:
    header = SegmentHeader.unpack(bytes(content[:PAGE_BYTES]))
    starts = [header.slot_offset(slot) for slot in range(header.stripe, header.slots, header.stripes)]
    return header, [slice(start, start + header.slot_bytes) for start in starts]


def flip_payload(root: Path) -> Mend:
    """One bit of every slab page."""

    def change(content: bytearray) -> bytearray:
        _, slots = _slots(content)
        for slot in slots:
            for page in range(slot.start + PAGE_BYTES, slot.stop, PAGE_BYTES):
                content[page + 1234 % PAGE_BYTES] ^= 1
        return content

    return _rewrite(root, change)


def zero(root: Path) -> Mend:
    """Everything but the segment's header page."""
    return _rewrite(root, lambda content: content[:PAGE_BYTES] + bytearray(len(content) - PAGE_BYTES))


def truncate(root: Path) -> Mend:
    """Half of each file is gone."""
    return _rewrite(root, lambda content: content[: len(content) // 2 // PAGE_BYTES * PAGE_BYTES // 8])


def swap_records(root: Path) -> Mend:
    """The record of every slot lies in the next one."""

    def change(content: bytearray) -> bytearray:
        _, slots = _slots(content)
        return content[:PAGE_BYTES] + b"".join(bytes(content[slot]) for slot in [*slots[1:], slots[0]])

    return _rewrite(root, change)


def swap_segments(root: Path) -> Mend:
    """Every segment has the content of another; with one alone, its slots in reverse."""
    paths = segments(root)
    kept = [path.read_bytes() for path in paths]
    for path, content in zip(paths, [*kept[1:], kept[0]], strict=True):
        _write(path, content)
    if len(paths) == 1:
        return swap_records(root)
    return lambda: [_write(path, content) for path, content in zip(paths, kept, strict=True)] and None


def remove(root: Path) -> Mend:
    """The files are gone (evicted by hand)."""
    kept = {path: path.with_suffix(".gone") for path in segments(root)}
    for path, aside in kept.items():
        path.rename(aside)
    return lambda: [aside.rename(path) for path, aside in kept.items()] and None


WAYS: dict[str, Callable[[Path], Mend]] = {
    "flip_payload": flip_payload,
    "zero": zero,
    "truncate": truncate,
    "swap_records": swap_records,
    "swap_segments": swap_segments,
    "remove": remove,
}
