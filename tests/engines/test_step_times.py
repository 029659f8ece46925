"""Steps are timed where it is known what the time between two plans belongs to."""

from kvtier.connectors.load_costs import StepTimer


def timed(*steps: tuple[str, int, float], ahead: int = 0) -> list[tuple[int, float]]:
    """steps: requests (a letter each), tokens, and when the step was planned; without tokens: its requests ended."""
    found: list[tuple[int, float]] = []
    times = StepTimer(lambda tokens, seconds: found.append((tokens, round(seconds, 6))), ahead)
    for requests, n_tokens, at_s in steps:
        if n_tokens:
            times.planned(set(requests), n_tokens, at_s)
        else:
            for request in requests:
                times.ended(request, at_s)
    return found


def test_a_prefill_of_one_step_is_timed() -> None:
    """Most prompts are shorter than a step; with these alone an engine would never know what a hit saves."""
    assert timed(("a", 1100, 0), ("a", 1, 5.6), ("a", 1, 5.7)) == [(1100, 5.6), (1, 0.1)]
    assert timed(("a", 1100, 0), ("a", 1, 0.001), ("a", 1, 5.6), ("a", 1, 5.7), ahead=1) == [(1100, 5.6), (1, 0.1)]


def test_a_prefill_of_two_unlike_steps_is_timed() -> None:
    assert timed(("a", 2048, 0), ("a", 300, 2), ("a", 1, 2.4)) == [(2048, 2), (300, 0.4)]


def test_a_request_of_one_token_ends_its_step() -> None:
    assert timed(("a", 1100, 0), ("a", 0, 5.6), ("b", 900, 9), ("b", 0, 10)) == [(1100, 5.6), (900, 1)]
    assert timed(("ab", 1100, 0), ("ab", 0, 5.6), ("c", 1, 9)) == [(1100, 5.6)], "one step is one time"


def test_what_ended_without_a_step_of_its_own_is_not_timed() -> None:
    assert timed(("a", 1100, 0), ("b", 0, 5.6)) == []
    assert timed(("a", 1100, 0), ("a", 0, 5.6), ahead=1) == [], "the step before it may still have run"


def test_a_long_prefill_is_timed_step_by_step() -> None:
    steps = (("a", 8192, 0), ("a", 8192, 0.1), ("a", 8192, 0.4), ("a", 8192, 0.7))
    assert timed(*steps) == [(8192, 0.1), (8192, 0.3), (8192, 0.3)]
    assert timed(*steps, ahead=1) == [(8192, 0.4), (8192, 0.3)]


def test_a_launch_may_take_as_long_as_its_step() -> None:
    """The second step is planned after the launch of the first, so the first one's time counts from its own plan."""
    steps = (("a", 16384, 0), ("a", 16384, 0.55), ("a", 1, 0.57), ("a", 1, 1.1), ("a", 0, 1.11))
    assert timed(*steps, ahead=1) == [(16384, 0.57), (16384, 0.53)]
    again = (("b", 16384, 5), ("b", 16384, 5.55), ("b", 1, 5.57))
    assert timed(*steps, *again, ahead=1)[2:] == [(16384, 0.57)]


def test_the_pause_between_two_prompts_is_no_step() -> None:
    for ahead in (0, 1):
        assert timed(("a", 8192, 0), ("b", 8192, 10), ("c", 8192, 20), ahead=ahead) == []


def test_the_wait_for_the_step_before_is_not_counted() -> None:
    """Planned ahead, b's prefill begins when a's step ends, at 0.5."""
    steps = (("a", 8192, 0), ("ab", 4096, 0.01), ("ab", 2, 0.5), ("ab", 2, 0.7), ("ab", 2, 0.71))
    assert timed(*steps, ahead=1) == [(8192, 0.5), (4096, 0.2), (2, 0.01)]
