"""Facts about model types that their config.json leaves out: defaults of transformers' classes, and names of keys.

`FAMILIES` has the types that `kvtier plan` computes, `REFUSED` those that kvtier does not serve. A type that is in
neither is refused too, for a guess could be wrong by any factor.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class ExpertKeys:
    """Keys of a mixture of experts.

    n: number of experts; the first key that is present. per_token: experts of a token. size: inner size of one.
    n_shared: number of experts of that size that every token takes; shared_size: inner size of all of them together;
    n_shared_usual: where the file does not say. first: first layer with experts, first_usual where the file does not
    say. step: every so many layers from there on, those whose number and `offset` are divisible by it. dense: list of
    layers without experts; sparse: of those with. is_optional: there may be none.
    """

    n: tuple[str, ...]
    per_token: str = "num_experts_per_tok"
    size: str = "moe_intermediate_size"
    n_shared: str = ""
    shared_size: str = ""
    n_shared_usual: int = 0
    first: str = ""
    first_usual: int = 0
    step: str = ""
    offset: int = 1
    dense: str = ""
    sparse: str = ""
    is_optional: bool = False


_QWEN = ExpertKeys(  # the second key since transformers 5
    ("num_experts", "num_local_experts"),
    shared_size="shared_expert_intermediate_size",
    step="decoder_sparse_step",
    dense="mlp_only_layers",
)
_DEEPSEEK = ExpertKeys(
    ("n_routed_experts",),
    n_shared="n_shared_experts",
    first="first_k_dense_replace",
    step="moe_layer_freq",
    offset=0,
    is_optional=True,
)
_MIXTRAL = ExpertKeys(("num_local_experts",), size="intermediate_size")
_FIRST_DENSE = ExpertKeys(
    ("num_experts",), n_shared="num_shared_experts", n_shared_usual=1, first="first_k_dense_replace", first_usual=1
)
_ERNIE = ExpertKeys(
    ("moe_num_experts",),
    per_token="moe_k",
    n_shared="moe_num_shared_experts",
    n_shared_usual=2,
    first="moe_layer_start_index",
    first_usual=1,
    step="moe_layer_interval",
    is_optional=True,
)
_LLAMA4 = ExpertKeys(
    ("num_local_experts",), size="intermediate_size", n_shared_usual=1, step="interleave_moe_layer_step",
    sparse="moe_layers",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """Facts about a model type that its config.json does not state.

    mlp_matrices: 3 for gate, up and down; 2 for up and down. mlp_key: inner size of layers without experts. is_mla:
    attention with a latent vector. The rest are transformers' defaults; kv_heads None: as many as query heads;
    head_size None: hidden size over heads; window: of attention, and whether it is used where the file does not say;
    full_every: every so many layers one attends to everything and the others within the window, where the file does not
    list them; window_from: of classes with max_window_layers, the first layer with a window where the file does not
    say. chunk: tokens of a chunk that layers with positions attend to, 0 without. usual: further keys that published
    files of the family leave out.
    """

    mlp_matrices: int = 3
    mlp_key: str = "intermediate_size"
    experts: ExpertKeys | None = None
    is_mla: bool = False
    kv_heads: int | None = None
    head_size: int | None = None
    is_tied: bool = False
    window: int | None = None
    uses_window: bool = True
    full_every: int = 0
    window_from: int | None = None
    chunk: int = 0
    usual: Mapping[str, int] = field(default_factory=dict)


_KEY_BIAS = {"attention_bias": True}
_GEMMA3 = Family(
    kv_heads=4,
    head_size=256,
    is_tied=True,
    window=4096,
    full_every=6,
    usual={"num_attention_heads": 8, "vocab_size": 262_208, "max_position_embeddings": 131_072},
)
_MISTRAL = Family(kv_heads=8, window=4096)
_QWEN2 = Family(kv_heads=32, uses_window=False, window_from=28)
_QWEN2_VL = Family(kv_heads=8, uses_window=False, window_from=80)
_QWEN3 = Family(kv_heads=32, head_size=128, uses_window=False, window_from=28)
_MLA = Family(is_mla=True, experts=_DEEPSEEK)
_GLM_MOE = Family(experts=_DEEPSEEK, kv_heads=8, usual={"n_shared_experts": 1, "first_k_dense_replace": 1})

FAMILIES = {
    "llama": Family(),
    "mistral": _MISTRAL,
    "ministral3": Family(kv_heads=8, head_size=128),
    "qwen2": _QWEN2,
    "qwen2_vl": _QWEN2_VL,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3": _QWEN3,
    "qwen3_vl_text": replace(_QWEN3, window_from=None),
    "gemma": Family(kv_heads=16, head_size=256, is_tied=True),
    "gemma2": Family(kv_heads=4, head_size=256, is_tied=True, window=4096, full_every=2),
    "gemma3_text": _GEMMA3,
    "gpt_oss": Family(
        experts=_MIXTRAL,
        kv_heads=8,
        head_size=64,
        window=128,
        full_every=2,
        usual={"num_local_experts": 128, "num_experts_per_tok": 4},
    ),
    "cohere": Family(is_tied=True),
    "cohere2": Family(is_tied=True, window=4096, full_every=4),
    "olmo": Family(),
    "olmo2": Family(),
    "olmo3": Family(window=4096, full_every=4),
    "olmoe": Family(
        experts=ExpertKeys(("num_experts",), size="intermediate_size"),
        usual={"num_experts": 64, "num_experts_per_tok": 8},
    ),
    "exaone4": Family(kv_heads=32, window=4096, full_every=4),
    "exaone_moe": Family(experts=_FIRST_DENSE, kv_heads=32, window=4096, full_every=4),
    "llama4_text": Family(
        mlp_key="intermediate_size_mlp",
        experts=_LLAMA4,
        kv_heads=8,
        head_size=128,
        chunk=8192,
        usual={"num_local_experts": 16, "num_experts_per_tok": 1, "intermediate_size_mlp": 16384},
    ),
    "glm4": Family(kv_heads=2, head_size=128, usual=_KEY_BIAS),
    "glm4v_text": Family(kv_heads=2),
    "glm4_moe": _GLM_MOE,
    "glm4v_moe_text": replace(_GLM_MOE, usual={**_GLM_MOE.usual, **_KEY_BIAS}),
    "glm4_moe_lite": replace(_MLA, usual={"n_shared_experts": 1, "first_k_dense_replace": 1}),
    "minimax_m2": Family(
        experts=_MIXTRAL, kv_heads=8, head_size=128, usual={"num_local_experts": 256, "num_experts_per_tok": 8}
    ),
    "ernie4_5": Family(kv_heads=2, head_size=128, is_tied=True),
    "ernie4_5_moe": Family(experts=_ERNIE, kv_heads=4, is_tied=True),
    "seed_oss": Family(kv_heads=8, head_size=128, usual=_KEY_BIAS),
    "smollm3": Family(kv_heads=4, is_tied=True, uses_window=False),
    "hunyuan_v1_dense": Family(),
    "hy_v3": Family(experts=_FIRST_DENSE, kv_heads=8, head_size=128),
    "dots1": Family(experts=_DEEPSEEK, window=4096, window_from=62),
    "granite": Family(),
    "granitemoe": Family(experts=_MIXTRAL, usual={"num_local_experts": 8, "num_experts_per_tok": 2}),
    "arcee": Family(mlp_matrices=2),
    "nemotron": Family(mlp_matrices=2),
    "starcoder2": Family(mlp_matrices=2, kv_heads=2, is_tied=True),
    "stablelm": Family(),
    "phi": Family(mlp_matrices=2),
    "phi3": Family(),
    "phimoe": Family(experts=_MIXTRAL, kv_heads=8, usual={"num_local_experts": 16, "num_experts_per_tok": 2}),
    "gpt_neox": Family(mlp_matrices=2),
    "mixtral": Family(experts=_MIXTRAL, kv_heads=8, usual={"num_local_experts": 8, "num_experts_per_tok": 2}),
    "qwen2_moe": Family(experts=_QWEN, kv_heads=16, uses_window=False),
    "qwen3_moe": Family(experts=_QWEN, kv_heads=4, uses_window=False),
    "qwen3_vl_moe_text": Family(experts=_QWEN, kv_heads=16, head_size=128, is_tied=True, uses_window=False),
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "kimi_k2": _MLA,
    "mistral4": replace(_MLA, usual={"n_shared_experts": 1}),
}

_UNLIKE = "its layers have KV of unlike sizes, or share it, and a record has one size for all"
_STATES = "it has layers without attention, whose state is not KV of tokens"
_SPARSE = "its attention is sparse or compressed"
ENCODER = "it is an encoder, or has one: its KV depends on tokens that come later"
REFUSED = {
    name: reason
    for reason, names in {
        _UNLIKE: ("gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "mimo_v2_flash"),
        _STATES: ("mamba", "mamba2", "falcon_mamba", "jamba", "bamba", "zamba", "zamba2", "falcon_h1", "nemotron_h",
                  "granitemoehybrid", "recurrent_gemma", "rwkv", "xlstm", "qwen3_next", "qwen3_5", "qwen3_5_moe",
                  "minimax", "lfm2", "lfm2_moe", "kimi_linear", "olmo_hybrid"),
        _SPARSE: ("deepseek_v32", "deepseek_v4", "glm_moe_dsa"),
        ENCODER: ("bert", "roberta", "xlm-roberta", "modernbert", "t5", "bart", "mllama", "whisper"),
    }.items()
    for name in names
}  # fmt: skip
