"""Real vLLM engines of different kinds on one root: two that write the same at once, two ranks, both model runners.

The second model runner is the default on GPUs from 0.32 on; here its kernels are interpreted. It prepares inputs, hands
blocks on and calls its connector by code of its own. All of this folder's tests run with it by ENGINE_SECOND_RUNNER=1
in the environment, 0.27.1's aside; these are the ones that are always run.
"""

from typing import Any

import pytest

from tests.engines.test_real_engine import (
    NOTHING_OF_FAILED,
    WITH_ASYNC,
    WITHOUT_ASYNC,
    assert_like_recompute,
    assert_loads_equal_saves,
)

OF_PAIR, OF_RANKS, OF_SECOND = [12], [14, 4], [1, 4]  # seeds of the prompts that each wrote; how many, if not all
# Interpreted kernels take a second for each few steps: fewer tokens and aborts are asked of them.
TURN_TOKENS, CROWDED_TOKENS = 24, 60
ABORTS, SYNC_ABORTS = ["aborts", 0, 1, 2, 4, 7, 20], ["aborts", 1, 4, 20]


@pytest.fixture(scope="session")
def spec(lab: Any) -> dict[str, Any]:
    return {"root": str(lab.folder / "common")}


@pytest.fixture(scope="session")
def pair(lab: Any, spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Two engines at once."""
    specs = [
        spec | {"llm": scheduling, "scenarios": [["write_the_same", 1], ["wide_prompts", seed]]}
        for scheduling, seed in ((WITH_ASYNC, 31), (WITHOUT_ASYNC, 32))
    ]
    runs: list[dict[str, Any]] = lab.run("pair", specs)
    return runs


@pytest.fixture(scope="session")
def second(lab: Any, spec: dict[str, Any]) -> dict[str, Any]:
    """The second runner, with vLLM's own prefix cache."""
    scenarios = [["cold_and_warm", *OF_SECOND], "partial_hits", ["second_turn", 3, TURN_TOKENS], SYNC_ABORTS]
    spec = spec | {"second_runner": True, "llm": WITHOUT_ASYNC, "scenarios": scenarios}
    run: dict[str, Any] = lab.run("second", [spec])[0]
    return run


@pytest.fixture(scope="session")
def ranks(lab: Any, spec: dict[str, Any]) -> dict[str, Any]:
    """Two ranks in processes of their own, which load shards. The others load the checkpoint: the same namespace."""
    llm = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp", "load_format": "kvtier"}
    spec = spec | {"model": str(lab.shards("llama", 2)), "llm": llm, "scenarios": [["tokens_alone", *OF_RANKS]]}
    found: dict[str, Any] = lab.run("ranks", [spec])[0]["tokens_alone"]
    return found


@pytest.fixture(scope="session")
def later(lab: Any, spec: dict[str, Any], pair: Any, ranks: Any, second: Any) -> dict[str, Any]:
    """The first runner, in a process that comes after all of these."""
    scenarios = [["reload", OF_PAIR, OF_RANKS, OF_SECOND], ["wide_prompts", 31]]
    run: dict[str, Any] = lab.run("later", [spec | {"scenarios": scenarios}])[0]
    return run


@pytest.fixture(scope="session")
def last(lab: Any, spec: dict[str, Any], pair: Any, second: Any) -> dict[str, Any]:
    """The second runner in a later process, with asynchronous scheduling, without vLLM's own prefix cache."""
    llm = WITH_ASYNC | {"enable_prefix_caching": False}
    scenarios = [["reload", [*OF_PAIR, 4], OF_SECOND], ["second_turn", 40, TURN_TOKENS], ABORTS]
    run: dict[str, Any] = lab.run("last", [spec | {"second_runner": True, "llm": llm, "scenarios": scenarios}])[0]
    return run


def test_runners_and_schedulers_are_those_that_were_asked_for(pair: Any, second: Any, later: Any, last: Any) -> None:
    runs = [*pair, second, later, last]
    assert [run["second_runner"] for run in runs] == [False, False, True, False, True]
    assert [run["scheduler"] for run in runs] == ["Scheduler"] * 4 + ["AsyncScheduler"]


def test_two_engines_write_the_same_at_once(pair: list[dict[str, Any]]) -> None:
    for run in pair:
        assert_like_recompute(run["write_the_same"]["first"])
        assert_like_recompute(run["write_the_same"]["second"])
        assert run["write_the_same"]["second"]["cached"] == run["write_the_same"]["expected"]
    assert all(run["saved"] for run in pair), "both engines must have saved"


def test_later_engines_load_what_any_saved_bit_for_bit(
    pair: Any, ranks: Any, second: Any, later: Any, last: Any
) -> None:
    for found in (*later["reload"], *last["reload"]):
        assert_like_recompute(found)
        assert found["cached"] == found["expected"]
    written = {key for run in (*pair, second) for key in run["saved"]}
    of_ranks = later["loaded"].keys() - written  # whose blocks could not be looked at
    assert len(of_ranks) * 64 == sum(ranks["expected"])
    loaded = {key: digests for key, digests in later["loaded"].items() if key in written}
    assert_loads_equal_saves([*pair, second, last, later | {"loaded": loaded}])


def test_another_tensor_parallel_size_reads_it(ranks: dict[str, Any], later: dict[str, Any]) -> None:
    """Two ranks wrote, each its heads; one rank reads both."""
    assert ranks["first_cached"] == [0] * len(ranks["expected"])
    assert ranks["again_cached"] == ranks["expected"]
    assert later["reload"][1]["recomputed"] == ranks["first"] == ranks["again"]


def test_computed_found_in_its_own_cache_and_loaded(second: dict[str, Any]) -> None:
    found = second["cold_and_warm"]
    for way in ("cold", "own", "warm"):
        assert_like_recompute(found[way])
    assert all(found["warm_as_own"]) and not any(found["cold"]["cached"])
    assert found["warm"]["cached"] == found["expected"]


def test_hits_that_end_inside_a_chunk(second: dict[str, Any]) -> None:
    for name, cached in (("branch", 192), ("within_a_chunk", 384)):
        assert_like_recompute(second["partial_hits"][name])
        assert second["partial_hits"][name]["cached"] == [cached]


@pytest.mark.parametrize("engine", ["second", "last"], ids=["sync", "async"])
def test_what_was_generated_and_what_was_aborted(engine: str, request: pytest.FixtureRequest) -> None:
    run = request.getfixturevalue(engine)
    turn, aborts = run["second_turn"], run["aborts"]
    assert_like_recompute(turn)
    assert turn["cached"] == [turn["expected"]] and turn["expected"] > 300
    assert aborts["left"] == 0 and len(set(aborts["free_blocks"])) == 1
    assert_like_recompute(aborts)
    assert aborts["cached"][0] == 640


def test_preempted_told_of_other_weights_too_early_and_failed(lab: Any) -> None:
    """Chunks of a forward that raised are not saved, also where saves come a step later, as with EAGLE and MTP."""
    llm = WITH_ASYNC | {"num_gpu_blocks_override": 26, "max_model_len": 512}
    scenarios = [["preemption", CROWDED_TOKENS], "reset_ahead", ["failed_forward", True]]
    spec = {"root": str(lab.folder / "second-crowd"), "second_runner": True, "llm": llm, "scenarios": scenarios}
    run = lab.run("second-crowd", [spec])[0]
    assert run["second_runner"] and run["scheduler"] == "AsyncScheduler"
    assert run["preemption"]["preempted"] > 0
    for name in ("crowded", "turns"):
        assert_like_recompute(run["preemption"][name])
    assert_loads_equal_saves([run])
    assert run["reset_ahead"] == {"was_reset": False, "found": 192, "saved": 0}
    assert run["failed_forward"] == NOTHING_OF_FAILED
