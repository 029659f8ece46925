"""What start-up refuses: each by name, with the value and the fix."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.config.settings import Settings
from kvtier.connectors.vllm import compatibility, kv_dtypes, platform
from kvtier.errors import ConfigError
from kvtier.model.layer_kinds import refusal
from tests.engines.fakes import FullAttentionSpec, MLAAttentionSpec

pytest.importorskip("vllm")


def engine(**changes: Any) -> SimpleNamespace:
    """A configuration that passes, but for `changes` ("cache.calculate_kv_scales" -> True)."""
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_load_failure_policy="recompute", kv_role="kv_both"),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        cache_config=SimpleNamespace(cache_dtype="auto", calculate_kv_scales=False),
        model_config=SimpleNamespace(model="m", is_encoder_decoder=False, hf_overrides={}, use_mla=False),
        load_config=SimpleNamespace(load_format="auto"),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    for path, value in changes.items():
        part, _, name = path.partition("__")
        setattr(getattr(config, f"{part}_config"), name, value) if name else setattr(config, part, value)
    return config


def settings(**changes: Any) -> Settings:
    return Settings.load({"root": "/tmp/kvtier-never-made", "chunk_tokens": 64} | changes)


@pytest.mark.parametrize(("backend", "ranks"), [("mp", 1), ("mp", 2), ("ray", 1), ("uni", 2), (object, 1)])
def test_an_index_in_memory_where_workers_are_other_processes(backend: object, ranks: int) -> None:
    """It never had a hit, and nothing said why."""
    config = engine(parallel__distributed_executor_backend=backend, parallel__world_size=ranks)
    with pytest.raises(ConfigError, match="index.kind = 'memory': only one process sees it"):
        compatibility.check_engine(config, settings(index={"kind": "memory"}))
    compatibility.check_engine(config, settings())


@pytest.mark.parametrize("backend", ["uni", "external_launcher", None])
def test_an_index_in_memory_where_there_is_one_process(backend: str | None) -> None:
    config = engine(parallel__distributed_executor_backend=backend, parallel__world_size=1)
    compatibility.check_engine(config, settings(index={"kind": "memory"}))


def rewrite(config: Any) -> None:
    """What a callable hf_overrides looks like."""


class SlidingWindowSpec(SimpleNamespace):
    pass


def cache(*specs: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec, layer_names=[]) for spec in specs])


def test_a_plain_engine_passes() -> None:
    compatibility.check_engine(engine(), settings())
    spec = FullAttentionSpec(block_size=16)
    assert compatibility.check_cache(cache(spec), settings()) is spec
    assert compatibility.check_cache(cache(MLAAttentionSpec(block_size=64)), settings())


@pytest.mark.parametrize(
    ("changes", "key", "fix"),
    [
        ({"kv_transfer__kv_load_failure_policy": "fail"}, "kv_load_failure_policy", 'add "kv_load_failure_policy": '),
        ({"parallel__decode_context_parallel_size": 2}, "decode_context_parallel_size", "set it to 1"),
        ({"parallel__prefill_context_parallel_size": 4}, "prefill_context_parallel_size", "set it to 1"),
        (
            {"parallel__distributed_executor_backend": "external_launcher", "parallel__world_size": 2},
            "distributed_executor_backend",
            "use mp or ray",
        ),
        (
            {"parallel__pipeline_parallel_size": 2, "speculative_config": object()},
            "pipeline_parallel_size",
            "use one or the other",
        ),
        ({"speculative_config": SimpleNamespace(method="draft_model")}, "speculative_config.method", "use ngram"),
        (
            {"speculative_config": SimpleNamespace(method="extract_hidden_states")},
            "speculative_config.method",
            "hidden states",
        ),
        (
            {"speculative_config": SimpleNamespace(method="mtp", kv_cache_dtype="fp8")},
            "speculative_config.kv_cache_dtype",
            "kv_cache_dtype is auto; leave it out",
        ),
        ({"parallel__enable_fault_tolerance": True}, "enable_fault_tolerance", "leave it out"),
        ({"parallel__all2all_backend": "nixl_ep"}, "all2all_backend", "leave it out"),
        ({"cache__calculate_kv_scales": True}, "calculate_kv_scales", "set it to false"),
        ({"model__enable_sleep_mode": True}, "enable_sleep_mode", "set it to false"),
        (
            {"aux_output_config": SimpleNamespace(enable_return_routed_experts=True)},
            "enable_return_routed_experts",
            "kv_producer",
        ),
        ({"model__enable_return_routed_experts": True}, "enable_return_routed_experts", "kv_producer"),
        ({"cache__cache_dtype": "int8_per_token_head"}, "kv_cache_dtype", "use auto"),
        ({"cache__cache_dtype": "int4_per_token_head"}, "kv_cache_dtype", "use auto"),
        ({"cache__cache_dtype": "fp8_per_token_head"}, "kv_cache_dtype", "use auto"),
        ({"cache__cache_dtype": "fp8_ds_mla"}, "kv_cache_dtype", "use auto"),
        ({"cache__cache_dtype": "turboquant_of_tomorrow"}, "kv_cache_dtype", "not known to kvtier; use auto"),
        ({"cache__cache_dtype": "ultraquant_4bit"}, "kv_cache_dtype", "use auto"),
        ({"cache__cache_dtype": "nvfp4"}, "kv_cache_dtype", "use auto"),
        ({"model__is_encoder_decoder": True}, "model", "without the kvtier connector"),
        ({"load__load_format": "dummy"}, "load_format", "set model_tag"),
        ({"model__model_weights": "/tuned"}, "model_weights", "set model_tag"),
        ({"load__load_format": "tensorizer"}, "load_format", "set model_tag"),
        ({"load__load_format": "ipc_cache"}, "load_format", "set model_tag"),
        ({"load__load_format": "npcache"}, "load_format", "set model_tag"),
        ({"load__load_format": "of_a_plugin"}, "load_format", "set model_tag"),
        (
            {"load__model_loader_extra_config": {"pattern": "../other/{part}"}},
            "model_loader_extra_config",
            "set model_tag",
        ),
        (
            {"speculative_config": SimpleNamespace(draft_load_config=SimpleNamespace(load_format="tensorizer"))},
            "load_format",
            "set model_tag",
        ),
        ({"model__hf_overrides": rewrite}, "hf_overrides", "set model_tag"),
    ],
    ids=lambda value: next(iter(value.values())) if isinstance(value, dict) else None,
)
def test_refused_engine_settings(changes: dict[str, Any], key: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compatibility.check_engine(engine(**changes), settings())
    assert caught.value.key == key
    assert fix in caught.value.fix


def attention(heads: int, size: int, is_mla: bool = False) -> dict[str, Any]:
    return {"use_mla": is_mla, "get_total_num_kv_heads": lambda: heads, "get_head_size": lambda: size}


@pytest.mark.parametrize("method", ["eagle", "eagle3", "dflash"])
@pytest.mark.parametrize("other", [attention(4, 128), attention(8, 64), attention(8, 128, is_mla=True)])
def test_drafts_whose_kv_has_another_form_are_refused(method: str, other: dict[str, Any]) -> None:
    """The worker refused them after the model was loaded, by the name of a KV dtype or as an unknown layout."""
    draft = SimpleNamespace(model="head", **other)
    config = engine(**{f"model__{name}": value for name, value in attention(8, 128).items()})
    config.speculative_config = SimpleNamespace(method=method, draft_model_config=draft)
    with pytest.raises(
        ConfigError, match=r"speculative_config.model = 'head': .* this model's 8 KV heads of 128.*ngram"
    ):
        compatibility.check_engine(config, settings())
    vars(draft).update(attention(8, 128))
    compatibility.check_engine(config, settings())


def test_chunks_longer_than_any_prompt_are_refused() -> None:
    """Nothing was ever stored, and nothing said why."""
    compatibility.check_engine(engine(model__max_model_len=64), settings(chunk_tokens=64))
    with pytest.raises(ConfigError, match="chunk_tokens = 128: only whole chunks are stored.*longer than 64 tokens"):
        compatibility.check_engine(engine(model__max_model_len=64), settings(chunk_tokens=128))


@pytest.mark.parametrize("kind", ["is_hybrid", "is_diffusion"])
def test_models_are_refused_before_vllm_lays_out_their_kv(kind: str) -> None:
    """Of hybrid ones it cannot, without a connector that takes several groups of layers, and does not say why."""
    from kvtier.connectors.vllm import KVTierConnector

    ask = KVTierConnector.get_required_kvcache_layout
    assert ask(engine()) is None and ask(engine(**{f"model__{kind}": False})) is None
    with pytest.raises(ConfigError) as caught:
        ask(engine(**{f"model__{kind}": True}))
    assert caught.value.key == "model" and "without the kvtier connector" in caught.value.fix


@pytest.mark.parametrize("place", ["model", "speculative.draft_model"])
@pytest.mark.parametrize(
    "architecture", ["UltravoxModel", "MoonshotKimiaForCausalLM", "MiMoV2OmniForCausalLM", "JinaEmbeddingsV5Model"]
)
def test_models_that_load_other_weights_need_a_model_tag(architecture: str, place: str) -> None:
    """Those of another model, of a subfolder, and of a subfolder by code in a file beside the model's own."""
    registry = pytest.importorskip("vllm.model_executor.models.registry").ModelRegistry
    model = {"model": "m", "architecture": architecture, "registry": registry}
    config = engine()
    if place == "model":
        vars(config.model_config).update(model)
    else:
        config.speculative_config = SimpleNamespace(method="mtp", draft_model_config=SimpleNamespace(**model))
    with pytest.raises(ConfigError, match=f"{architecture}: this model also loads weights") as caught:
        compatibility.check_engine(config, settings())
    assert caught.value.key == "model_tag"
    compatibility.check_engine(config, settings(model_tag="mine"))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2VLForConditionalGeneration", "NeverHeardOf"])
def test_models_of_one_folder_pass(architecture: str) -> None:
    registry = pytest.importorskip("vllm.model_executor.models.registry").ModelRegistry
    compatibility.check_engine(engine(model__architecture=architecture, model__registry=registry), settings())


@pytest.mark.parametrize(
    ("model", "caches", "expected"),
    [
        ({}, True, (True, True)),
        ({"is_prefix_caching_supported": True}, False, (True, True)),
        ({"is_prefix_caching_supported": False}, False, (False, False)),
        ({"is_prefix_caching_supported": False}, True, (False, False)),
        ({"runner_type": "pooling"}, True, (True, True)),
        ({"runner_type": "pooling"}, False, (False, False)),
        ({"runner_type": "generate"}, False, (True, True)),
    ],
)
def test_what_vllm_cannot_continue_is_neither_loaded_nor_saved(
    model: dict[str, Any], caches: bool, expected: tuple[bool, bool]
) -> None:
    changes = {f"model__{name}": value for name, value in model.items()}
    config = engine(cache__enable_prefix_caching=caches, **changes)
    assert compatibility.roles(config) == expected
    config.kv_transfer_config.kv_role = "kv_producer"
    assert compatibility.roles(config) == (False, True)


def test_an_engine_that_only_saves_may_return_routed_experts() -> None:
    experts = SimpleNamespace(enable_return_routed_experts=True)
    compatibility.check_engine(engine(aux_output_config=experts, kv_transfer__kv_role="kv_producer"), settings())


def test_what_passes() -> None:
    """Formats that read the folder; weights that no file tells, with a model tag; dtypes that are moved."""
    for load_format in ("safetensors", "fastsafetensors", "pt", "sharded_state", "runai_streamer", "kvtier"):
        compatibility.check_engine(engine(load__load_format=load_format), settings())
    untold = ({"load__load_format": "dummy"}, {"load__load_format": "tensorizer"}, {"model__hf_overrides": rewrite})
    for changes in untold:
        compatibility.check_engine(engine(**changes), settings(model_tag="mine"))
    for dtype in ("auto", "bfloat16", "fp8", "fp8_e5m2", "fp8_inc", *kv_dtypes.SLOTS):
        compatibility.check_cache_dtype(dtype)


@pytest.mark.parametrize(
    ("specs", "key", "text"),
    [
        ([FullAttentionSpec(block_size=16), SlidingWindowSpec(block_size=16)], "kv_cache_groups", "hybrid"),
        ([], "kv_cache_groups", "nothing can be cached"),
        ([SlidingWindowSpec(block_size=16)], "kv_cache_spec", "all its layers attend within a window"),
        ([SimpleNamespace(block_size=16)], "kv_cache_spec", "only full attention and MLA"),
        ([FullAttentionSpec(block_size=16, non_causal=True)], "kv_cache_spec", "tokens after it"),
        ([MLAAttentionSpec(block_size=64, compress_ratio=4)], "kv_cache_spec", "sparse"),
        ([MLAAttentionSpec(block_size=64, tokens_per_state=4)], "kv_cache_spec", "sparse"),
        (
            [FullAttentionSpec(block_size=16, kv_quant_mode=SimpleNamespace(name="INT8_PER_TOKEN_HEAD"))],
            "kv_cache_dtype",
            "use auto",
        ),
        ([FullAttentionSpec(block_size=48)], "chunk_tokens", "multiple of the engine's block of 48"),
    ],
)
def test_refused_caches(specs: list[SimpleNamespace], key: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compatibility.check_cache(cache(*specs), settings())
    assert caught.value.key == key
    assert text in caught.value.fix


@pytest.mark.parametrize(
    ("window", "draft", "longest"), [(2047, None, 2047), (9000, None, 4096), (2047, "eagle", None), (None, None, None)]
)
def test_a_window_in_all_layers_of_an_unknown_class_is_refused_with_a_way_out(
    window: int | None, draft: str | None, longest: int | None
) -> None:
    """The refusal of Solar only advised to run it without kvtier. window None: an option disabled it, or layers have
    windows of their own."""
    given = compatibility.window_advice(
        SimpleNamespace(
            cache_config=SimpleNamespace(sliding_window=window),
            model_config=SimpleNamespace(max_model_len=4096),
            speculative_config=draft,
        )
    )
    with pytest.raises(ConfigError, match="kv_cache_spec = 'SlidingWindowSpec'") as caught:
        compatibility.check_cache(cache(SlidingWindowSpec(block_size=16)), settings(), given)
    advice = f"add --disable-sliding-window, with which vLLM takes requests of up to {longest} tokens, or "
    assert (advice in caught.value.fix) == (longest is not None)
    assert caught.value.fix.endswith(compatibility.WITHOUT)


@pytest.mark.parametrize(
    "kinds",
    [
        ["full_attention"],
        ["full_attention", "sliding_attention"],
        ["sliding_attention"],
        ["chunked_attention"],
        ["full_attention", "chunked_attention"],
        ["full_attention", "linear_attention"],
    ],
)
def test_plan_refuses_the_layers_that_an_engine_refuses(kinds: list[str]) -> None:
    """By vLLM's own specs, after what it does to them for connectors that take one KV-cache group."""
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.core.kv_cache_utils import unify_hybrid_kv_cache_specs

    form = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    made: dict[str, Callable[[], Any]] = {
        "full_attention": lambda: interface.FullAttentionSpec(**form),
        "sliding_attention": lambda: interface.SlidingWindowSpec(**form, sliding_window=128),
        "chunked_attention": lambda: interface.ChunkedLocalAttentionSpec(**form, attention_chunk_size=128),
        "linear_attention": lambda: interface.MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,)),
    }
    specs = {f"layer.{number}": made[kind]() for number, kind in enumerate(kinds)}
    try:
        unify_hybrid_kv_cache_specs(specs)
        groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=[name]) for name, spec in specs.items()]
        if len({type(spec) for spec in specs.values()}) == 1:
            groups = groups[:1]
        compatibility.check_cache(SimpleNamespace(kv_cache_groups=groups), settings())
        is_served = True
    except (ConfigError, ValueError):
        is_served = False
    assert is_served == (refusal(kinds) == "")


def test_layers_that_share_kv_are_refused() -> None:
    config = engine()
    config.compilation_config.static_forward_context = {
        "model.layers.0.attn": SimpleNamespace(kv_sharing_target_layer_name=None),
        "model.layers.1.attn": SimpleNamespace(kv_sharing_target_layer_name="model.layers.0.attn"),
    }
    with pytest.raises(ConfigError, match=r"KV-sharing layer = 'model\.layers\.1\.attn'"):
        compatibility.check_layers(config, list(config.compilation_config.static_forward_context))


def test_scales_found_by_a_layer_are_refused() -> None:
    config = engine()
    config.compilation_config.static_forward_context = {"layers.0": SimpleNamespace(calculate_kv_scales=True)}
    with pytest.raises(ConfigError, match="calculate_kv_scales"):
        compatibility.check_layers(config, ["layers.0"])


@pytest.mark.parametrize(
    ("role", "expected"), [("kv_both", (True, True)), ("kv_consumer", (True, False)), ("kv_producer", (False, True))]
)
def test_roles(role: str, expected: tuple[bool, bool]) -> None:
    assert compatibility.roles(engine(kv_transfer__kv_role=role)) == expected
    with pytest.raises(ConfigError, match="kv_role"):
        compatibility.roles(engine(kv_transfer__kv_role=None))


class Platform:
    def __init__(self, name: str) -> None:
        self.device_name = name

    def is_cuda(self) -> bool:
        return self.device_name == "cuda"

    def is_cpu(self) -> bool:
        return self.device_name == "cpu"


@pytest.mark.parametrize(("device", "refused"), [("cpu", True), ("cuda", False)])
def test_mla_that_cannot_continue_from_loaded_kv_is_refused(
    device: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.platforms.current_platform", Platform(device))
    config = engine(model__use_mla=True, scheduler__enable_chunked_prefill=False)
    if refused:
        with pytest.raises(ConfigError, match="cannot continue from loaded KV"):
            platform.check_continuation(config)
    else:
        platform.check_continuation(config)
    platform.check_continuation(engine(scheduler__enable_chunked_prefill=False))


@pytest.mark.parametrize(
    ("device", "release", "window", "refused"),
    [
        ("cpu", "0.27.1+cpu", 512, True),
        ("cpu", "0.27.1+cpu", 1024, False),  # max_model_len: no layer looks back further
        ("cpu", "0.27.1+cpu", None, False),
        ("cpu", "0.28.0+cpu", 512, False),
        ("cuda", "0.25.1", 512, False),
    ],
)
def test_windows_beside_full_attention_are_refused_on_a_cpu_before_028(
    device: str, release: str, window: int | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 3's answers to prompts longer than its window were others than without the connector."""
    monkeypatch.setattr("vllm.platforms.current_platform", Platform(device))
    monkeypatch.setattr("vllm.__version__", release)
    layers = SimpleNamespace(layer_types=["sliding_attention", "full_attention"], sliding_window=window)
    config = engine(model__max_model_len=1024, model__hf_text_config=layers)
    for known in (None, cache(FullAttentionSpec(sliding_window=window))):  # before KV is laid out, and then
        if refused:
            with pytest.raises(ConfigError, match=r"sliding_window = 512: on CPUs, vLLM before 0.28"):
                platform.check_windows(config, known)
        else:
            platform.check_windows(config, known)


@pytest.mark.parametrize(
    ("family", "window", "drafts", "refused"),
    [
        ("phi3", 256, None, True),
        ("mistral", 4096, None, True),
        ("phi3", None, None, False),  # --disable-sliding-window, or layers of several kinds
        ("mimo_v2_flash", 128, None, False),  # its class takes the window from some layers
        ("mistral", 4096, SimpleNamespace(method="eagle"), False),  # whose layers have full attention
        ("deepseek_v3", 4096, None, False),  # MLA knows no window
    ],
)
def test_a_window_in_all_layers_is_refused_before_the_model_is_loaded(
    family: str, window: int | None, drafts: object, refused: bool
) -> None:
    """The refusal by the KV cache's specs ended a worker: the last line of the log did not name the reason."""
    config = engine(model__hf_text_config=SimpleNamespace(model_type=family), speculative_config=drafts)
    config.cache_config.sliding_window = window
    config.model_config.use_mla, config.model_config.max_model_len = family == "deepseek_v3", 1 << 17
    if refused:
        with pytest.raises(ConfigError, match=rf"sliding_window = {window}: all its .*; add --disable-sliding-window"):
            compatibility.check_model(config)
    else:
        compatibility.check_model(config)


@pytest.mark.parametrize(("device", "cache_dtype"), [("cpu", "bfloat16"), ("cpu", "auto"), ("cuda", "bfloat16")])
def test_kv_of_another_dtype_than_the_models_is_refused_on_a_cpu(
    device: str, cache_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's attention there wrote float32 into tensors of bfloat16, past the ends of pages: hits were wrong."""
    monkeypatch.setattr("vllm.platforms.current_platform", Platform(device))
    config = engine(cache__cache_dtype=cache_dtype, model__dtype=torch.float32)
    if (device, cache_dtype) == ("cpu", "bfloat16"):
        with pytest.raises(ConfigError, match=r"kv_cache_dtype = 'bfloat16': .*\(float32\).*set it to auto"):
            platform.check_continuation(config)
        config.model_config.dtype = torch.bfloat16
    platform.check_continuation(config)


def test_platforms_whose_packing_is_not_known_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.platforms.current_platform", Platform("rocm"))
    with pytest.raises(ConfigError, match="platform = 'rocm'"):
        platform.packing_of(FullAttentionSpec(block_size=16), engine())


def test_packing_on_the_cpu_names_block_and_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """K is packed over a whole block there: another block size is another namespace. On CUDA it is not."""
    pytest.importorskip("vllm.v1.attention.backends.cpu_attn")  # before the platform is exchanged
    config = engine()
    config.model_config.dtype = torch.float32
    small = FullAttentionSpec(block_size=32, head_size=64, dtype=torch.float32)
    large = FullAttentionSpec(block_size=64, head_size=64, dtype=torch.float32)
    monkeypatch.setattr("vllm.platforms.current_platform", Platform("cuda"))
    assert platform.packing_of(small, config) == platform.packing_of(large, config)
    monkeypatch.setattr("vllm.platforms.current_platform", Platform("cpu"))
    families = [platform.packing_of(spec, config) for spec in (small, large)]
    assert families[0] != families[1] and all(packing.is_halved for packing in families)
    assert families[0].family.startswith("vllm-cpu-") and families[0].family.endswith("-b32")


def written(isa: str) -> tuple[bool, bool]:
    """Return whether vLLM's operator packs K as [element][token] and V as [token][element] of a block and head."""
    from vllm import _custom_ops

    blocks, heads, tokens, size = 3, 2, 32, 64
    k, v = (torch.randn(blocks * tokens, heads, size, dtype=torch.bfloat16) for _ in range(2))
    cache = torch.zeros(blocks, heads, 2, tokens, size, dtype=torch.bfloat16)
    _custom_ops.cpu_attn_reshape_and_cache(k, v, *cache.unbind(2), torch.arange(len(k)), isa)
    by_element = cache[:, :, 0].reshape(blocks, heads, size, tokens).permute(0, 3, 1, 2).flatten(0, 1)
    return torch.equal(by_element, k), torch.equal(cache[:, :, 1].transpose(1, 2).flatten(0, 1), v)


@pytest.mark.parametrize("isa", ["vec", "vec16", "amx"])
def test_codecs_are_refused_where_a_cpu_packs_kv_in_pairs(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codecs took elements of several tokens for one vector, and lost much more than they should."""
    cpu_attn = pytest.importorskip("vllm.v1.attention.backends.cpu_attn")
    can_read = isa in platform.BY_ELEMENT
    if not can_read and not torch.cpu._is_avx512_bf16_supported():
        pytest.skip("of vLLM's libraries only the one for AVX-512 with bfloat16 has an operator for AMX")
    assert written(isa) == (can_read, can_read)
    monkeypatch.setattr(cpu_attn, "_get_attn_isa", lambda dtype, block_size: isa)
    monkeypatch.setattr("vllm.platforms.current_platform", Platform("cpu"))
    config = engine()
    config.model_config.dtype = torch.bfloat16
    packing = platform.packing_of(FullAttentionSpec(block_size=32, head_size=64, dtype=torch.bfloat16), config)
    assert packing.is_halved and packing.is_k_by_element == can_read
    packing.check_codec("raw")
    if can_read:
        packing.check_codec("int8")
    else:
        with pytest.raises(ConfigError, match="codec = 'int8': vLLM packs KV .* as 'vllm-cpu-amx-b32'.*set it to raw"):
            packing.check_codec("int8")
