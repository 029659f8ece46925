"""Worker half of the connector: gathers after the forward, loads in the background, answers.

A forward may raise: out of memory, a failed collective, SIGTERM. Afterwards no block is known to hold the KV of its
tokens: vLLM's first model runner still calls `wait_for_save` while the exception passes through; the second one does
not, and if the engine goes on, its next step gathers blocks that the scheduler considers computed; and vLLM's own
prefix cache has had the step's blocks since the step was planned. So after a failed forward nothing is saved any more.
"""

import atexit
import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

from kvtier.build import Work, open_transfer
from kvtier.config.settings import Settings
from kvtier.connectors.bridge import AnswerPace, Step, WorkerBridge
from kvtier.connectors.faults import Faults
from kvtier.connectors.tracked_request import BlockShape
from kvtier.connectors.vllm import platform
from kvtier.connectors.vllm.compatibility import check_cache, check_engine, check_layers, layer_specs, window_advice
from kvtier.connectors.vllm.kv_dtypes import check_specs
from kvtier.connectors.vllm.kv_layout import CacheShape, EnginePages, engine_pages, in_layer_order
from kvtier.connectors.vllm.messages import RankReport, ReportMetadata, StepMetadata
from kvtier.connectors.vllm.metrics import KVTierStats, stats_of
from kvtier.connectors.vllm.namespace import Identity, check_share, identity_of
from kvtier.format.geometry import LayerForm, RankShare
from kvtier.plan import LoadPlan, SavePlan
from kvtier.scheduler.engine_report import RankFigures
from kvtier.scheduler.load_threshold import LoadCost

log = logging.getLogger("kvtier")
P = TypeVar("P", LoadPlan, SavePlan)

FIGURES_INTERVAL_S = 1.0  # between two reports of a rank's figures, while the engine makes steps, seconds


class WorkerHalf:
    """Called from the worker's thread only. Does nothing until the KV caches are registered."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Settings) -> None:
        check_engine(vllm_config, settings)
        platform.check_continuation(vllm_config)
        self._spec = check_cache(kv_cache_config, settings, window_advice(vllm_config))
        platform.check_windows(vllm_config, kv_cache_config)
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._settings = settings
        self._faults = Faults()
        self._forwards = ForwardWatch()
        self._failed_blocks: set[int] = set()
        self._pages: EnginePages | None = None
        self._bridge: WorkerBridge | None = None
        self._cost: LoadCost | None = None
        self._take_metrics: Any = dict
        self._figures: Callable[[], RankFigures] | None = None
        self._figures_due_s = 0.0
        self._rank = 0

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Open the tier over the engine's KV cache, after closing it over an earlier one. Raises ConfigError."""
        before = self._bridge
        self.close()
        names = in_layer_order(self._kv_cache_config.kv_cache_groups[0].layer_names)
        check_layers(self._vllm_config, names)
        identity = identity_of(self._vllm_config, self._spec, names, self._settings)
        self._rank = _rank()
        share = identity.shares[self._rank]
        check_share(share, self._spec, names, identity.namespace.geometry)
        self._pages = self._engine_pages(kv_caches, names, identity, share)
        step_tokens = int(self._vllm_config.scheduler_config.max_num_batched_tokens)
        work = Work(step_tokens, platform.ranks_here(self._vllm_config.parallel_config))
        transfer = open_transfer(self._settings, identity.namespace, share, self._pages.pages, work)
        self._take_metrics = transfer.metrics.take
        self._figures = RankReport(transfer, is_first_rank=self._rank == 0).take
        self._cost = transfer.cost
        chunk_shape = BlockShape(self._settings.chunk_tokens, self._pages.pages.block_tokens)
        pace = AnswerPace(self._settings.queues.load_group_s)
        self._bridge = WorkerBridge(transfer, chunk_shape, self._faults, pace)
        if before is not None:
            self._bridge.take_over(before)
        atexit.register(self.close)  # an engine in the caller's own process is not always shut down

    def before_forward(self, metadata: StepMetadata) -> None:
        self._forwards.begins(metadata.number)
        if self._bridge is not None:
            self._bridge.before_forward(self._expand(self._trusted(metadata.step)))

    def start_loads(self, step: Step) -> None:
        if self._bridge is not None:
            self._bridge.start_loads(self._expand(step))

    def after_forward(self, step: Step) -> None:
        self.step_ends()
        if self._bridge is not None:
            self._bridge.after_forward(self._expand(self._trusted(step)))

    def step_ends(self) -> None:
        """Note the end of the step, after its forward or without one. Later calls for the same step do nothing."""
        self._forwards.ends()

    def take_finished(self) -> set[str]:
        """Return the requests whose load ended; `take_failed_blocks` returns their failed blocks in the same step."""
        if self._bridge is None or self._pages is None:
            return set()
        done = self._bridge.poll()
        for answer in done:
            self._failed_blocks.update(self._pages.contract(answer.failed_blocks))
        return {answer.request_id for answer in done}

    def take_failed_blocks(self) -> set[int]:
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_report(self) -> ReportMetadata | None:
        """Return the report to the scheduler's half; None without news."""
        if self._bridge is None:
            return None
        cost, self._cost = self._cost, None
        saves, timings = self._bridge.take_saves(), self._bridge.take_timings()
        figures, now = None, time.monotonic()
        is_last = bool(saves or timings) and self._bridge.are_all_answered  # no step may follow
        if self._figures is not None and (is_last or now >= self._figures_due_s):
            self._figures_due_s = now + FIGURES_INTERVAL_S
            with self._faults.contained("reporting"):
                figures = self._figures()
        report = ReportMetadata(saves, timings, cost, figures, self._forwards.has_failed)
        return report if report != ReportMetadata([]) else None

    def take_stats(self) -> KVTierStats | None:
        return stats_of(self._take_metrics(), self._faults.take(), is_first_rank=self._rank == 0)

    def close(self) -> None:
        """Wait a little for saves under way. Later calls do nothing."""
        bridge, self._bridge = self._bridge, None
        if bridge is not None:
            atexit.unregister(self.close)
            bridge.close(self._settings.shutdown_drain_s)

    def _engine_pages(
        self, kv_caches: Mapping[str, torch.Tensor], names: list[str], identity: Identity, share: RankShare
    ) -> EnginePages:
        """Return views of the engine's tensors, each layer in its own form. Raises ConfigError for unexpected
        tensors."""
        geometry = identity.namespace.geometry
        forms = {name: geometry.form_of(number) for number, name in enumerate(names, share.reads.first_layer)}
        check_specs(self._vllm_config, layer_specs(self._kv_cache_config.kv_cache_groups[0]), forms)
        shapes = {form: self._shape(form, share, identity) for form in {geometry.form, *forms.values()}}
        others = {name: shapes[form] for name, form in forms.items() if form != geometry.form}
        return engine_pages(kv_caches, names, shapes[geometry.form], others)

    def _shape(self, form: LayerForm, share: RankShare, identity: Identity) -> CacheShape:
        return CacheShape(
            n_blocks=self._kv_cache_config.num_blocks,
            block_tokens=self._spec.block_size,
            heads=share.reads.n_heads,
            k_head_size=form.k_head_size,
            v_head_size=form.v_head_size,
            is_halved=identity.packing.is_halved,
            is_k_by_element=identity.packing.is_k_by_element,
            is_slots=form.v_head_size == 0 and identity.namespace.geometry.attention == "heads",
            element_bytes=form.element_bytes,
        )

    def _trusted(self, step: Step) -> Step:
        """Return the step without its saves once a forward failed. These get no answer; the scheduler's half plans no
        more once it is informed."""
        return replace(step, before=None, after=None) if self._forwards.has_failed else step

    def _expand(self, step: Step) -> Step:
        """Convert the step to blocks of the attention kernel, which may be smaller than the scheduler's."""
        pages = self._pages
        assert pages is not None
        if pages.ratio == 1:
            return step
        refused = tuple(
            replace(done, failed_blocks=frozenset(pages.expand(sorted(done.failed_blocks)))) for done in step.refused
        )
        loads = tuple(_in_kernel_blocks(plan, pages) for plan in step.loads)
        before, after = (plan and _in_kernel_blocks(plan, pages) for plan in (step.before, step.after))
        return replace(step, before=before, after=after, loads=loads, refused=refused)


def _in_kernel_blocks(plan: P, pages: EnginePages) -> P:
    return replace(plan, chunks=tuple(c._replace(block_ids=pages.expand(c.block_ids)) for c in plan.chunks))


def _rank() -> int:
    """Return the number of this worker within its engine: pipeline stage x tensor-parallel size + tensor-parallel
    rank."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    tensor = get_tp_group()
    return int(get_pp_group().rank_in_group * tensor.world_size + tensor.rank_in_group)


class ForwardWatch:
    """Watch of one worker's forwards. Steps have consecutive numbers, so a step that never arrived is noticed too."""

    def __init__(self) -> None:
        self.has_failed = False  # since the start; vLLM has no recovery that connectors could detect
        self._number: int | None = None
        self._has_ended = True
        self._handled: BaseException | None = None

    def begins(self, number: int) -> None:
        """Note a step. Call before any work of the step."""
        if not self._has_ended or (self._number is not None and number != self._number + 1):
            self._failed(None)
        self._number, self._has_ended = number, False
        # An engine may run in a caller's handler of another exception.
        self._handled = sys.exc_info()[1]

    def ends(self) -> None:
        """Note the end of a step. Call where vLLM says that its KV is complete, and where vLLM is done with the
        step."""
        raised = sys.exc_info()[1]
        if raised is not None and raised is not self._handled:
            self._failed(raised)
        self._has_ended = True

    def _failed(self, fault: BaseException | None) -> None:
        if not self.has_failed:
            why = "it did not end" if fault is None else repr(fault)[:200]
            log.error(
                "a forward failed (%s): vLLM's blocks may be wrong, so no more KV is saved; restart the engine", why
            )
        self.has_failed = True
