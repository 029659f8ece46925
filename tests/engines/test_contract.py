"""CONTRACT tests: no engine runs here. The connector offers every hook that vLLM calls, with a signature that fits.

Facts of the installed release are read from its own base class. Those of releases that are not installed (0.25.1; the
second model runner of 0.32; the main branch that becomes 0.33) were taken from their published sources and are
written down below as calls: (hook, positional arguments, keyword arguments).
"""

import inspect
import logging
import pickle
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("vllm")

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.core.sched.output import CachedRequestData

from kvtier.connectors.bridge import Step
from kvtier.connectors.faults import Faults
from kvtier.connectors.load_costs import StepTimer
from kvtier.connectors.vllm import KVTierConnector
from kvtier.connectors.vllm import connector as connector_module
from kvtier.connectors.vllm.kv_layout import EnginePages
from kvtier.connectors.vllm.lora import Adapters
from kvtier.connectors.vllm.messages import ReportMetadata, StepMetadata
from kvtier.connectors.vllm.requests import GivenBlocks, view_of
from kvtier.connectors.vllm.save_progress import FrontierDelay, Frontiers
from kvtier.connectors.vllm.scheduler import SchedulerHalf
from kvtier.connectors.vllm.worker import WorkerHalf
from kvtier.plan import LoadChunk, LoadDone, LoadPlan, SaveChunk, SaveOutcome, SavePlan

from .fakes import answer_to_save

CALLS_SINCE_025: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("register_kv_caches", 1, ()),
    ("set_host_xfer_buffer_ops", 1, ()),
    ("handle_preemptions", 1, ()),
    ("bind_connector_metadata", 1, ()),
    ("start_load_kv", 1, ()),
    ("wait_for_layer_load", 1, ()),
    ("save_kv_layer", 3, ()),
    ("wait_for_save", 0, ()),
    ("get_finished", 1, ()),
    ("get_block_ids_with_load_errors", 0, ()),
    ("get_kv_connector_stats", 0, ()),
    ("get_kv_connector_kv_cache_events", 0, ()),
    ("build_connector_worker_meta", 0, ()),
    ("clear_connector_metadata", 0, ()),
    ("get_handshake_metadata", 0, ()),
    ("get_num_new_matched_tokens", 2, ()),
    ("update_state_after_alloc", 3, ()),
    ("build_connector_meta", 1, ()),
    ("on_new_request", 1, ()),
    ("update_connector_output", 1, ()),
    ("request_finished", 2, ()),
    ("take_events", 0, ()),
    ("has_pending_push_work", 0, ()),
    ("get_finished_count", 0, ()),
    ("reset_cache", 0, ()),
    ("shutdown", 0, ()),
)
CALLS_OF_THE_SECOND_RUNNER: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("start_load_kv", 1, ("scheduler_output", "request_state_indices", "request_ids", "num_tokens", "attn_metadata")),
    ("start_load_kv", 1, ("something_of_a_later_release",)),
)


@pytest.mark.parametrize(("hook", "positional", "keywords"), CALLS_SINCE_025 + CALLS_OF_THE_SECOND_RUNNER)
def test_hooks_take_the_calls_of_all_releases(hook: str, positional: int, keywords: tuple[str, ...]) -> None:
    signature = inspect.signature(getattr(KVTierConnector, hook))
    signature.bind(object(), *range(positional), **dict.fromkeys(keywords))


def test_nothing_abstract_is_left() -> None:
    assert not KVTierConnector.__abstractmethods__


def test_overridden_hooks_take_what_the_installed_base_class_takes() -> None:
    for name, ours in vars(KVTierConnector).items():
        theirs = getattr(base.KVConnectorBase_V1, name, None)
        if name.startswith("_") or not inspect.isfunction(ours) or theirs is None:
            continue
        wanted = inspect.signature(theirs).parameters.values()
        plain = [p.name for p in wanted if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert list(inspect.signature(ours).parameters)[: len(plain)] == plain, name


def test_the_constructor_takes_the_cache_configuration_by_name() -> None:
    parameters = inspect.signature(KVTierConnector).parameters
    assert list(parameters) == ["vllm_config", "role", "kv_cache_config"]


def test_hooks_that_keep_blocks_safe_exist_in_the_installed_release() -> None:
    for hook in connector_module.NEEDED_HOOKS:
        assert hasattr(base.KVConnectorBase_V1, hook)


def test_a_release_without_them_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connector_module, "NEEDED_HOOKS", ("a_hook_that_never_was",))
    with pytest.raises(connector_module.ConfigError, match="a_hook_that_never_was"):
        connector_module.check_release()


def test_an_untested_release_warns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "kvtier"):
        for version in ("0.27.1", "0.29.0", "0.32.0+cpu"):
            monkeypatch.setattr("vllm.__version__", version)
            connector_module.check_release()
        assert caplog.records == []
        monkeypatch.setattr("vllm.__version__", "0.33.0")
        connector_module.check_release()
    assert "vLLM 0.33.0 is not tested" in caplog.text


def test_it_is_a_best_effort_cache_of_one_group() -> None:
    assert KVTierConnector.requires_kv_delivery.fget(object()) is False  # type: ignore[attr-defined]
    assert not base.supports_hma(KVTierConnector)
    source = getattr(base.KVConnectorBase_V1, "_cache_hit_source", None)
    assert source is None or KVTierConnector._cache_hit_source.value == "disk"


def test_metadata_travels_between_processes() -> None:
    step = StepMetadata(Step())
    saves = ReportMetadata([answer_to_save(b"k" * 16, SaveOutcome.SAVED)], has_failed=True)
    assert pickle.loads(pickle.dumps(step)) == step
    both = pickle.loads(pickle.dumps(saves)).aggregate(ReportMetadata([answer_to_save(b"k" * 16, SaveOutcome.FAILED)]))
    assert [done.outcome for done in both.saves] == [SaveOutcome.SAVED, SaveOutcome.FAILED] and both.has_failed
    assert isinstance(step, base.KVConnectorMetadata) and isinstance(saves, base.KVConnectorWorkerMetadata)


class RecordingBridge:
    """Takes what a scheduler half decides."""

    def __init__(self) -> None:
        self.advanced: list[tuple[str, int, tuple[int, ...]]] = []

    def chunks_pending(self, request_id: str, frontier_tokens: int) -> bool:
        return True

    def begin(self, request_id: str, computed_tokens: int) -> None:
        pass

    def advance(self, request_id: str, frontier_tokens: int, block_ids: Any) -> None:
        self.advanced.append((request_id, frontier_tokens, tuple(block_ids)))

    def track(self, view: Any) -> None:
        pass

    def landed(self, request_id: str) -> None:
        pass

    def begin_load(self, request_id: str, block_ids: Any, n_tokens: int) -> None:
        pass

    def take_step(self, is_idle: bool = False, rewritten: Any = frozenset(), decodes: bool = False) -> Step:
        return Step(decodes=decodes)


def scheduled(new: list[Any], cached: list[tuple[str, list[int] | None, int]], resumed: set[str], **more: Any) -> Any:
    """A SchedulerOutput, as every release since 0.25 makes it, of one token a request."""
    ids = [item.req_id for item in new] + [request_id for request_id, _, _ in cached]
    return SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[request_id for request_id, _, _ in cached],
            new_block_ids=[None if added is None else (added,) for _, added, _ in cached],
            num_computed_tokens=[computed for _, _, computed in cached],
            resumed_req_ids=resumed,
        ),
        num_scheduled_tokens=dict.fromkeys(ids, 1),
        total_num_scheduled_tokens=len(ids),
        **more,
    )


@pytest.fixture
def half() -> SchedulerHalf:
    half = SchedulerHalf.__new__(SchedulerHalf)
    half._bridge = RecordingBridge()  # type: ignore[assignment]
    half._requests = {name: SimpleNamespace(request_id=name, num_tokens=1000, num_prompt_tokens=1000) for name in "abc"}
    half._tables, half._given = {}, GivenBlocks()
    half._saves, half._n_steps = True, 0
    half._frontiers = Frontiers(True, FrontierDelay(0, 2), Adapters())
    half._step_timer = StepTimer(lambda tokens, seconds: None)
    half._faults = Faults()
    return half


def test_mirrored_block_tables_before_030(half: SchedulerHalf) -> None:
    """New requests bring their table, running ones what was added, resumed ones a table of their own again."""
    half.build_step(scheduled([SimpleNamespace(req_id="a", block_ids=([1, 2],), num_computed_tokens=0)], [], set()))
    half.build_step(scheduled([], [("a", [3], 32)], set()))
    half.build_step(scheduled([], [("a", None, 33)], set()))
    half.build_step(scheduled([], [("a", [7, 8], 0)], {"a"}))
    half.build_step(scheduled([], [("a", [9], 32), ("unknown", [5], 32)], set()))
    assert half._bridge.advanced == [  # type: ignore[attr-defined]
        ("a", 1, (1, 2)),
        ("a", 33, (1, 2, 3)),
        ("a", 34, (1, 2, 3)),
        ("a", 1, (7, 8)),
        ("a", 33, (7, 8, 9)),
    ]


def test_tables_of_029_are_mirrored(half: SchedulerHalf) -> None:
    """0.29 offers the tables only of requests that got blocks in the step."""
    new = SimpleNamespace(req_id="a", block_ids=([1, 2],), num_computed_tokens=0)
    for step, tables in ((([new], [], set()), {"a": ([1, 2],)}), (([], [("a", None, 1)], set()), {})):
        state = SimpleNamespace(block_ids=tables, boundary_state_offloads={})
        half.build_step(scheduled(*step, kv_connector_block_state=state))
    assert half._bridge.advanced == [("a", 1, (1, 2)), ("a", 2, (1, 2))]  # type: ignore[attr-defined]
    assert half._faults.take() == 0


def test_block_tables_since_030(half: SchedulerHalf) -> None:
    """Where vLLM offers to resolve them, its own answer counts."""
    state = SimpleNamespace(resolve_block_ids=lambda request_id: ([4, 5, 6],))
    half.build_step(scheduled([], [("b", None, 10)], set(), kv_connector_block_state=state))
    assert half._bridge.advanced == [("b", 11, (4, 5, 6))]  # type: ignore[attr-defined]
    half.build_step(scheduled([], [("c", [7], 10)], {"c"}))
    half.build_step(scheduled([], [("c", [8], 11)], set(), kv_connector_block_state=state))
    assert not half._tables, "what a later step adds is not behind block 7"


def test_block_ids_are_read_only_to_plan_a_load(half: SchedulerHalf) -> None:
    """vLLM makes a list of all of a request's blocks, on the thread that all loads of a burst wait for."""
    n_read = []
    blocks = SimpleNamespace(get_block_ids=lambda: n_read.append(1) or ([1, 2],), blocks=([],))
    half.allocated(half._requests["a"], blocks, 0)
    assert not n_read
    half.allocated(half._requests["a"], blocks, 16)
    assert n_read == [1]


def test_workers_know_whether_requests_decode(half: SchedulerHalf) -> None:
    step = scheduled([], [("a", None, 10), ("b", None, 10)], set())
    assert not half.build_step(step).step.decodes
    empty = CachedRequestData.make_empty()
    step.scheduled_cached_reqs = replace(
        empty, req_ids=["a", "b"], new_block_ids=[None, None], num_computed_tokens=[10, 10], num_output_tokens=[0, 3]
    )
    assert half.build_step(step).step.decodes


def test_a_step_that_cannot_be_understood_saves_nothing(half: SchedulerHalf) -> None:
    """I9, also for what a later release may change in its own structures."""
    odd = SimpleNamespace(scheduled_new_reqs=[], total_num_scheduled_tokens=1)
    assert half.build_step(odd) == StepMetadata(Step(), 1)
    assert half._faults.take() == 1


def test_a_request_that_cannot_be_understood_is_passed_by(half: SchedulerHalf) -> None:
    half._view = partial(view_of, chunk_tokens=64, adapters=Adapters())
    blocks = SimpleNamespace(get_block_ids=lambda: ([1, 2],), blocks=([],))
    half.allocated(SimpleNamespace(request_id="odd"), blocks, 0)
    assert half._faults.take() == 1


def test_chunks_of_a_draft_model_wait_a_step(half: SchedulerHalf) -> None:
    half._frontiers = Frontiers(True, FrontierDelay(1, 2), Adapters())
    half.build_step(scheduled([], [("b", [1], 10)], set()))
    assert half._bridge.advanced[0][1] == 10  # type: ignore[attr-defined]


def test_a_new_kv_cache_ends_what_is_moved_into_the_earlier_one() -> None:
    """vLLM may give the earlier one's memory to something else."""
    half, ended = object.__new__(WorkerHalf), []
    half._bridge = cast(Any, SimpleNamespace(close=ended.append))
    half._settings = cast(Any, SimpleNamespace(shutdown_drain_s=3.0))
    half._kv_cache_config = SimpleNamespace(kv_cache_groups=())
    with pytest.raises(IndexError):
        half.register({})
    assert ended == [3.0] and half._bridge is None


def test_a_step_is_converted_to_the_smaller_blocks_of_a_kernel() -> None:
    half = object.__new__(WorkerHalf)
    half._pages = EnginePages(cast(Any, None), 2)
    save = SavePlan(b"n", 64, (SaveChunk(b"k", b"p", 1, 2, (3, 4), "tenant", 5),))
    load = LoadPlan("r", b"n", (LoadChunk(b"k", b"e", (1,), 16),))
    step = half._expand(Step(None, save, (load,), (LoadDone("q", frozenset({2})),), True))
    assert step == Step(
        None,
        SavePlan(b"n", 64, (SaveChunk(b"k", b"p", 1, 2, (6, 7, 8, 9), "tenant", 5),)),
        (LoadPlan("r", b"n", (LoadChunk(b"k", b"e", (2, 3), 16),)),),
        (LoadDone("q", frozenset({4, 5})),),
        True,
    )
