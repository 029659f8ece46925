"""Rows are shared by engines whose rows mean the same, and by no others."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_offload.config import OffloadingGroupConfig

from kvtier.config.settings import Settings
from kvtier.connectors.vllm_tiering import identity as identity_module
from kvtier.connectors.vllm_tiering.identity import host_of
from kvtier.errors import ConfigError
from tests.vllm_tiering.rig import (
    ROOM,
    ROW_BYTES,
    UNTAGGED,
    expected,
    keys,
    offloader,
    offloading_config,
    tier_config,
    write_model,
)

GROUP = OffloadingGroupConfig(16, ("model.layers.0.self_attn.attn",), 0)
OTHERS: Mapping[str, Mapping[str, Any]] = {
    "dtype": {"dtype": "fp8"},
    "layout": {"kv_cache_layout": "BLHNC"},
    "canonical": {"canonical_layout": True},
    "replicated": {"replicated_layout": True},
    "layers": {"groups": (OffloadingGroupConfig(16, ("model.layers.1.self_attn.attn",), 0),)},
    "groups": {"groups": (GROUP, OffloadingGroupConfig(16, ("model.layers.1.mixer",), 1))},
    "block size": {"groups": (OffloadingGroupConfig(32, GROUP.layer_names, 0),)},
    "chunk": {"blocks_per_chunk": 1, "worker_kv_bytes_per_block": 12_000},
    "tensor parallel size": {"tp_size": 4},
}


def identity(settings: Mapping[str, Any] = ROOM, row_bytes: int = ROW_BYTES, **changes: Any) -> str:
    loaded = Settings.load({"root": "/nowhere"} | dict(settings))
    return host_of(offloading_config({}, **changes), loaded, row_bytes).identity


@pytest.mark.parametrize("other", OTHERS)
def test_what_decides_where_bytes_lie_keeps_engines_apart(other: str) -> None:
    assert identity() == identity()
    assert identity(**OTHERS[other]) != identity()


def test_bytes_of_a_row_and_releases_keep_engines_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    assert identity(row_bytes=2 * ROW_BYTES) != identity()
    here = identity()
    monkeypatch.setattr(identity_module.vllm, "__version__", "0.99.0")
    assert identity() != here


def test_canonical_rows_of_any_parallel_size_are_one() -> None:
    portable = {"canonical_layout": True, "is_parallelism_agnostic": True}
    assert identity(tp_size=2, **portable) == identity(tp_size=4, **portable)
    assert identity(tp_size=2, is_parallelism_agnostic=True) != identity(tp_size=4, is_parallelism_agnostic=True)


def test_weights_are_those_in_the_folder_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity_module, "FINGERPRINTS", tmp_path / "fingerprints")
    folders = [tmp_path / name for name in ("one", "same", "other")]
    for folder, weight in zip(folders, (1.0, 1.0, 2.0), strict=True):
        folder.mkdir()
        write_model(folder, weight)
    one, same, other = (identity(UNTAGGED, name=str(folder)) for folder in folders)
    assert one == same != other
    assert identity(name=str(folders[0])) == identity(name=str(folders[2])), "a tag stands for them"


def test_a_model_of_a_hub_needs_a_tag() -> None:
    with pytest.raises(ConfigError, match="model_tag = None: .*'org/model' is no folder"):
        identity(UNTAGGED)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
        {"text_config": {"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}},
        {"model_type": "llama4", "text_config": {"model_type": "llama4_text"}},
    ],
)
def test_positions_that_depend_on_the_engines_longest_prompt_need_a_tag(
    rope: Mapping[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines of one folder compute other KV with another --max-model-len, of which a tier is not told."""
    monkeypatch.setattr(identity_module, "FINGERPRINTS", tmp_path / "fingerprints")
    write_model(tmp_path, 1.0)
    assert identity(UNTAGGED, name=str(tmp_path))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(rope)))
    with pytest.raises(ConfigError, match="model_tag = None: .*(longrope|llama4).*max-model-len"):
        identity(UNTAGGED, name=str(tmp_path))
    assert identity(name=str(tmp_path)), "a tag stands for it"


def test_a_folder_may_have_params_json_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity_module, "FINGERPRINTS", tmp_path / "fingerprints")
    write_model(tmp_path, 1.0)
    (tmp_path / "config.json").rename(tmp_path / "params.json")
    assert identity(UNTAGGED, name=str(tmp_path))


def test_engines_with_another_dtype_find_nothing_of_each_other(tmp_path: Path) -> None:
    init_none_hash(sha256)
    names = keys(range(3))
    with offloader(tier_config(tmp_path)) as one, offloader(tier_config(tmp_path), dtype="fp8") as other:
        one.store(names)
        assert other.load(names) == [None] * 3
        other.store(names)
        for engine in (one, other):
            engine.empty_cpu_tier()
            assert engine.load(names) == expected(names)
    with offloader(tier_config(tmp_path, model_tag="another")) as third:
        assert third.load(names) == [None] * 3
