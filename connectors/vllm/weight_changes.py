"""Weights that change in a running engine: vLLM does not inform its connectors, so calls from its core into the workers
are observed: `reload_weights`, a trainer's `update_weights`, or a function that calls `load_weights`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakSet

# Methods of vLLM's workers, and of trainers, that name weights and leave them as they are.
READERS = frozenset(
    {
        "compute_weight_checksums",
        "init_weight_transfer_engine",
        "shutdown_weight_transfer_engine",
        "supports_draft_weight_updates",
    }
)
_watching: WeakSet[Any] = WeakSet()  # objects with a method weights_changed()


def watch_weights(watcher: Any) -> None:
    """Call `watcher.weights_changed()` after each call in this process that may have changed an engine's weights."""
    from vllm.v1.engine.core import EngineCore

    if EngineCore.collective_rpc.__globals__ is not globals():
        EngineCore.collective_rpc = _observed(EngineCore.collective_rpc)
    _watching.add(watcher)


def may_change_weights(method: Any, args: tuple[Any, ...] = ()) -> bool:
    """Return True for a call into all workers after which their weights may be others, as far as its name says."""
    if method == "apply_model" and args:
        method = args[0]
    if isinstance(method, str):
        return "weight" in method and method not in READERS
    function = getattr(method, "func", method)  # of a partial
    names = (getattr(function, "__name__", ""), *getattr(getattr(function, "__code__", None), "co_names", ()))
    return any(name.endswith("load_weights") or name == "update_weights" for name in names)


def _observed(call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)  # vLLM decodes arguments from other processes by the signature
    def observed(core: Any, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return call(core, method, timeout, args, kwargs)
        finally:  # a call that failed may have changed some of them
            if may_change_weights(method, args):
                for watcher in tuple(_watching):
                    watcher.weights_changed()

    return observed
