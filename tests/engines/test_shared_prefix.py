"""Real vLLM and many requests at once: a burst in front of workers whose queue is full, and sixteen requests with one
stored prefix, for which there is one load of it and one copy in vLLM's blocks."""

from typing import Any

import pytest

from kvtier.runtime import metrics as names

N = 16
CHUNKS = 1024 // 64
LLM = {"max_num_seqs": 32, "max_num_batched_tokens": 2048, "num_gpu_blocks_override": 1201}


@pytest.fixture(scope="session")
def newest(lab: Any) -> dict[str, Any]:
    spec = {
        "root": str(lab.folder / "at-once"),
        "llm": LLM,
        "scenarios": ["burst", "short_burst", ["shared_prefix", N]],
    }
    run: dict[str, Any] = lab.run("at-once", [spec])[0]
    return run


@pytest.fixture(scope="session")
def scarce(lab: Any) -> dict[str, Any]:
    """An engine whose blocks are given to the next request at once."""
    llm = LLM | {"num_gpu_blocks_override": 71}
    spec = {"root": str(lab.folder / "scarce"), "llm": llm, "scenarios": ["short_burst"]}
    run: dict[str, Any] = lab.run("scarce", [spec])[0]
    return run


@pytest.fixture(scope="session", params=["0.32.0", "0.27.1"])
def found(request: pytest.FixtureRequest, lab: Any) -> dict[str, Any]:
    if request.param == "0.32.0":
        result: dict[str, Any] = request.getfixturevalue("newest")["shared_prefix"]
        return result
    spec = {"root": str(lab.folder / "older-at-once"), "llm": LLM, "scenarios": [["shared_prefix", N]]}
    result = lab.run("older-at-once", [spec], request.getfixturevalue("older_python"))[0]["shared_prefix"]
    return result


@pytest.mark.parametrize("scenario", ["burst", "short_burst"])
def test_what_was_refused_in_a_burst_is_saved_later(newest: dict[str, Any], scenario: str) -> None:
    """Requests with answers of one token end before their workers' refusals arrive. Their chunks are saved, too."""
    burst = newest[scenario]
    assert burst["refused"] > 40
    assert burst["cached"] == [burst["whole"]] * 8 and all(burst["same_tokens"])
    assert scenario == "short_burst" or burst["counters"][names.SAVED_LATER] > 40
    assert not burst["counters"].get(names.SKIPPED_QUEUE_FULL) and not burst["counters"].get(names.DROPPED_TAILS)


def test_nothing_is_saved_from_blocks_that_others_have_by_then(scarce: dict[str, Any]) -> None:
    """A refused chunk is saved while vLLM's cache has its blocks. After that the tail of its prompt is dropped."""
    burst = scarce["short_burst"]
    assert burst["counters"][names.SKIPPED_QUEUE_FULL] and burst["counters"][names.SAVED_LATER]
    assert all(burst["same_tokens"])
    assert all(len(digests) == 1 for digests in scarce["saved"].values()), "one content a chunk"
    assert all(scarce["saved"][key] == digests for key, digests in scarce["loaded"].items())


@pytest.mark.parametrize("way", ["own", "tier", "held", "failed", "overdue", "never"])
def test_answers_are_those_that_were_computed(found: dict[str, Any], way: str) -> None:
    assert found[way]["tokens"] == found["computed"]["tokens"]


@pytest.mark.parametrize("way", ["tier", "held", "failed"])
def test_one_load_and_one_copy(found: dict[str, Any], way: str) -> None:
    """After a failure the first request computes, and the others hit what it computes."""
    assert found[way]["loads"] == [CHUNKS]
    assert found[way]["blocks"] <= 1.2 * found["own"]["blocks"]


def test_without_waiting_each_loads_its_own(found: dict[str, Any]) -> None:
    """The control: without waiting, several requests load the same prefix."""
    assert len(found["never"]["loads"]) > 2
    assert found["never"]["blocks"] > 3 * found["own"]["blocks"]


def test_an_abort_of_the_first_makes_the_second_load(found: dict[str, Any]) -> None:
    assert found["aborted"]["loads"] == [CHUNKS, CHUNKS]
    assert found["aborted"]["tokens"][1:] == found["computed"]["tokens"][1:]


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
