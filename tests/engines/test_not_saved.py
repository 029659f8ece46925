"""Blocks that a request has, but whose KV is not, or not surely, what its key would stand for: never saved.

The scheduler's half over a real bridge, told what vLLM tells it. The facts of vLLM behind it are asked of the installed
release where it has them.
"""

import logging
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash

from kvtier.connectors.bridge import SchedulerBridge
from kvtier.connectors.faults import Faults
from kvtier.connectors.load_costs import StepTimer
from kvtier.connectors.tracked_request import BlockShape
from kvtier.connectors.vllm import KVTierConnector
from kvtier.connectors.vllm.lora import Adapters
from kvtier.connectors.vllm.requests import GivenBlocks, view_of
from kvtier.connectors.vllm.save_progress import FrontierDelay, Frontiers
from kvtier.connectors.vllm.scheduler import SchedulerHalf, rewritten_blocks
from kvtier.connectors.vllm.weight_changes import watch_weights
from kvtier.runtime import metrics as names
from kvtier.scheduler.load_threshold import FixedThreshold

from .fakes import FakeStore

CHUNK, BLOCK = 64, 32


class Scene:
    """A scheduler's half, and requests of 130 tokens in blocks 10, 11, ..."""

    def __init__(self) -> None:
        self.store = FakeStore()
        self.half = half = SchedulerHalf.__new__(SchedulerHalf)
        half._faults = Faults()
        half._saves, half._n_steps = True, 0
        half._frontiers = Frontiers(True, FrontierDelay(0, 2), Adapters())
        half._bridge = SchedulerBridge(self.store, BlockShape(CHUNK, BLOCK), FixedThreshold(CHUNK), 1.0, half._faults)  # type: ignore[arg-type]
        half._view = partial(view_of, chunk_tokens=CHUNK, adapters=Adapters())
        half._step_timer = StepTimer(lambda tokens, seconds: None)
        half._requests, half._tables, half._given = {}, {}, GivenBlocks()
        self.first = SimpleNamespace(block_id=10, ref_cnt=0)

    def ask(self, name: str = "r", local: int = 0) -> Any:
        """A request that vLLM admits, with so many tokens found in its own cache."""
        tokens = list(range(130))
        request = SimpleNamespace(
            request_id=name,
            all_token_ids=tokens,
            prompt_token_ids=tokens,
            num_tokens=130,
            num_prompt_tokens=130,
            num_computed_tokens=0,
            kv_transfer_params=None,
            lora_request=None,
            cache_salt=None,
            mm_features=[],
        )
        self.half.matched_tokens(request, local)
        self.half.allocated(request, blocks(range(10, 15), self.first), 0)
        return request

    def step(self, request: Any, computed: int, scheduled: int, **more: Any) -> list[tuple[int, ...]]:
        """One step of vLLM's in which the request is new: the blocks that are gathered."""
        new = SimpleNamespace(req_id=request.request_id, block_ids=(list(range(10, 15)),), num_computed_tokens=computed)
        ids = {request.request_id: scheduled} if scheduled else {}
        step = self.half.build_step(output([new] if scheduled else [], ids, **more)).step
        request.num_computed_tokens = computed + scheduled
        return [chunk.block_ids for plan in (step.before, step.after) if plan for chunk in plan.chunks]

    def end(self, request: Any, **more: Any) -> list[tuple[int, ...]]:
        """The request ends; the next step's gathers."""
        self.half.finished(request, list(range(10, 15)))
        return self.step(request, 0, 0, **more)


def blocks(ids: Any, first: Any = None) -> Any:
    each = [first] if first is not None else []
    return SimpleNamespace(get_block_ids=lambda: (list(ids),), blocks=(each,), new_empty=lambda: None)


def output(new: list[Any], scheduled: dict[str, int], cached: Any = None, **more: Any) -> Any:
    none = SimpleNamespace(req_ids=[], new_block_ids=[], num_computed_tokens=[], resumed_req_ids=set())
    return SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached or none,
        num_scheduled_tokens=scheduled,
        total_num_scheduled_tokens=sum(scheduled.values()),
        **more,
    )


# --- blocks that vLLM writes to before it lets anything be gathered ---


def computed_at_its_end(scene: Scene) -> Any:
    """A request whose chunks wait for its end, as those of a draft model do."""
    scene.half._frontiers = Frontiers(True, FrontierDelay(1, 2), Adapters())
    request = scene.ask()
    assert scene.step(request, 0, 130) == []
    return request


def test_a_request_that_ends_is_saved() -> None:
    scene = Scene()
    assert scene.end(computed_at_its_end(scene)) == [(10, 11), (12, 13)]


@pytest.mark.parametrize(
    "step",
    [
        {"new_block_ids_to_zero": [13, 20]},
        {"kv_cache_block_copies": [SimpleNamespace(src_block_id=10, dst_block_id=12)]},
    ],
)
def test_blocks_that_are_zeroed_or_copied_to_in_the_same_step_are_left(step: dict[str, Any]) -> None:
    """The second model runner does that before `handle_preemptions`."""
    scene = Scene()
    assert scene.end(computed_at_its_end(scene), **step) == [(10, 11)]
    assert scene.store.metrics.total() == {names.SKIPPED_OVERWRITTEN: 1, names.DROPPED_TAILS: 1}


def test_nothing_is_gathered_when_what_is_rewritten_cannot_be_understood() -> None:
    scene = Scene()
    assert scene.end(computed_at_its_end(scene), new_block_ids_to_zero=[[13], [20]]) == []
    assert scene.half._faults.take() == 1
    assert scene.store.metrics.total() == {names.SKIPPED_OVERWRITTEN: 2, names.DROPPED_TAILS: 1}


def test_what_the_second_runner_writes_to_before_gathers_is_known_to_the_scheduler() -> None:
    """vLLM's own execute_model: what it touched when `handle_preemptions` was called is in the step that it is told."""
    runner = pytest.importorskip("vllm.v1.worker.gpu.model_runner").GPUModelRunner
    if not hasattr(runner, "update_requests"):
        pytest.skip("this release has another second runner")
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy

    touched: list[int] = []
    none = lambda *args, **kwargs: None  # noqa: E731

    class Told(Exception):
        pass

    def told(*args: Any, **kwargs: Any) -> None:
        raise Told

    numbers = SimpleNamespace(np=None)
    model = SimpleNamespace(
        update_pp_decode_requests=none,
        finish_requests=none,
        free_states=none,
        add_requests=none,
        aux_output_connector=None,
        encoder_cache=None,
        block_tables=SimpleNamespace(apply_staged_writes=none, append_block_ids=none),
        kv_connector=SimpleNamespace(no_forward=told, pre_forward=told),
        kv_block_zeroer=SimpleNamespace(zero_block_ids=touched.extend),
        kv_caches=[],
        kv_cache_config=SimpleNamespace(num_blocks=8),
        req_states=SimpleNamespace(num_computed_tokens_np=None, prefill_len=numbers, num_computed_prefill_tokens=None),
    )
    step = output([], {}, new_block_ids_to_zero=[2, 3], kv_cache_block_copies=[KVCacheBlockCopy(5, 6)])
    step.finished_req_ids = {"ended"}
    model.update_requests = lambda scheduled: runner.update_requests(model, scheduled)
    with pytest.MonkeyPatch.context() as patch:
        module = pytest.importorskip("vllm.v1.worker.gpu.model_runner")
        patch.setattr(module.np, "minimum", none)
        patch.setattr(
            module, "copy_kv_cache_blocks_inplace", lambda caches, count, copies: touched.extend(c[1] for c in copies)
        )
        with pytest.raises(Told):
            runner.execute_model(model, step)
    assert touched == [2, 3, 6], "else the order has changed, for the better: say so in kvtier/README.md"
    assert rewritten_blocks(step) == {*touched}


def test_the_first_runner_lets_be_gathered_before_it_writes_to_blocks() -> None:
    import inspect

    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    source = inspect.getsource(GPUModelRunner.execute_model)
    assert 0 < source.index(".handle_preemptions(") < source.index("self._update_states(")


# --- KV that another connector was to bring ---


class Other:
    """An asynchronous connector with a hit of 128 tokens, as a decoder has it of its prefiller."""

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        return 128, True

    def update_state_after_alloc(self, *args: Any) -> None:
        pass

    def request_finished(self, *args: Any) -> tuple[bool, None]:
        return False, None


@pytest.fixture
def pair() -> tuple[Scene, Any]:
    """vLLM's own MultiConnector over another connector and kvtier."""
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    scene = Scene()
    ours = KVTierConnector.__new__(KVTierConnector)
    ours._scheduler_half, ours._worker_half = scene.half, None
    both = MultiConnector.__new__(MultiConnector)
    both._connectors, both._requests_to_connector, both._extra_async_saves = [Other(), ours], {}, {}
    return scene, both


def admitted_by(both: Any, scene: Scene) -> Any:
    request = scene.ask()
    tokens, _ = both.get_num_new_matched_tokens(request, 0)
    both.update_state_after_alloc(request, blocks(range(10, 15)), tokens)
    request.num_computed_tokens = tokens  # vLLM counts them before they have come
    return request


def test_a_request_aborted_while_another_connector_loads_it_saves_nothing(pair: tuple[Scene, Any]) -> None:
    scene, both = pair
    request = admitted_by(both, scene)
    both.request_finished(request, list(range(10, 15)))
    assert scene.step(request, 0, 0) == []


def test_a_request_that_was_preempted_before_saves_nothing_either(pair: tuple[Scene, Any]) -> None:
    """What it had computed before it lost its blocks does not count."""
    scene, both = pair
    request = scene.ask()
    scene.half._frontiers = Frontiers(True, FrontierDelay(1, 2), Adapters())
    scene.step(request, 0, 130)
    both.get_num_new_matched_tokens(request, 0)
    both.update_state_after_alloc(request, blocks(range(10, 15)), 128)
    request.num_computed_tokens = 128
    both.request_finished(request, list(range(10, 15)))
    assert scene.step(request, 0, 0) == []


def test_what_another_connector_loaded_is_not_saved(pair: tuple[Scene, Any], caplog: pytest.LogCaptureFixture) -> None:
    """It may be lossy, or have failed in a way that is told only after the step."""
    scene, both = pair
    request = admitted_by(both, scene)
    assert scene.step(request, 128, 2) == []
    assert scene.end(request) == []
    assert caplog.text.count("another connector") == 1
    for local, computed in ((96, 96), (96, 101), (0, 5)):
        later = scene.ask(f"hit {computed}", local=local)
        assert scene.step(later, computed, 130 - computed) == [], "vLLM's own cache has that KV now"
        assert scene.end(later) == []
    fresh = scene.ask("fresh")
    assert scene.step(fresh, 0, 130) == [(10, 11), (12, 13)]
    scene.end(fresh)
    scene.store.stored.clear()
    assert scene.half.reset(), "its cache is empty"
    later = scene.ask("later", local=96)
    assert scene.step(later, 96, 34) == [(10, 11), (12, 13)]


@pytest.mark.parametrize("is_first", [True, False])
def test_a_hit_in_what_another_connector_loads_in_the_same_step_is_not_saved(
    pair: tuple[Scene, Any], is_first: bool
) -> None:
    """vLLM caches those blocks while it schedules, before the connector learns of the first request."""
    scene, both = pair
    loaded, hit = admitted_by(both, scene), scene.ask("hit", local=96)
    new = [SimpleNamespace(req_id=name.request_id, block_ids=(list(range(10, 15)),), num_computed_tokens=computed)
           for name, computed in ((loaded, 128), (hit, 96))]  # fmt: skip
    tokens = {loaded.request_id: 2, hit.request_id: 34}
    step = scene.half.build_step(output(new if is_first else new[::-1], tokens)).step
    assert not step.before and not step.after
    assert scene.end(hit) == []


@pytest.mark.parametrize("local", [0, 32, 96])
def test_what_the_engine_found_itself_is_saved(local: int) -> None:
    """Also where its own hit goes on within a block, past the whole blocks that it tells of."""
    scene = Scene()
    request = scene.ask(local=local)
    assert scene.step(request, local + 5, 130 - local - 5) == [(10, 11), (12, 13)]


@pytest.mark.parametrize("loads", [True, False])
def test_what_this_tier_loaded_counts_as_its_own(loads: bool) -> None:
    scene = Scene()
    scene.half._view = partial(scene.half._view, loads=loads)  # a producer only saves
    scene.store.stored.update(chunk.key for chunk in saved_by(Scene())[:1])
    request = scene.ask()
    n_tokens, _ = scene.half.matched_tokens(request, 0)
    assert n_tokens == (64 if loads else 0)
    scene.half.allocated(request, blocks(range(10, 15)), 64 if loads else 0)
    scene.step(request, 0, 0)
    scene.half._bridge.loads_ended({"r"}, frozenset())
    assert scene.step(request, 64 if loads else 0, 66 if loads else 130) == [(12, 13)]


def saved_by(scene: Scene) -> list[Any]:
    scene.step(scene.ask(), 0, 130)
    return scene.store.wanted


# --- a reset that leaves vLLM's own cache as it is ---


def test_own_hits_after_a_reset_while_a_request_runs_are_not_saved() -> None:
    """vLLM's own reset fails then, but its connector is reset all the same: its cache still finds KV of before."""
    scene = Scene()
    running = scene.ask("running")
    scene.step(running, 0, 130)
    scene.half.reset()
    fresh = scene.ask("fresh")
    assert scene.step(fresh, 0, 130) == [(10, 11), (12, 13)]
    assert scene.end(fresh) == []
    scene.store.stored.clear()
    again = scene.ask("again", local=96)
    assert scene.step(again, 96, 34) == []
    assert scene.end(again) == []
    within = scene.ask("within", local=0)
    assert scene.step(within, 5, 125) == [], "its hit goes on within a block"


def test_own_hits_after_a_reset_while_an_ended_request_holds_blocks_are_not_saved() -> None:
    """vLLM keeps the blocks of a request that ended until a step that was planned with it is over, and until its load
    is: its reset fails so long, too."""
    scene = Scene()
    ended = scene.ask("ended")
    scene.step(ended, 0, 130)
    scene.first.ref_cnt = 1
    scene.end(ended)
    scene.half.reset()
    scene.store.stored.clear()
    again = scene.ask("again", local=96)
    assert scene.step(again, 96, 34) == [] and scene.end(again) == []
    scene.first.ref_cnt = 0
    scene.half.reset()
    later = scene.ask("later", local=96)
    assert scene.step(later, 96, 34) == [(10, 11), (12, 13)]


def test_a_later_reset_with_no_block_in_use_ends_that() -> None:
    """So it is also when vLLM preempts all that runs for it: they hold no blocks then."""
    scene = Scene()
    running = scene.ask("running")
    scene.step(running, 0, 130)
    scene.half.reset()
    running.num_computed_tokens = 0
    assert scene.half.reset()
    later = scene.ask("later", local=96)
    assert scene.step(later, 96, 34) == [(10, 11), (12, 13)]


WRITES: tuple[Any, ...] = (
    lambda model: model.norm.bias.add_(1),
    lambda model: [tensor.zero_() for tensor in model.buffers()],
    lambda model: setattr(model.norm.bias, "data", 1),
    lambda model: model.load("path"),
)


def write_slice(model: Any) -> None:
    model.norm.bias[:] = 0


def write_all(model: Any) -> None:
    model.norm.bias[...] = 0


def counters_of(worker: Any) -> dict[str, int]:
    found = {}
    for name in worker.names:
        found[name] = worker.count(name)
    return found


def write_column(model: Any) -> None:
    model.norm.bias[:, 0] = 0


def add_to_slice(model: Any) -> None:
    model.norm.bias[1:2, ...] += 1


def multiply_into(model: Any) -> None:
    torch.mul(model.norm.bias, 2, out=model.norm.bias)


WRITES += write_slice, write_all, write_column, add_to_slice, multiply_into


def test_weights_that_change_begin_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV of reloaded weights was stored under the fingerprint of the old ones, and loaded by other engines."""
    from vllm.v1.engine.core import EngineCore

    monkeypatch.setattr(EngineCore, "collective_rpc", EngineCore.collective_rpc)  # put back afterwards
    scene, core = Scene(), EngineCore.__new__(EngineCore)
    core.model_executor = SimpleNamespace(collective_rpc=lambda *call: [])
    watch_weights(scene.half)

    def epochs_after(method: Any, *args: Any) -> int:
        before = scene.store.epoch
        scene.step(scene.ask(str((method, args))), 0, 130)
        assert core.collective_rpc(method, args=args) == []
        return scene.store.epoch - before

    @torch.no_grad()
    def without_gradients(worker: Any) -> None:
        worker.model_runner.model.load_weights([])

    for method in ("reload_weights", "finish_weight_update", "update_named_param", "load_model", "add_lora"):
        assert epochs_after(method) == 1, method
    assert epochs_after(without_gradients) == 1, "the code of what it decorates"
    assert epochs_after(partial(lambda add, worker: [worker.model.load_weights(add) for _ in "ab"], [])) == 1, "nested"
    assert epochs_after("apply_model", lambda model: model.norm.data.copy_(0)) == 1
    core.collective_rpc("update_weights")
    assert scene.store.epoch == 8, "nothing was computed since"
    for write in WRITES:
        assert epochs_after("apply_model", write) == 1, write.__code__.co_names
    for method in ("profile", "compute_weight_checksums", len, lambda worker: {worker.rank: worker.device}):
        assert epochs_after(method) == 0, method
    assert epochs_after("apply_model", lambda model: model.training) == 0
    assert epochs_after(counters_of) == 0
    scene.store.stored.clear()
    assert scene.step(scene.ask("own hit", local=96), 96, 34) == []
    for older, saved in ((False, [(10, 11), (12, 13)]), (True, [])):
        scene = Scene()
        watch_weights(scene.half)
        if older:
            scene.ask("older")
        assert scene.half.reset()
        core.collective_rpc("update_weights")
        assert scene.step(scene.ask("own hit", local=96), 96, 34) == saved, "the request before may have computed since"


def test_loads_into_a_model_of_this_process_begin_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer in the engine's process calls the model's `load_weights` for each parameter."""
    from vllm.model_executor.models.utils import AutoWeightsLoader

    monkeypatch.setattr(AutoWeightsLoader, "load_weights", AutoWeightsLoader.load_weights)  # put back afterwards
    scene, model, other = (
        Scene(),
        torch.nn.Sequential(torch.nn.Linear(2, 2)),
        torch.nn.Sequential(torch.nn.Linear(2, 2)),
    )
    watch_weights(scene.half, {"layers.0": model[0]})
    before = scene.store.epoch
    scene.step(scene.ask("r"), 0, 130)
    for module in (other, model, model):
        AutoWeightsLoader(module).load_weights([("0.bias", torch.ones(2)), ("0.weight", torch.ones(2, 2))])
    assert scene.store.epoch == before + 1
    assert model[0].bias.tolist() == [1, 1]


# --- blocks of ended requests whose chunks were refused ---


def test_vllm_tells_when_a_block_of_its_cache_was_given_away() -> None:
    """A block that is full of the same tokens again is not the same content: in between it held others."""
    pool = BlockPool(3, True, BLOCK)
    contents = partial(Scene().half._contents, pool)

    def filled() -> int:
        (block,) = pool.get_new_blocks(1)
        request = SimpleNamespace(block_hashes=[BlockHash(bytes(32))])
        pool.cache_full_blocks(request, [block], 0, 1, BLOCK, 0)
        pool.free_blocks([block])
        return int(block.block_id)

    number = filled()
    (before,) = contents([number])
    assert before is not None and contents([number])[0] is before, "free, and still as it was"
    pool.touch([pool.blocks[number]])
    pool.free_blocks([pool.blocks[number]])
    assert contents([number])[0] is before, "a hit writes nothing"
    given = pool.get_new_blocks(2)
    assert contents([number]) == [None]
    pool.free_blocks(given)
    while (again := filled()) != number:
        pass
    assert contents([again]) == [before] and contents([again])[0] is not before
    pool.blocks[number] = None
    assert contents([number]) == [None], "what cannot be read is not known"


# --- block tables, before 0.32 ---


def test_a_table_that_lost_a_piece_is_not_used() -> None:
    """What is added later would stand in the wrong place. At the end vLLM tells all blocks, and it is saved then."""
    scene = Scene()
    request = scene.ask()
    scene.step(request, 0, 20)
    added = SimpleNamespace(req_ids=["r"], new_block_ids=[object()], num_computed_tokens=[20], resumed_req_ids=set())
    scene.half.build_step(output([], {"r": 50}, added))
    more = SimpleNamespace(req_ids=["r"], new_block_ids=[([14, 15],)], num_computed_tokens=[70], resumed_req_ids=set())
    assert scene.half.build_step(output([], {"r": 60}, more)).step.after is None
    assert scene.half._faults.take() == 1


def test_a_table_shorter_than_what_was_computed_is_not_used() -> None:
    scene = Scene()
    request = scene.ask()
    scene.half._bridge.advance("r", 130, [10, 11, 12, 13])
    assert scene.half._bridge.take_step().after is None
    assert scene.step(request, 0, 130) == [(10, 11), (12, 13)]


def test_a_reset_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """vLLM resets as it pauses, too: hits that end for good must not be a riddle."""
    with caplog.at_level(logging.INFO, "kvtier"):
        assert Scene().half.reset()
    assert "until this engine is started again" in caplog.text
