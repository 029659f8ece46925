"""The arithmetic of `kvtier plan`, against figures worked out by hand and by others."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.format.geometry import Geometry
from kvtier.model.config_json import ModelConfig, read_model
from kvtier.planner.capacity import ChunkBytes, EngineSizes, Prefill, TransferRates, plan_hbm
from kvtier.planner.codecs import CODECS, chunks_of_codecs
from kvtier.planner.model_parameters import active_parameters, rank_parameters, total_parameters
from tests.model_configs import EXPERTS, GLM_MOE, LLAMA4, LLAMA_8B, LLAMA_70B, MLA, SMALL


def model_of(folder: Path, values: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(values))
    return read_model(folder)


def engine_of(tensor: int = 1, pipeline: int = 1) -> EngineSizes:
    return EngineSizes(tensor, pipeline, 141 * 10**9, 0.9, 4 << 30)


def chunks_of(geometry: Geometry, engine: EngineSizes) -> dict[str, ChunkBytes]:
    return chunks_of_codecs(geometry, engine.shares(geometry))[0]


# --- bytes ---

# By hand. A token, layer and head of 128: raw 2 x 128 x 2 = 512 bytes, int8 2 x 128 codes, 2 for
# the scale of V, 3 (6 x 128 / 256) for middles and scales of K, 2 (4 x 128 / 256) for a raw token; with bk and bv bits
# 16 (bk + bv) + 4, 256 / 256 = 1 for the mean of K and 2 for a raw token. So k4v4 has 135: 512 / 135 = 3.79. With b
# bits a component tc has 32 b + 2, 2 for a raw token and 16 / 256 for the position.
BYTES = {"raw": 512, "int8": 263, "k6v5": 183, "k4v4": 135, "tc4": 132 + 1 / 16, "tc3": 100 + 1 / 16}


@pytest.mark.parametrize(("config", "token_bytes", "cells"), [(LLAMA_8B, 131_072, 256), (LLAMA_70B, 327_680, 640)])
def test_bytes_of_a_token(config: dict[str, Any], token_bytes: int, cells: int, tmp_path: Path) -> None:
    geometry = model_of(tmp_path, config).geometry("auto", 256)
    assert geometry.token_bytes == token_bytes
    found = chunks_of(geometry, engine_of())
    assert {name: chunk.token_bytes / cells for name, chunk in found.items()} == BYTES
    assert set(found) == set(CODECS)


def test_bytes_of_a_chunk_in_files_arenas_and_reads(tmp_path: Path) -> None:
    """k4v4 of the 8B model: a layer of a head has 256 x 135 = 34,560 bytes, 8.4 pages."""
    geometry = model_of(tmp_path, LLAMA_8B).geometry("auto", 256)
    # 32 layers are 270 whole pages; 8 such slabs behind a header page. In an arena each layer is padded: 9 pages.
    chunk = chunks_of(geometry, engine_of())["k4v4"]
    assert (chunk.file, chunk.slot) == (4096 * (1 + 8 * 270), 4096 * (1 + 8 * 32 * 9))
    assert chunk.read == chunk.read_in_all == 4096 * 8 * 270
    # Four ranks of two heads each, and a header page for each.
    chunk = chunks_of(geometry, engine_of(tensor=4))["k4v4"]
    assert (chunk.file, chunk.slot) == (4096 * (4 + 8 * 270), 4096 * (1 + 2 * 32 * 9))
    assert (chunk.read, chunk.read_in_all) == (4096 * 2 * 270, 4096 * 8 * 270)
    # Each head on two ranks: one of them writes, both read.
    chunk = chunks_of(geometry, engine_of(tensor=16))["k4v4"]
    assert chunk.file == 4096 * (8 + 8 * 270) and (chunk.read, chunk.read_in_all) == (4096 * 270, 4096 * 16 * 270)
    # Three stages of 11, 11 and 10 layers: 380,160 bytes are 92.8 pages, 345,600 are 84.4.
    chunk = chunks_of(geometry, engine_of(pipeline=3))["k4v4"]
    assert chunk.file == 4096 * (3 + 8 * (93 + 93 + 85)) and chunk.read == 4096 * 8 * 93
    assert chunk.encoded == 8 * 32 * 34_560  # whatever the cut


def test_bytes_with_a_latent_vector(tmp_path: Path) -> None:
    """MLA: 61 layers of 512 + 64 elements; every rank reads all of it, and each writes some of the layers."""
    deepseek = LLAMA_8B | MLA | {"model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128}
    deepseek |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    geometry = model_of(tmp_path, deepseek).geometry("auto", 256)
    assert geometry.token_bytes == 61 * 576 * 2 == 70_272
    sizes, refused = chunks_of_codecs(geometry, engine_of(tensor=8).shares(geometry))
    assert set(sizes) == {"raw"} and all("MLA" in reason for reason in refused.values())
    layer = 256 * 576 * 2  # 72 pages
    assert sizes["raw"].file == 8 * 4096 + 61 * layer
    assert sizes["raw"].read == 61 * layer and sizes["raw"].read_in_all == 8 * 61 * layer


def test_kv_of_8_bits_is_moved_as_it_is(tmp_path: Path) -> None:
    geometry = model_of(tmp_path, LLAMA_8B).geometry("fp8", 256)
    assert geometry.token_bytes == 65_536 and set(chunks_of(geometry, engine_of())) == {"raw"}
    asks = LLAMA_8B | {
        "quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}
    }
    assert model_of(tmp_path, asks).geometry("auto", 256) == geometry


# --- parameters: matrices ---

# Of the large ones as published, less 65 norms of 4,096 and 161 of 8,192. (8B: embedding and head 2 x 128,256 x 4,096;
# a layer has 2 x 4,096^2 for q and o, 2 x 4,096 x 1,024 for k and v, 3 x 4,096 x 14,336.)
# The small ones: parameters of two and more dimensions that transformers 5.19 makes (AutoModelForCausalLM on "meta").
PARAMETERS = [
    (LLAMA_8B, 8_030_261_248 - 65 * 4096),
    (LLAMA_70B, 70_553_706_496 - 161 * 8192),
    (SMALL | {"model_type": "llama"}, 637_440),
    (SMALL | {"model_type": "llama", "num_key_value_heads": None}, 698_880),
    (SMALL | {"model_type": "llama", "head_dim": 32, "tie_word_embeddings": True}, 664_320),
    (SMALL | {"model_type": "mistral", "sliding_window": None}, 637_440),
    (SMALL | {"model_type": "qwen2", "sliding_window": 4096}, 637_440),
    (SMALL | {"model_type": "qwen3"}, 1_497_600),
    (SMALL | {"model_type": "gemma"}, 2_384_640),
    (SMALL | {"model_type": "phi"}, 529_920),
    (SMALL | {"model_type": "phi3", "vocab_size": 40_000}, 8_125_440),
    (SMALL | {"model_type": "gpt_neox", "num_key_value_heads": None}, 591_360),
    (SMALL | {"model_type": "mixtral", "num_local_experts": 4}, 1_607_040),
    (SMALL | EXPERTS | {"model_type": "qwen3_moe"}, 663_360),
    (SMALL | MLA | {"model_type": "deepseek_v2"}, 841_728),
    (SMALL | MLA | {"model_type": "deepseek_v2", "q_lora_rank": None}, 864_768),
    (SMALL | MLA | {"model_type": "deepseek_v3"}, 841_728),
    (SMALL | {"model_type": "exaone4"}, 637_440),
    (SMALL | EXPERTS | {"model_type": "exaone_moe"}, 704_256),
    (SMALL | LLAMA4 | {"interleave_moe_layer_step": 2}, 2_080_128),
    (SMALL | LLAMA4 | {"moe_layers": [0, 3], "head_dim": 16}, 1_219_968),
    (SMALL | GLM_MOE | {"model_type": "glm4_moe"}, 757_248),
    (SMALL | GLM_MOE | {"model_type": "dots1"}, 757_248),
    (SMALL | MLA | {"model_type": "glm4_moe_lite", "first_k_dense_replace": 1}, 893_184),
    (SMALL | {"model_type": "minimax_m2", "num_local_experts": 4, "num_experts_per_tok": 2}, 2_467_200),
    (SMALL | {"model_type": "ernie4_5"}, 1_401_600),
    # Less 4 x 8 corrections of routers. Its first layer has no experts.
    (SMALL | {"model_type": "ernie4_5_moe", "moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 40}, 747_264),
    (SMALL | {"model_type": "seed_oss"}, 1_497_600),
    (SMALL | {"model_type": "smollm3"}, 541_440),
    (SMALL | {"model_type": "olmo"}, 637_440),
    (SMALL | {"model_type": "olmoe", "num_experts": 6, "num_experts_per_tok": 2}, 2_253_120),
    (SMALL | {"model_type": "phimoe", "num_local_experts": 4}, 1_607_040),
    (SMALL | {"model_type": "starcoder2"}, 433_920),
    (SMALL | {"model_type": "cohere"}, 541_440),
    (SMALL | {"model_type": "hunyuan_v1_dense"}, 637_440),
    (SMALL | EXPERTS | {"model_type": "hy_v3"}, 1_564_416),
    (SMALL | {"model_type": "arcee"}, 529_920),
    (SMALL | {"model_type": "nemotron"}, 529_920),
    (SMALL | {"model_type": "granitemoe", "num_local_experts": 4}, 1_607_040),
    (SMALL | {"model_type": "ministral3"}, 1_497_600),
    (SMALL | {"model_type": "stablelm"}, 637_440),
]


@pytest.mark.parametrize(("config", "expected"), PARAMETERS)
def test_parameters(config: dict[str, Any], expected: int, tmp_path: Path) -> None:
    assert total_parameters(model_of(tmp_path, config)) == expected


def test_a_tied_embedding_lies_on_the_first_stage_and_on_the_last(tmp_path: Path) -> None:
    model = model_of(tmp_path, SMALL | {"model_type": "llama", "tie_word_embeddings": True})
    assert rank_parameters(model, range(5), 1) == total_parameters(model)
    first, _, last = (rank_parameters(model, stage, 1) for stage in engine_of(pipeline=3).stages(5))
    layer = (total_parameters(model) - 96_000) / 5
    assert (first, last) == (2 * layer + 96_000, layer + 96_000)


def test_a_token_is_multiplied_with_its_own_experts_only(tmp_path: Path) -> None:
    """2 of 6 experts of 3 x 96 x 40 in each of 5 layers; the embedding and the head, 2 x 96,000, in none."""
    config = SMALL | EXPERTS | {"model_type": "qwen3_moe"}
    assert active_parameters(model_of(tmp_path, config)) == 663_360 - 192_000 - 5 * 4 * 11_520


# --- what fits ---


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [
        (61, 4, [15, 15, 16, 15]),
        (32, 3, [11, 11, 10]),
        (5, 2, [3, 2]),
        (80, 8, [10] * 8),
        (10, 4, [2, 3, 3, 2]),
        (7, 5, [1, 1, 2, 2, 1]),
        (33, 8, [4, 4, 4, 4, 4, 4, 5, 4]),
        (32, 1, [32]),
    ],
)
def test_stages_are_those_of_vllm(layers: int, stages: int, sizes: list[int]) -> None:
    """Of vllm.distributed.utils.get_pp_indices, of vLLM 0.32."""
    found = engine_of(pipeline=stages).stages(layers)
    assert [len(stage) for stage in found] == sizes and [n for stage in found for n in stage] == list(range(layers))


def test_context_that_fits(tmp_path: Path) -> None:
    """8B in bf16: 126.9e9 - 2 x 8,029,995,008 - 4 GiB = 106,545,042,688 bytes, 812,874.2 tokens of 131,072."""
    model = model_of(tmp_path, LLAMA_8B)
    geometry = model.geometry("auto", 256)
    plan = plan_hbm(model, geometry, 2 * total_parameters(model), engine_of())
    assert (plan.kv_bytes, plan.tokens, plan.outside_bytes) == (106_545_042_688, 812_874, 14_100_000_000)
    # On 16 ranks each KV head lies twice: a rank has a sixteenth of all matrices, but an eighth of those of K and V.
    plan = plan_hbm(model, geometry, 2 * total_parameters(model), engine_of(tensor=16))
    kv_bytes = 2 * 32 * 2 * 4096 * 1024
    assert plan.weights_bytes == (2 * 8_029_995_008 - kv_bytes) // 16 + kv_bytes // 8
    assert plan.token_bytes == 131_072 // 8
    # Stages: the first has 16 of 32 layers and the embedding, the last as many and the head.
    plan = plan_hbm(model, geometry, 2 * total_parameters(model), engine_of(pipeline=2))
    assert plan.weights_bytes == 8_029_995_008 and plan.token_bytes == 65_536
    assert plan_hbm(model, geometry, 10**12, engine_of()).tokens == 0


# --- times ---


def test_reload_takes_the_longer_way() -> None:
    chunk = ChunkBytes(tokens=256, encoded=1, file=1, slot=1, read=1000, read_in_all=8000)
    assert TransferRates(2000.0, 100.0).from_files(chunk) == 10 / 256  # PCIe: 1000 / 100
    assert TransferRates(500.0, 100.0).from_files(chunk) == 16 / 256  # storage: 8000 / 500
    assert TransferRates(500.0, None).from_files(chunk) == 16 / 256
    assert TransferRates(None, 100.0).from_files(chunk) is None
    assert TransferRates(None, 100.0).from_host(chunk) == 10 / 256 and TransferRates(1.0, None).from_host(chunk) is None


def test_flops_of_a_prompt(tmp_path: Path) -> None:
    """8B: 2 x 218,103,808 x 32 a token, and 32 layers x 32 heads x 256 n^2, half of 4 x 32 x 32 x 128."""
    prefill = Prefill.of(model_of(tmp_path, LLAMA_8B))
    assert (prefill.linear, prefill.square) == (13_958_643_712, 262_144)
    assert prefill.flops(8192) == 13_958_643_712 * 8192 + 262_144 * 8192**2
    # MLA: scores with 24 + 8 elements, outputs with 16, 6 heads, 5 layers.
    assert Prefill.of(model_of(tmp_path, SMALL | MLA | {"model_type": "deepseek_v2"})).square == 5 * 6 * 48


@given(st.floats(1e8, 1e13), st.floats(1e3, 1e7), st.floats(1e12, 1e17), st.floats(1e-4, 1.0), st.floats(1e-9, 1e-2))
def test_break_even_is_the_first_that_pays(
    linear: float, square: float, flop_s: float, fixed_s: float, token_s: float
) -> None:
    prefill = Prefill(linear, square, flop_s)
    tokens = prefill.break_even_tokens(fixed_s, token_s)

    def gain_s(n: int) -> float:
        return prefill.seconds(n) - fixed_s - n * token_s

    unsure_s = 1e-9 * (prefill.seconds(tokens) + fixed_s + tokens * token_s)
    assert tokens >= 1 and gain_s(tokens) >= -unsure_s and (tokens == 1 or gain_s(tokens - 1) <= unsure_s)


def test_a_storage_slower_than_any_prefill_of_short_prompts_pays_for_long_ones() -> None:
    """1 s a token to load, 0.5 s + 0.001 s x n to compute: from n = 500 on, and later where any load takes longer."""
    prefill = Prefill(0.5, 0.001, 1.0)
    assert prefill.break_even_tokens(1e-9, 1.0) in (500, 501) and prefill.break_even_tokens(100.0, 1.0) > 600
