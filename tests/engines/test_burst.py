"""Real vLLM, a burst of prompts, and workers whose queue is full most of the time: all is saved in later steps."""

from __future__ import annotations

from typing import Any

from kvtier.runtime import metrics as names


def test_what_was_refused_is_saved_later(lab: Any) -> None:
    llm = {"max_num_seqs": 8, "max_num_batched_tokens": 4096}
    found = lab.run("burst", [{"root": str(lab.folder / "burst"), "llm": llm, "scenarios": ["burst"]}])[0]["burst"]
    counters = found["counters"]
    assert found["refused"] > 40
    assert found["cached"] == [found["whole"]] * 8 and all(found["same_tokens"])
    assert counters[names.SAVED_LATER] > 40
    assert not counters.get(names.SKIPPED_QUEUE_FULL) and not counters.get(names.DROPPED_TAILS)
