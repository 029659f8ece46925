"""Start-up checks: models and settings that kvtier refuses. An engine that passes them is cached correctly.

Every refusal is a ConfigError with the setting, its value and the fix (I8). An attribute that a vLLM release lacks has
the value that it implied before it existed.

`install` runs the checks before an engine loads weights. vLLM makes its connectors only after it has loaded the weights
and compiled the model, and passes them no complete configuration before that. But each of its front ends imports the
connector's module while it builds its configuration, and then chooses the executor for it (`Executor.get_class`). The
checks run in that call, so a refusal ends the front end itself, with the reason as the last line of the log.
"""

import copy
import logging
import re
from collections.abc import Iterator, Mapping
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig
from vllm.platforms import current_platform
from vllm.v1.executor.abstract import Executor

from kvtier._bootstrap import PREFIX
from kvtier.build import check_place
from kvtier.config.kv_transfer import CONNECTOR, MULTI, POLICY, check_policy, policy_of_multi, roles_of
from kvtier.config.settings import Settings
from kvtier.connectors.vllm import platform
from kvtier.connectors.vllm.kv_dtypes import check_cache_dtype
from kvtier.connectors.vllm.namespace import check_sizes
from kvtier.errors import ConfigError, IndexUnavailable
from kvtier.model.families import FAMILIES
from kvtier.model.layer_kinds import CHUNK, FULL, WINDOW, refusal
from kvtier.runtime.memory_limits import check_host_arena, memory_here

log = logging.getLogger("kvtier")

# Kinds of layers by the class of their spec. A windowed layer beside full ones comes as a full one (`layer_kinds`).
SPECS = {
    "FullAttentionSpec": FULL,
    "TQFullAttentionSpec": FULL,
    "MLAAttentionSpec": FULL,
    "SlidingWindowSpec": WINDOW,
    "SlidingWindowMLASpec": WINDOW,
    "ChunkedLocalAttentionSpec": CHUNK,
}
# Values of load_format that read weights only from the top of the model's folder. Not npcache: its arrays in `np/`
# may be older than the weights beside them.
READ_FROM_THE_FOLDER = frozenset(
    {
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "gguf",
        "hf",
        "instanttensor",
        "kvtier",
        "mistral",
        "pt",
        "runai_streamer",
        "runai_streamer_sharded",
        "safetensors",
        "sharded_state",
    }
)
LOADS_ELSEWHERE = (
    "secondary_weights",
    "subfolder=",
    "load_file(",
    "/adapter_model.",
)  # in the source of a model that loads other files too
_SIBLING_IMPORT = re.compile(r"^from \.(\w+) import", re.MULTILINE)
OWN_ATTENTION = frozenset({"eagle", "eagle3", "dflash", "dspark"})  # methods with heads of their own configuration
MARK = "_is_checked_by_kvtier"  # attribute of a KVTransferConfig; it travels to the processes of the engine
WITHOUT = "run this model without the kvtier connector"


def check_engine(vllm_config: Any, settings: Settings) -> None:
    """Check the settings that are known before the KV cache is laid out. Raises ConfigError."""
    transfer = vllm_config.kv_transfer_config
    check_policy(getattr(transfer, "kv_load_failure_policy", POLICY))
    parallel, cache, model = vllm_config.parallel_config, vllm_config.cache_config, vllm_config.model_config
    _check_index(parallel, settings)
    _check_launcher(parallel)
    longest = getattr(model, "max_model_len", None)
    if isinstance(longest, int) and settings.chunk_tokens > longest:
        fix = f"only whole chunks are stored, and no prompt here is longer than {longest} tokens (max_model_len)"
        raise ConfigError("chunk_tokens", settings.chunk_tokens, f"{fix}: set it to less")
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise ConfigError(name, size, "a context-parallel rank holds only some tokens of a block; set it to 1")
    _check_drafts(vllm_config)
    for name, value in (("enable_fault_tolerance", True), ("all2all_backend", "nixl_ep")):
        if getattr(parallel, name, None) == value:
            fix = "vLLM goes on after a failed forward, and KV that was not computed could be saved; leave it out"
            raise ConfigError(name, value, fix)
    if getattr(cache, "calculate_kv_scales", False):
        fix = "scales found at run time differ between engines; set it to false and use scales of the checkpoint"
        raise ConfigError("calculate_kv_scales", True, fix)
    check_cache_dtype(str(cache.cache_dtype))
    if getattr(model, "is_encoder_decoder", False):
        raise ConfigError("model", model.model, f"encoder-decoder models are not supported; {WITHOUT}")
    if getattr(model, "enable_sleep_mode", False):
        fix = "a sleeping engine frees memory that kvtier's copies still use; set it to false"
        raise ConfigError("enable_sleep_mode", True, fix)
    if roles(vllm_config)[0] and _returns_experts(vllm_config):
        fix = "only a forward knows a token's experts, and loaded tokens have none; leave it out, or set kv_role"
        raise ConfigError("enable_return_routed_experts", True, f"{fix} to kv_producer")
    if settings.model_tag is None:
        speculative = getattr(vllm_config, "speculative_config", None)
        _check_load(vllm_config.load_config)
        _check_load(getattr(speculative, "draft_load_config", None))
        for loaded in (model, getattr(speculative, "draft_model_config", None)):
            _check_weights_beside(loaded)
            check_sources(getattr(loaded, "architecture", None), getattr(loaded, "registry", None))
    overrides = getattr(model, "hf_overrides", None)
    if callable(overrides) and settings.model_tag is None:
        fix = (
            "the changes of a function cannot be identified; pass a mapping, or set model_tag to a name for the result"
        )
        raise ConfigError("hf_overrides", getattr(overrides, "__qualname__", "function"), fix)


def _check_drafts(vllm_config: Any) -> None:
    """Refuse drafts whose KV has no place beside the model's. Raises ConfigError."""
    drafts = getattr(vllm_config, "speculative_config", None)
    if drafts is None:
        return
    stages = getattr(vllm_config.parallel_config, "pipeline_parallel_size", 1)
    if stages > 1:
        fix = (
            "with speculative decoding, vLLM does not inform all pipeline stages when KV is final; use one or the other"
        )
        raise ConfigError("pipeline_parallel_size", stages, fix)
    method = getattr(drafts, "method", None)
    if method == "draft_model":
        fix = "a whole draft model's layers have the same numbers as this model's, so their positions are unknown"
        raise ConfigError("speculative_config.method", "draft_model", f"{fix}; use ngram, suffix, eagle or mtp")
    if method == "extract_hidden_states":
        raise ConfigError("speculative_config.method", method, f"its layer keeps hidden states, not KV; {WITHOUT}")
    theirs, ours = getattr(drafts, "kv_cache_dtype", None), str(vllm_config.cache_config.cache_dtype)
    if theirs is not None and _plain(theirs) != ours:
        fix = f"kvtier stores a draft's KV in the form of the model's, whose kv_cache_dtype is {ours}; leave it out"
        raise ConfigError("speculative_config.kv_cache_dtype", _plain(theirs), fix)
    if method not in OWN_ATTENTION:
        return
    draft = drafts.draft_model_config
    its, of_model = _vectors(draft), _vectors(vllm_config.model_config)
    if its != of_model:
        fix = f"its layers keep {its} a token, this model's {of_model}, and kvtier stores both in one form"
        raise ConfigError("speculative_config.model", draft.model, f"{fix}; use a draft like the model, or ngram")


def _vectors(model: Any) -> str:
    heads = "one latent (MLA)" if model.use_mla else f"{model.get_total_num_kv_heads()} KV heads"
    return f"{heads} of {model.get_head_size()}"


def _check_index(parallel: Any, settings: Settings) -> None:
    """Refuse an index in memory if the engine's workers are processes of their own. Raises ConfigError."""
    backend, ranks = getattr(parallel, "distributed_executor_backend", None), getattr(parallel, "world_size", 1)
    is_one_process = backend in (None, "uni", "external_launcher") and ranks == 1
    if settings.index.kind == "memory" and not is_one_process:
        fix = (
            f"only one process sees it, and this engine's workers are others (distributed_executor_backend "
            f"{_plain(backend)}, {ranks} ranks): nothing would ever be found; set it to embedded or redis"
        )
        raise ConfigError("index.kind", "memory", fix)


def _check_launcher(parallel: Any) -> None:
    """Refuse `external_launcher` with several ranks: each schedules for itself, so a load that ends a step later
    on one of them would give the ranks different batches. Raises ConfigError."""
    backend, ranks = _plain(getattr(parallel, "distributed_executor_backend", None)), getattr(parallel, "world_size", 1)
    if backend == "external_launcher" and ranks > 1:
        fix = "each rank schedules for itself, and loads do not end in the same step on all; use mp or ray, or one rank"
        raise ConfigError("distributed_executor_backend", backend, fix)


def check_model(vllm_config: Any) -> None:
    """Refuse models that vLLM must not reach: without connectors for several groups it puts the layers of hybrid models
    into one, or fails with an error that does not name the cause. Raises ConfigError."""
    model = vllm_config.model_config
    if getattr(model, "is_hybrid", False):
        fix = "hybrid models, some of whose layers keep a state instead of KV (Mamba and the like), are not supported"
        raise ConfigError("model", model.model, f"{fix}; {WITHOUT}")
    if getattr(model, "is_diffusion", False):
        fix = "a diffusion model's tokens may change after their KV was computed"
        raise ConfigError("model", model.model, f"{fix}; {WITHOUT}")
    # In classes of FAMILIES all layers but those of MLA have this window. In others some may not.
    advice = window_advice(vllm_config)
    is_known = getattr(getattr(model, "hf_text_config", None), "model_type", None) in FAMILIES
    if advice and is_known and not getattr(model, "use_mla", False):
        window = vllm_config.cache_config.sliding_window
        raise ConfigError("sliding_window", window, f"{refusal([WINDOW])}; {advice}{WITHOUT}")


def window_advice(vllm_config: Any) -> str:
    """Return the advice to disable the window of a model's layers. Return "" where vLLM knows none for the whole model,
    or where a draft has layers of its own."""
    window = getattr(vllm_config.cache_config, "sliding_window", None)
    if window is None or getattr(vllm_config, "speculative_config", None) is not None:
        return ""
    longest = min(window, vllm_config.model_config.max_model_len)
    return f"add --disable-sliding-window, with which vLLM takes requests of up to {longest} tokens, or "


def _returns_experts(vllm_config: Any) -> bool:
    """Return True if vLLM returns the experts of each token. With a hit that it did not compute itself, 0.32 fails (its
    store lacks those tokens), and earlier releases return the experts of the blocks' previous owners."""
    places = (getattr(vllm_config, "aux_output_config", None), vllm_config.model_config)
    return any(getattr(place, "enable_return_routed_experts", False) for place in places)


def _check_load(load_config: Any) -> None:
    """Refuse weights that may not be those in the model's folder, which are fingerprinted. Raises ConfigError."""
    load_format = _plain(getattr(load_config, "load_format", "auto"))
    if load_format == "dummy":
        fix = "dummy weights are in no files and cannot be identified; set model_tag to a name for them"
        raise ConfigError("load_format", load_format, fix)
    if load_format not in READ_FROM_THE_FOLDER:
        fix = "its weights need not be those in the model's folder; set model_tag to a name that changes when they do"
        raise ConfigError("load_format", load_format, fix)
    extra = getattr(load_config, "model_loader_extra_config", None)
    if isinstance(extra, dict) and "pattern" in extra:
        fix = "it may name files outside of the model's folder; set model_tag to a name that changes when they do"
        raise ConfigError("model_loader_extra_config", extra, fix)


def _check_weights_beside(model: Any) -> None:
    """Refuse `model_weights`, from where some load formats read instead of the folder that is fingerprinted. Raises
    ConfigError."""
    elsewhere = getattr(model, "model_weights", None)
    if elsewhere and elsewhere != model.model:
        fix = f"the weights in {model.model} are fingerprinted, and these may be others; set model_tag to a name that"
        raise ConfigError("model_weights", elsewhere, f"{fix} changes when they do")


def check_sources(architecture: str | None, registry: Any) -> None:
    """Refuse a model whose code in vLLM's `registry` loads weights that are not at the top of its folder.

    Ultravox loads those of another model; Kimi-Audio, MiMo-V2-Omni and Jina v5 those of a subfolder. Raises
    ConfigError.
    """
    registered = getattr(registry, "models", {}).get(architecture)
    module = getattr(registered, "module_name", None) or getattr(
        getattr(registered, "model_cls", None), "__module__", None
    )
    found = None if module is None else find_spec(module)
    if found is None or found.origin is None:
        return
    path = Path(found.origin)
    source = path.read_text(encoding="utf-8", errors="replace")
    # Parts such as an audio encoder are often another file's beside it.
    parts = [path.with_name(f"{part}.py") for part in sorted(set(_SIBLING_IMPORT.findall(source)))]
    sources = [source, *(part.read_text(encoding="utf-8", errors="replace") for part in parts if part.is_file())]
    if any(mark in text for mark in LOADS_ELSEWHERE for text in sources):
        fix = f"{architecture}: this model also loads weights from outside of its folder or from a subfolder, which are"
        fix = f"{fix} not fingerprinted; set it to a name that changes when any of them does"
        raise ConfigError("model_tag", None, fix)


def check_cache(kv_cache_config: Any, settings: Settings, advice: str = "") -> Any:
    """Check the KV cache's groups. Return the spec of a layer of the only group. Raises ConfigError.

    advice: what `window_advice` returns.
    """
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        raise ConfigError("kv_cache_groups", 0, f"no layer of this model keeps KV, so nothing can be cached; {WITHOUT}")
    if len(groups) != 1:
        kinds = sorted({type(group.kv_cache_spec).__name__ for group in groups})
        fix = f"hybrid models, with more than one KV-cache group ({', '.join(kinds)}), are not supported; {WITHOUT}"
        raise ConfigError("kv_cache_groups", len(groups), fix)
    specs = list(layer_specs(groups[0]).values()) or [groups[0].kv_cache_spec]
    for number, spec in enumerate(specs):
        if spec not in specs[:number]:
            _check_spec(spec, advice)
    sizes = dict.fromkeys((getattr(s, "num_kv_heads", None), getattr(s, "head_size", None)) for s in specs)
    if len(sizes) > 1:
        found = ", ".join(f"{heads} KV heads of {size}" for heads, size in sizes)
        fix = f"its layers have KV of unlike sizes, and a record has one size for all; {WITHOUT}"
        raise ConfigError("kv_cache_spec", found, fix)
    settings.check_block(specs[0].block_size)
    return specs[0]


def layer_specs(group: Any) -> Mapping[str, Any]:
    """Return each layer's own spec. Layers of a group may differ in bytes; then the group's spec is a mapping of
    theirs."""
    each = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return each if each is not None else dict.fromkeys(group.layer_names, group.kv_cache_spec)


def _check_spec(spec: Any, advice: str) -> None:
    kind = type(spec).__name__
    why = refusal({SPECS.get(kind, kind)})
    if why:
        # For classes that are not in FAMILIES, only the specs say that no layer looks further back.
        raise ConfigError("kv_cache_spec", kind, f"{why}; {advice if kind == 'SlidingWindowSpec' else ''}{WITHOUT}")
    if getattr(spec, "non_causal", False):
        fix = f"a token's KV would depend on tokens after it; {WITHOUT}"
        raise ConfigError("kv_cache_spec", "non-causal attention", fix)
    if getattr(spec, "tokens_per_state", 1) != 1 or getattr(spec, "compress_ratio", 1) != 1:
        raise ConfigError("kv_cache_spec", kind, f"compressed sparse attention is not supported; {WITHOUT}")
    quantization = _plain(getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE"))
    if quantization not in ("NONE", "FP8_PER_TENSOR") and not quantization.startswith("TURBOQUANT"):
        check_cache_dtype(str(getattr(spec, "cache_dtype_str", None) or quantization.lower()))
        raise ConfigError("kv_cache_dtype", quantization.lower(), "not supported yet; use auto, bfloat16 or fp8")


def check_layers(vllm_config: Any, layer_names: list[str]) -> None:
    """Refuse on a worker, once its layers exist, layers that read another layer's KV. Raises ConfigError."""
    context = getattr(vllm_config.compilation_config, "static_forward_context", {})
    for name in sorted(context):
        target = getattr(context[name], "kv_sharing_target_layer_name", None)
        if target is not None:
            fix = f"it shares the KV of {target}, which is not supported; {WITHOUT}"
            raise ConfigError("KV-sharing layer", name, fix)
        if name in layer_names and getattr(context[name], "calculate_kv_scales", False):
            raise ConfigError(
                "calculate_kv_scales", True, f"layer {name} finds its scales at run time; set it to false"
            )


def roles(vllm_config: Any) -> tuple[bool, bool]:
    """Return (loads, saves) of this engine by its kv_role. Raises ConfigError for an unknown role.

    An engine that cannot continue from loaded KV does not load, and saves only as a kv_producer.
    """
    role = vllm_config.kv_transfer_config.kv_role
    known = roles_of(role)
    return known if can_continue(vllm_config) else (False, role == "kv_producer")


def can_continue(vllm_config: Any) -> bool:
    """Return True if vLLM can compute on from a cached prefix.

    With MEAN, CLS and STEP pooling the pooler needs all tokens of a request in one step, and raises if some are cached.
    Releases without the attribute have no such check, and disable their own prefix cache instead.
    """
    model = vllm_config.model_config
    is_supported = getattr(model, "is_prefix_caching_supported", None)
    if is_supported is None and getattr(model, "runner_type", "generate") == "pooling":
        is_supported = getattr(vllm_config.cache_config, "enable_prefix_caching", True)
    return is_supported is None or bool(is_supported)


def _plain(value: object) -> str:
    return str(getattr(value, "value", value))


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
    own_configs = list(_own_configs(vllm_config))
    if own_configs and transfer.kv_connector == MULTI:
        warning = policy_of_multi(getattr(transfer, "kv_load_failure_policy", POLICY))
        if warning:
            log.warning("%s", warning)
    for own in own_configs:
        settings = Settings.load(own.kv_transfer_config.kv_connector_extra_config)
        check_engine(own, settings)
        check_model(own)
        platform.check_continuation(own)
        platform.check_windows(own)
        settings.signing.signer()
        if _runs_here(own.parallel_config):
            device = "cuda" if current_platform.is_cuda() else "cpu"
            settings.check_device(has_gpu=device == "cuda")
            check_sizes(own, settings, device)
            check_host_arena(settings.host.arena_bytes_on(device), memory_here())
            try:
                check_place(settings)
            except IndexUnavailable as fault:  # vLLM shows its text as the last line of the log
                fault.args = (f"{PREFIX}{fault}",)
                raise
    setattr(transfer, MARK, True)


def _own_configs(vllm_config: Any) -> Iterator[Any]:
    """Yield the configuration as each KVTierConnector will see it: a copy for each one in a MultiConnector."""
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_connector == CONNECTOR:
        yield vllm_config
    elif transfer.kv_connector == MULTI:
        for child in transfer.kv_connector_extra_config.get("connectors") or ():
            if child.get("kv_connector") == CONNECTOR:
                own = copy.copy(vllm_config)
                own.kv_transfer_config = KVTransferConfig(**child)
                yield own


def _runs_here(parallel: Any) -> bool:
    """Return whether an engine of this front end runs on this machine, so that it sees the same root and index."""
    is_spread = getattr(parallel, "data_parallel_backend", "mp") == "ray"
    return not is_spread and getattr(parallel, "data_parallel_size_local", 1) > 0
