"""How 32 requests at once are judged: what a tier may not do, and how an engine without one changes its answers."""

from copy import deepcopy
from typing import Any

import pytest

from benchmarks.gpu.load_mix import SPARE_BYTES, compared, faults, judge

LEADS = [2.0, 0.03, 1.0, 4.0]
LIMITS = {"token_bytes": 10, "capacity_bytes": 1000}
ARENA = 100 << 20


def answer(tokens: str = "abcd", leads: list[float] | None = None, hit: int = 512) -> dict[str, Any]:
    return {"answer": [ord(c) for c in tokens], "leads": LEADS if leads is None else leads, "hit_tokens": hit}


def passed(*rounds: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The shared part and two rounds, of two answers each; those given come first."""
    return [list(part) for part in (*rounds, *([[answer(), answer()]] * 3))[:3]]


def moved(by: float) -> list[float]:
    """The leads of an answer that is the same, each of them moved."""
    return [lead + by for lead in LEADS]


def process(parts: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """What the two first steps of a process return."""
    rounds = [{"answers": part, "elapsed_s": 0.5, "counted": {"load_tokens": 512}} for part in parts[1:]]
    blocks = {"key": "k", "first_block": 0, "first_head": 0, "digests": [[1], [2]]}
    return {
        "shared_prefix": {"answers": parts[0], "counted": {"rchar": 9000.0, "file_read_bytes": 5120.0}},
        "mixed_rounds": {
            "rounds": rounds,
            "counted": {"evicted_bytes": 7.0},
            "most_on_disk": 1000,
            "memory": {"device_used": 5 << 30, "own_max": 2 << 30, "mapped_max": 1 << 20},
            "arenas": {"device": ARENA, "host": ARENA},
        },
        "watch": [{"saved": [blocks], "loaded": [deepcopy(blocks)], "failed_loads": 0}],
        "counters": {},
        "store_mix": {"most_on_disk": 0},
    }


def judged(loaded: list[list[dict[str, Any]]], other_order: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Judge against a bare engine whose first pass answers `answer()` everywhere."""
    bare = process(passed()) | {"other_order": other_order}
    found: dict[str, Any] = judge(process(passed()), process(loaded), bare, LIMITS)
    return deepcopy(found)


def parted(mine: float = 0.01) -> list[dict[str, Any]]:
    """Two answers, the second of which leaves `answer()` at token 1, where that one leads by 0.03."""
    return [answer(), answer("axyz", [2.0, mine, 9.0, 9.0])]


def test_two_passes_are_compared_up_to_where_they_part() -> None:
    found = compared(passed([answer(), answer()], parted(), [answer(leads=moved(0.02)), answer()]), passed())
    assert (found["same_answers"], found["answers"]) == (3, 4)
    assert (found["same_shared_answers"], found["shared_answers"]) == (2, 2)
    row = {"round": 1, "request": 1, "token": 1, "lead": 0.03, "moved": 0.04, "hit_tokens": 512}
    assert found["differing"] == [row]
    assert found["largest_shift"] == 0.04, "what comes after a parting has another context, and is no shift"


def test_an_answer_on_the_shared_prefix_alone_counts_apart() -> None:
    found = compared(passed(parted()), passed())
    assert (found["same_answers"], found["same_shared_answers"]) == (4, 1)
    assert found["differing"][0]["round"] == 0


@pytest.mark.parametrize(
    ("mine", "control", "is_good"),
    [
        (passed(), passed(), True),
        (passed([answer(), answer()], parted()), passed(), False),  # the engine moves nothing by itself
        (passed([answer(), answer()], parted()), passed([answer(leads=moved(0.05))] * 2), True),
        (passed([answer(), answer()], parted()), passed(parted()), True),  # it parts there itself
        (passed(parted()), passed([answer(leads=moved(0.05))] * 2), True),
        (passed(parted()), passed([answer(leads=moved(0.02))] * 2), False),  # 0.03 and 0.01 are 0.04
        (passed([answer(), answer()], parted(mine=3.0)), passed([answer(leads=moved(0.05))] * 2), False),
    ],
)
def test_an_answer_may_differ_where_the_engine_itself_moves_as_much(
    mine: list[list[dict[str, Any]]], control: list[list[dict[str, Any]]], is_good: bool
) -> None:
    found = judged(mine, control)
    found["tokens"] *= 100  # so few tokens would all be ties
    assert (not faults(found)) is is_good, faults(found)


def test_a_control_that_lets_everything_pass_shows_nothing() -> None:
    found = judged(passed(), passed([answer(leads=moved(1.5)), answer()]))
    assert (found["tokens_within_tie"], found["tokens"]) == (12, 24)
    assert "answers show nothing" in faults(found)[0]


BAD = {
    "1 differ from what was saved": lambda found: found["blocks"].update(wrong=1),
    "1 were not seen saved": lambda found: found["blocks"].update(unknown=1),
    "no loaded block": lambda found: found["blocks"].update(equal=0),
    "1 loads failed": lambda found: found.update(failed_loads=1),
    "bytes on disk": lambda found: found.update(most_on_disk=1001),
    "read 1.21 times": lambda found: found.update(copies_read=1.21),
    "device_used": lambda found: found["more_memory"].update(device_used=ARENA + SPARE_BYTES + 1),
    "own_max": lambda found: found["more_memory"].update(own_max=ARENA + SPARE_BYTES + 1),
    "mapped: ": lambda found: found["more_memory"].update(mapped_max=1001),
    "a round loaded nothing": lambda found: found["rounds_counted"][1].pop("load_tokens"),
    "evicted nothing": lambda found: found["counted"].clear(),
}


@pytest.mark.parametrize("named", BAD)
def test_what_is_bad_is_named(named: str) -> None:
    found = judged(passed(), passed())
    assert faults(found) == []
    BAD[named](found)
    (fault,) = faults(found)
    assert named in fault


def test_up_to_its_bounds_a_run_is_good() -> None:
    found = judged(passed(), passed())
    found["copies_read"] = 1.2
    found["more_memory"].update(device_used=ARENA + SPARE_BYTES, own_max=ARENA + SPARE_BYTES, mapped_max=1000)
    assert faults(found) == []


def test_blocks_that_were_loaded_otherwise_than_saved_are_wrong() -> None:
    other = {"key": "k", "first_block": 0, "first_head": 0, "digests": [[1], [3]]}
    loaded = process(passed()) | {"watch": [{"saved": [], "loaded": [other], "failed_loads": 2}]}
    bare = process(passed()) | {"other_order": passed()}
    found = judge(process(passed()), loaded, bare, LIMITS)
    assert found["blocks"] == {"equal": 1, "wrong": 1, "unknown": 0} and found["failed_loads"] == 2
