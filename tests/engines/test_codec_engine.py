"""Real vLLM with a codec: what comes back is as far from what was computed as the codec's bits allow."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture(scope="session")
def encoded(lab: Any) -> dict[str, Any]:
    """One engine whose KV is stored with 4 bits an element."""
    spec = {
        "kind": "wide",
        "root": str(lab.folder / "encoded"),
        "extra": {"codec": "k4v4"},
        "scenarios": ["lossy"],
    }
    return lab.run("encoded", [spec])[0]


def test_error_of_what_comes_back(encoded: dict[str, Any]) -> None:
    assert encoded["lossy"]["cached"] == [384, 640]
    k, v = encoded["lossy"]["nmse"]
    assert 0.006 < k < 1.3 * 0.0095
    assert 0.006 < v < 1.3 * 0.0095


def test_bytes_that_were_stored(encoded: dict[str, Any]) -> None:
    chunks = 16  # of 64 tokens: 6 and 10
    layer_bytes = 64 * 64 * (4 + 4) // 8 + 4 * 64 + 2 * 64 + 4 * 64
    slab_bytes = -(-4 * layer_bytes // 4096) * 4096
    assert encoded["prometheus"]["vllm:kvtier_load_bytes"] == chunks * 2 * slab_bytes
    assert encoded["prometheus"]["vllm:kvtier_skipped_chunks_refused"] == 0
