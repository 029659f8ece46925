"""Real vLLM with a codec: what comes back is as far from what was computed as the codec's bits allow."""

from typing import Any


def test_error_and_bytes_of_what_comes_back(lab: Any) -> None:
    """KV stored with 4 bits an element."""
    spec = {"kind": "wide", "root": str(lab.folder / "encoded"), "extra": {"codec": "k4v4"}, "scenarios": ["lossy"]}
    run = lab.run("encoded", [spec])[0]
    assert run["lossy"]["cached"] == [384, 640]
    assert all(0.006 < nmse < 1.3 * 0.0095 for nmse in run["lossy"]["nmse"]), "of K and of V"
    chunks = 16  # of 64 tokens: 6 and 10
    layer_bytes = 64 * 64 * (4 + 4) // 8 + 4 * 64 + 2 * 64 + 4 * 64
    slab_bytes = -(-4 * layer_bytes // 4096) * 4096
    assert run["prometheus"]["vllm:kvtier_load_bytes"] == chunks * 2 * slab_bytes
    assert run["prometheus"]["vllm:kvtier_skipped_chunks_refused"] == 0
