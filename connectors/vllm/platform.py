"""Platform facts: the packing of KV inside a block, which decides whether engines can exchange bytes.

On CUDA every known backend keeps a vector's elements together, whatever the strides, so bytes are exchanged between
engines of any block size. On the CPU, K of a page (block, head) is packed for the instruction set, over the whole
block: bytes are exchanged only between engines with the same packing and block size. Observed in 0.27.1 and 0.32.0 on
AVX-512, by writing known vectors through vLLM's own operator: with "vec" and "vec16" K is [element][token] and V is
[token][element]; with "amx" (bf16 where the CPU has AMX) both are packed in pairs, K of elements and V of tokens.
Lossy codecs read vectors, and are refused with all but "vec" and "vec16". The packing of other platforms is
unknown, and start-up is refused.
"""

import inspect
import logging
import re
from dataclasses import dataclass
from typing import Any

import torch
import vllm

from kvtier.connectors.vllm.kv_dtypes import PLAIN, is_slot, kv_dtype_of, torch_name
from kvtier.errors import ConfigError
from kvtier.model.layer_kinds import FULL, WINDOW

log = logging.getLogger("kvtier")

FAMILY = "vllm"
BY_ELEMENT = ("vec", "vec16")  # vLLM's names of the packings with K as [element][token] and V as [token][element]


@dataclass(frozen=True, slots=True)
class Packing:
    """family: engines whose KV bytes can be exchanged, as far as the platform decides. The others: see
    kv_layout.CacheShape."""

    family: str
    is_halved: bool
    is_k_by_element: bool = False

    def check_codec(self, codec: str) -> None:
        """Raise ConfigError for a lossy codec where the elements of a vector cannot be found in a page."""
        if self.is_halved and not self.is_k_by_element and codec != "raw":
            fix = f"vLLM packs KV on this CPU as {self.family!r}, where lossy codecs cannot find vectors: set it to raw"
            raise ConfigError("codec", codec, fix)


def packing_of(spec: Any, vllm_config: Any) -> Packing:
    """Return the packing of KV on this process's platform. Raises ConfigError if it is unknown."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda():
        return Packing(FAMILY, False)
    if not current_platform.is_cpu():
        name = getattr(current_platform, "device_name", type(current_platform).__name__)
        fix = "how vLLM packs KV inside a block is not known to kvtier there; run on CUDA or the CPU, or without kvtier"
        raise ConfigError("platform", name, fix)
    cache_dtype = kv_dtype_of(vllm_config, spec)
    if is_slot(cache_dtype):
        raise ConfigError("kv_cache_dtype", cache_dtype, "vLLM has it on GPUs only; use auto, bfloat16 or fp8")
    if type(spec).__name__ == "MLAAttentionSpec":
        return Packing(f"{FAMILY}-cpu-mla", False)
    isa = _cpu_packing(spec, vllm_config)
    return Packing(f"{FAMILY}-cpu-{isa}-b{spec.block_size}", True, isa in BY_ELEMENT)


def device_name() -> str:
    """Return the maker's name of vLLM's device. Uses no GPU."""
    from vllm.platforms import current_platform

    try:
        return str(current_platform.get_device_name())
    except (AttributeError, NotImplementedError, RuntimeError) as fault:
        log.info("cannot read the name of vLLM's device: %s", fault)
        return type(current_platform).__name__


def ranks_here(parallel: Any) -> int:
    """Return the number of this engine's ranks on this machine, which all load each request, or the weights, at once.
    (Data-parallel engines load separately.) Under Ray vLLM counts the ranks of all machines, but there are no more than
    GPUs."""
    n_ranks, n_gpus = max(1, int(parallel.local_world_size)), torch.cuda.device_count()
    return min(n_ranks, n_gpus) if n_gpus else n_ranks


def check_continuation(vllm_config: Any) -> None:
    """Refuse engines that compute wrong KV after a prefix that they did not compute themselves. Raises ConfigError.

    vLLM's reference MLA for CPUs (0.32.0) ignores the tokens before a prefill, and therefore disables chunked prefill
    and its own prefix cache. Its attention for CPUs (0.32.0) writes elements of the model's dtype, whichever other
    unquantized dtype the KV tensors have: pages begin at other addresses then.
    """
    from vllm.platforms import current_platform

    model, cache_dtype = vllm_config.model_config, str(vllm_config.cache_config.cache_dtype)
    own = torch_name(getattr(model, "dtype", ""))
    if current_platform.is_cpu() and cache_dtype in PLAIN - {"auto", own}:
        fix = f"vLLM's attention for CPUs writes elements of the model's dtype ({own}) all the same: set it to auto"
        raise ConfigError("kv_cache_dtype", cache_dtype, fix)
    chunked = getattr(vllm_config.scheduler_config, "enable_chunked_prefill", True)
    if current_platform.is_cpu() and getattr(model, "use_mla", False) and not chunked:
        fix = "vLLM's MLA for this CPU cannot continue from loaded KV; run it on a GPU, or without the kvtier connector"
        raise ConfigError("model", model.model, fix)


def check_windows(vllm_config: Any, kv_cache_config: Any = None) -> None:
    """Refuse layers with a window beside others in one KV-cache group on CPUs before vLLM 0.28. Raises ConfigError.

    vLLM's attention for CPUs took the window of a group for that of all its layers. Without a connector these layers
    have groups of their own. kv_cache_config: None before KV is laid out, where the model's configuration counts.
    """
    from vllm.platforms import current_platform

    if kv_cache_config is None:
        config = getattr(vllm_config.model_config, "hf_text_config", None)
        are_mixed = {FULL, WINDOW} <= set(getattr(config, "layer_types", None) or ())
        window = getattr(config, "sliding_window", None) if are_mixed else None
    else:
        window = getattr(kv_cache_config.kv_cache_groups[0].kv_cache_spec, "sliding_window", None)
    is_cut = window is not None and window < vllm_config.model_config.max_model_len
    release = re.match(r"0\.(\d+)\.", vllm.__version__)
    if is_cut and current_platform.is_cpu() and release and int(release[1]) < 28:
        fix = "on CPUs, vLLM before 0.28 cuts full attention to the window of other layers in its KV-cache group, and a"
        fix = f"{fix} connector has one group; use a later vLLM, max_model_len {window} or less, or no kvtier connector"
        raise ConfigError("sliding_window", window, fix)


def _cpu_packing(spec: Any, vllm_config: Any) -> str:
    try:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    except ImportError:
        raise ConfigError("platform", "cpu", "this vLLM does not say how it packs KV; use a tested version") from None
    cache = vllm_config.cache_config
    known = {"dtype": vllm_config.model_config.dtype, "block_size": spec.block_size, "head_size": spec.head_size}
    taken = inspect.signature(_get_attn_isa).parameters

    def packing(cache_dtype: str) -> str:
        values = {**known, "kv_cache_dtype": cache_dtype}
        return str(_get_attn_isa(**{name: value for name, value in values.items() if name in taken}))

    of_all = packing(kv_dtype_of(vllm_config, spec))
    of_plain = packing("auto") if getattr(cache, "kv_cache_dtype_skip_layers", None) else of_all
    return of_all if of_plain == of_all else f"{of_all}+{of_plain}"


def join_log() -> None:
    """Write kvtier's log lines with vLLM's handlers, unless the caller has set up logging."""
    if not log.handlers and not logging.getLogger().handlers:
        log.handlers = list(logging.getLogger("vllm").handlers)
        log.setLevel(logging.getLogger("vllm").level)
        log.propagate = False
