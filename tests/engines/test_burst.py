"""Real vLLM, a burst of prompts, and workers whose queue is full most of the time: all is saved in later steps."""

from __future__ import annotations

from typing import Any

import pytest

from kvtier.runtime import metrics as names


@pytest.fixture(scope="session", params=["0.32.0", "0.27.1"])
def found(request: pytest.FixtureRequest, lab: Any) -> dict[str, Any]:
    options = {"python": request.getfixturevalue("older_python")} if request.param == "0.27.1" else {}
    name = f"burst-{request.param}"
    llm = {"max_num_seqs": 8, "max_num_batched_tokens": 4096}
    spec = {"root": str(lab.folder / name), "llm": llm, "scenarios": ["burst"]}
    result: dict[str, Any] = lab.run(name, [spec], **options)[0]["burst"]
    return result


def test_what_was_refused_is_saved_later(found: dict[str, Any]) -> None:
    counters = found["counters"]
    assert found["refused"] > 40
    assert found["cached"] == [found["whole"]] * 8 and all(found["same_tokens"])
    assert counters[names.SAVED_LATER] > 40
    assert not counters.get(names.SKIPPED_QUEUE_FULL) and not counters.get(names.DROPPED_TAILS)
