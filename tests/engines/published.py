"""What the index says is stored, seen from outside, and damage to chosen parts of it: so a test knows what it took."""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvtier.config.settings import Settings
from kvtier.errors import Corrupt
from kvtier.eviction.pins import Pin
from kvtier.format.geometry import PAGE_BYTES
from kvtier.format.namespace import chunk_keys
from kvtier.format.record import STRIPES_MAX, RecordHeader, SegmentHeader, parts_of
from kvtier.index import entry
from kvtier.index.base import Location
from kvtier.index.redis.index import RedisIndex
from kvtier.maintenance.record_check import RecordVerdict, judge
from kvtier.storage.segments import SegmentFiles, segment_name
from tests.damage import own_slots
from tests.engines.fleet_prompts import CHUNK_TOKENS, prompt

Segment = tuple[int, int]  # (set, part)
Slot = tuple[int, int, int]  # (set, part, slot)
Chunks = list[list[Slot]]  # where each chunk of a prompt lies, from its first one on


@dataclass
class Damage:
    segments: set[Segment] = field(default_factory=set)
    slots: set[Slot] = field(default_factory=set)

    def add(self, more: Damage) -> None:
        self.segments |= more.segments
        self.slots |= more.slots

    def left_of(self, chunks: Chunks) -> int:
        """How many chunks at the prompt's beginning were not touched."""
        for number, places in enumerate(chunks):
            if any(place in self.slots or place[:2] in self.segments for place in places):
                return number
        return len(chunks)


class Published:
    """config: of an engine. below: its root, past all faults of the file system."""

    def __init__(self, config: Path, below: Path) -> None:
        self._settings = Settings.load({"config": str(config)})
        (self._folder,) = [folder for folder in (below / "v2").iterdir() if len(folder.name) == 32]

    def chunks(self, numbers: Sequence[int]) -> dict[int, Chunks]:
        """Of those prompts that are there whole."""
        namespace = bytes.fromhex(self._folder.name)
        found: dict[int, Chunks] = {}
        index = RedisIndex(self._settings.index)
        try:
            for number in numbers:
                keys = chunk_keys(namespace, prompt(number), CHUNK_TOKENS, {})
                values = index.resolve(keys)
                if len(values) == len(keys):
                    places = [[(at.set_id, at.part, at.slot) for at in entry.locations_of(value)] for value in values]
                    found[number] = places
        finally:
            index.close()
        return found

    def traces(self, number: int, chunks: Chunks) -> list[str]:
        """Of a prompt's chunks that the index does not have whole any more: where each lay, where the index says now
        that it lies, and which of these records are as they were summed. To find out why a chunk is lost."""
        keys = chunk_keys(bytes.fromhex(self._folder.name), prompt(number), CHUNK_TOKENS, {})
        files, index = SegmentFiles(self._folder, direct=False), RedisIndex(self._settings.index)
        found = []
        try:
            known = {info.set_id: info for info in index.sets()}
            for key, places, value in zip(keys, chunks, index.find(keys), strict=False):
                now = {(at.set_id, at.part, at.slot): at for at in entry.locations_of(value)}
                was = [
                    f"{segment_name(*at[:2])} slot {at[2]}: {self._state_of(files, key, at)}, set {known.get(at[0])}"
                    for at in places
                ]
                good = {at: judge(files, key, location) is RecordVerdict.AS_SUMMED for at, location in now.items()}
                if not good or not all(good.values()):
                    found.append(f"{key.hex()} was at {was}; is at {good}")
        finally:
            files.close()
            index.close()
        return found

    def _state_of(self, files: SegmentFiles, key: bytes, slot: Slot) -> str:
        """What the file has in a slot that was the chunk's."""
        if not files.exists(*slot[:2]):
            return "no such file"
        for at, page in files.pages(*slot[:2]):
            if at == slot[2]:
                try:
                    header = RecordHeader.unpack(page)
                except Corrupt as fault:
                    return f"no header: {fault}"
                where = Location(
                    slot[0], slot[1] // STRIPES_MAX, slot[2], header.slab_bytes, header.extent, header.checksums
                )
                return f"its record: {header.key == key}, good: {judge(files, key, where) is RecordVerdict.AS_SUMMED}"
        return "nothing there"

    def all(self) -> list[Slot]:
        index = RedisIndex(self._settings.index)
        try:
            entries = [value for _, value in index.entries()]
        finally:
            index.close()
        return sorted((at.set_id, at.part, at.slot) for value in entries for at in entry.locations_of(value))

    def pin(self, numbers: Iterable[int]) -> None:
        """Keeps the sets that hold these prompts' chunks from being evicted, and no more those that were before."""
        namespace = bytes.fromhex(self._folder.name)
        keys = [key for number in numbers for key in chunk_keys(namespace, prompt(number), CHUNK_TOKENS, {})]
        pin = Pin("chaos", namespace, tuple(keys), "", 0.0, None)
        index = RedisIndex(self._settings.index)
        try:
            index.put_note(pin.name, pin.pack(), None)
        finally:
            index.close()

    def path(self, segment: Segment) -> Path:
        return self._folder / segment_name(*segment)

    def flip(self, slots: Sequence[Slot], rng: random.Random) -> Damage:
        """One bit of each record's slabs."""
        damage = Damage()
        for slot in slots:
            header = self._header(slot[:2])
            if header is None:
                continue
            at = header.slot_offset(slot[2]) + rng.randrange(PAGE_BYTES, header.slot_bytes)
            with self.path(slot[:2]).open("r+b", buffering=0) as file:
                old = os.pread(file.fileno(), 1, at)
                if old:
                    os.pwrite(file.fileno(), bytes([old[0] ^ 1 << rng.randrange(8)]), at)
            damage.slots.add(slot)
        return damage

    def cut(self, segments: Sequence[Segment], rng: random.Random) -> Damage:
        """Each ends within one of its records."""
        damage = Damage()
        for segment in segments:
            header = self._header(segment)
            if header is None:
                continue
            last = rng.choice(own_slots(header))
            os.truncate(self.path(segment), header.slot_offset(last) + rng.randrange(header.slot_bytes))
            damage.slots |= {(*segment, slot) for slot in own_slots(header) if slot >= last}
        return damage

    def remove(self, segments: Sequence[Segment]) -> Damage:
        """Remove all files of the rank in the set: what garbage collection does with the set then costs no more."""
        parts = {(set_id, other) for set_id, part in segments for other in parts_of(set_id, part // STRIPES_MAX)}
        for segment in parts:
            self.path(segment).unlink(missing_ok=True)
        return Damage(segments=parts)

    def drop_sets(self, set_ids: Collection[int]) -> None:
        """Take the sets out of the index."""
        index = RedisIndex(self._settings.index)
        try:
            for info in index.some_sets(set_ids):
                index.take_over(info.set_id)
                index.remove_set(info.set_id)
        finally:
            index.close()

    def _header(self, segment: Segment) -> SegmentHeader | None:
        """None: the file is gone already."""
        try:
            with self.path(segment).open("rb") as file:
                return SegmentHeader.unpack(file.read(PAGE_BYTES))
        except FileNotFoundError:
            return None
