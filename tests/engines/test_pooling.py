"""A real engine that pools in one step: a hit would end it."""

from typing import Any


def test_cls_pooling_loads_nothing_and_answers_twice(lab: Any) -> None:
    """vLLM turns its own prefix caching off for CLS and MEAN pooling, and raises where tokens are cached."""
    llm = {
        "runner": "pooling",
        "convert": "embed",
        "skip_tokenizer_init": False,
        "max_num_batched_tokens": 2048,
        "pooler_config": {"seq_pooling_type": "CLS"},
    }
    spec = {"root": str(lab.folder / "pooling"), "llm": llm, "scenarios": ["embeddings"]}
    result = lab.run("pooling", [spec])[0]
    first, second = result["embeddings"]
    assert first == second
    assert not result["counters"].get("hit_tokens") and not result["counters"].get("save_tokens")
