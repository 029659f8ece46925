"""Real vLLM, sixteen requests with one stored prefix: one load of it and one copy in vLLM's blocks."""

from __future__ import annotations

from typing import Any

import pytest

N = 16
CHUNKS = 1024 // 64
LLM = {"max_num_seqs": 32, "max_num_batched_tokens": 2048, "num_gpu_blocks_override": 1201}


def spec(root: str) -> dict[str, Any]:
    return {"root": root, "llm": LLM, "scenarios": [["shared_prefix", N]]}


@pytest.fixture(scope="session", params=["0.32.0", "0.27.1"])
def found(request: pytest.FixtureRequest, lab: Any) -> dict[str, Any]:
    options = {"python": request.getfixturevalue("older_python")} if request.param == "0.27.1" else {}
    name = f"shared-{request.param}"
    result: dict[str, Any] = lab.run(name, [spec(str(lab.folder / name))], **options)[0]["shared_prefix"]
    return result


@pytest.mark.parametrize("way", ["own", "tier", "held", "failed", "overdue", "never"])
def test_answers_are_those_that_were_computed(found: dict[str, Any], way: str) -> None:
    assert found[way]["tokens"] == found["computed"]["tokens"]


@pytest.mark.parametrize("way", ["tier", "held"])
def test_one_load_and_one_copy(found: dict[str, Any], way: str) -> None:
    assert found[way]["loads"] == [CHUNKS]
    assert found[way]["blocks"] <= 1.2 * found["own"]["blocks"]


def test_without_waiting_each_loads_its_own(found: dict[str, Any]) -> None:
    """The control: without waiting, several requests load the same prefix."""
    assert len(found["never"]["loads"]) > 2
    assert found["never"]["blocks"] > 3 * found["own"]["blocks"]


def test_an_abort_of_the_first_makes_the_second_load(found: dict[str, Any]) -> None:
    assert found["aborted"]["loads"] == [CHUNKS, CHUNKS]
    assert found["aborted"]["tokens"][1:] == found["computed"]["tokens"][1:]


def test_after_a_failure_the_first_computes_and_the_others_hit_what_it_computes(found: dict[str, Any]) -> None:
    assert found["failed"]["loads"] == [CHUNKS]
    assert found["failed"]["blocks"] <= 1.2 * found["own"]["blocks"]


def test_an_overdue_load_is_waited_for_no_longer(found: dict[str, Any]) -> None:
    """Its answer takes half a second, the wait 0.2 s: others load meanwhile, not all of them at the same time."""
    assert 2 <= len(found["overdue"]["loads"]) < N


def test_each_tenant_loads_its_own(found: dict[str, Any]) -> None:
    assert found["salts"]["tokens"] == found["salts, computed"]["tokens"]
    assert found["salts"]["loads"] == [CHUNKS, CHUNKS]


def test_vllms_free_blocks_are_watched(found: dict[str, Any]) -> None:
    assert found["short"] == [False, True]


def test_nothing_is_left(found: dict[str, Any]) -> None:
    assert found["left"] == 0
    assert found["counters"]["shared_wait_requests"] > 0
