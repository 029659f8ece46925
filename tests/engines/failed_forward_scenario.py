"""A scenario: forwards that raise, in an engine that goes on as vLLM's fault tolerance would let it."""

import random
from typing import Any

import torch
from vllm.v1.request import RequestStatus

from kvtier.connectors.vllm.save_progress import FrontierDelay

N_TOKENS = 200


def failed_forward(engine: Any, waits_a_step: bool = False) -> dict[str, Any]:
    """Records that the index has got after a prompt, after one whose forward ran out of memory, and after a later one.

    waits_a_step: as with EAGLE and MTP, whose chunks are gathered in the step after the one that completed them.
    """
    engine.scheduler_half._frontiers._behind = FrontierDelay(int(waits_a_step), 2)
    rng = random.Random(engine.root.name)
    before, victim, later = ([rng.randrange(3, 500) for _ in range(N_TOKENS)] for _ in range(3))
    found: dict[str, Any] = {}
    engine.forget()
    engine.wait_for_set()
    at_first = records(engine)
    engine.ask([before])
    engine.settle()
    found["before"] = records(engine) - at_first
    layer = _layers(engine)[2]
    compute = layer.forward
    layer.forward = _out_of_memory
    try:
        engine.ask([victim])
    except torch.OutOfMemoryError as fault:
        found["raised"] = str(fault)
    layer.forward = compute
    _go_on(engine)
    engine.settle()
    found["after"] = records(engine) - at_first
    engine.ask([later])
    engine.settle()
    found["later"] = records(engine) - at_first
    return found


def records(engine: Any) -> int:
    return int(engine.scheduler_half._store._keeper._index.counts().records)


def _out_of_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("simulated")


def _layers(engine: Any) -> list[torch.nn.Module]:
    worker = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
    model = getattr(worker, "worker", worker).model_runner.model
    return [module for module in model.modules() if type(module).__name__ == "LlamaDecoderLayer"]


def _go_on(engine: Any) -> None:
    """What vLLM's EngineCoreSentinel does after a fault."""
    core = engine.llm.llm_engine.engine_core.engine_core
    engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    if core.batch_queue is not None:
        core.batch_queue.clear()
    processor = engine.llm.llm_engine.output_processor
    processor.abort_requests(list(processor.request_states), internal=True)
