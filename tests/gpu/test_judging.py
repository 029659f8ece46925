"""How the GPU's measurements are judged and written down: a miss, a stray context or a mixed run must not look fine."""

from typing import Any

import pytest

from benchmarks.gpu.equality import are_apart
from benchmarks.gpu.models import DIMENSIONS
from benchmarks.gpu.save_cost import decode_summary
from benchmarks.gpu.ttft import summary


def test_of_reloads_all_but_the_first_count() -> None:
    """The first one fills an arena, and of two hits in vLLM's own cache the first may still compile."""

    def row(seconds: float, token: int = 7) -> dict[str, Any]:
        counted = {"load_bytes": 100.0, "load_seconds": seconds / 2}
        return {"tokens": 100, "hit_tokens": 96, "ttft_s": seconds, "token": token, "counted": counted}

    found = {"computed": [row(5.0)], "own": [row(3.0), row(1.0)], "reloaded": [row(9.0), row(2.0), row(4.0, token=8)]}
    computed, floor, reloaded = summary(found, "kvtier")
    assert (computed["ttft_s"], floor["ttft_s"], reloaded["ttft_s"]) == (5.0, 1.0, 3.0)
    assert reloaded["load_bytes_s"] == 75.0 and floor["same_first_token"] and not reloaded["same_first_token"]


def windows(stored: int, *pairs: tuple[float, float]) -> dict[str, Any]:
    return {
        "window_s": 12.0,
        "pairs": [
            {"on": {"tokens_s": on, "stored_chunks": [stored, 390]}, "off": {"tokens_s": off}} for on, off in pairs
        ],
    }


def test_decoding_is_compared_within_pairs() -> None:
    """Medians of all windows would say -50%: 100 beside 200."""
    found = decode_summary(windows(390, (99.0, 100.0), (100.0, 101.0), (198.0, 200.0), (99.0, 200.0), (396.0, 400.0)))
    assert found["loss_percent"] == pytest.approx(1.0) and found["is_durable_within"]


@pytest.mark.parametrize(
    ("by_rank", "is_good"), [([[0], [1]], True), ([[0]], True), ([[0], [0, 1]], False), ([[0], [0]], False)]
)
def test_contexts_are_judged(by_rank: list[list[int]], is_good: bool) -> None:
    assert are_apart(by_rank) is is_good


def test_kv_of_a_latent_is_one_vector_a_token_and_layer() -> None:
    assert DIMENSIONS["mla"].token_bytes() == 4 * 576 * 2
    assert DIMENSIONS["8b"].token_bytes() == 2 * 32 * 8 * 128 * 2
