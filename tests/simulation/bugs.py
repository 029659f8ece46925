"""Bugs to plant: mutations of the library, each of which the simulation must catch. Each is a context in which the
library has that bug; the recipe that stirs it up is named beside it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from kvtier.arena.arena import Arena, SlotTable
from kvtier.connectors import tracked_request
from kvtier.connectors.bridge import SchedulerBridge
from kvtier.errors import ConfigError
from kvtier.eviction.set_removal import Remover
from kvtier.format.namespace import chunk_keys
from kvtier.format.record import STRIPES_MAX, stripes_of
from kvtier.index import entry
from kvtier.index.base import NewRecord, SetInfo
from kvtier.index.memory import MemoryIndex
from kvtier.io.native import slab_checksums
from kvtier.io.ring import OpResult
from kvtier.maintenance.sweeper import Sweeper
from kvtier.plan import SaveOutcome
from kvtier.scheduler.background import Keeper
from kvtier.scheduler.segment_allocator import SlotAllocator
from kvtier.scheduler.store import Store
from kvtier.storage.open_segments import OpenSegment, OpenSegments
from kvtier.worker.context import Quarantine
from kvtier.worker.loading import ChunkLoader, Fetch, State, Waiter
from kvtier.worker.loads import Loader
from kvtier.worker.loop import TransferLoop
from kvtier.worker.own_segments import OwnSegments
from kvtier.worker.read_plan import Source
from kvtier.worker.record_reader import RecordReader
from kvtier.worker.record_writer import RecordWriter, SaveBatch, SaveState
from kvtier.worker.saving import Saver

Patch = AbstractContextManager[object]


@dataclass(frozen=True)
class Bug:
    """plant: a context that has it. recipe: what stirs it up. first_seed: of the runs that try to catch it."""

    name: str
    plant: Callable[[], Patch]
    recipe: str = "random"
    first_seed: int = 0


BUGS: dict[str, Bug] = {}


def planted(target: object, attribute: str, recipe: str = "random", first_seed: int = 0) -> Callable[[Any], Any]:
    """The decorated function, which is named for the bug, stands in for the attribute; it is given the original."""

    def note(mutation: Any) -> Any:
        original = getattr(target, attribute)

        def plant() -> Patch:
            def mutated(*args: Any, **options: Any) -> Any:
                return mutation(original, *args, **options)

            return patch.object(target, attribute, mutated)

        BUGS[mutation.__name__] = Bug(mutation.__name__, plant, recipe, first_seed)
        return mutation

    return note


# --- verification and identity ---


@planted(RecordReader, "_op", "damage")
def what_is_read_is_not_verified(original: Any, reader: RecordReader, *args: Any) -> Any:
    return original(reader, *args)._replace(checksums=None)


@planted(ChunkLoader, "verify", "damage", first_seed=4)
def what_lies_in_an_arena_is_not_verified(original: Any, chunks: ChunkLoader, fetches: Sequence[Fetch]) -> None:
    chunks.set_state(fetches, State.VERIFIED)


@planted(tracked_request, "chunk_keys", "calm")
def a_key_without_its_parent(original: Any, namespace: bytes, tokens: Any, size: int, extras: Any, **chain: Any) -> Any:
    keys = []
    for number in range(chain.get("first", 0), len(tokens) // size):
        part = tokens[number * size : (number + 1) * size]
        keys += chunk_keys(namespace, part, size, {0: extras[number]} if number in extras else {})
    return keys


@planted(tracked_request, "chunk_keys", "calm")
def a_key_without_the_tenants_salt(
    original: Any, namespace: bytes, tokens: Any, size: int, extras: Any, **chain: Any
) -> Any:
    return original(namespace, tokens, size, {}, **chain)


@planted(Keeper, "begin_epoch", "new_weights")
def new_weights_under_the_old_namespace(original: Any, keeper: Keeper) -> bytes:
    return keeper._epoch[0].id


@planted(SchedulerBridge, "reset", "new_weights")
def old_blocks_are_saved_under_new_weights(original: Any, bridge: SchedulerBridge, blocks_in_use: bool) -> bool:
    return bool(original(bridge, False))


# --- waiting ---


@planted(OpenSegments, "lease_at_once", "calm")
def the_loop_opens_segments_itself(original: Any, files: OpenSegments, *name: int) -> OpenSegment | None:
    return files.lease(*name)


# --- saving ---


@planted(RecordWriter, "_submit", "slow_disk")
def published_before_the_write_is_done(
    original: Any, writer: RecordWriter, batch: SaveBatch, state: SaveState, ops: Any
) -> None:
    original(writer, batch, state, ops)
    if batch.state is SaveState.WRITING:
        batch.io = None
        sums = [
            slab_checksums(op.address + 4096, op.slab_bytes, op.n_slabs, op.key, op.first_head, op.first_layer)
            for op in ops
        ]
        writer._written(batch, [OpResult(0, (), of_op) for of_op in sums])


@planted(RecordWriter, "_written", "shared_disk")
def published_before_the_flush(original: Any, writer: RecordWriter, *args: Any) -> None:
    files = writer._worker.files
    files.sharing = files.sharing._replace(flushes=False)
    original(writer, *args)


@planted(RecordWriter, "_written", "calm")
def the_end_of_a_write_is_lost(original: Any, writer: RecordWriter, batch: SaveBatch, results: Any) -> None:
    if batch.staged[0].chunk.key[0] % 4:
        original(writer, batch, results)


@planted(RecordWriter, "_write", "calm")
def two_chunks_change_slots(original: Any, writer: RecordWriter, batch: SaveBatch) -> None:
    for one, other in zip(batch.staged[::2], batch.staged[1::2], strict=False):
        one.slot, other.slot = other.slot, one.slot
    original(writer, batch)


@planted(RecordWriter, "_abandon", "hung_reads")
def slots_of_a_late_write_are_given_back(original: Any, writer: RecordWriter, batch: SaveBatch) -> None:
    writer._saver.end(batch.staged, SaveOutcome.FAILED)
    writer._finish(batch)


@planted(RecordWriter, "_opened", "hung_calls")
def a_batch_that_was_given_up_is_written(original: Any, writer: RecordWriter, batch: SaveBatch, results: Any) -> None:
    if batch.state is SaveState.HUNG:
        for item in batch.staged:
            writer.work[item] = None
        batch.state = SaveState.OPENING
    original(writer, batch, results)


@planted(Saver, "_left", "hung_reads")
def a_late_write_counts_for_ever(original: Any, saver: Saver, then: Any, n_chunks: int) -> None:
    then()


@planted(Saver, "_answer", "calm")
def a_chunk_is_answered_twice(original: Any, saver: Saver, *args: Any) -> None:
    original(saver, *args)
    original(saver, *args)


@planted(Arena, "blank", "calm")
def padding_is_not_blanked(original: Any, arena: Arena[Any], *args: Any, **options: Any) -> None:
    return None


@planted(Quarantine, "add", "hung_reads")
def slots_of_late_operations_are_freed_at_once(original: Any, quarantine: Quarantine, batch: Any, release: Any) -> None:
    batch.cancel()
    release()


@planted(SlotAllocator, "answered", "hung_reads")
def a_slot_that_was_written_to_is_given_again(
    original: Any, allocator: SlotAllocator, set_id: int, slot: int, is_blank: bool
) -> None:
    original(allocator, set_id, slot, True)


@planted(OwnSegments, "leave", "slow_writers")
def what_the_index_refused_is_called_saved(original: Any, segments: OwnSegments, namespace: bytes, written: Any) -> Any:
    return {location.set_id for location in written}


# --- loading ---


@planted(RecordReader, "may_be_stale", "shared_disk", first_seed=4)
def a_stale_read_is_taken_for_damage(original: Any, reader: RecordReader, error: int = 0) -> bool:
    return False


@planted(RecordReader, "_known_sets", "shared_disk", first_seed=30)
def what_is_away_is_taken_for_gone(original: Any, reader: RecordReader, set_ids: set[int]) -> set[int]:
    return set()


@planted(SlotTable, "_evict_one", "slow_disk", first_seed=2)
def a_leased_slot_is_given_to_another(original: Any, table: SlotTable[Any]) -> bool:
    for key, cached in table._cached.items():
        del table._cached[key]
        table._free.append(cached.slot)
        return True
    return False


@planted(Loader, "_expire", "hung_calls")
def a_late_load_still_writes_into_blocks(original: Any, loader: Loader) -> bool:
    now_s = loader._worker.clock()
    late = [load for load in loader.work if load.deadline_s <= now_s]
    for load in late:
        loader.work.remove(load)
        loader._answer(load)
    return bool(late)


@planted(Loader, "_expire", "hung_calls")
def a_load_has_no_deadline(original: Any, loader: Loader) -> bool:
    return False


@planted(ChunkLoader, "first_block", "calm")
def blocks_that_the_engine_had_are_written(original: Any, chunks: ChunkLoader, chunk: Any) -> int:
    return 0


@planted(TransferLoop, "check_deadlines", "hung_calls", first_seed=7)
def nobody_wakes_the_loop_for_a_load_that_hangs(original: Any, loop: TransferLoop) -> None:
    return None


@planted(ChunkLoader, "arrived", "calm")
def a_completion_is_lost(original: Any, chunks: ChunkLoader, fetches: Sequence[Fetch]) -> None:
    lost = [fetch for fetch in fetches if not fetch.chunk.key[0] % 4]
    chunks.set_state(lost, State.JUDGING)
    original(chunks, [fetch for fetch in fetches if fetch not in lost])


@planted(ChunkLoader, "leave", "calm")
def a_slot_is_freed_twice(original: Any, chunks: ChunkLoader, fetches: Sequence[Fetch]) -> None:
    slots = [fetch.slot for fetch in fetches]
    original(chunks, fetches)
    chunks._worker.arena.discard(*slots)


@planted(ChunkLoader, "leave", "calm")
def a_slot_is_never_freed(original: Any, chunks: ChunkLoader, fetches: Sequence[Fetch]) -> None:
    return None


@planted(ChunkLoader, "_move", "calm")
def two_chunks_are_swapped(original: Any, chunks: ChunkLoader, fetch: Fetch, source: Source, waiter: Waiter) -> Any:
    other = waiter.number ^ 1
    n_chunks = len(waiter.load.plan.chunks)
    return original(chunks, fetch, source, waiter._replace(number=other) if other < n_chunks else waiter)


@planted(Loader, "_landed", "slow_disk")
def a_chunk_is_counted_before_it_lands(original: Any, loader: Loader, moved: Any) -> None:
    original(loader, moved)
    for _, (load, _) in moved:
        if load.n_pending:
            load.n_landed += 1
            load.n_pending -= 1


@planted(OwnSegments, "lease", "calm")
def a_record_goes_into_the_file_of_another_stripe(
    original: Any, segments: OwnSegments, plan: Any, chunk: Any, part: int
) -> Any:
    rank, stripe = divmod(part, STRIPES_MAX)
    return original(segments, plan, chunk, rank * STRIPES_MAX + (stripe + 1) % stripes_of(chunk.set_id))


@planted(Loader, "_join", "calm")
def who_joins_anothers_read_is_forgotten(original: Any, loader: Loader, fetch: Fetch, waiter: Waiter) -> None:
    return None


@planted(SchedulerBridge, "loads_ended", "damage")
def a_failed_load_is_offered_again(original: Any, bridge: SchedulerBridge, received: Any, failed_blocks: Any) -> None:
    original(bridge, received, frozenset())


@planted(RecordReader, "retract", "damage")
def a_bad_record_ends_the_request(original: Any, reader: RecordReader, key: bytes, location: Any) -> None:
    raise KeyError("no such location")


# --- the index, eviction and upkeep ---


@planted(Remover, "remove", "two_evictors", first_seed=4)
def eviction_without_fencing(original: Any, remover: Remover, info: SetInfo, token: int | None = None) -> int:
    return int(original(remover, info, None))


@planted(Remover, "remove", "killed_evictors")
def files_go_before_the_index_forgets_them(
    original: Any, remover: Remover, info: SetInfo, token: int | None = None
) -> int:
    freed = remover._unlink(info.set_id, info.namespace)
    remover._index.remove_set(info.set_id, token)
    return freed


@planted(MemoryIndex, "retract", "stale_location", first_seed=40)
def retracting_takes_whatever_is_there(original: Any, index: MemoryIndex, key: bytes, location: Any) -> bool:
    value = index._entries.get(key)
    return [original(index, key, one) for one in ([] if value is None else entry.unpack(value))] != []


@planted(MemoryIndex, "take_over", "lapsed_writers", first_seed=22)
def who_was_taken_over_goes_on_publishing(original: Any, index: MemoryIndex, set_id: int) -> None:
    return None


@planted(MemoryIndex, "_publish_one", "slow_writers", first_seed=1)
def records_of_a_set_that_was_taken_over_are_published(
    original: Any, index: MemoryIndex, record: NewRecord, into_unowned: bool
) -> bool:
    return bool(original(index, record, True))


@planted(entry, "covers", "calm")
def part_of_a_chunk_is_taken_for_all_of_it(original: Any, parts: Any, whole: Any) -> bool:
    return bool(list(parts))


@planted(Sweeper, "_trim", "restart_in_mid_save")
def a_dead_writers_set_is_cut_too_short(original: Any, keeper: Sweeper, info: SetInfo, locations: Any) -> int:
    return int(original(keeper, info, locations[:1]))


@planted(Keeper, "_capacity_bytes", "stale_location")
def the_budget_is_not_kept(original: Any, keeper: Keeper) -> int:
    return 1 << 60


@planted(Store, "select_saves", "calm")
def a_setting_is_looked_at_when_it_is_used(original: Any, store: Store, wanted: Any) -> Any:
    if wanted:
        raise ConfigError("segment_bytes", 1, "choose a larger one")
    return original(store, wanted)


@planted(Store, "select_saves", "tenants")
def a_full_queue_raises(original: Any, store: Store, wanted: Any) -> Any:
    selection = original(store, wanted)
    if selection.left:
        raise RuntimeError("no room")
    return selection
