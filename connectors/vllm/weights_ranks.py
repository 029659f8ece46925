"""One rank of an engine, alone in this process: its model's parameters without the other ranks and without a GPU.

torch's "fake" process groups know a rank and a size and exchange nothing, which is all that vLLM's layers ask while
they are made and loaded. Nothing may be computed with such a model.
"""

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model

FAKE = "fake"  # torch's name of the backend


def engine_config(model: str, tensor_size: int, load_format: str = "auto", dtype: str = "auto") -> Any:
    """Return the VllmConfig of an engine with `tensor_size` ranks."""
    arguments = EngineArgs(
        model=model,
        dtype=dtype,
        load_format=load_format,
        tensor_parallel_size=tensor_size,
        distributed_executor_backend="external_launcher",
        skip_tokenizer_init=True,
        enforce_eager=True,
    )
    return arguments.create_engine_config()


@contextmanager
def as_rank(vllm_config: Any, rank: int) -> Iterator[None]:
    """Be rank `rank` of the engine as long as the context lasts; no other process group may exist."""
    parallel = vllm_config.parallel_config
    with set_current_vllm_config(vllm_config):
        dist.init_process_group(FAKE, store=FakeStore(), rank=rank, world_size=parallel.world_size)
        try:
            with _groups_without_peers():
                parallel_state.init_distributed_environment(parallel.world_size, rank, "env://", 0, FAKE)
                sizes = (parallel.tensor_parallel_size, parallel.pipeline_parallel_size)
                parallel_state.initialize_model_parallel(*sizes, backend=FAKE)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()
            # Layers register here by name, and the next rank's have the same names.
            vllm_config.compilation_config.static_forward_context.clear()


def build_model(vllm_config: Any, device: str = "cpu") -> torch.nn.Module:
    """Return the rank's model before any weight was loaded. Call it within `as_rank`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(vllm_config.model_config.dtype)
    try:
        with torch.device(device):
            model: torch.nn.Module = initialize_model(vllm_config, model_config=vllm_config.model_config)
            return model
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _groups_without_peers() -> Iterator[None]:
    """Make vLLM's groups of the fake backend, without queues and communicators, which would wait for other ranks."""
    coordinator, new_group = parallel_state.GroupCoordinator, dist.new_group
    names = inspect.signature(coordinator.__init__)

    class Alone(coordinator):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **options: Any) -> None:
            bound = names.bind(self, *args, **options).arguments
            del bound["self"]
            super().__init__(**bound | {"use_device_communicator": False, "use_message_queue_broadcaster": False})

    def fake_group(ranks: Any = None, *args: Any, **options: Any) -> Any:
        return new_group(ranks, backend=FAKE)

    with ExitStack() as stack:
        stack.enter_context(patch.object(parallel_state, "GroupCoordinator", Alone))
        stack.enter_context(patch.object(dist, "new_group", fake_group))
        if hasattr(parallel_state, "_node_count"):  # it asks the other ranks
            stack.enter_context(patch.object(parallel_state, "_node_count", lambda group: 1))
        yield
