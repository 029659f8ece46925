"""Steps are timed only where it is sure what the time between two plans belongs to."""

from __future__ import annotations

from kvtier.connectors.step_times import StepTimes


def timed(*steps: tuple[str, int, float]) -> list[tuple[int, float]]:
    """steps: requests (a letter each), tokens, and when the step was planned."""
    found: list[tuple[int, float]] = []
    times = StepTimes(lambda tokens, seconds: found.append((tokens, round(seconds, 6))))
    for requests, n_tokens, at_s in steps:
        times.planned(set(requests), n_tokens, at_s)
    return found


def test_a_long_prefill_is_timed_step_by_step() -> None:
    assert timed(("a", 8192, 0), ("a", 8192, 0.1), ("a", 8192, 0.4), ("a", 8192, 0.7)) == [(8192, 0.3), (8192, 0.3)]


def test_the_pause_between_two_prompts_is_no_step() -> None:
    assert timed(("a", 8192, 0), ("b", 8192, 10), ("c", 8192, 20)) == []


def test_a_step_planned_ahead_does_not_count_for_another_kind() -> None:
    # with plans made ahead, what passes after the first decode was planned is still the prefill's time
    assert timed(("a", 8192, 0), ("a", 8192, 0.01), ("a", 1, 0.3), ("a", 1, 0.6), ("a", 1, 0.61)) == [
        (8192, 0.29), (1, 0.01),
    ]  # fmt: skip


def test_decoding_is_timed() -> None:
    assert timed(("ab", 2, 0), ("ab", 2, 0.01), ("ab", 2, 0.02)) == [(2, 0.01)]


def test_steps_of_unlike_sizes_are_not() -> None:
    assert timed(("a", 8192, 0), ("a", 2000, 0.3), ("a", 8192, 0.6)) == []
