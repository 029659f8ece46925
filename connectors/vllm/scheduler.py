"""Scheduler half of the connector: hits, load plans and save plans of vLLM's requests."""

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import vllm

from kvtier.build import load_limit, open_store
from kvtier.codecs.measured_loss import loss_text
from kvtier.config.settings import Settings
from kvtier.connectors import dynamo
from kvtier.connectors.bridge import SchedulerBridge
from kvtier.connectors.faults import Faults, catch_faults
from kvtier.connectors.kv_events import Announcements, ChunkBlocks
from kvtier.connectors.late_saves import no_contents
from kvtier.connectors.load_costs import LoadCosts, StepTimer
from kvtier.connectors.tracked_request import BlockShape, RequestView
from kvtier.connectors.vllm import platform
from kvtier.connectors.vllm.compatibility import can_continue, check_cache, check_engine, roles, window_advice
from kvtier.connectors.vllm.kv_layout import in_layer_order
from kvtier.connectors.vllm.lora import Adapters
from kvtier.connectors.vllm.messages import ReportMetadata, StepMetadata
from kvtier.connectors.vllm.metrics import KVTierStats, stats_of
from kvtier.connectors.vllm.namespace import identity_of
from kvtier.connectors.vllm.requests import GivenBlocks, view_of, why_items_are_not_cached
from kvtier.connectors.vllm.save_progress import FrontierDelay, Frontiers
from kvtier.connectors.vllm.weight_changes import watch_weights
from kvtier.model.tenants import Tenants
from kvtier.scheduler.engine_report import About

log = logging.getLogger("kvtier")

SHORT_OF_BLOCKS = 0.1  # share of vLLM's blocks; with fewer free, requests wait for long loads of others, too


class SchedulerHalf:
    """Called from the scheduler's thread only.

    Block tables are part of the step if vLLM offers them (0.30), else they are mirrored from its steps. A
    request's end saves no more than was computed: vLLM counts tokens that any connector is to load as computed before
    they arrive, so the progress of its steps is recorded here.
    """

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Settings) -> None:
        check_engine(vllm_config, settings)
        platform.check_continuation(vllm_config)
        spec = check_cache(kv_cache_config, settings, window_advice(vllm_config))
        platform.check_windows(vllm_config, kv_cache_config)
        layer_names = in_layer_order(kv_cache_config.kv_cache_groups[0].layer_names)
        identity = identity_of(vllm_config, spec, layer_names, settings)
        if getattr(vllm_config, "weight_transfer_config", None) is not None:
            log.warning(
                "after each update of the weights call reset_prefix_cache(reset_connector=True), or vLLM reuses old KV"
            )
        loads, self._saves = roles(vllm_config)
        _warn_at_start(vllm_config, settings, self._saves)
        self._faults = Faults()
        about = _about(vllm_config, len(identity.shares))
        self._store = open_store(settings, identity.namespace, identity.shares, about)
        kept = self._store.costs
        self._costs = LoadCosts(load_limit(settings), kept)
        if kept is not None and kept.expected is not None:
            self._store.reporter.expect(kept.expected.prefill_token_s)
        self._step_timer = StepTimer(self._saw_step, _steps_ahead(vllm_config))
        self._block_tokens = spec.block_size
        shape = BlockShape(settings.chunk_tokens, spec.block_size)
        self._bridge = SchedulerBridge(
            self._store, shape, self._costs.limit, settings.index.lookup_timeout_s, self._faults
        )
        self._bridge.active_loads.loads_max = settings.queues.load_requests_max
        if vllm_config.cache_config.enable_prefix_caching:  # else a request that waited would find nothing
            self._bridge.active_loads.shared.wait_s = settings.queues.shared_load_wait_s
        why_not = why_items_are_not_cached(vllm_config)
        if why_not:
            log.warning("requests with images, audio or video are neither loaded nor saved: %s", why_not)
        adapters = Adapters()
        if vllm_config.lora_config is not None:
            adapters.watch_loads()
        behind = FrontierDelay.of(vllm_config, bool(identity.namespace.draft))
        self._frontiers = Frontiers(settings.save_generated, behind, adapters)
        self._view: Callable[[Any], RequestView] = partial(
            view_of,
            chunk_tokens=settings.chunk_tokens,
            adapters=adapters,
            caches_items=not why_not,
            tenants=Tenants(settings.capacity.tenants),
            loads=loads,
        )
        self._requests: dict[str, Any] = {}
        self._tables: dict[str, list[int]] = {}
        self._given = GivenBlocks()
        self._is_closed, self._n_steps = False, 0
        watch_weights(self, vllm_config.compilation_config.static_forward_context)
        self._events: dynamo.TierEvents | None = None
        if loads and dynamo.wants_events(vllm_config):  # an engine that only saves needs no prompts sent to it
            hash_tokens = getattr(kv_cache_config, "hash_block_size", None) or spec.block_size
            describe = partial(self._describe, shape=shape, hash_tokens=hash_tokens)
            writers = sum(share.writes is not None for share in identity.shares)
            self._bridge.saves.watcher = announcements = Announcements(
                describe, self._store.index, shape.blocks, writers
            )
            self._events = dynamo.TierEvents(announcements, spec)
            announcements.start()

    def bind_blocks(self, pool: Any) -> None:
        """Watch vLLM's blocks: how many are free, and which still have the content of an ended request."""
        self._bridge.active_loads.shared.is_short = partial(self._is_short, pool)
        self._bridge.saves.late.contents_of = partial(self._contents, pool)

    def matched_tokens(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """Return how many tokens of a waiting request can be loaded, and True if they are loaded in the background
        (always)."""
        self._track(request)
        n_tokens = self._bridge.hit_tokens(request.request_id, computed_tokens)
        if n_tokens and not self._is_of_its_key(request):
            n_tokens = 0
        return n_tokens, bool(n_tokens)

    def allocated(self, request: Any, blocks: Any, external_tokens: int) -> None:
        """Note blocks given to a request; with `external_tokens`, plan the load of so many tokens."""
        self._track(request)
        self._given.anew(request.request_id, blocks.blocks[0])
        if external_tokens > 0:
            self._bridge.begin_load(request.request_id, blocks.get_block_ids()[0], external_tokens)
        else:
            self._bridge.landed(request.request_id)

    def build_step(self, scheduled: Any) -> StepMetadata:
        """Return the workers' work of this step. Must be called before vLLM counts the step's tokens as computed."""
        self._advance(scheduled)
        rewritten = None
        with self._faults.contained("reading a step's blocks"):
            rewritten = rewritten_blocks(scheduled)
        self._n_steps += 1
        is_idle = not scheduled.total_num_scheduled_tokens
        return StepMetadata(self._bridge.take_step(is_idle, rewritten, requests_decode(scheduled)), self._n_steps)

    def finished(self, request: Any, block_ids: Sequence[int]) -> None:
        """Note the end of a request, for any reason; its blocks are free from the next step on, after that step's
        `before`."""
        self._step_timer.ended(request.request_id, time.monotonic())
        if request.request_id not in self._requests:
            return
        self._tables.pop(request.request_id, None)
        frontier, reached_tokens = 0, self._given.ended(request.request_id)
        with self._faults.contained("reading the end of a request"):
            frontier = self._frontiers.of_end(request, reached_tokens)
        self._bridge.finish(request.request_id, frontier if self._saves else 0, block_ids)
        del self._requests[request.request_id]  # only now: chunks to be saved are described from it

    def take_output(self, output: Any) -> None:
        """Take the workers' answers of a step."""
        self._bridge.loads_ended(output.finished_recving or (), output.invalid_block_ids or frozenset())
        report = getattr(output, "kv_connector_worker_meta", None)
        if isinstance(report, ReportMetadata):
            self._bridge.saved(report.saves)
            self._saves &= not report.has_failed
            if report.cost is not None:
                self._costs.calibrate(report.cost)
            for tokens, seconds in report.timings:
                self._costs.saw_load(tokens, seconds)
                self._store.reporter.saw_load(tokens, seconds)
            if report.figures is not None:
                self._store.reporter.add(report.figures)

    @catch_faults("making KV events", default=())
    def take_events(self) -> Iterable[Any]:
        """Return the tier's KV events, for vLLM to publish with its own."""
        return () if self._events is None else self._events.take()

    def needs_a_step(self) -> bool:
        """Return True if gathers or events wait for a step although vLLM has nothing to compute."""
        return self._bridge.has_pending_gathers() or (self._events is not None and self._events.has_waiting)

    def take_stats(self) -> KVTierStats | None:
        return stats_of(self._store.metrics.take(), self._faults.take(), is_first_rank=True)

    def reset(self) -> bool:
        """Begin an epoch. vLLM has tried to empty its own cache before, which fails while a request, even an ended one,
        holds blocks."""
        in_use = any(request.num_computed_tokens > 0 for request in self._requests.values())
        in_use |= self._given.are_held()
        log.info(
            "vLLM reset its caches and kvtier's, as after a change of weights: until this engine is started again it "
            "loads no KV stored before, and shares none with other engines"
        )
        return self._bridge.reset(in_use)

    def weights_changed(self) -> None:
        """Begin an epoch. vLLM's own cache still holds KV of the old weights: hits in it are not saved until a
        `reset`."""
        if self._bridge.weights_changed():
            log.warning(
                "weights changed in place: until this engine is started again it loads no KV stored before, and shares "
                "none with other engines; call reset_prefix_cache(reset_connector=True), or vLLM reuses old KV"
            )

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self._events is not None:
                self._events.announcements.close()
            with self._faults.contained("closing the store"):
                self._store.close()

    def _saw_step(self, tokens: int, seconds: float) -> None:
        token_s = self._costs.saw_step(tokens, seconds)
        if token_s is not None:
            self._store.reporter.saw_prefill(token_s)

    @catch_faults("counting free blocks", default=False)
    def _is_short(self, pool: Any, n_tokens: int) -> bool:
        left = pool.get_num_free_blocks() - n_tokens // self._block_tokens
        return bool(left < pool.num_gpu_blocks * SHORT_OF_BLOCKS)

    @catch_faults("reading the content of blocks", default=lambda self, pool, block_ids: no_contents(block_ids))
    def _contents(self, pool: Any, block_ids: Sequence[int]) -> Sequence[object | None]:
        """Return the hash objects of blocks in vLLM's own cache, or None. vLLM drops a block's hash when it gives the
        block to a request that will write to it. When the block is full again, vLLM makes another object, even if the
        hash is equal."""
        return [pool.blocks[block_id].block_hash for block_id in block_ids]

    @catch_faults("describing a chunk in KV events")
    def _describe(self, request_id: str, chunk: int, shape: BlockShape, hash_tokens: int) -> ChunkBlocks | None:
        request = self._requests.get(request_id)
        return None if request is None else dynamo.chunk_blocks(request, chunk, shape, hash_tokens)

    def _track(self, request: Any) -> None:
        if request.request_id not in self._requests:
            self._requests[request.request_id] = request
            self._bridge.track(self._look(request))

    @catch_faults("checking an adapter", default=False)
    def _is_of_its_key(self, request: Any) -> bool:
        """Return True if the request's weights are those of its key. Reads an adapter's files: call only if needed."""
        return self._frontiers.is_of_its_key(request)

    # A request that cannot be read is neither loaded nor saved.
    @catch_faults("reading a request", default=lambda self, request: RequestView(request.request_id))
    def _look(self, request: Any) -> RequestView:
        view = self._view(request)
        self._frontiers.track(request)
        return view

    @catch_faults("reading a step")
    def _advance(self, scheduled: Any) -> None:
        resolve = getattr(getattr(scheduled, "kv_connector_block_state", None), "resolve_block_ids", None)
        if resolve is not None:
            self._tables.clear()  # they miss this step, so later additions would be at wrong positions
        elif not self._mirror_tables(scheduled):
            self._tables.clear()
            return
        self._step_timer.planned(
            scheduled.num_scheduled_tokens.keys(), scheduled.total_num_scheduled_tokens, time.monotonic()
        )
        if not self._saves:
            return
        running = [
            (request_id, self._requests[request_id], computed, n_tokens)
            for request_id, computed in _computed_tokens(scheduled)
            if request_id in self._requests and (n_tokens := scheduled.num_scheduled_tokens.get(request_id, 0))
        ]
        for request_id, request, computed, _ in running:  # before any is saved: `begin` may forbid that of others too
            if request_id not in self._given.reached:
                self._bridge.begin(request_id, computed)
                self._frontiers.anew(request)
        for request_id, request, computed, n_tokens in running:
            self._given.reached[request_id] = computed + n_tokens
            frontier = self._frontiers.of_step(request, computed, n_tokens, self._n_steps)
            if self._bridge.chunks_pending(request_id, frontier) and self._is_of_its_key(request):
                table = self._tables.get(request_id, ()) if resolve is None else resolve(request_id)[0]
                self._bridge.advance(request_id, frontier, table)

    @catch_faults("following block tables", default=False)
    def _mirror_tables(self, scheduled: Any) -> bool:
        """Update block tables: new and resumed requests come with their whole table, running ones with added blocks."""
        for new in scheduled.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids[0])
        cached = scheduled.scheduled_cached_reqs
        for request_id, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if added is None:
                continue
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = list(added[0])
            elif request_id in self._tables:
                self._tables[request_id] += added[0]
        return True


def _warn_at_start(vllm_config: Any, settings: Settings, saves: bool) -> None:
    """Log what costs answers or hits, and does not stop a start."""
    if loss := loss_text(settings.codec):
        log.warning("%s", loss)
    if not can_continue(vllm_config):
        log.warning(
            "this model's pooling needs all tokens of a prompt in one step, so vLLM caches no prefixes of it: "
            "nothing is loaded, and %s; run it without the kvtier connector",
            "saves are of use to other engines only" if saves else "nothing is saved",
        )


def _steps_ahead(vllm_config: Any) -> int:
    """Return how many steps vLLM plans before the oldest one ended."""
    batches = getattr(vllm_config, "max_concurrent_batches", None)
    if batches is None:  # before 0.27 only the executor knows it
        is_async = getattr(vllm_config.scheduler_config, "async_scheduling", False)
        batches = max(vllm_config.parallel_config.pipeline_parallel_size, 2 if is_async else 1)
    return int(batches) - 1


def rewritten_blocks(scheduled: Any) -> frozenset[int]:
    """Return the blocks that vLLM zeroes or copies to in a step: the second model runner does so before
    `handle_preemptions`."""
    zeroed = getattr(scheduled, "new_block_ids_to_zero", None) or ()
    copies = getattr(scheduled, "kv_cache_block_copies", None) or ()
    return frozenset(zeroed) | {copy.dst_block_id for copy in copies}


def requests_decode(scheduled: Any) -> bool:
    """Return True if a request decodes in a step; False also if vLLM does not tell."""
    running = getattr(scheduled, "scheduled_cached_reqs", None)
    return any(getattr(running, "num_output_tokens", ()))


def _computed_tokens(scheduled: Any) -> list[tuple[str, int]]:
    """Return (request, tokens computed before this step) of every scheduled request."""
    cached = scheduled.scheduled_cached_reqs
    computed = [(new.req_id, new.num_computed_tokens) for new in scheduled.scheduled_new_reqs]
    return computed + list(zip(cached.req_ids, cached.num_computed_tokens, strict=True))


def _about(vllm_config: Any, ranks: int) -> About:
    """Describe this engine for `stats` and the admin service."""
    model = vllm_config.model_config
    label = getattr(model, "served_model_name", None) or model.model
    folder = Path(str(model.tokenizer))  # others read the report in other working directories
    tokenizer = folder.resolve() if folder.is_dir() else model.tokenizer
    return About(ranks, "vllm", vllm.__version__, str(label), str(tokenizer), platform.device_name())
