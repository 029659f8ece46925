"""Checks at vLLM's start: settings, root and index, before an engine process loads weights.

vLLM makes its connectors after it has loaded the weights and compiled the model. Before that it gives no connector the
whole configuration. It does import the connector's module while it builds its configuration, in each of its front ends,
and chooses the executor for that configuration next (`Executor.get_class`). The checks run there, so a refusal ends the
front end itself, and its sentence is the last one in the log.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import wraps
from typing import Any

from vllm.config import KVTransferConfig
from vllm.platforms import current_platform
from vllm.v1.executor.abstract import Executor

from kvtier.assemble import check_place
from kvtier.config import HOST_ARENA_BYTES, Settings
from kvtier.connectors import vllm_platforms
from kvtier.connectors.vllm_checks import check_engine, check_model
from kvtier.machine import check_host_arena, memory_here

NAME = "KVTierConnector"
MARK = "_is_checked_by_kvtier"  # attribute of a KVTransferConfig; it travels to the processes of the engine


def install() -> None:
    """Check each configuration for which vLLM chooses an executor. Later calls do nothing."""
    choose = Executor.get_class
    if hasattr(choose, MARK):
        return

    @wraps(choose)
    def checked(vllm_config: Any) -> Any:
        check_start(vllm_config)
        return choose(vllm_config)

    setattr(checked, MARK, True)
    Executor.get_class = staticmethod(checked)


def check_start(vllm_config: Any) -> None:
    """Refuse what a start can refuse before the model is loaded, once for a configuration.

    Raises ConfigError; IndexUnavailable where an embedded index does not open.
    """
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    if transfer is None or hasattr(transfer, MARK):
        return
    for own in _own_configs(vllm_config):
        settings = Settings.load(own.kv_transfer_config.kv_connector_extra_config)
        check_engine(own, settings)
        check_model(own)
        vllm_platforms.check_continuation(own)
        settings.signing.signer()
        if _runs_here(own.parallel_config):
            is_cuda = current_platform.is_cuda()
            settings.check_device(has_gpu=is_cuda)
            check_host_arena(settings.host.arena_bytes or HOST_ARENA_BYTES["cuda" if is_cuda else "cpu"], memory_here())
            check_place(settings)
    setattr(transfer, MARK, True)


def _own_configs(vllm_config: Any) -> Iterator[Any]:
    """Yield the configuration as each KVTierConnector will see it: a copy for each one in a MultiConnector."""
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_connector == NAME:
        yield vllm_config
    elif transfer.kv_connector == "MultiConnector":
        for child in transfer.kv_connector_extra_config.get("connectors") or ():
            if child.get("kv_connector") == NAME:
                own = copy.copy(vllm_config)
                own.kv_transfer_config = KVTransferConfig(**child)
                yield own


def _runs_here(parallel: Any) -> bool:
    """Return whether an engine of this front end runs on this machine, so that it sees the same root and index."""
    is_spread = getattr(parallel, "data_parallel_backend", "mp") == "ray"
    return not is_spread and getattr(parallel, "data_parallel_size_local", 1) > 0
