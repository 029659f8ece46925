"""`kvtier plan`: what it prints, and what it refuses in one line."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from kvtier.codecs.measured_loss import MODELS
from tests.cli.asking import Cli
from tests.model_configs import GLM_MOE, LLAMA4, LLAMA_8B, LLAMA_70B, MLA, SMALL

GPU = ("--gpu-memory", "141GB")


def folder_of(path: Path, values: dict[str, Any]) -> str:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(values))
    return str(path)


@pytest.fixture
def model(tmp_path: Path) -> str:
    return folder_of(tmp_path / "8b", LLAMA_8B)


def planned(cli: Cli, *arguments: str) -> Any:
    return cli.json("plan", *GPU, *arguments)


def test_plan_for_people(model: str, cli: Cli) -> None:
    rates = ("--storage-rate", "2GB/s", "--pcie-rate", "55GB/s", "--prefill-rate", "40000@8192")
    out = cli.printed("plan", "--model", model, *GPU, *rates, "--storage", "1TB", "--host-memory", "64GiB")
    assert "KV: 131,072 bytes a token, in bfloat16" in out and "context: 812,874 tokens in HBM" in out
    assert "by the parameters that config.json implies, all bfloat16" in out
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith(("raw ", "k4v4 "))}
    # 131,072 tokens are 512 chunks of 8 x 270 pages at 2 GB/s, 2.26 s; over PCIe 0.0824 s; 1 / 57,870 s a token. To
    # both times comes what any load takes.
    assert rows["k4v4"][:6] == ["k4v4", "2.28", "s", "0.102", "s", "57,870"]
    assert rows["raw"][:6] == ["raw", "8.61", "s", "0.332", "s", "15,259"]
    assert "assumed: 4.0 GiB of each GPU" in out and "assumed: any load takes 0.02 s" in out


def test_staging_for_people(model: str, cli: Cli) -> None:
    """Three steps of 32 chunks and 32 for loads, each of a page and 32 MiB."""
    out = cli.printed("plan", "--model", model, *GPU)
    assert "13.1 GiB of each GPU, less 4.0 GiB for kvtier's staging (raw) and 512.0 MiB to spare: 8.6 GiB left" in out
    assert (
        "a step of the engine computes up to 8,192 tokens (--max-num-batched-tokens)" in out and "not with" not in out
    )
    out = cli.printed("plan", "--model", model, *GPU, "--gpu-memory-utilization", "0.98")
    assert "less 1.8 GiB for kvtier's staging (raw)" in out, "two thirds of what the engine leaves"
    wanted = ("--gpu-memory-utilization", "0.98", "--hbm-staging", "4GiB")
    out = cli.printed("plan", "--model", model, *GPU, *wanted, status=1)
    assert "4.0 GiB for kvtier's staging (raw) and 512.0 MiB to spare: 1.8 GiB too little" in out
    assert "not with raw: hbm.staging_bytes: 127 slots for staging" in out
    assert "set gpu_memory_utilization lower by 0.02" in out


def test_staging_for_programs(model: str, cli: Cli) -> None:
    slot = (32 << 20) + 4096
    staging = planned(cli, "--model", model)["codecs"]["raw"]["staging"]
    assert staging == {"n_bytes": 128 * slot, "spare_bytes": 512 << 20, "fault": None}
    values = planned(cli, "--model", model, "--max-num-batched-tokens", "2000")
    assert values["codecs"]["raw"]["staging"]["n_bytes"] == (3 * 8 + 32) * slot
    values = planned(cli, "--model", model, "--hbm-staging", "1GiB")
    assert values["codecs"]["raw"]["staging"]["n_bytes"] == 31 * slot
    assert not any("max-num-batched" in text for text in values["assumptions"])


def test_where_no_codec_fits_the_status_says_so(model: str, cli: Cli) -> None:
    assert "not with k4v4" in cli.printed("plan", "--model", model, *GPU, "--gpu-memory-utilization", "1", status=1)
    out = cli.printed("plan", "--model", model, *GPU, "--hbm-staging", "200GiB", status=1)
    assert "set it to less (at least" in out and "lower by" not in out, "no share of a GPU is that large"
    assert "at least 4 of them must fit" in cli.printed(
        "plan", "--model", model, *GPU, "--hbm-staging", "1MiB", status=1
    )


@pytest.mark.parametrize(
    ("option", "setting"),
    [
        (("--chunk-tokens", "4096", "--hbm-staging", "4GiB"), "not with k4v4: chunk_tokens: with codec k4v4 it may be"),
    ],
)
def test_what_a_codec_refuses_is_named(option: tuple[str, ...], setting: str, model: str, cli: Cli) -> None:
    """By the setting's name: "it may be 2048 at most" did not say what."""
    assert setting in cli.printed("plan", "--model", model, *GPU, *option)


def test_plan_for_programs(model: str, cli: Cli) -> None:
    rates = ("--storage-rate", "2GB/s", "--prefill-rate", "10000@99840")
    values = planned(cli, "--model", model, *rates, "--context", "100000")
    assert values["geometry"]["token_bytes"] == 131_072 and values["hbm"]["tokens"] == 812_874
    assert values["context"] == 390 * 256 and values["refused"] == {}
    k4v4 = values["codecs"]["k4v4"]
    assert k4v4["chunk"]["token_bytes"] == 34_560 and round(k4v4["ratio"], 2) == 3.79
    # A GiB holds 121.3 records of 8 x 270 pages and a header page.
    assert k4v4["per_gib_of_files"] == (1 << 30) * 256 // (4096 * 2161) == 31_054
    assert k4v4["from_host_s"] is None and k4v4["from_files_s"] == pytest.approx(0.02 + 390 * 8 * 270 * 4096 / 2e9)
    n = values["context"]
    assert values["prefill_flops"] == pytest.approx(13_958_643_712 * n + 262_144 * n * n)
    assert values["prefill_s"] == pytest.approx(n / 10_000)


def test_without_rates_no_time_is_made_up(model: str, cli: Cli) -> None:
    out = cli.printed("plan", "--model", model, *GPU)
    assert "give --prefill-rate for its time" in out and "reload of" not in out
    assert all(row["break_even_tokens"] is None for row in planned(cli, "--model", model)["codecs"].values())


def test_break_even_is_earlier_with_fewer_bytes_and_in_whole_chunks(model: str, cli: Cli) -> None:
    values = planned(cli, "--model", model, "--storage-rate", "2GB/s", "--prefill-rate", "40000@8192")
    tokens = [values["codecs"][name]["break_even_tokens"] for name in ("raw", "int8", "k6v5", "k4v4")]
    assert tokens == sorted(tokens, reverse=True) and tokens[0] > tokens[-1] and all(n % 256 == 0 for n in tokens)


def test_ranks(tmp_path: Path, cli: Cli) -> None:
    model = folder_of(tmp_path / "70b", LLAMA_70B)
    values = planned(cli, "--model", model, "--tensor-parallel", "4", "--pcie-rate", "55GB/s")
    assert values["geometry"]["token_bytes"] == 327_680 and values["hbm"]["token_bytes"] == 81_920
    assert values["codecs"]["raw"]["from_host_s"] == pytest.approx(0.02 + 131_072 * 81_920 / 55e9)
    assert "raise --tensor-parallel" in cli.refused("plan", "--model", model, *GPU)  # 131 GiB of weights


def test_weights_are_those_of_the_files(model: str, cli: Cli) -> None:
    """Tensors for drafts (of layer 32 here) and a second copy under other names are not loaded."""
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "model.layers.31.mlp.weight": {"dtype": "BF16", "shape": [500], "data_offsets": [0, 1000]},
            "model.layers.32.mlp.weight": {"dtype": "BF16", "shape": [500], "data_offsets": [1000, 2000]},
        }
    ).encode()
    for name in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
        Path(model, name).write_bytes(struct.pack("<Q", len(header)) + header)
    assert planned(cli, "--model", model)["weights"] == {
        "n_bytes": 2000,
        "source": "by the headers of 2 safetensors files",
    }
    index = {"metadata": {"total_size": 777}, "weight_map": {"x": "model-1.safetensors", "y": "model-9.safetensors"}}
    Path(model, "model.safetensors.index.json").write_text(json.dumps(index))
    assert planned(cli, "--model", model)["weights"]["n_bytes"] == 777
    index["weight_map"] = {"x": "model-1.safetensors", "y": "model-1.safetensors"}
    Path(model, "model.safetensors.index.json").write_text(json.dumps(index))
    assert planned(cli, "--model", model)["weights"]["n_bytes"] == 1000
    Path(model, "model-1.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1")
    assert "is no safetensors file" in cli.refused("plan", "--model", model, *GPU)


def test_one_of_a_kind_is_not_called_many(tmp_path: Path, cli: Cli) -> None:
    folder = folder_of(tmp_path / "tiny", LLAMA_8B | {"num_hidden_layers": 1, "num_key_value_heads": 1})
    header = json.dumps({"x": {"dtype": "BF16", "shape": [500], "data_offsets": [0, 1000]}}).encode()
    Path(folder, "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    out = cli.printed("plan", "--model", folder, *GPU)
    assert "by the headers of 1 safetensors file\n" in out
    assert "llama, 1 layer, 1 KV head of 128 (32 of queries)" in out


def test_quantized_weights_without_files(tmp_path: Path, cli: Cli) -> None:
    awq = LLAMA_8B | {"quantization_config": {"quant_method": "awq", "bits": 4}}
    found = planned(cli, "--model", folder_of(tmp_path, awq))["weights"]["n_bytes"]
    assert found == 2 * 2 * 128_256 * 4096 + 32 * 218_103_808 // 2
    other = LLAMA_8B | {"quantization_config": {"quant_method": "quark"}}
    assert "quantization 'quark'" in cli.refused("plan", "--model", folder_of(tmp_path, other), *GPU)


def test_kv_that_a_checkpoint_asks_for(model: str, cli: Cli) -> None:
    """Also in the file of its own that ModelOpt's first releases wrote, as vLLM reads it."""
    file = Path(model, "hf_quant_config.json")
    index = {"metadata": {"total_size": 9}, "weight_map": {}}
    Path(model, "model.safetensors.index.json").write_text(json.dumps(index))
    for algo, dtype in (("FP8", "fp8_e4m3"), (None, "bfloat16"), ("INT8", "bfloat16")):
        values = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": algo}}
        file.write_text(json.dumps(values))
        assert planned(cli, "--model", model)["geometry"]["dtype"] == dtype
    file.write_text(json.dumps({"quantization": {"kv_cache_quant_algo": "NVFP4"}}))
    said = cli.refused("plan", "--model", model, *GPU)
    assert said.startswith("kvtier: --kv-dtype = 'auto': the checkpoint asks for KV in nvfp4")
    assert planned(cli, "--model", model, "--kv-dtype", "fp8")["geometry"]["dtype"] == "fp8_e4m3"
    of_config = LLAMA_8B | {"quantization_config": {"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 4}}}
    folder_of(Path(model), of_config)
    assert "nvfp4" in cli.refused("plan", "--model", model, *GPU)
    folder_of(Path(model), of_config | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}})
    assert planned(cli, "--model", model)["geometry"]["dtype"] == "bfloat16", "that file is for older ones"


QWEN_WINDOW = SMALL | {"model_type": "qwen2", "sliding_window": 512, "use_sliding_window": True}
NOT_SERVED = [
    ({"model_type": "gemma4"}, "gemma4: its layers have KV of unlike sizes"),
    ({"model_type": "mamba2"}, "mamba2: it has layers without attention"),
    ({"model_type": "t5"}, "t5: it is an encoder"),
    ({"model_type": "llama", "is_encoder_decoder": True}, "it is an encoder"),
    ({"model_type": "deepseek_v32"}, "its attention is sparse"),
    ({"model_type": "gemma3n", "text_config": SMALL | {"model_type": "gemma3n_text"}}, "gemma3n: its layers have KV"),
    ({"model_type": "new_model"}, "model_type 'new_model' is not known to this command"),
    ({}, "model_type 'None' is not known"),
    (SMALL | {"model_type": "mistral"}, "all its layers attend within a window"),
    (QWEN_WINDOW | {"max_window_layers": 0}, "all its layers attend within a window"),
    (SMALL | {"model_type": "gemma3_text", "sliding_window": 512}, "all its layers attend within a window"),
    (SMALL | {"model_type": "llama", "layer_types": ["sliding_attention"] * 5}, "all its layers attend within"),
    (SMALL | {"model_type": "llama", "layer_types": ["full_attention", "linear_attention"]}, "of linear_attention"),
    (SMALL | LLAMA4 | {"no_rope_layers": [1] * 5}, "all its layers attend within a chunk"),
    (QWEN_WINDOW | {"max_window_layers": 2}, "some of its layers have a window"),
    (SMALL | {"model_type": "dots1", "max_window_layers": 0} | GLM_MOE, "all its layers attend within a window"),
    (SMALL | {"model_type": "llama", "layer_types": 5}, "its layer_types is 5"),
    (SMALL | {"model_type": "llama", "num_key_value_heads": 4}, "6 attention heads do not divide over 4 KV heads"),
    (SMALL | {"model_type": "llama", "hidden_size": 100}, "its hidden_size 100 does not divide over 6"),
    (SMALL | {"model_type": "llama", "num_hidden_layers": None}, "its num_hidden_layers is None"),
    (SMALL | {"model_type": "llama", "num_hidden_layers": True}, "its num_hidden_layers is True"),
    (SMALL | {"model_type": "llama", "vocab_size": "many"}, "its vocab_size is 'many'"),
    (SMALL | {"model_type": "llama", "dtype": "int8"}, "its dtype is 'int8'"),
    (SMALL | MLA | {"model_type": "deepseek_v2", "kv_lora_rank": None}, "its kv_lora_rank is None"),
]


@pytest.mark.parametrize(("values", "reason"), NOT_SERVED)
def test_what_is_not_served_is_named(values: dict[str, Any], reason: str, tmp_path: Path, cli: Cli) -> None:
    said = cli.refused("plan", "--model", folder_of(tmp_path, values), *GPU)
    assert said.startswith("kvtier: --model = ") and reason in said


TEXT = {"model_type": "mistral", "max_position_embeddings": 4096} | {
    key: value for key, value in SMALL.items() if key != "dtype"
}
NESTED = {"model_type": "mistral3", "dtype": "bfloat16"}
KV_HEAD_BYTES = 2 * 5 * 16 * 2  # K and V of 5 layers, heads of 16 elements in bfloat16
CONTEXT = {"max_position_embeddings": 4096}
EXAONE_LAYERS = ["sliding_attention"] * 3 + ["full_attention", "sliding_attention"]
SERVED = [
    (SMALL | {"model_type": "gemma2", "head_dim": 16}, 2 * KV_HEAD_BYTES),
    (SMALL | {"model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 4}, 2 * KV_HEAD_BYTES),
    (SMALL | {"model_type": "cohere2", "num_key_value_heads": None}, 6 * KV_HEAD_BYTES),
    (SMALL | {"model_type": "olmo3"}, 2 * KV_HEAD_BYTES),
    (SMALL | {"model_type": "qwen3", "head_dim": None}, 2 * KV_HEAD_BYTES),
    (SMALL | {"model_type": "llama", "layer_types": ["full_attention", "sliding_attention"]}, 2 * KV_HEAD_BYTES),
    (QWEN_WINDOW | {"max_window_layers": 5}, 2 * KV_HEAD_BYTES),
    (QWEN_WINDOW, 2 * KV_HEAD_BYTES),  # as many as 28 without
    (SMALL | LLAMA4 | {"head_dim": 16}, 2 * KV_HEAD_BYTES),
    (SMALL | LLAMA4 | {"head_dim": 16, "no_rope_layers": [1] * 5, "attention_chunk_size": None}, 2 * KV_HEAD_BYTES),
    ({"model_type": "llama4", "text_config": SMALL | LLAMA4 | {"head_dim": 16} | CONTEXT}, 2 * KV_HEAD_BYTES),
    (SMALL | {"model_type": "exaone4", "sliding_window": 512, "layer_types": EXAONE_LAYERS}, 2 * KV_HEAD_BYTES),
    (SMALL | {"model_type": "exaone4", "sliding_window": None, "sliding_window_pattern": None}, 2 * KV_HEAD_BYTES),
    (SMALL | GLM_MOE | {"model_type": "glm4_moe"}, 2 * KV_HEAD_BYTES),
    (SMALL | {"model_type": "qwen2_5_vl"}, 2 * KV_HEAD_BYTES),
    (
        SMALL | {"model_type": "olmo3", "sliding_window": None, "layer_types": ["sliding_attention"] * 5},
        2 * KV_HEAD_BYTES,
    ),
    (NESTED | {"text_config": TEXT | {"sliding_window": None}}, 2 * KV_HEAD_BYTES),
    (
        NESTED | {"text_config": TEXT | {"sliding_window": None, "dtype": None, "num_key_value_heads": None}},
        6 * KV_HEAD_BYTES,
    ),
]


@pytest.mark.parametrize(("values", "token_bytes"), SERVED)
def test_what_an_engine_serves_is_planned(values: dict[str, Any], token_bytes: int, tmp_path: Path, cli: Cli) -> None:
    """Windows beside full attention were refused, which vLLM gives kvtier as full attention; so were windows that the
    text part says null of, and KV heads of null counted as the family's default, not as the query heads."""
    values = {"max_position_embeddings": 4096} | values
    found = planned(cli, "--model", folder_of(tmp_path, values))
    assert found["geometry"]["token_bytes"] == token_bytes


def test_gemma_3_as_it_is_published(tmp_path: Path, cli: Cli) -> None:
    """Its file leaves out heads, vocabulary and context."""
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "sliding_window": 1024,
    }
    values = {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text, "vision_config": {}}
    found = planned(cli, "--model", folder_of(tmp_path, values))
    assert found["geometry"]["token_bytes"] == 2 * 34 * 4 * 256 * 2 and found["context"] == 131_072
    assert any("attend within a window" in note for note in found["assumptions"])


@pytest.mark.parametrize("rate", ["16Gbit/s", "16 Gbits/s", "2gB/s", "2 GB/s", "2000000000/s"])
def test_a_rate_in_bits(rate: str, model: str, cli: Cli) -> None:
    expected = planned(cli, "--model", model, "--storage-rate", "2GB/s")
    assert planned(cli, "--model", model, "--storage-rate", rate) == expected
    binary = planned(cli, "--model", model, "--storage-rate", "8Gibit/s")
    assert binary == planned(cli, "--model", model, "--storage-rate", "1GiB/s") != expected


NOT_FOR_THE_MODEL = [
    (("--gpu-memory", "10GB"), "raise --tensor-parallel or --pipeline-parallel"),
    (("--gpu-memory", "4GB"), "lower --reserve"),
    ((*GPU, "--tensor-parallel", "3"), "--tensor-parallel = 3: the model's 32 attention heads do not divide"),
    ((*GPU, "--chunk-tokens", "250"), "a multiple of 16"),
    ((*GPU, "--pipeline-parallel", "33"), "--pipeline-parallel = 33: the model has 32 layers"),
    ((*GPU, "--context", "255"), "--context = 255: give the tokens of a prompt, at least a chunk (256)"),
]


@pytest.mark.parametrize(("arguments", "reason"), NOT_FOR_THE_MODEL)
def test_options_that_do_not_fit_the_model(arguments: tuple[str, ...], reason: str, model: str, cli: Cli) -> None:
    assert reason in cli.refused("plan", "--model", model, *arguments)


BAD_VALUES = [
    ("--gpu-memory", "12XB", "'12XB': must be a whole number of bytes"),
    ("--gpu-memory", "141", "'141': it must be 1MiB to 1048576TiB; give the unit too"),
    ("--tensor-parallel", "0", "Input should be greater than or equal to 1"),
    ("--gpu-memory-utilization", "1.5", "'1.5': it must be a number above 0, 1 at most"),
    ("--storage-rate", "2GB", 'a size a second, such as "2GB/s"'),
    ("--pcie-rate", "0/s", "'0/s': it must be above 0"),
    ("--storage-rate", "2Gb/s", "'2Gb/s': is that bytes or bits?"),
    ("--storage-rate", "2Gbps", '"2GB/s", or in bits "16Gbit/s"'),
    ("--storage-rate", "2G/s", "must be a whole number of bytes or a size"),
    ("--prefill-rate", "40000", "name the length too"),
    ("--prefill-rate", "nan@8192", "'nan': it must be a number above 0"),
    ("--host-memory", "40", "give the unit too"),
    ("--storage", "450", "give the unit too"),
    ("--gpu-memory", "9" * 400 + "GB", "it must be 1MiB to 1048576TiB"),
    ("--storage-rate", "9" * 400 + "GB/s", "1048576TiB/s at most"),
    ("--tensor-parallel", "1" * 5000, "as an integer"),
    ("--context", "9" * 400, "Input should be"),
]


@pytest.mark.parametrize(("option", "value", "reason"), BAD_VALUES)
def test_bad_values(option: str, value: str, reason: str, model: str, cli: Cli) -> None:
    said = " ".join(cli.errors("plan", "--model", model, *GPU, option, value, status=2).split())
    assert f"Invalid value for '{option}': " in said and reason in said


def test_a_folder_without_a_model(tmp_path: Path, cli: Cli) -> None:
    for named in (str(tmp_path), "meta-llama/Llama-3.1-8B"):  # the latter: a name on the Hub, as vLLM takes it
        said = cli.refused("plan", "--model", named, *GPU)
        assert "name the folder of a Hugging Face model" in said and "`hf download NAME` prints" in said
    for text, reason in (("{", "it is not JSON"), ("[]", "it is not a JSON object")):
        (tmp_path / "config.json").write_text(text)
        assert reason in cli.refused("plan", "--model", str(tmp_path), *GPU)


def test_codecs_say_what_they_lose(model: str, cli: Cli) -> None:
    assert "lossy: KL to raw KV in nats, measured on SmolLM2-135M, " in cli.printed("plan", "--model", model, *GPU)
    assert set(planned(cli, "--model", model)["codecs"]["int8"]["kl_nats"]) == set(MODELS)
