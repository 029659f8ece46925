"""Composition root: builds the parts from settings. It is the only module that maps configured names to classes.

Every fault of a setting, or of the place that it names, is found here, before the engine starts (I8).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvtier.arena.admission import Admission, Admissions
from kvtier.codecs.base import Codec, slab_bytes
from kvtier.codecs.int8.codec import Int8Codec
from kvtier.codecs.raw import RawCodec
from kvtier.codecs.transform.codec import TransformCodec
from kvtier.codecs.transform.table import PRESET_BITS, read_table
from kvtier.codecs.turboquant.codec import Turboquant, rope_base_of
from kvtier.config.capacity import few_sets
from kvtier.config.settings import HOST_ADMIT, Settings
from kvtier.errors import ConfigError, TierUnavailable
from kvtier.eviction.evictor import Evictor
from kvtier.eviction.limits import Rules
from kvtier.format.geometry import PAGE_BYTES, Geometry, RankShare
from kvtier.format.namespace import Namespace
from kvtier.format.record import HEADS_PER_RECORD_MAX, HEADS_PER_SIGNED_RECORD_MAX, record_bytes
from kvtier.format.signing import Signer
from kvtier.index.base import new_owner
from kvtier.index.guard import GuardedIndex
from kvtier.index.open import open_index, open_lookups
from kvtier.kernels.paged import PagedKV
from kvtier.maintenance.sweeper import Sweeper
from kvtier.runtime import switch_interval
from kvtier.runtime.metrics import Metrics
from kvtier.runtime.threads import ThreadJobs
from kvtier.runtime.units import exact
from kvtier.scheduler.background import SPARES_MAX, Keeper, KeeperPlan
from kvtier.scheduler.capacity_warnings import CapacityWatch
from kvtier.scheduler.cost_history import CostHistory, note_name
from kvtier.scheduler.engine_report import COUNT_MAX, About
from kvtier.scheduler.load_threshold import FixedThreshold, LoadThreshold
from kvtier.scheduler.store import Store
from kvtier.storage.filesystem import Visibility, file_system_of, stripes_for
from kvtier.storage.root import (
    Root,
    check_namespace,
    check_reserve,
    check_space,
    is_in_place,
    open_again,
    open_namespace,
    open_root,
)
from kvtier.storage.segments import SegmentFolders, Sharing, direct_io_works
from kvtier.storage.start_wait import in_time
from kvtier.worker.arenas import cuda_memory, hbm_slots, host_memory, host_slots
from kvtier.worker.context import Quarantine, WorkerContext, arena_slot_bytes
from kvtier.worker.io_setup import load_cost, open_io
from kvtier.worker.loop import TASKS_MAX
from kvtier.worker.saving import SaveBounds
from kvtier.worker.transfer import Transfer, TransferJobs

log = logging.getLogger("kvtier")

# Codecs without presets; the other codecs of the settings are presets of transform or of turboquant.
CODECS: dict[str, Callable[[], Codec]] = {"raw": RawCodec, "int8": Int8Codec}

STEP_TOKENS = 8192  # tokens of an engine's step where the engine does not say
STRIPE_SLOTS_MIN = 4  # least slots in each file of a set: a smaller set has fewer files


def make_codec(settings: Settings, rope_base: float = 0.0) -> Codec:
    """Return the configured codec. rope_base: of the rotary embedding of the model's K, 0 where it stays as it is.
    Raises ConfigError for settings that contradict each other, and for a file that is no table."""
    settings.check_codec()
    if settings.codec_table and settings.codec in PRESET_BITS:
        return TransformCodec(settings.codec, read_table(settings.codec_table, settings.codec))
    made = CODECS.get(settings.codec)
    return Turboquant(settings.codec, rope_base) if made is None else made()


def codec_of(settings: Settings, namespace: Namespace) -> Codec:
    """Return the configured codec for a namespace, whose id names the base or the table. Raises as `make_codec` does,
    and for a table of other weights."""
    codec = make_codec(settings, rope_base_of(namespace.codec.name))
    if isinstance(codec, TransformCodec):
        if settings.model_tag is None:
            codec.check_weights(namespace.weights)
        if codec.name != namespace.codec.name:
            fix = f"the table was another ({namespace.codec.name}) when this engine's namespace was made: restart it"
            raise ConfigError("codec_table", str(settings.codec_table), fix)
    return codec


@dataclass(frozen=True, slots=True)
class SetShape:
    """Slots of a segment set, files that each rank has in it, and size of all its files over all ranks in bytes."""

    slots: int
    stripes: int
    set_bytes: int


def set_shape(
    settings: Settings, geometry: Geometry, codec: Codec, shares: Sequence[RankShare], stripes_max: int = 1
) -> SetShape:
    """Return the slots that fit into segment_bytes of the largest rank, or by default into a sixteenth of the capacity
    if that is less. Raises ConfigError when none fits."""
    sizes = []
    for share in shares:
        if share.writes is not None:
            if share.writes.n_heads > HEADS_PER_RECORD_MAX:
                fix = f"a record has room for {HEADS_PER_RECORD_MAX} KV heads a rank; use a larger tensor-parallel size"
                raise ConfigError("tensor_parallel_size", len(shares), fix)
            sizes.append(record_bytes(share.writes, slab_bytes(codec, geometry, share.writes)))
    slots = settings.slots_max(sizes)
    if slots < 1:
        fix = f"a chunk of this model takes {exact(max(sizes))} a rank; set it to several times that"
        raise ConfigError("segment_bytes", settings.segment_bytes, fix)
    stripes = max(1, min(stripes_max, slots // STRIPE_SLOTS_MIN))
    return SetShape(slots, stripes, sum(stripes * PAGE_BYTES + slots * size for size in sizes))


def _check_capacity(settings: Settings, shape: SetShape) -> None:
    """Warn where few sets fit the capacity. Raises ConfigError where not one does."""
    settings.check_capacity(shape.set_bytes, shape.slots)
    if warning := few_sets(settings.capacity_bytes, shape.set_bytes, shape.slots):
        log.warning("%s", warning)


def load_limit(settings: Settings) -> LoadThreshold:
    """Return the configured rule for the shortest hit that is loaded."""
    if settings.min_load_tokens == "auto":
        return LoadThreshold()
    return FixedThreshold(settings.min_load_tokens)


def signer_of(settings: Settings, namespace: Namespace, shares: Sequence[RankShare]) -> Signer | None:
    """Return the signer of this namespace's records; None where they are not signed. Raises ConfigError."""
    signer = settings.signing.signer()
    if namespace.signing != (signer.fingerprint if signer else ""):
        fix = "its secret is not the one that this engine's namespace was made with: was it changed just now?"
        raise ConfigError("signing.key_file", str(settings.signing.key_file), fix)
    if signer is not None:
        n_heads = max((share.writes.n_heads for share in shares if share.writes is not None), default=0)
        if n_heads > HEADS_PER_SIGNED_RECORD_MAX:
            fix = (
                f"a signed record has room for {HEADS_PER_SIGNED_RECORD_MAX} KV heads a rank, not {n_heads}: leave it "
                "out, or use a larger tensor-parallel size"
            )
            raise ConfigError("signing.key_file", str(settings.signing.key_file), fix)
    return signer


def check_place(settings: Settings) -> None:
    """Open the root and its index as an engine does, and close them, so that a start is refused before the model is
    loaded. Raises ConfigError; IndexUnavailable where an embedded index does not open."""
    root = open_root(settings)
    if settings.index.kind != "memory":  # that one is shared by all of a process, and nothing of it can be wrong
        open_index(settings, root).close()


def check_chunks(settings: Settings, geometry: Geometry, shares: Sequence[RankShare], device: str) -> None:
    """Check that segments and arenas have room for the chunks of a model, before it is loaded. device: "cpu" or "cuda",
    where the KV will be. Raises ConfigError."""
    codec = make_codec(settings)
    codec.check(geometry)
    set_shape(settings, geometry, codec, shares)
    slot_bytes = max(arena_slot_bytes(geometry, codec, share) for share in shares)
    host_slots(settings.host.arena_bytes_on(device), slot_bytes)
    if device == "cuda":
        hbm_slots(settings.hbm, slot_bytes, step_chunks=1)


def open_store(
    settings: Settings,
    namespace: Namespace,
    shares: Sequence[RankShare],
    about: About | None = None,
    codec: Codec | None = None,
    spares_max: int = SPARES_MAX,
) -> Store:
    """Make the Store, which decides in the engine's scheduler process. `shares`: of all ranks; `about`: for its
    reports; `codec`: None for the settings' own; `spares_max`: segment sets kept ready at most. Raises ConfigError."""
    codec = codec or codec_of(settings, namespace)
    codec.check(namespace.geometry)
    signer_of(settings, namespace, shares)
    root = _begin(settings)
    kind = in_time(root.path, "asking for its kind", partial(file_system_of, root.folder)).kind
    shape = set_shape(settings, namespace.geometry, codec, shares, stripes_for(kind, settings.io.stripes))
    _check_capacity(settings, shape)
    in_time(root.path, "asking for its free space", partial(check_space, root.path, shape.set_bytes))
    reserve = partial(check_reserve, root.path, settings.capacity.reserve_bytes, shape.set_bytes)
    in_time(root.path, "asking for its free space", reserve)
    about = replace(about or About(len(shares)), capacity_bytes=min(settings.capacity_bytes, COUNT_MAX))
    in_time(root.path, "opening this model's folder", partial(open_namespace, root, namespace, model=about.model))
    index = open_index(settings, root, is_engines=True)
    owner = new_owner()
    writers = sum(share.writes is not None for share in shares)
    costs = CostHistory(index, note_name(namespace.id, about)) if about.device else None
    evictor = Evictor(index, root.folder, owner, Rules.of(settings.capacity))
    sweeper = Sweeper(index, root.folder, owner)
    watch = CapacityWatch(
        owner, settings.capacity_bytes, index, lambda: sweeper.free_space().n_bytes - evictor.rules.reserve_bytes
    )
    plan = KeeperPlan(
        owner,
        shape.slots,
        shape.set_bytes,
        settings.capacity_bytes,
        settings.writer_lease_s,
        settings.touch_interval_s,
        partial(_make_namespace_folder, settings, root, {namespace.id}, about.model),
        about,
        spares_max,
        partial(_on_renewal, watch, costs),
        set_files=writers * shape.stripes,
        stripes=shape.stripes,
        reclaim_s=file_system_of(root.folder).reclaim_s,
    )
    keeper = Keeper(namespace, plan, index, sweeper, evictor, random.SystemRandom())
    if isinstance(index, GuardedIndex):
        index.metrics = keeper.metrics
    keeper.start()
    log.info(
        "tier at %s: %s index, namespace %s, segment sets of %d chunks and %d MiB, files a rank: %d",
        root.path,
        settings.index.kind,
        namespace.id.hex(),
        shape.slots,
        shape.set_bytes >> 20,
        shape.stripes,
    )
    store = Store(namespace.id, settings.chunk_tokens, writers, open_lookups(index), keeper)
    store.costs = costs
    return store


def _begin(settings: Settings) -> Root:
    """Name this process's switch interval, and open the root."""
    switch_interval.use(settings.switch_interval_s)
    return in_time(settings.root, "opening the root and reading its owner.json", partial(open_root, settings))


def _on_renewal(watch: CapacityWatch, costs: CostHistory | None, now_s: float) -> None:
    watch.look(now_s)
    if costs is not None:
        costs.refresh(now_s)


def _make_namespace_folder(
    settings: Settings, root: Root, opened: set[bytes], model: str, namespace: Namespace
) -> None:
    """Look at the root, and make a namespace's folder if it is missing. Raises ConfigError, TierUnavailable."""
    open_again(settings, root)
    open_namespace(root, namespace, namespace.id in opened, model)
    opened.add(namespace.id)


@dataclass(frozen=True, slots=True)
class Work:
    """Amount of work. step_tokens: largest number of tokens computed in one step of the engine. ranks: workers on this
    machine that load at once, including this one."""

    step_tokens: int = STEP_TOKENS
    ranks: int = 1


def open_transfer(
    settings: Settings,
    namespace: Namespace,
    share: RankShare,
    pages: PagedKV,
    work: Work | None = None,
    codec: Codec | None = None,
) -> Transfer:
    """Make the Transfer, which moves KV in each worker. Raises ConfigError.

    pages: the engine's KV cache on this rank. codec: None for the settings' own.
    """
    work = work or Work()
    settings.check_block(pages.block_tokens)
    device = pages.layers[0].k.device
    if device.type not in HOST_ADMIT:
        where = ", ".join(HOST_ADMIT)
        fix = f"KV is moved to and from {where} only; run the engine there, or without the kvtier connector"
        raise ConfigError("device", device.type, fix)
    settings.check_device(has_gpu=device.type == "cuda")
    codec, geometry = codec or codec_of(settings, namespace), namespace.geometry
    codec.check(geometry)
    root = _begin(settings)
    slot_bytes = arena_slot_bytes(geometry, codec, share)
    if device.type == "cpu":
        memory = host_memory(settings, slot_bytes)
    else:
        memory = cuda_memory(settings, slot_bytes, -(-work.step_tokens // geometry.chunk_tokens), device)
    codec.prepare(pages, geometry, share.reads)
    direct = in_time(root.path, "trying direct I/O", partial(use_direct_io, settings, root))
    measure = partial(open_io, settings, root, direct, memory.arena, device, work.ranks)
    engines, measured = in_time(root.path, "measuring its reads (io.calibrate)", measure)
    engines = engines._replace(signer=signer_of(settings, namespace, [share]))
    metrics = Metrics()
    check = partial(check_namespace, root, namespace)
    files = SegmentFolders(
        root.folder, direct, check, engines.forget, partial(is_in_place, root), sharing_of(settings, root)
    )
    index = open_index(settings, root, metrics, is_engines=True)
    worker = WorkerContext(
        geometry,
        share,
        codec,
        pages,
        memory.arena,
        memory.host,
        memory.order,
        memory.sums,
        engines,
        index,
        files,
        Quarantine(),
        metrics,
        settings.io.timeout_s,
    )
    jobs = _transfer_jobs(settings)
    cost = load_cost(measured, codec, geometry, share)
    bounds = SaveBounds(settings.queues.saves_within(memory.save_slots), memory.held_slots)
    transfer = Transfer(worker, jobs, _admissions(settings, device.type), bounds, cost, memory.pinner)
    transfer.start()
    return transfer


def _transfer_jobs(settings: Settings) -> TransferJobs:
    queues = settings.queues
    return TransferJobs(
        ThreadJobs("loop", 1, 1),
        ThreadJobs("load", queues.load_threads, TASKS_MAX),
        ThreadJobs("save", queues.save_threads, TASKS_MAX),
        ThreadJobs("tidy", 1, 1),
    )


def _admissions(settings: Settings, device: str) -> Admissions:
    """On the CPU there is one arena, and it is the host's."""
    host = Admission(settings.host.admit or HOST_ADMIT[device])
    if device == "cpu":
        return Admissions(host, host)
    return Admissions(Admission(settings.hbm.admit if settings.hbm.arena_bytes else "never"), host)


def sharing_of(settings: Settings, root: Root) -> Sharing:
    """Return how nodes share the root's files, by its file system and io.fdatasync."""
    found = file_system_of(root.folder)
    flushes = found.is_flushed(settings.io.fdatasync)
    if flushes:
        kind = found.kind if found.nfs_version is None else f"NFS {found.nfs_version}"
        log.info(
            "%s: on %s, segments are flushed before they are published (io.fdatasync: %s)",
            root.path,
            kind,
            settings.io.fdatasync,
        )
    elif found.visibility is Visibility.FLUSHED:
        log.warning(
            "%s: on %s other nodes may read stale bytes of what is published without a flush; set io.fdatasync "
            "to auto unless only this node uses the root",
            root.path,
            found.kind,
        )
    if found.nfs_fix is not None:
        log.warning("%s: %s", root.path, found.nfs_fix)
    return Sharing(flushes, found.visibility is Visibility.FLUSHED, found.visibility is not Visibility.LOCAL)


def use_direct_io(settings: Settings, root: Root) -> bool:
    """Return True if segments are opened for direct I/O. Raises ConfigError when it is required and refused."""
    if settings.io.direct == "never":
        return False
    try:
        works = direct_io_works(root.folder)
    except TierUnavailable as fault:
        raise ConfigError(
            "root", str(root.path), f"cannot be written: {fault}; make it writable, or choose another root"
        ) from fault
    kind = file_system_of(root.folder).kind
    if not works and settings.io.direct == "require":
        raise ConfigError(
            "io.direct", "require", f"the file system of {root.path} ({kind}) refuses direct I/O; set it to auto"
        )
    if not works:
        shared = settings.index.kind == "redis"
        others = ", and other nodes may take for damaged what this one's has not written out yet" if shared else ""
        log.warning("%s (%s) refuses direct I/O: reads and writes go through the page cache%s", root.path, kind, others)
    return works
