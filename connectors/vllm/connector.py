"""KVTierConnector: kvtier as a KV connector of vLLM (V1 engine).

    --kv-transfer-config '{"kv_connector": "KVTierConnector", "kv_connector_module_path": "kvtier.connectors.vllm",
      "kv_role": "kv_both", "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"root": "/mnt/kv"}}'

Only dispatch: each hook of vLLM calls the half that it belongs to. vLLM makes one instance in the scheduler's process
and one in each worker. Loads are asynchronous. Saves are gathered after the forward of the step that completes a chunk,
and those of ended requests before the next step touches a block (`handle_preemptions`; blocks that vLLM zeroes before
that are not saved), so no blocks of a request are held back.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole

from kvtier.config.settings import Settings
from kvtier.connectors.bridge import Step
from kvtier.connectors.vllm.compatibility import check_model, install
from kvtier.connectors.vllm.messages import ReportMetadata, StepMetadata
from kvtier.connectors.vllm.metrics import KVTierPromMetrics, KVTierStats
from kvtier.connectors.vllm.platform import join_log
from kvtier.connectors.vllm.plugin import register_connector
from kvtier.connectors.vllm.scheduler import SchedulerHalf
from kvtier.connectors.vllm.worker import WorkerHalf
from kvtier.errors import ConfigError

log = logging.getLogger("kvtier")

# 0.25.1 on CUDA (H200); 0.32.0 there for hits and loaded bytes; all but 0.25.1 on the CPU.
TESTED_VERSIONS = ("0.25.1", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
# Without these, vLLM could reuse a request's blocks before its chunks are gathered.
NEEDED_HOOKS = ("handle_preemptions", "build_connector_worker_meta", "has_pending_push_work", "update_connector_output")


class KVTierConnector(KVConnectorBase_V1):
    """Connector of vLLM. Not SupportsHMA on purpose: vLLM then puts all attention layers into one KV-cache group, the
    form that kvtier stores."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        join_log()
        check_release()
        settings = Settings.load(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._scheduler_half: SchedulerHalf | None = None
        self._worker_half: WorkerHalf | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler_half = SchedulerHalf(vllm_config, kv_cache_config, settings)
        else:
            self._worker_half = WorkerHalf(vllm_config, kv_cache_config, settings)

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: a save that is dropped is a later miss, so preempted requests need not wait for it."""
        return False

    # In the workers

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self._worker.register(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        assert isinstance(kv_connector_metadata, StepMetadata)
        self._worker.before_forward(kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        step = self._step()
        if step is not None:
            self._worker.start_loads(step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is not scheduled before its asynchronous load has ended."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: whole chunks are gathered after the forward."""

    def wait_for_save(self) -> None:
        """Gather the step's chunks. vLLM's first model runner also calls this while an exception leaves the forward."""
        step = self._step()
        if step is not None:
            self._worker.after_forward(step)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._worker.step_ends()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self._worker.take_finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> ReportMetadata | None:
        return self._worker.take_report()

    # In the scheduler's process

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self._scheduler.bind_blocks(gpu_block_pool)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return self._scheduler.build_step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self._scheduler.take_output(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.finished(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._scheduler.needs_a_step()

    def take_events(self) -> Iterable[Any]:
        return self._scheduler.take_events()

    def reset_cache(self) -> bool:
        return self._scheduler.reset()

    # In both

    def get_kv_connector_stats(self) -> KVTierStats | None:
        half = self._scheduler_half if self._worker_half is None else self._worker_half
        assert half is not None
        return half.take_stats()

    def shutdown(self) -> None:
        for half in (self._worker_half, self._scheduler_half):
            if half is not None:
                half.close()

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Return None: any layout will do. vLLM asks before it lays out KV and makes connectors, so the model is
        checked here."""
        join_log()
        check_model(vllm_config)
        return None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVTierStats:
        return KVTierStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVTierPromMetrics:
        return KVTierPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def _scheduler(self) -> SchedulerHalf:
        assert self._scheduler_half is not None, "a scheduler's hook was called on a worker's connector"
        return self._scheduler_half

    @property
    def _worker(self) -> WorkerHalf:
        assert self._worker_half is not None, "a worker's hook was called on the scheduler's connector"
        return self._worker_half

    def _step(self) -> Step | None:
        metadata = self._connector_metadata
        return metadata.step if isinstance(metadata, StepMetadata) else None


def _label_hits() -> None:
    """Label hits as storage hits in vLLM's own metrics (0.32)."""
    try:
        from vllm.v1.metrics.cache_hit_source import CacheHitSource
    except ImportError:
        return
    KVTierConnector._cache_hit_source = CacheHitSource.DISK


def check_release() -> None:
    """Refuse a vLLM that lacks a required hook; warn of one that was not tested. Raises ConfigError."""
    version = vllm.__version__.split("+")[0]
    missing = [hook for hook in NEEDED_HOOKS if not hasattr(KVConnectorBase_V1, hook)]
    if missing:
        fix = f"its connectors have no {missing[0]}; use one of {', '.join(TESTED_VERSIONS)}"
        raise ConfigError("vllm", version, fix)
    if version not in TESTED_VERSIONS:
        log.warning("vLLM %s is not tested with this kvtier (tested: %s)", version, ", ".join(TESTED_VERSIONS))


_label_hits()
# vLLM's front end finds the children of a MultiConnector by name alone, and exits if one is not registered.
register_connector()
install()
