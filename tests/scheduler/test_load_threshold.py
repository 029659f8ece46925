"""A hit is never slower than prefill, as far as was measured; and no state is final."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier.scheduler.load_threshold import (
    FORGET_S,
    NEVER,
    STEP_S,
    UNCALIBRATED,
    UNMEASURED_MIN_TOKENS,
    Costs,
    LoadCost,
    LoadThreshold,
)
from tests.support.clock import Clock

TOKEN_BYTES = st.integers(1024, 1 << 20)
RATES = st.floats(1e6, 1e12)
LATENCIES = st.floats(1e-6, 1.0)
PREFILL_TOKENS_S = st.floats(100.0, 1e6)
STEPS_S = st.floats(1e-4, 0.5)


def calibrated(latency_s: float, read_bytes_s: float, token_bytes: int) -> LoadCost:
    return LoadCost(latency_s, token_bytes / read_bytes_s)


def measured(cost: LoadCost, prefill_tokens_s: float, step_s: float, clock: Clock) -> LoadThreshold:
    found = LoadThreshold(cost, clock)
    for _ in range(200):
        found.saw_step(8192, 8192 / prefill_tokens_s)
        found.saw_step(1, step_s)
    return found


@given(LATENCIES, RATES, TOKEN_BYTES, PREFILL_TOKENS_S, STEPS_S)
def test_what_is_worth_it_is_not_slower(
    latency_s: float, read_bytes_s: float, token_bytes: int, prefill_tokens_s: float, step_s: float
) -> None:
    cost = calibrated(latency_s, read_bytes_s, token_bytes)
    found = measured(cost, prefill_tokens_s, step_s, Clock())
    for tokens in (1, 255, 256, 1000, 32768, 1 << 20, found.min_tokens - 1, found.min_tokens):
        load_s = latency_s + tokens * token_bytes / read_bytes_s + step_s
        if 0 < tokens < NEVER - 1:
            is_quicker = load_s <= tokens / prefill_tokens_s
            close = abs(load_s - tokens / prefill_tokens_s) <= 1e-3 * load_s + tokens * 1e-12
            assert close or (tokens >= found.min_tokens) == is_quicker


@given(st.lists(RATES, min_size=2, max_size=5).map(sorted), LATENCIES, TOKEN_BYTES, PREFILL_TOKENS_S)
def test_slower_storage_never_takes_shorter_hits(
    rates: list[float], latency_s: float, token_bytes: int, prefill_tokens_s: float
) -> None:
    least = [
        measured(calibrated(latency_s, rate, token_bytes), prefill_tokens_s, 0.01, Clock()).min_tokens for rate in rates
    ]
    assert all(slow >= fast for slow, fast in pairwise(least))


@settings(max_examples=40)
@given(RATES, RATES, TOKEN_BYTES, PREFILL_TOKENS_S)
def test_loads_correct_what_was_calibrated(
    calibrated_bytes_s: float, real_bytes_s: float, token_bytes: int, prefill_tokens_s: float
) -> None:
    """Whatever calibration said, after some loads the decision is the one that the real rate asks for."""
    real = LoadCost(0.001, token_bytes / real_bytes_s)
    found = measured(calibrated(0.001, calibrated_bytes_s, token_bytes), prefill_tokens_s, 0.01, Clock())
    for _ in range(400):
        for tokens in (256, 1 << 17):
            found.saw_load(tokens, real.of(tokens))
    for tokens in (1 << 14, 1 << 17):
        load_s, prefill_s = real.of(tokens) + 0.01, tokens / prefill_tokens_s
        if load_s > 1.2 * prefill_s + 0.2:
            assert tokens < found.min_tokens


def test_short_loads_say_little_about_long_ones_and_the_other_way() -> None:
    """A way through the engine that takes 20 ms more than calibrated makes short hits worthless, not long ones."""
    for seen in (512, 4096):
        found = measured(calibrated(1e-4, 50e9, 131072), 40000.0, 0.01, Clock())
        real = LoadCost(0.02, 131072 / 50e9)
        for _ in range(100):
            found.saw_load(seen, real.of(seen))
        assert 256 < found.min_tokens <= 1 << 17
        assert 600 < found.min_tokens < 2000
    found = measured(calibrated(0.003, 50e9, 131072), 40000.0, 0.01, Clock())
    for _ in range(100):
        found.saw_load(1 << 17, (1 << 17) * 131072 / 10e9)
    assert 1000 < found.min_tokens < 2000


def test_one_slow_load_is_no_storage() -> None:
    found = measured(calibrated(0.003, 50e9, 131072), 40000.0, 0.01, Clock())
    before = found.min_tokens
    found.saw_load(32768, 0.3)
    assert before <= found.min_tokens < 1.5 * before


def test_nothing_calibrated_is_learned() -> None:
    """As the engine begins: neither latency nor rate is known, and then long and short loads are seen."""
    found = measured(UNCALIBRATED, 40000.0, 0.01, Clock())
    real = LoadCost(0.005, 131072 / 50e9)
    for _ in range(50):
        for tokens in (512, 1 << 15, 1 << 17):
            found.saw_load(tokens, real.of(tokens))
    assert pytest.approx(found.min_tokens, rel=0.1) == (0.005 + 0.01) / (1 / 40000 - 131072 / 50e9)


def test_until_a_prefill_was_measured() -> None:
    found = LoadThreshold(calibrated(1e-4, 5e10, 131072))
    assert found.min_tokens == UNMEASURED_MIN_TOKENS
    found.saw_step(1, 0.007)
    found.saw_load(8192, 10.0)
    assert found.min_tokens == 256


def test_h200() -> None:
    """8B bf16: 131,072 bytes a token, 51.4 GB/s from tmpfs, 8,192 tokens computed in 0.205 s."""
    found = LoadThreshold(calibrated(1e-4, 51.4e9, 131072))
    found.saw_step(8192, 0.205)
    assert 400 < found.min_tokens < 500  # bound by the step of 10 ms that nobody has measured yet
    for _ in range(50):
        found.saw_step(1, 0.006)
    assert 250 < found.min_tokens < 300
    slow = LoadThreshold(calibrated(0.002, 0.8e9, 131072))
    slow.saw_step(8192, 0.205)
    assert slow.min_tokens == NEVER and slow.min_tokens > 1 << 40


def test_a_storage_that_was_slow_for_a_while_is_tried_again() -> None:
    clock = Clock()
    found = measured(calibrated(1e-4, 50e9, 131072), 40000.0, 0.01, clock)
    before = found.min_tokens
    for _ in range(20):
        found.saw_load(32768, 30.0)
    assert found.min_tokens == NEVER
    clock.now_s += 10 * FORGET_S
    assert before <= found.min_tokens < 2 * before


def test_a_step_that_compiles_a_kernel_is_forgotten() -> None:
    """The first step with log probabilities took 23 s on a CPU, with a cache of compiled code 2.3 s, where 1,500 tokens
    take 0.1 s. Eight prefills later hits of 3 tokens were still loaded, or of 22."""
    cost = calibrated(1e-4, 50e9, 131072)
    usual = measured(cost, 15000.0, 0.005, Clock())
    fresh = LoadThreshold(cost)
    for found, before in ((fresh, 0), (usual, usual.min_tokens)):
        found.saw_step(1500, 23.0)
        assert found.saw_step(1, 2.3) is None
        for _ in range(2):
            assert found.saw_step(1500, 0.1) == pytest.approx(0.1 / 1500)  # which a report takes for loads, too
            found.saw_step(1, 0.005)
        assert 70 < found.min_tokens < 90
        assert before in (0, found.min_tokens)


def test_nonsense_is_not_learned() -> None:
    found = LoadThreshold(calibrated(1e-4, 50e9, 131072))
    for tokens, seconds in ((0, 1.0), (-1, 1.0), (1000, 0.0), (1000, -1.0), (1000, float("nan")), (10, float("inf"))):
        assert found.saw_step(tokens, seconds) is None
        found.saw_load(tokens, seconds)
    assert found.min_tokens == UNMEASURED_MIN_TOKENS
    assert STEP_S > 0


def test_what_an_engine_like_it_saw_counts_until_it_has_measured() -> None:
    """The first request of a fresh process: it was loaded from a disk of 1 GB/s, at 131 us a token, where computing
    takes 25."""
    slow, fast = (calibrated(0.002, rate, 131072) for rate in (1e9, 50e9))
    found = LoadThreshold()
    assert found.min_tokens == UNMEASURED_MIN_TOKENS and found.costs() is None
    found.expect(Costs(25e-6, slow))
    assert found.min_tokens == NEVER
    found.calibrate(fast)  # the mount was measured anew
    assert found.min_tokens < 1000
    found.saw_step(8192, 8192 * 1e-6)  # and so was this GPU
    assert found.min_tokens == NEVER
    assert found.costs() == Costs(1e-6, fast)


def test_what_was_expected_does_not_replace_what_was_measured() -> None:
    found = LoadThreshold()
    found.calibrate(calibrated(0.002, 50e9, 131072))
    found.saw_step(8192, 0.205)
    before = found.min_tokens
    found.expect(Costs(1e-9, LoadCost(1.0, 1.0)))
    assert found.min_tokens == before
