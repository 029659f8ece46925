"""Settings of vLLM that change KV and not the weights: each keeps its KV apart, and those that are plain are silent."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.connectors.vllm import namespace
from kvtier.connectors.vllm.namespace import settings_text
from kvtier.errors import ConfigError

from .conftest import Lab

vllm = pytest.importorskip("vllm")


@dataclass
class Spec:
    """A setting as vLLM has it: a dataclass with dtypes and tuples in it."""

    weight: Any = None
    activation: Any = None


def engine(**changes: Any) -> SimpleNamespace:
    """A configuration where all is plain but `changes` ("model__model_impl" -> "transformers")."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            model="m",
            revision=None,
            dtype=torch.bfloat16,
            quantization=None,
            config_format="auto",
            model_impl="auto",
            model_class_overrides={},
            quantization_config=None,
            hf_config_path=None,
            multimodal_config=None,
        ),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        lora_config=None,
        speculative_config=None,
    )
    for path, value in changes.items():
        part, _, name = path.partition("__")
        setattr(getattr(config, f"{part}_config"), name, value)
    return config


def text(config: SimpleNamespace, has_tag: bool = False, has_draft: bool = False) -> str:
    return settings_text(config, has_tag, has_draft)


def multimodal(**changes: Any) -> SimpleNamespace:
    plain = {
        "mm_processor_kwargs": None,
        "media_io_kwargs": {},
        "mm_encoder_attn_dtype": None,
        "mm_encoder_fp8_scale_path": None,
        "video_pruning_rate": None,
        "video_pruning_method": "evs",
    }
    return engine(model__multimodal_config=SimpleNamespace(**plain | changes))


def lora(**changes: Any) -> SimpleNamespace:
    plain = {
        "target_modules": None,
        "lora_dtype": torch.bfloat16,
        "enable_tower_connector_lora": False,
        "enable_mixed_moe_lora_format": False,
        "enable_moe_shared_loras": False,
    }
    config = engine()
    config.lora_config = SimpleNamespace(**plain | changes)
    return config


def with_draft(quantization: str | None = None, **changes: Any) -> SimpleNamespace:
    config = engine()
    draft = engine(**changes).model_config
    config.speculative_config = SimpleNamespace(draft_model_config=draft, quantization=quantization)
    return config


DIFFERENT = [
    engine(model__quantization_config=Spec(weight=torch.float8_e4m3fn)),
    engine(model__quantization_config=Spec(weight=torch.float8_e4m3fn, activation=(1, 128))),
    engine(model__quantization_config={"ignore": ["re:.*mlp.*"]}),
    engine(model__model_impl="transformers"),
    engine(model__model_class_overrides={"A": "module:B"}),
    engine(model__config_format="mistral"),
    engine(load__load_format="pt"),
    engine(load__load_format="safetensors"),
    multimodal(mm_processor_kwargs={"num_crops": 4}),
    multimodal(mm_processor_kwargs={"num_crops": 16}),
    multimodal(mm_processor_kwargs={"num_crops": None}),
    multimodal(media_io_kwargs={"video": {"num_frames": 40}}),
    multimodal(mm_encoder_attn_dtype="fp8"),
    multimodal(video_pruning_rate=0.5),
    multimodal(video_pruning_rate=0.5, video_pruning_method="vidcom2"),
    lora(target_modules=["o_proj"]),
    lora(target_modules=[]),
    lora(lora_dtype=torch.float16),
    lora(enable_tower_connector_lora=True),
    lora(enable_mixed_moe_lora_format=True),
    lora(enable_moe_shared_loras=True),
]
PLAIN = [
    engine(),
    SimpleNamespace(  # a release that has none of them
        model_config=SimpleNamespace(model="m", dtype=torch.bfloat16), load_config=SimpleNamespace()
    ),
    engine(model__model_impl="vllm"),
    engine(load__load_format="kvtier"),
    multimodal(),
    multimodal(mm_processor_kwargs={"device": "cpu"}, video_pruning_rate=0.0),
    lora(),
    lora(lora_dtype="auto"),
]


def test_each_setting_is_told_from_all_others() -> None:
    texts = [text(config) for config in DIFFERENT]
    assert "" not in texts
    assert len(set(texts)) == len(DIFFERENT)


@pytest.mark.parametrize("config", PLAIN)
def test_plain_settings_say_nothing(config: SimpleNamespace) -> None:
    assert text(config) == ""


def test_the_order_of_modules_does_not_count() -> None:
    assert text(lora(target_modules=["a", "b"])) == text(lora(target_modules=["b", "a"])) != ""


def test_a_model_tag_stands_for_weights_however_they_are_loaded() -> None:
    assert text(engine(load__load_format="tensorizer"), has_tag=True) == ""
    assert text(engine(load__load_format="tensorizer", model__model_impl="transformers"), has_tag=True) != ""


def test_settings_of_a_draft_model_whose_kv_is_stored() -> None:
    assert text(with_draft(), has_draft=True) == ""
    texts = [text(with_draft(quantization="fp8"), has_draft=True)]
    texts.append(text(with_draft(model__model_impl="transformers"), has_draft=True))
    texts.append(text(engine(model__model_impl="transformers")))
    assert len({"", *texts}) == 4
    assert text(with_draft(quantization="fp8"), has_draft=False) == ""


def test_a_configuration_from_elsewhere_is_told_by_what_it_says(tmp_path: Path) -> None:
    texts = []
    for number, eps in enumerate((1e-6, 0.1, 1e-6)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"rms_norm_eps": eps, "_name_or_path": str(folder)}))
        texts.append(text(engine(model__hf_config_path=str(folder))))
    assert texts[0] == texts[2] and len({"", *texts}) == 3
    assert text(engine(model__hf_config_path="m")) == ""  # the model's own
    with pytest.raises(ConfigError, match="hf_config_path .* has no config.json"):
        text(engine(model__hf_config_path=str(tmp_path)))


def test_scales_of_an_encoder_are_told_by_their_file(tmp_path: Path) -> None:
    texts = []
    for name, content in (("a", "{}"), ("b", "{} "), ("c", "{}")):
        (tmp_path / name).write_text(content)
        texts.append(text(multimodal(mm_encoder_attn_dtype="fp8", mm_encoder_fp8_scale_path=str(tmp_path / name))))
    assert texts[0] == texts[2] != texts[1]
    with pytest.raises(ConfigError, match="mm_encoder_fp8_scale_path .* cannot be read"):
        text(multimodal(mm_encoder_fp8_scale_path=str(tmp_path / "none")))


def test_what_cannot_be_written_down_is_refused() -> None:
    with pytest.raises(ConfigError, match="mm_processor_kwargs .* has a object"):
        text(multimodal(mm_processor_kwargs={"resample": [object()]}))


def test_quantization_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_MARLIN_INPUT_DTYPE", "fp8")
    monkeypatch.setattr(namespace, "ENVIRONMENT", {"VLLM_MARLIN_INPUT_DTYPE": ()})
    if not hasattr(vllm.envs, "VLLM_MARLIN_INPUT_DTYPE"):
        pytest.skip("not in this release")
    assert text(engine()) == '{"environment":{"VLLM_MARLIN_INPUT_DTYPE":"fp8"}}'


@pytest.mark.parametrize(
    ("name", "value"), [("VLLM_MOE_ROUTING_SIMULATION_STRATEGY", "uniform_random"), ("VLLM_CPU_INT4_W4A8", "0")]
)
def test_what_else_of_the_environment_changes_kv(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(vllm.envs, name):
        pytest.skip("not in this release")
    assert text(engine()) == ""
    monkeypatch.setenv(name, value)
    assert name in text(engine())


def test_the_loader_of_videos_chooses_their_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM hashes the file that a client sent."""
    monkeypatch.setenv("VLLM_VIDEO_LOADER_BACKEND", "opencv_dynamic")
    assert "opencv_dynamic" in text(multimodal())
    assert text(engine()) == ""


# --- with vLLM's own configuration ---


def made_by_vllm(model: Path, **arguments: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(model), block_size=32, max_model_len=1024, skip_tokenizer_init=True, **arguments
    ).create_engine_config()


def test_a_plain_engine_of_this_release_says_nothing(lab: Lab) -> None:
    assert text(made_by_vllm(lab.model("llama"), enable_lora=True)) == ""


def test_engines_of_this_release_that_differ(lab: Lab, tmp_path: Path) -> None:
    """Found by a review: all of these had one namespace."""
    model = lab.model("llama")
    config = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.1}))
    different: list[dict[str, Any]] = [
        {},
        {"hf_config_path": str(tmp_path)},
        {"enable_lora": True, "lora_target_modules": ["o_proj"]},
        {"enable_lora": True, "dtype": "float32", "lora_dtype": "float16"},
        {"model_impl": "transformers"},
        {"quantization": "online", "quantization_config": {"linear": "fp8_per_tensor"}},
        {"quantization": "online", "quantization_config": {"linear": "fp8_per_block"}},
        {"quantization": "fp8_per_tensor", "quantization_config": {"ignore": ["re:.*mlp.*"]}},
    ]
    texts = [text(made_by_vllm(model, **arguments)) for arguments in different]
    assert len(set(texts)) == len(different)
    assert text(made_by_vllm(model, quantization="fp8_per_tensor")) == ""  # that name says it all
    copied = shutil.copytree(model, tmp_path / "copy")
    assert text(made_by_vllm(copied, hf_config_path=str(tmp_path))) == texts[1]
