"""What a disk may hold after a crash, made from a record of all that was changed below a root (record_writes.c).

Two kinds of crash. A killed process: the kernel has all that was done, and maybe a part of the write that was under
way. A power loss: names and sizes are those of some earlier moment, in their order and not before the last fsync (what
a journal keeps); and of each page that was not synced since it was written, the disk has an old version or the new one,
or sectors of both.
"""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from kvtier.format.geometry import PAGE_BYTES

SECTOR_BYTES = 512
INDEX = PurePosixPath("v2/index")
_HEAD = struct.Struct("<IIIQQ")


class Kind(IntEnum):
    CREATE = 1
    WRITE = 2
    SIZE = 3
    ALLOCATE = 4
    SYNC = 5
    LINK = 6
    RENAME = 7
    UNLINK = 8
    MKDIR = 9
    RMDIR = 10


@dataclass(frozen=True, slots=True)
class Step:
    """One change. other: the new name of LINK and RENAME. at: offset of WRITE, new size of SIZE and ALLOCATE."""

    kind: Kind
    path: str
    other: str
    at: int
    data: bytes

    @property
    def is_of_the_index(self) -> bool:
        return PurePosixPath(self.other or self.path).is_relative_to(INDEX)


def read_record(file: Path) -> list[Step]:
    content = file.read_bytes()
    steps, offset = [], 0
    while offset < len(content):
        kind, path_bytes, other_bytes, at, n_bytes = _HEAD.unpack_from(content, offset)
        paths = offset + _HEAD.size
        others = paths + path_bytes
        data = others + other_bytes
        offset = data + n_bytes
        path, other = content[paths:others].decode(), content[others:data].decode()
        steps.append(Step(Kind(kind), path, other, at, content[data:offset]))
    return steps


@dataclass(slots=True, eq=False)
class Inode:
    """A file. pages: of each page that was written, its versions since it was last synced, the oldest first (None:
    never written, so zeros)."""

    size: int = 0
    pages: dict[int, list[bytes | None]] = field(default_factory=dict)

    def write(self, at: int, data: bytes) -> None:
        for page in range(at // PAGE_BYTES, -(-(at + len(data)) // PAGE_BYTES)):
            versions = self.pages.setdefault(page, [None])
            new = bytearray(versions[-1] or bytes(PAGE_BYTES))
            first = max(at, page * PAGE_BYTES)
            end = min(at + len(data), (page + 1) * PAGE_BYTES)
            new[first - page * PAGE_BYTES : end - page * PAGE_BYTES] = data[first - at : end - at]
            versions.append(bytes(new))

    def sync(self) -> None:
        for versions in self.pages.values():
            del versions[:-1]


Choose = Callable[[list[bytes | None]], bytes | None]  # which version of a page the disk has


def newest(versions: list[bytes | None]) -> bytes | None:
    return versions[-1]


class Losing:
    """Of each page the disk has the newest version by `chance`; else an older one, or sectors of two."""

    def __init__(self, rng: random.Random, chance: float) -> None:
        self._rng = rng
        self._chance = chance

    def __call__(self, versions: list[bytes | None]) -> bytes | None:
        new, rng = versions[-1], self._rng
        if len(versions) == 1 or rng.random() < self._chance:
            return new
        old = rng.choice(versions[:-1])
        if new is None or rng.random() < 0.5:
            return old
        torn = bytearray(old or bytes(PAGE_BYTES))
        for sector in range(0, PAGE_BYTES, SECTOR_BYTES):
            if rng.random() < 0.5:
                torn[sector : sector + SECTOR_BYTES] = new[sector : sector + SECTOR_BYTES]
        return bytes(torn)


class Image:
    """A folder as a disk may have it.

    live: files by the names that they have after all steps. files: by the names that the disk knows of.
    """

    def __init__(self) -> None:
        self.folders: set[str] = set()
        self.files: dict[str, Inode] = {}
        self._live: dict[str, Inode] = {}

    @classmethod
    def of_killed(cls, steps: Sequence[Step], part_bytes: int = 0) -> Image:
        """All that was done but, of the last step, if that is a write, only the first `part_bytes`, if not 0."""
        image = cls()
        for step in steps[:-1]:
            image._add(step, True)
        last = steps[-1]
        image._add(replace(last, data=last.data[:part_bytes]) if part_bytes else last, True)
        return image

    @classmethod
    def of_power_loss(cls, steps: Sequence[Step], n_names: int) -> Image:
        """Bytes that were written by all steps, names and sizes of the first `n_names` steps; by those of a later fsync
        if there is one."""
        synced = max((number + 1 for number, step in enumerate(steps) if step.kind is Kind.SYNC), default=0)
        image = cls()
        for number, step in enumerate(steps):
            image._add(step, number < max(n_names, synced))
        return image

    def _add(self, step: Step, is_named: bool) -> None:
        if step.kind is Kind.CREATE:
            self._live[step.path] = Inode()
        elif step.kind is Kind.LINK:
            self._live[step.other] = self._live[step.path]
        elif step.kind is Kind.RENAME:
            self._live[step.other] = self._live.pop(step.path)
        inode = self._live.get(step.other or step.path)
        if is_named:
            self._add_name(step, inode)
        if step.kind is Kind.UNLINK:
            self._live.pop(step.path)
        if inode is not None:
            _change(inode, step, is_named)

    def _add_name(self, step: Step, inode: Inode | None) -> None:
        if step.kind is Kind.MKDIR:
            self.folders.add(step.path)
        elif step.kind is Kind.RMDIR:
            self.folders.remove(step.path)
        elif step.kind is Kind.UNLINK:
            del self.files[step.path]
        elif inode is not None and step.kind in (Kind.CREATE, Kind.LINK, Kind.RENAME):
            self.files[step.other or step.path] = inode
            if step.kind is Kind.RENAME:
                del self.files[step.path]

    def put(self, root: Path, choose: Choose, is_wanted: Callable[[str], bool] = lambda path: True) -> None:
        """Makes it below `root`; `choose`: which version the disk has of each page."""
        for path in sorted(filter(is_wanted, self.folders)):
            (root / path).mkdir(mode=0o700, parents=True)
        for path, inode in self.files.items():
            if is_wanted(path):
                with open(root / path, "wb", opener=_private) as file:
                    _put_pages(file, inode, choose)


def _change(inode: Inode, step: Step, is_named: bool) -> None:
    size = inode.size
    if step.kind is Kind.WRITE:
        inode.write(step.at, step.data)
        size = max(size, step.at + len(step.data))
    elif step.kind is Kind.ALLOCATE:
        size = max(size, step.at)
    elif step.kind is Kind.SIZE:
        size = step.at
    elif step.kind is Kind.SYNC:
        inode.sync()
    if is_named:
        inode.size = size


def _put_pages(file: BinaryIO, inode: Inode, choose: Choose) -> None:
    for page, versions in inode.pages.items():
        data = choose(versions)
        if data is not None and page * PAGE_BYTES < inode.size:
            file.seek(page * PAGE_BYTES)
            file.write(data)
    file.truncate(inode.size)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
