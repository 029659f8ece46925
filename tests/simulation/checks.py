"""What must hold whenever one looks: the invariants of kvtier/README.md that show from outside, and the accounts.

I1 with each publish and over the whole index; I2, I9, I10 and I11 by who serves (tests.simulation.serving); I3 by the
ring and here; I4 here and by the runtime; I5 because all of it holds while the index forgets, lies and is late; I6
because one seed is one run; I7 here.

I8 in part, with each call of an engine into the tier (tests.simulation.engine.StrictFaults): what is wrong with a
setting was found before the engine started, so nothing is called a ConfigError any more while it serves. That a wrong
setting stops start-up, and that key, value and fix are named, cannot be seen here: the simulation puts an engine
together from parts and reads no settings, and start-up is over before anything happens in an order that a seed could
draw. That is proved by test_settings and test_index_settings in tests/config (values, names and sources),
tests/root/test_open_root (the place that they name) and tests/engines/test_refusals (the engine's own).
"""

import ctypes
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest.mock import patch

from kvtier.errors import Corrupt, StaleLease
from kvtier.eviction.evictor import EvictionResult, Evictor
from kvtier.eviction.set_removal import Remover
from kvtier.format.geometry import PAGE_BYTES, covers
from kvtier.format.record import RecordHeader, SegmentHeader, record_bytes
from kvtier.index import entry
from kvtier.index.base import UNOWNED, Location, NewRecord, SetInfo
from kvtier.io.native import slab_checksums
from kvtier.maintenance.consistency_check import check_consistency
from kvtier.maintenance.scrub import Finding
from kvtier.storage.segments import segment_name
from kvtier.worker.read_plan import place_in_file
from kvtier.worker.transfer import TIDY_INTERVAL_S
from tests.simulation.disk import Segment
from tests.simulation.engine import JOBS_MAX, EngineProcess
from tests.simulation.own_thread import for_own_thread
from tests.simulation.place import Place
from tests.simulation.primitives import SimJobs
from tests.simulation.runtime import Process
from tests.simulation.serving import Serving
from tests.simulation.truth import SHAPE, slabs_of

READ_S = 5.0  # a set is published so long at most after its files were listed, seconds


class Checks:
    """Of a place. What is wrong goes to the runtime's violations."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._violate = place.runtime.violate
        self.evicting: dict[Process | None, int] = {}
        self._homes: dict[bytes, set[int]] = {}
        self._overlapping: set[bytes] = set()
        self._removing: dict[Process | None, int] = {}
        self._condemned: set[int] = set()
        self._read_in_part: set[int] = set()  # sets that a rebuild read while files of theirs were away
        place.index.on_publish = self.look_at_publish
        place.index.on_retract = self.look_at_retract
        place.index.removing = self.removal

    # --- the index ---

    def look_at_publish(self, records: Sequence[NewRecord], from_files: bool, into_unowned: bool) -> None:
        """I1: what becomes visible now is whole on disk, and is what the engine computed."""
        place = self._place
        set_ids = {record.location.set_id for record in records}
        known = {info.set_id: info for info in place.index.real.some_sets(set_ids)}
        if from_files:
            since_s = place.runtime.now_s - READ_S
            away = {set_id for (set_id, _), until_s in place.disk.away.items() if until_s > since_s}
            self._read_in_part |= away & set_ids
        for record in records:
            self._homes.setdefault(record.key, set()).add(record.location.set_id)
            info = known.get(record.location.set_id)
            if info is None or (info.owner == UNOWNED and not into_unowned):
                continue  # it will be refused
            place.published.add(record.key)
            if not from_files:
                self._look_at_flush(record.location)
            self._look_at_record(info.namespace, record.key, record.location, may_be_gone=from_files)

    def _look_at_flush(self, at: Location) -> None:
        """I1 for other nodes: they read zeros of what its writer did not flush."""
        n_bytes = record_bytes(at.extent, at.slab_bytes)
        first = place_in_file(at).start
        if any(part.overlap((at.set_id, at.part), first, n_bytes) for part in self._place.disk.unflushed):
            self._violate(f"slot {at.slot} of set {at.set_id:016x} was published before it was flushed (I1)")

    def look_at_retract(self, key: bytes, at: Location) -> None:
        """Check that no whole record is retracted while other nodes may still read what was there before it."""
        place, disk = self._place, self._place.disk
        n_bytes, segment = record_bytes(at.extent, at.slab_bytes), (at.set_id, at.part)
        if segment in disk.damaged or segment in disk.away:
            return  # a rebuild retracts what is away if it found another record of the chunk
        if not disk.may_be_stale(segment, place_in_file(at).start, n_bytes):
            return
        held = [one.extent for value in place.index.real.resolve([key]) for one in entry.unpack(value)]
        if sum(e.n_layers * e.n_heads for e in held) > SHAPE.whole.n_layers * SHAPE.whole.n_heads:
            self._overlapping.add(key)  # records of unlike cuts are all retracted, one after another
        if key in self._overlapping:
            return
        for info in place.index.real.some_sets({at.set_id}):
            path = place.root.folder / info.namespace.hex() / segment_name(*segment)
            record = _read(path, at)
            if record is not None and self._fault_of(record, key, at) is None:
                self._violate(f"slot {at.slot} of {path.name} was retracted, is whole, and may be read stale")

    def look_at_index(self, *, may_be_gone: bool = True) -> None:
        """I1 of all that is visible; no entry names a set that is not there; each is of one whole chunk. may_be_gone:
        files of what is visible, because somebody takes care of that right now."""
        real = self._place.index.real
        known = {info.set_id: info for info in real.sets()}
        for key, value in real.entries():
            locations = entry.unpack(value)
            for location in locations:
                info = known.get(location.set_id)
                if info is None:
                    self._violate(f"an entry names set {location.set_id:016x}, which is not there")
                else:
                    self._look_at_record(info.namespace, key, location, may_be_gone)
            if entry.is_complete(value) != covers((one.extent for one in locations), SHAPE.whole):
                self._violate("a chunk is offered that is not complete (I1)")

    @contextmanager
    def removal(self, set_id: int, process: Process) -> Iterator[None]:
        """A set goes. What was saved in one that an evictor chose is evicted then, and no sooner: until it goes, maybe
        long after that evictor was killed, chunks that lie there in part may still be answered saved."""
        keys = self._keys_in(set_id)
        yield
        if set_id in self._condemned:
            self._place.claims -= keys
        self._look_at_token(set_id, process)

    def condemn(self, process: Process | None, set_id: int) -> None:
        """The process, which evicts, is about to remove the set; whoever comes next does if it is killed before."""
        self._condemned.add(set_id)
        self._removing[process] = set_id

    def reprieve(self, process: Process | None) -> None:
        """Its evictor was refused. The set stays condemned: whoever evicts now may have found the note of it just
        before, and finishes the removal."""
        self._removing.pop(process, None)

    def look_at_unlink(self, process: Process | None, set_id: int) -> None:
        """First out of the index, then off the disk: who is killed in between leaves nothing visible that is gone.
        Another evictor may have taken the set out of the index meanwhile."""
        is_indexed = any(info.set_id == set_id for info in self._place.index.real.sets())
        if self._removing.get(process) == set_id and is_indexed:
            self._violate(f"the files of set {set_id:016x} go before the index forgets them (I1)")

    def _look_at_token(self, set_id: int, process: Process) -> None:
        """One evictor at a time: who was taken for dead removes nothing more."""
        if self._removing.get(process) != set_id:
            return  # what comes after the first step, to which the lease matters
        del self._removing[process]
        token, latest = self.evicting.get(process), self._place.index.evict_token
        if token is not None and token < latest:
            self._violate(f"set {set_id:016x} was evicted under lease {token}, and there is {latest}")

    def _keys_in(self, set_id: int) -> set[bytes]:
        """Return the keys of chunks that have a record in the set; where the index may not know all that its files
        hold, as after its loss, the keys of all that ever had one."""
        real = self._place.index.real
        if real.was_reset or set_id in self._read_in_part:
            return {key for key in self._place.claims if set_id in self._homes.get(key, ())}
        return {key for key, _ in real.members(set_id)}

    def _look_at_record(self, namespace: bytes, key: bytes, at: Location, may_be_gone: bool) -> None:
        place = self._place
        if (at.set_id, at.part) in place.disk.damaged:
            return
        path = place.root.folder / namespace.hex() / segment_name(at.set_id, at.part)
        record = _read(path, at)
        if record is None:
            if not may_be_gone:
                self._violate(f"a record was published in {path.name}, which is gone (I1)")
            return
        fault = self._fault_of(record, key, at)
        if fault is not None:
            self._violate(f"slot {at.slot} of {path.name} is visible: {fault} (I1)")

    def _fault_of(self, record: bytes, key: bytes, at: Location) -> str | None:
        if len(record) < record_bytes(at.extent, at.slab_bytes):
            return f"the file ends {len(record)} bytes into it"
        try:
            header = RecordHeader.unpack(record[:PAGE_BYTES])
        except Corrupt as fault:
            return str(fault)
        if (header.key, header.slot, header.set_id, header.extent) != (key, at.slot, at.set_id, at.extent):
            return "its header is another record's"
        slabs = [record[first : first + at.slab_bytes] for first in range(PAGE_BYTES, len(record), at.slab_bytes)]
        identity = self._place.truth.by_key.get(key)
        for number, slab in enumerate(slabs):
            head, layer = at.extent.first_head + number, at.extent.first_layer
            if header.checksums[number] != at.checksums[number] or _sum(slab, key, head, layer) != at.checksums[number]:
                return f"the checksum of head {head} is wrong"
            if identity is not None:
                of_head = slabs_of(self._place.truth.of(identity), at.extent)[number]
                if slab[: len(of_head)] != of_head:
                    return f"head {head} is not what was computed (I2)"
                if any(slab[len(of_head) :]):
                    return f"behind head {head}, what others had in memory came to the disk"
        return None

    # --- memory, queues and accounts ---

    def look_at_engine(self, serving: Serving) -> None:
        """I3, I4, I7, after every step."""
        engine = serving.engine
        serving.check()
        for name, fault in self._faults_of_memory(engine):
            self._violate(f"{engine.process.name}: {name}: {fault}")

    @staticmethod
    def _faults_of_memory(engine: EngineProcess) -> Iterator[tuple[str, str]]:
        for transfer, worker in zip(engine.transfers, engine.workers, strict=True):
            for arena in (worker.arena, worker.host):
                if arena is None:
                    continue
                try:
                    arena.check()
                except AssertionError as fault:
                    yield "a slot is in no state, or in two (I3)", str(fault)
                if arena.n_ready != arena.n_slots:
                    yield "slots were added while it ran (I7)", str(arena.n_ready)
            saver = transfer._saver
            if (
                not 0 <= saver.n_gathered <= saver.bounds.gathered_max
                or not 0 <= saver._n_held <= saver.bounds.held_max
            ):
                yield "saves hold more than they may (I4)", f"{saver.n_gathered}, {saver._n_held}"
            for jobs in transfer._jobs:
                assert isinstance(jobs, SimJobs)
                if len(jobs._queue) > JOBS_MAX:
                    yield "a queue is longer than it may be (I4)", str(len(jobs._queue))

    def look_at_budget(self, late_bytes: int) -> None:
        """Segments never take more than the budget, but for `late_bytes`: what writes that outlived their deadline, or
        their writer's lease, may add to segments that were cut meanwhile, until the next sweep measures them again. (A
        namespace's file of a few hundred bytes is in no budget.) Where files are away for a while, those of a removed
        set may come back after the note of it has expired, or was lost with the index. The index may book too little
        for a set that was closed, and so measured, while files without a record were away. The next sweep counts or
        removes them."""
        place = self._place
        known = {info.set_id: info for info in place.index.real.sets()}
        files: defaultdict[int, dict[Segment, int]] = defaultdict(dict)
        for path, at in place.disk.segments():
            files[at[0]][at] = path.stat().st_blocks * 512
        came_back = sum(self._came_back(known.get(set_id), of_set) for set_id, of_set in files.items())
        taken_bytes = place.disk.segments_bytes() - came_back
        if taken_bytes > place.capacity_bytes + late_bytes:
            self._violate(f"segments take {taken_bytes} bytes of {place.capacity_bytes}")

    def _came_back(self, info: SetInfo | None, files: dict[Segment, int]) -> int:
        """Return the bytes of files of a set that were away, as far as the index does not count them."""
        away = {at: n_bytes for at, n_bytes in files.items() if at in self._place.disk.away}
        if info is None:
            return sum(away.values())
        if info.is_open:
            return 0
        recorded = {location.part for _, location in self._place.index.real.members(info.set_id)}
        unseen = sum(n_bytes for (_, part), n_bytes in away.items() if part not in recorded)
        return max(0, min(unseen, sum(files.values()) - info.n_bytes))

    # --- at the end ---

    def look_at_rest(self, serving: Serving) -> None:
        """All is answered: every slot, claim and descriptor has come back."""
        name = serving.engine.process.name
        for left in self._left_over(serving):
            self._violate(f"{name}: when all had ended, {left}")

    def look_at_claims(self) -> None:
        """What all ranks said is saved, and was visible then, is there, unless it was evicted, or damaged behind the
        tier's back: nothing is lost."""
        place = self._place
        damaged = {set_id for set_id, _ in place.disk.damaged}
        lost = [
            key
            for key in place.claims
            if not self._homes.get(key, set()) & damaged and not place.index.real.resolve([key])
        ]
        if lost:
            homes = ", ".join(f"{home:016x}" for home in sorted(self._homes[lost[0]]))
            self._violate(
                f"{len(lost)} of {len(place.claims)} chunks that were saved are lost; one was in sets {homes}"
            )

    def look_at_agreement(self) -> None:
        """Index and segments agree, as `kvtier verify` sees it: where nothing was killed or damaged."""
        agreement = check_consistency(self._place.root, self._place.index.real, wait=lambda seconds: None)
        for found in (*agreement.disagreements, *agreement.unnamed_places):
            if not self._was_covered(found):
                self._violate(f"index and segments disagree: {found}")

    def _was_covered(self, found: Finding) -> bool:
        """Whether it is a record that the index had no need of, because others of unlike cuts (layers here, heads
        there) made up the chunk, and some of those were evicted since: what is left is part of a chunk."""
        if found.what != "not in the index" or found.slot is None:
            return False
        with (self._place.root.folder / found.namespace / found.segment).open("rb", buffering=0) as file:
            file.seek(SegmentHeader.unpack(file.read(PAGE_BYTES)).slot_offset(found.slot))
            key = RecordHeader.unpack(file.read(PAGE_BYTES)).key
        known = {info.set_id for info in self._place.index.real.sets()}
        return bool(self._homes.get(key, set()) & self._condemned - known)

    @staticmethod
    def _left_over(serving: Serving) -> Iterator[str]:
        if not serving.is_idle:
            yield f"{len(serving.requests) + len(serving.arrived)} requests had not (I9)"
        if any(known.missing for known in serving.engine.store._known.values()):
            yield "chunks were believed to be on their way"
        for transfer, worker in zip(serving.engine.transfers, serving.engine.workers, strict=True):
            loader, saver = transfer._loader, transfer._saver
            if loader._unanswered or loader.work or loader._fetches or loader.events:
                yield "a load or a chunk of it was left"
            if saver.n_gathered or saver._n_held or saver.staged or saver.events or saver.writer._batches:
                yield "a chunk of a save was left"
            tidy, since_s = transfer._jobs.tidy, serving.engine.place.runtime.now_s - TIDY_INTERVAL_S
            is_tidying = any(began_s > since_s for began_s in tidy._running.values())  # as it does at any time
            if any(jobs.pending() for jobs in transfer._jobs if jobs is not tidy or not is_tidying):
                yield "work was left"
            if len(worker.quarantine):
                yield "late I/O was never taken back"
            for arena in (worker.arena, worker.host):
                if arena is not None and arena.available != arena.n_slots:
                    yield f"{arena.n_slots - arena.available} of {arena.n_slots} slots were lost (I3)"
            for files in worker.files._known.values():
                if any(segment.users for segment in files._open.values()):
                    yield "a segment was still in use"


@contextmanager
def watching(checks: Checks) -> Iterator[None]:
    """Knows who evicts, and what was evicted, while it lasts."""
    runtime = checks._place.runtime
    plain_evict, plain_remove, plain_unlink = Evictor._remove, Remover.remove, Remover._unlink

    def evict(evictor: Evictor, victims: Sequence[SetInfo], token: int) -> EvictionResult:
        process = runtime.process
        checks.evicting[process] = token
        try:
            return plain_evict(evictor, victims, token)
        finally:
            del checks.evicting[process]

    def remove(remover: Remover, info: SetInfo, token: int | None = None) -> int:
        if runtime.process not in checks.evicting:
            return plain_remove(remover, info, token)
        checks.condemn(runtime.process, info.set_id)
        try:
            return plain_remove(remover, info, token)
        except StaleLease:
            checks.reprieve(runtime.process)
            raise

    def unlink(remover: Remover, set_id: int, namespace: bytes) -> int:
        checks.look_at_unlink(runtime.process, set_id)
        return plain_unlink(remover, set_id, namespace)

    with ExitStack() as stack:
        watched = ((Evictor, "_remove", evict), (Remover, "remove", remove), (Remover, "_unlink", unlink))
        for target, name, stand_in in watched:
            chosen = for_own_thread(stand_in, getattr(target, name))
            stack.enter_context(patch.object(target, name, chosen))
        yield


def _read(path: Path, at: Location) -> bytes | None:
    try:
        with path.open("rb", buffering=0) as file:
            n_bytes = record_bytes(at.extent, at.slab_bytes)
            file.seek(place_in_file(at).start)
            return file.read(n_bytes)
    except FileNotFoundError:
        return None


def _sum(slab: bytes, key: bytes, head: int, layer: int) -> int:
    buffer = ctypes.create_string_buffer(slab, len(slab))
    (found,) = slab_checksums(ctypes.addressof(buffer), len(slab), 1, key, head, layer)
    return found
