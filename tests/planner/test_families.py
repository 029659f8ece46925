"""Facts of `kvtier.model.families`, held against transformers' own classes."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvtier.model.config_json import _layer_kinds, _Values, read_model
from kvtier.model.families import FAMILIES
from kvtier.model.layer_kinds import FULL
from tests.model_configs import SMALL

LEFT_OUT = ("num_key_value_heads", "dtype")
HEADS = 32  # that the KV heads of all classes divide
# Keys without which a file of the type says nothing; the classes have those of one model instead.
NEEDED: dict[str, dict[str, Any]] = {
    "exaone_moe": {"first_k_dense_replace": 1},
    "qwen2_moe": {"num_experts": 4},
}
OF_THE_WHOLE = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}  # older files have their keys flat


@pytest.mark.parametrize("name", [name for name in FAMILIES if not FAMILIES[name].is_mla])
def test_what_a_file_leaves_out(name: str, tmp_path: Path) -> None:
    """KV heads, head size, tied embeddings, and which layers have a window or chunk."""
    from transformers import CONFIG_MAPPING

    experts = {"moe_intermediate_size": 40, "num_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4}
    more = {"num_experts_per_tok": 2, "moe_k": 2, "pad_token_id": 0, "num_attention_heads": HEADS, "hidden_size": 4096}
    values = {key: value for key, value in SMALL.items() if key not in LEFT_OUT} | more | NEEDED.get(name, {})
    theirs = CONFIG_MAPPING[OF_THE_WHOLE.get(name, name)](**values)
    (tmp_path / "config.json").write_text(json.dumps(values | experts | {"model_type": name, "sliding_window": 0}))
    model = read_model(tmp_path)
    kv_heads = getattr(theirs, "num_key_value_heads", None) or HEADS
    assert model.attention.kv_heads == kv_heads
    assert model.attention.k_size == (getattr(theirs, "head_dim", None) or values["hidden_size"] // HEADS)
    kinds = _layer_kinds(_Values(tmp_path, values), FAMILIES[name])
    window = getattr(theirs, "sliding_window", None)
    usual = ["sliding_attention" if window else FULL] * model.layers
    assert kinds == (getattr(theirs, "layer_types", None) or usual)
    if hasattr(theirs, "tie_word_embeddings"):
        assert model.is_tied == bool(theirs.tie_word_embeddings)
