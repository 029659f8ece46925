"""vLLM's second model runner, the default on GPUs from 0.32 on, on a CPU: Triton's interpreter runs its kernels.

There vLLM takes it only if Triton has a backend for CPUs, which the interpreter does not need.
"""

import os
from types import SimpleNamespace
from typing import Any


def choose() -> None:
    """For this process, before vLLM is imported."""
    os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    import vllm.triton_utils  # noqa: F401 - looks for it once

    del backends["cpu"]  # torch's compiler looks, too, and would use it
    import fast_interpreter

    fast_interpreter.install()
    _let_it_schedule_ahead()


def _let_it_schedule_ahead() -> None:
    """On a CPU vLLM turns asynchronous scheduling off, whoever asked for it. This runner works with it there, too: the
    steps are computed one by one, but each is planned before the answer of the one before it is looked at."""
    from vllm.platforms.cpu import CpuPlatform

    adapt = CpuPlatform.check_and_update_config

    def adapt_but_for_that(vllm_config: Any) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        adapt(vllm_config)
        vllm_config.scheduler_config.async_scheduling = asked

    CpuPlatform.check_and_update_config = staticmethod(adapt_but_for_that)  # type: ignore[method-assign]
