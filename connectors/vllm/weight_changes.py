"""Observer of weight changes in a running engine: vLLM does not inform its connectors, so calls from its core into the
workers are observed, and loads into a model in the core's own process. Other writes into the model are not."""

from collections.abc import Callable, Mapping
from dis import get_instructions
from functools import partial, wraps
from inspect import unwrap
from types import CodeType
from typing import Any
from weakref import WeakKeyDictionary

# Methods of vLLM's workers that leave weights as they are. Any other may be a trainer's, whatever its name.
READERS = """
check_health checkpoint_prepare checkpoint_restore compute_weight_checksums determine_available_memory discard
execute_dummy_batch get_cache_block_size_bytes get_compilation_match_table get_encoder_timing_stats get_kv_cache_spec
get_kv_connector_handshake_metadata get_model_inspection get_supported_tasks handle_ft_command
init_weight_transfer_engine list_loras pin_lora profile release_late_interaction_query_cache remove_lora
reset_encoder_cache reset_mm_cache save_sharded_state save_tensorized_model shutdown_weight_transfer_engine sleep
supports_draft_weight_updates synchronize_device update_config update_max_model_len vocab_size wake_up
"""
CHANGING = ("weight", "param", "load", "state_dict")  # parts of names in functions that may change weights
WRITERS = ("data", "setattr")  # names there that write into tensors, besides torch's methods, which end in "_"
# Objects with a method weights_changed() -> layers of their engine's model, or None: see watch_weights.
_watching: WeakKeyDictionary[Any, Mapping[str, Any] | None] = WeakKeyDictionary()


def watch_weights(watcher: Any, layers: Mapping[str, Any] | None = None) -> None:
    """Call `watcher.weights_changed()` after each call in this process that may have changed an engine's weights.

    layers: those of the engine's model, if it is in this process; loads into other models are then ignored. None: a
    load into any model counts.
    """
    from vllm.model_executor.models.utils import AutoWeightsLoader
    from vllm.v1.engine.core import EngineCore

    if EngineCore.collective_rpc.__globals__ is not globals():
        EngineCore.collective_rpc = _observed(EngineCore.collective_rpc)
    if AutoWeightsLoader.load_weights.__globals__ is not globals():
        AutoWeightsLoader.load_weights = _observed_load(AutoWeightsLoader.load_weights)
    _watching[watcher] = layers


def may_change_weights(method: Any, args: tuple[Any, ...] = ()) -> bool:
    """Return True for a call into all workers that may change their weights. Of a function only its own code is
    examined, not that of the functions that it calls.

    A function that only reads weights counts too, because there is no cheap way to show that it wrote none: torch
    counts no writes through `data` or into inference tensors, and vLLM 0.32 copies all weights into host memory to sum
    them.
    """
    if method == "apply_model" and args:
        method = args[0]
    if isinstance(method, str):
        return method not in READERS.split()
    while isinstance(method, partial):
        method = method.func
    function = unwrap(method) if callable(method) else method
    codes = [getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)]
    names = [getattr(function, "__name__", "")]
    for code in filter(None, codes):
        names += code.co_names
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        if _writes_into_tensors(code):
            return True
    return any(
        name in WRITERS or (name.endswith("_") and not name.endswith("__")) or any(part in name for part in CHANGING)
        for name in names
    )


def _writes_into_tensors(code: CodeType) -> bool:
    """Return True if the code assigns to an item and has a slice or `...`, as in `x[:, 0] = y`, or passes `out`."""
    names = {one.opname for one in get_instructions(code)}
    constants = [part for each in code.co_consts for part in (each if isinstance(each, tuple) else (each,))]
    has_slice = "BUILD_SLICE" in names or any(each is Ellipsis or isinstance(each, slice) for each in constants)
    return "STORE_SLICE" in names or ("STORE_SUBSCR" in names and has_slice) or "out" in constants


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


def _observed_load(load: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(load)
    def observed(loader: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return load(loader, *args, **kwargs)
        finally:
            modules = set(loader.module.modules())
            for watcher, layers in tuple(_watching.items()):
                if layers is None or not modules.isdisjoint(layers.values()):
                    watcher.weights_changed()

    return observed
