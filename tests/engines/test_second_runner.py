"""Real vLLM with its second model runner, the default on GPUs from 0.32 on, here with its kernels interpreted.

It prepares inputs, hands blocks on and calls its connector by code of its own. All of this folder's tests run with it
by ENGINE_SECOND_RUNNER=1 in the environment, 0.27.1's aside; these are the ones that are always run.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engines.test_real_engine import WITH_ASYNC, WITHOUT_ASYNC, assert_like_recompute, assert_loads_equal_saves

ANOTHER_SEED = 50


@pytest.fixture(scope="session")
def three(lab: Any) -> list[dict[str, Any]]:
    """On one root, one after the other: an engine with the second runner, one with the first, one with the second."""
    root = str(lab.folder / "runners")
    second = {"root": root, "second_runner": True}
    return [
        lab.run(
            "runners-one",
            [
                second
                | {
                    "llm": WITHOUT_ASYNC,
                    "scenarios": ["cold_and_warm", "partial_hits", "second_turn", "aborts"],
                }
            ],
        )[0],
        lab.run("runners-two", [{"root": root, "scenarios": ["warm", ["warm_of_another", ANOTHER_SEED]]}])[0],
        lab.run(
            "runners-three",
            [
                second
                | {
                    "llm": WITH_ASYNC | {"enable_prefix_caching": False},
                    "scenarios": ["warm", ["second_turn", 40], "aborts", ["warm_of_another", ANOTHER_SEED]],
                }
            ],
        )[0],
    ]


def test_it_is_that_runner(three: list[dict[str, Any]]) -> None:
    assert [run["second_runner"] for run in three] == [True, False, True]
    assert [run["scheduler"] for run in three] == ["Scheduler", "Scheduler", "AsyncScheduler"]


def test_computed_found_in_its_own_cache_and_loaded(three: list[dict[str, Any]]) -> None:
    found = three[0]["cold_and_warm"]
    for way in ("cold", "own", "warm"):
        assert_like_recompute(found[way])
    assert all(found["warm_as_own"]) and not any(found["cold"]["cached"])
    assert found["warm"]["cached"] == found["expected"]


def test_each_runner_loads_what_the_other_saved_bit_for_bit(three: list[dict[str, Any]]) -> None:
    for warm in (three[1]["warm"], three[2]["warm"], three[2]["warm_of_another"]):
        assert_like_recompute(warm)
        assert warm["cached"] == warm["expected"]
    assert_loads_equal_saves(three)


def test_hits_that_end_inside_a_chunk(three: list[dict[str, Any]]) -> None:
    for name, cached in (("branch", 192), ("within_a_chunk", 384)):
        assert_like_recompute(three[0]["partial_hits"][name])
        assert three[0]["partial_hits"][name]["cached"] == [cached]


@pytest.mark.parametrize("run", [0, 2], ids=["sync", "async"])
def test_what_was_generated_and_what_was_aborted(three: list[dict[str, Any]], run: int) -> None:
    turn, aborts = three[run]["second_turn"], three[run]["aborts"]
    assert_like_recompute(turn)
    assert turn["cached"] == [turn["expected"]] and turn["expected"] > 300
    assert aborts["left"] == 0 and len(set(aborts["free_blocks"])) == 1
    assert_like_recompute(aborts)
    assert aborts["cached"][0] == 640


def test_preempted_and_told_of_other_weights_too_early(lab: Any) -> None:
    llm = WITH_ASYNC | {"num_gpu_blocks_override": 26, "max_model_len": 512}
    spec = {"root": str(lab.folder / "runners-crowd"), "second_runner": True, "llm": llm}
    run = lab.run("runners-crowd", [spec | {"scenarios": ["preemption", "reset_ahead"]}])[0]
    assert run["second_runner"] and run["scheduler"] == "AsyncScheduler"
    assert run["preemption"]["preempted"] > 0
    for name in ("crowded", "turns"):
        assert_like_recompute(run["preemption"][name])
    assert_loads_equal_saves([run])
    assert run["reset_ahead"] == {"was_reset": False, "found": 192, "saved": 0}
