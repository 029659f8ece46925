"""Observer of weight updates in a running SGLang engine: SGLang informs its storage of neither an update nor a flush of
its caches, so calls of the methods below are observed. Writes into weights without these calls are not.

Names are those of SGLang 0.5.23. Its classes are used in the process that makes its storage.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any
from weakref import WeakSet

UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater", "WeightUpdater"
UPDATES = (
    "begin_weight_update",
    "load_weights_from_distributed",
    "update_weights_from_disk",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)
END = "end_weight_update"
CONTROLLER = "sglang.srt.managers.cache_controller", "HiCacheController"
RESET = "reset"  # method that a flush calls: it ends the storage's threads and empties the host pool

_wrapped: WeakSet[Any] = WeakSet()  # classes whose methods are observed
_watching: WeakSet[Any] = WeakSet()  # objects with methods weights_changed() and caches_emptied()
_updated: WeakSet[Any] = WeakSet()  # classes by which weights have changed since the process started


def watch_weights(watcher: Any) -> bool:
    """Call `watcher.weights_changed()` after each call in this process that may have changed an engine's weights, and
    `watcher.caches_emptied()` when SGLang empties its caches. Return False if this SGLang lacks one of the methods."""
    updater, controller = (getattr(sys.modules.get(module), name, None) for module, name in (UPDATER, CONTROLLER))
    if not all(hasattr(updater, name) for name in (*UPDATES, END)) or not hasattr(controller, RESET):
        return False
    if updater not in _wrapped:
        _wrapped.add(updater)
        for name in UPDATES:
            setattr(updater, name, _announcing_update(updater)(getattr(updater, name)))
        setattr(updater, END, _observed_end(updater, getattr(updater, END)))
    if controller not in _wrapped:
        _wrapped.add(controller)
        setattr(controller, RESET, _announcing_reset()(getattr(controller, RESET)))
    _watching.add(watcher)
    if updater in _updated:  # SGLang detaches a storage and attaches another one while it runs
        watcher.weights_changed()
    return True


@contextmanager
def _announcing_update(updater: Any) -> Iterator[None]:
    try:
        yield
    finally:  # a call that failed may have changed some weights
        _updated.add(updater)
        for watcher in tuple(_watching):
            watcher.weights_changed()


@contextmanager
def _announcing_reset() -> Iterator[None]:
    yield
    for watcher in tuple(_watching):
        watcher.caches_emptied()


def _observed_end(updater: Any, end: Callable[..., None]) -> Callable[..., None]:
    @wraps(end)
    def observed(self: Any, *, run_post_load: bool) -> None:
        """run_post_load: True where another program, and no observed call, wrote weights since the update began."""
        with _announcing_update(updater) if run_post_load else nullcontext():
            end(self, run_post_load=run_post_load)

    return observed
