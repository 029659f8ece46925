"""Forms in which vLLM keeps the KV of each layer: element types, slots of opaque bytes, and unquantized layers.

    --kv-cache-dtype      a token and head of one layer is                              kvtier
    auto, bfloat16, ...   K and V, vectors of elements                                  moves it, any codec
    fp8, fp8_e5m2, ...    the same of one byte; scales are in the checkpoint            moves it unchanged
    turboquant_*          one slot: K's codes and norm, V's codes, scale and zero       moves it unchanged
    all others            see REFUSED

Slots were compared in the sources of SLOT_RELEASES: the kernels that write and read them, the codebooks and the
rotation are equal but for a cast, so their bytes have one meaning in all of them. vLLM itself leaves the boundary
layers unquantized with turboquant_*, and others with --kv-cache-dtype-skip-layers; these have the model's own dtype,
and vLLM puts all layers into one group with different page sizes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvtier.errors import ConfigError
from kvtier.format.geometry import LayerForm

PLAIN = frozenset({"auto", "float16", "bfloat16", "float32", "half", "float"})
FP8 = frozenset({"fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc"})
SLOTS = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
# releases whose slots have the same meaning; those of others are kept apart
SLOT_RELEASES = ("0.25.1", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0")

_DYNAMIC = "vLLM sets all scales in its blocks to 1 in its first forward, which may come after a load"
_SPARSE = "it is of sparse attention only, whose index is a second KV cache"
_ROCM = "vLLM has it on ROCm only, where kvtier was never run"
_PLANES = "the scales of a page follow the data of all its heads, so that no head's KV is rows of bytes"
# vLLM's other KV dtypes, and the reasons why their blocks are not moved.
REFUSED: Mapping[str, str] = {
    "int8_per_token_head": _DYNAMIC,
    "int4_per_token_head": _DYNAMIC,
    "fp8_per_token_head": _DYNAMIC,
    "fp8_ds_mla": _SPARSE,
    "nvfp4_ds_mla": _SPARSE,
    "nvfp4": _PLANES,
    "nvfp4_4over6": _PLANES,
    "ultraquant_4bit": _ROCM,
    "octave_k3v4": _ROCM,
    "octave_k3v3": _ROCM,
    "octave_k3v3_compact": _ROCM,
}


@dataclass(frozen=True, slots=True)
class Forms:
    """main: form of all layers but the numbers `plain_layers` (within the model), which have form `plain`."""

    main: LayerForm
    plain_layers: tuple[int, ...]
    plain: LayerForm | None


def check_cache_dtype(cache_dtype: str) -> None:
    """Refuse KV dtypes whose blocks kvtier does not move. Raises ConfigError."""
    is_plugins = _has_handler(cache_dtype)
    if not is_plugins and (cache_dtype in PLAIN or cache_dtype in FP8 or cache_dtype in SLOTS):
        return
    unknown = "a plugin of vLLM defines this KV dtype" if is_plugins else "this KV dtype is not known to kvtier"
    why = REFUSED.get(cache_dtype, unknown)
    raise ConfigError("kv_cache_dtype", cache_dtype, f"{why}; use auto, bfloat16, fp8 or {SLOTS[1]}")


def _has_handler(cache_dtype: str) -> bool:
    """Return True if a platform's plugin has registered this dtype, which may be a name of vLLM's own."""
    try:
        from vllm.config.cache import get_kv_cache_dtype_handler  # from vLLM 0.33 on
    except ImportError:
        return False
    return get_kv_cache_dtype_handler(cache_dtype) is not None


def kv_dtype_of(vllm_config: Any, spec: Any) -> str:
    """Return vLLM's name of the layers' KV dtype. spec: of any layer.

    If a checkpoint asks for fp8 (llm-compressor's kv_cache_scheme), each new layer replaces `auto` by it in the
    configuration of its process. The scheduler's process has no layers if workers are processes of their own.
    """
    configured = str(vllm_config.cache_config.cache_dtype)
    scheme = getattr(getattr(vllm_config, "quant_config", None), "kv_cache_scheme", None)
    is_asked = configured == "auto" and scheme is not None and type(spec).__name__ != "MLAAttentionSpec"
    return "fp8" if is_asked or (configured in PLAIN and spec.dtype.itemsize == 1) else configured


def is_slot(cache_dtype: str) -> bool:
    """Return True if K and V of a token and head are one slot of opaque bytes."""
    return cache_dtype in SLOTS


def forms_of(vllm_config: Any, spec: Any, numbers: Sequence[int]) -> Forms:
    """Return the forms of the layers with these numbers in their names, in order. Raises ConfigError.

    spec: of any one of them. The scheduler's process gets no more, so the rest is derived from vLLM's configuration;
    `check_specs` compares it on the workers.
    """
    cache, model = vllm_config.cache_config, vllm_config.model_config
    configured = kv_dtype_of(vllm_config, spec)
    is_mla = type(spec).__name__ == "MLAAttentionSpec"
    k_size = int(spec.head_size)
    v_size = 0 if is_mla else int(getattr(spec, "head_size_v", None) or k_size)
    skipped = frozenset() if configured == "auto" else _skipped(cache)
    plain_layers = tuple(place for place, number in enumerate(numbers) if number in skipped)
    dtype = _stored_dtype(configured, model) if plain_layers else spec.dtype
    main = LayerForm(k_size, v_size, cache_dtype_name(configured, dtype), dtype.itemsize)
    if is_slot(configured):
        main = LayerForm(slot_bytes(configured, k_size), 0, slot_name(configured), 1)
    plain = LayerForm(k_size, v_size, torch_name(model.dtype), model.dtype.itemsize)
    if len(plain_layers) == len(numbers):  # turboquant_* of a model with up to four layers
        return Forms(plain, (), None)
    if not plain_layers or plain == main:
        return Forms(main, (), None)
    return Forms(main, plain_layers, plain)


def check_specs(vllm_config: Any, specs: Mapping[str, Any], forms: Mapping[str, LayerForm]) -> None:
    """Check on a worker that each layer's own spec has the expected form. Raises ConfigError."""
    configured = str(vllm_config.cache_config.cache_dtype)
    for name, spec in specs.items():
        form = forms[name]
        found = spec.real_page_size_bytes / (spec.num_kv_heads * spec.block_size)
        if found != form.vector_bytes or spec.dtype.itemsize != form.element_bytes:
            theirs = f"vLLM keeps {found:g} bytes a token and head, in elements of {spec.dtype.itemsize}"
            ours = f"kvtier expected {form.vector_bytes}, in elements of {form.element_bytes} ({form.dtype})"
            fix = f"{theirs}; {ours}; run without the kvtier connector"
            raise ConfigError("kv_cache_dtype", f"{configured}, {name}", fix)


def cache_dtype_name(configured: str, dtype: Any) -> str:
    """Return the name of the KV element type; fp8 variants that share a torch type on some platforms are
    distinguished."""
    stored = torch_name(dtype)
    if not configured.startswith("fp8"):
        return stored
    variant = "fp8_e4m3" if configured == "fp8" else configured
    return variant if stored == "uint8" else f"{variant}:{stored}"


def slot_name(configured: str) -> str:
    """Return a name for the meaning of a slot's bytes, besides the head size: the preset, and the variant of K's
    fp8."""
    import vllm

    release = vllm.__version__.split("+")[0]
    name = configured if release in SLOT_RELEASES else f"{configured}@{release}"
    return f"{name}:e4b15" if configured == "turboquant_k8v4" and _fp8_is_e4b15() else name


def slot_bytes(configured: str, head_size: int) -> int:
    """Return the size of a slot by vLLM's own arithmetic. Raises ConfigError."""
    try:
        from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
    except ImportError:
        fix = "this vLLM does not say how large its slots are; use a tested version"
        raise ConfigError("kv_cache_dtype", configured, fix) from None
    return int(TurboQuantConfig.from_cache_dtype(configured, head_size).slot_size_aligned)


def _fp8_is_e4b15() -> bool:
    """Return True if K in fp8 is the variant that vLLM's kernels use on GPUs before compute capability 8.9."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cuda() and not current_platform.has_device_capability(89))


def _skipped(cache: Any) -> frozenset[int]:
    """Return the numbers of the layers that vLLM does not quantize. Raises ConfigError."""
    patterns = getattr(cache, "kv_cache_dtype_skip_layers", None) or ()
    kinds = [pattern for pattern in patterns if not str(pattern).isdigit()]
    if kinds:
        raise ConfigError("kv_cache_dtype_skip_layers", kinds[0], "name the layers by their numbers instead")
    return frozenset(int(pattern) for pattern in patterns)


def _stored_dtype(configured: str, model: Any) -> Any:
    """Return the torch type in which vLLM keeps a quantized layer."""
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype

    return kv_cache_dtype_str_to_dtype(configured, model)


def torch_name(dtype: Any) -> str:
    """Return the name of a torch type, or of its name, as "bfloat16"."""
    return str(dtype).removeprefix("torch.")
