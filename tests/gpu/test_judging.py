"""How the GPU's measurements are judged and written down: a miss, a stray context or a mixed run must not look fine."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import contexts
from benchmarks.gpu.models import DIMENSIONS
from benchmarks.gpu.save_cost import decode_summary
from benchmarks.gpu.ttft import summary

TOKEN_BYTES = 1000


def reload_row(seconds: float, rates: tuple[float, float]) -> dict[str, Any]:
    """One reload of 100 tokens, with a direct read right before and right after."""
    counted = {"load_bytes": 100.0 * TOKEN_BYTES, "load_seconds": seconds / 2}
    return {
        "tokens": 100,
        "hit_tokens": 100,
        "ttft_s": seconds,
        "token": 7,
        "counted": counted,
        "reads": [{"bytes_s": rate, "again_bytes_s": rate} for rate in rates],
    }


def disk_results(*reloads: dict[str, Any]) -> dict[str, Any]:
    row = {"tokens": 100, "hit_tokens": 100, "token": 7}
    bare = {"computed": [row | {"ttft_s": 5.0}], "own": [row | {"ttft_s": 3.0}, row | {"ttft_s": 1.0}]}
    return {"none": {"computed_and_own": bare}, "kvtier": {"reload": {"first_tokens": list(reloads)}}}


def test_a_disk_reload_is_held_against_the_reads_around_it() -> None:
    """100,000 bytes: at 100,000 bytes a second 1 s over the floor of 1 s is the limit itself."""
    results = disk_results(reload_row(2.0, (50_000.0, 150_000.0)), reload_row(3.0, (50_000.0, 50_000.0)))
    row = next(r for r in summary(results, [100], TOKEN_BYTES, limit_bytes_s=1.0) if r["system"] == "kvtier")
    assert row["all_times_limit"] == [1.0, 1.0]
    assert row["over_floor_s"] == 1.5 and row["all_read_bytes_s"] == [50_000.0, 150_000.0, 50_000.0, 50_000.0]


def test_without_reads_around_it_the_limit_of_the_run_counts() -> None:
    plain = {key: value for key, value in reload_row(2.0, (1.0, 1.0)).items() if key != "reads"}
    row = summary(disk_results(plain), [100], TOKEN_BYTES, limit_bytes_s=200_000.0)[-1]
    assert row["times_limit"] == 2.0 and "all_read_bytes_s" not in row


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


def test_a_process_on_two_gpus_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, listing = tmp_path / "nvidia-smi", tmp_path / "listing"
    program.write_text(f"#!/bin/sh\ncat {listing}\n")
    program.chmod(0o755)
    listing.write_text("1, GPU-a\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(contexts, "SAMPLE_S", 0.01)
    watch = contexts.ContextWatch()
    with watch:
        listing.write_text("1, GPU-a\n1, GPU-b\n2, GPU-a\n3, GPU-a\n3, GPU-b\n[N/A], GPU-a\n")
        deadline = time.monotonic() + 10
        while not watch.seen() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert watch.seen() == {"2": ["GPU-a"], "3": ["GPU-a", "GPU-b"]}, "1 ran before"
    assert not contexts.is_good(contexts.judge(watch.seen(), []))


@pytest.mark.parametrize(
    ("listed", "by_rank", "is_good"),
    [
        ({"2": ["a"], "3": ["b"]}, [[[0], [1]]], True),
        ({"2": ["a"], "3": ["b"]}, [], True),
        ({}, [[[0], [1]], [[0]]], True),
        ({}, [], False),
        ({}, [[[0], [0, 1]]], False),
        ({}, [[[0], [0]]], False),
        ({"2": ["a"], "3": ["a", "b"]}, [[[0], [1]]], False),
    ],
)
def test_contexts_are_judged(listed: dict[str, list[str]], by_rank: list[list[list[int]]], is_good: bool) -> None:
    assert contexts.is_good(contexts.judge(listed, by_rank)) is is_good


def test_kv_of_a_latent_is_one_vector_a_token_and_layer() -> None:
    assert DIMENSIONS["mla"].token_bytes() == 4 * 576 * 2
    assert DIMENSIONS["8b"].token_bytes() == 2 * 32 * 8 * 128 * 2
