"""From vLLM's configuration to the namespace and the ranks' shares."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.build import codec_of
from kvtier.config.settings import Settings
from kvtier.connectors.vllm import kv_dtypes, namespace, scheduler
from kvtier.connectors.vllm.platform import Packing
from kvtier.errors import ConfigError
from kvtier.format.geometry import Extent
from tests.engines.fakes import FullAttentionSpec, MLAAttentionSpec

pytest.importorskip("vllm")
LAYERS = [f"model.layers.{number}.attn" for number in range(4)]


FULL = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128, head_size_v=128, dtype=torch.bfloat16)
MLA = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(namespace, "packing_of", lambda spec, config: Packing("vllm", False))
    monkeypatch.setattr(namespace, "FINGERPRINTS", tmp_path / "fingerprints")


def model_folder(folder: Path, value: float = 1.0) -> Path:
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"w": np.full(64, value, np.float32)}, folder / "model.safetensors")
    return folder


def engine(folder: Path, tensor: int = 1, stages: int = 1, **changes: Any) -> SimpleNamespace:
    text = SimpleNamespace(**{"rope_theta": 10000.0, "max_position_embeddings": 4096} | changes.pop("text", {}))
    model = {
        "model": str(folder),
        "revision": None,
        "dtype": torch.bfloat16,
        "quantization": None,
        "hf_text_config": text,
        "hf_overrides": {},
        "max_model_len": 4096,
        "get_total_num_kv_heads": lambda: 8,
        "get_total_num_hidden_layers": lambda: 4,
    }
    speculative = changes.pop("speculative", None)
    cache_dtype = changes.pop("cache_dtype", "auto")
    return SimpleNamespace(
        model_config=SimpleNamespace(**model | changes),
        parallel_config=SimpleNamespace(tensor_parallel_size=tensor, pipeline_parallel_size=stages),
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        load_config=SimpleNamespace(download_dir=None),
        speculative_config=speculative,
    )


def settings(**changes: Any) -> Settings:
    return Settings.load({"root": "/tmp/kvtier-never-made"} | changes)


def identity(config: SimpleNamespace, spec: Any = FULL, names: list[str] = LAYERS, **changes: Any) -> Any:
    return namespace.identity_of(config, spec, names, settings(**changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "model")


def test_parallel_sizes_and_paths_are_not_in_the_namespace_and_weights_are(folder: Path, tmp_path: Path) -> None:
    base = identity(engine(folder)).namespace.id
    assert identity(engine(folder, tensor=2)).namespace.id == base
    assert identity(engine(folder, stages=2), names=LAYERS[:2]).namespace.id == base
    assert identity(engine(model_folder(tmp_path / "elsewhere"))).namespace.id == base
    assert identity(engine(model_folder(tmp_path / "other value", 2.0))).namespace.id != base


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": torch.float16},
        {"quantization": "fp8"},
        {"hf_overrides": {"rope_theta": 5}},
        {"text": {"rope_theta": 500000.0}},
        {"text": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}},
        {"cache_dtype": "fp8"},
        {"text": {"sliding_window": 128}},
        {"model_impl": "transformers"},
    ],
    ids=str,
)
def test_what_changes_kv_changes_the_namespace(folder: Path, changes: dict[str, Any]) -> None:
    assert identity(engine(folder, **changes)).namespace.id != identity(engine(folder)).namespace.id


def test_a_file_that_overrides_name_is_told_by_its_content(folder: Path, tmp_path: Path) -> None:
    """torchao's configuration may be in a file of its own."""
    config, ids = tmp_path / "quantization.json", set()
    for content in ('{"bits": 4}', '{"bits": 8}'):
        config.write_text(content)
        overridden = engine(folder, hf_overrides={"quantization_config_file": str(config)})
        ids.add(identity(overridden).namespace.id)
    assert len(ids) == 2


@pytest.mark.parametrize("changes", [{"epoch": 1}, {"model_tag": "x"}, {"chunk_tokens": 128}], ids=str)
def test_settings_that_change_the_namespace(folder: Path, changes: dict[str, Any]) -> None:
    assert identity(engine(folder), **changes).namespace.id != identity(engine(folder)).namespace.id


def test_old_and_new_spellings_of_rope_are_the_same(folder: Path) -> None:
    """transformers 4 has rope_theta beside rope_scaling, transformers 5 has both in rope_parameters."""
    old = {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2}}
    new = {"rope_theta": None, "rope_parameters": {"rope_theta": 10000, "rope_type": "linear", "factor": 2.0}}
    assert identity(engine(folder, text=old)).namespace == identity(engine(folder, text=new)).namespace
    plain = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
    assert identity(engine(folder, text=plain)).namespace == identity(engine(folder)).namespace


def test_what_deepseek_models_make_of_their_configuration_changes_nothing(folder: Path) -> None:
    """They write it into the copy of their own process, which need not be the scheduler's. For models that leave their
    configuration alone, these are encodings apart."""
    kinds = ("yarn", "deepseek_yarn", "deepseek_llama_scaling")
    texts = [{"rope_parameters": {"rope_theta": 1e4, "rope_type": kind, "factor": 40.0}} for kind in kinds]
    positions = [
        {namespace.positions_text(engine(folder, text=text, use_mla=is_mla).model_config) for text in texts}
        for is_mla in (True, False)
    ]
    assert [len(found) for found in positions] == [1, 3] and positions[0] < positions[1]


@pytest.mark.parametrize(
    ("text", "is_mla", "base"),
    [
        ({"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}}, False, 1e6),
        ({"rope_theta": 1e4, "rope_parameters": None}, False, 1e4),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0}}, False, 1e4),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0}}, False, 0.0),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, False, 0.0),
        ({"rope_theta": None, "rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, False, 0.0),
        ({"rope_theta": 1e4, "model_type": "glm4"}, False, 0.0),
        ({"rope_theta": 1e4, "model_type": "cohere2_moe"}, False, 0.0),
        ({"rope_theta": 1e4}, True, 0.0),
    ],
)
def test_rotary_embedding_that_a_codec_may_take_off(
    folder: Path, text: dict[str, Any], is_mla: bool, base: float
) -> None:
    """Both halves have it by the name of the namespace's codec."""
    config = engine(folder, text=text, use_mla=is_mla)
    assert namespace.rope_base(config.model_config) == base
    if not is_mla:
        made = identity(config, codec="k4v4").namespace
        assert made.codec.name == "turboquant-k4v4" + (f"+rope{base}" if base else "")
        assert codec_of(settings(codec="k4v4"), made).name == made.codec.name


@pytest.mark.parametrize(("kind", "differs"), [("longrope", True), ("yarn", False)])
@pytest.mark.parametrize("is_nested", [False, True])
def test_a_maximum_length_counts_where_it_changes_positions(
    folder: Path, kind: str, differs: bool, is_nested: bool
) -> None:
    rope: dict[str, Any] = {"rope_type": kind}
    text = {"rope_parameters": {"full_attention": rope} if is_nested else rope}
    ids = {identity(engine(folder, text=text, max_model_len=n)).namespace.id for n in (4096, 131072)}
    assert (len(ids) == 2) == differs


def test_a_length_fitted_to_the_memory_is_not_that_of_positions(folder: Path) -> None:
    """vLLM builds the model for its own maximum, and fits the length later."""
    text = {"rope_scaling": {"rope_type": "longrope"}, "max_position_embeddings": 131072}
    fitted, given = {"original_max_model_len": -1}, {"original_max_model_len": 4096}
    ids = [identity(engine(folder, text=text, max_model_len=n, **fitted)).namespace.id for n in (4096, 8192)]
    assert ids[0] == ids[1] != identity(engine(folder, text=text, max_model_len=4096, **given)).namespace.id


def test_a_maximum_length_counts_where_it_scales_queries(folder: Path) -> None:
    """Llama 4: by default above 32,768 tokens."""

    def id_of(max_model_len: int, fitted: int | None = None, **override: Any) -> bytes:
        model = {"try_get_generation_config": dict, "override_generation_config": override}
        text = {"model_type": "llama4_text", "max_position_embeddings": 1 << 20}
        config = engine(folder, text=text, max_model_len=max_model_len, original_max_model_len=fitted, **model)
        found: bytes = identity(config).namespace.id
        return found

    assert id_of(4096) == id_of(32768) != id_of(32769) == id_of(4096, fitted=-1)
    assert id_of(4096, attn_temperature_tuning=True) == id_of(65536)


def test_geometry_of_heads(folder: Path) -> None:
    geometry = identity(engine(folder)).namespace.geometry
    assert (geometry.layers, geometry.kv_heads, geometry.k_head_size, geometry.v_head_size) == (4, 8, 128, 128)
    assert (geometry.dtype, geometry.element_bytes, geometry.attention) == ("bfloat16", 2, "heads")


def test_geometry_of_mla(folder: Path) -> None:
    geometry = identity(engine(folder), MLA).namespace.geometry
    assert (geometry.kv_heads, geometry.k_head_size, geometry.v_head_size, geometry.attention) == (1, 576, 0, "mla")


def test_shares_of_tensor_and_pipeline_parallel_ranks(folder: Path) -> None:
    shares = identity(engine(folder, tensor=2, stages=2), names=LAYERS[:2]).shares
    assert [share.rank for share in shares] == [0, 1, 2, 3]
    assert [share.reads for share in shares] == [
        Extent(0, 2, 0, 4),
        Extent(0, 2, 4, 4),
        Extent(2, 2, 0, 4),
        Extent(2, 2, 4, 4),
    ]


def test_duplicated_heads_are_written_once(folder: Path) -> None:
    shares = identity(engine(folder, tensor=16)).shares
    assert [share.writes is not None for share in shares] == [True, False] * 8


def test_sizes_that_do_not_divide_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        identity(engine(folder, tensor=3))


def test_a_rank_must_hold_what_its_share_says(folder: Path) -> None:
    found = identity(engine(folder, tensor=2))
    geometry = found.namespace.geometry
    half = FullAttentionSpec(**vars(FULL) | {"num_kv_heads": 4})
    namespace.check_share(found.shares[0], half, LAYERS, geometry)
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        namespace.check_share(found.shares[0], FULL, LAYERS, geometry)
    with pytest.raises(ConfigError, match="pipeline_parallel_size"):
        namespace.check_share(found.shares[0], half, LAYERS[:3], geometry)


def test_drafts_with_kv_are_in_the_namespace(folder: Path, tmp_path: Path) -> None:
    draft = SimpleNamespace(model=str(model_folder(tmp_path / "draft", 3.0)), revision=None)
    eagle = SimpleNamespace(method="eagle", draft_model_config=draft)
    ngram = SimpleNamespace(method="ngram", draft_model_config=None)
    assert identity(engine(folder, speculative=eagle)).namespace.draft.startswith("eagle:")
    assert identity(engine(folder, speculative=ngram)).namespace == identity(engine(folder)).namespace
    with pytest.raises(ConfigError, match="draft model"):
        identity(engine(folder, stages=2, speculative=eagle), names=LAYERS[:2])


def test_a_model_in_no_folder_needs_a_tag(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="set model_tag"):
        identity(engine(Path("nobody/no-such-model")))
    assert identity(engine(Path("nobody/no-such-model")), model_tag="mine").namespace.weights == "mine"


def test_files_of_another_hub_are_not_looked_for_in_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(folder))
    assert identity(engine(Path("some/model"))).namespace == identity(engine(folder)).namespace
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "1")
    with pytest.raises(ConfigError, match="ModelScope"):
        identity(engine(Path("some/model")))
    assert identity(engine(folder)).namespace.weights


@pytest.mark.parametrize(
    ("configured", "stored", "name"),
    [
        ("auto", torch.bfloat16, "bfloat16"),
        ("fp8", torch.uint8, "fp8_e4m3"),
        ("fp8_e5m2", torch.uint8, "fp8_e5m2"),
        ("fp8_e4m3", torch.float8_e4m3fn, "fp8_e4m3:float8_e4m3fn"),
        ("bfloat16", torch.bfloat16, "bfloat16"),
    ],
)
def test_names_of_kv_dtypes(configured: str, stored: torch.dtype, name: str) -> None:
    assert kv_dtypes.cache_dtype_name(configured, stored) == name


def test_reports_name_a_folder_with_a_tokenizer_wherever_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model_folder(tmp_path / "models/one").parent)
    for name, reported in (("one", str(tmp_path / "models/one")), ("org/one", "org/one")):
        config = SimpleNamespace(model_config=SimpleNamespace(tokenizer=name, model=name, served_model_name=None))
        assert scheduler._about(config, 1).tokenizer == reported
