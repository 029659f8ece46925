"""Real vLLM in float32: blocks after a load are bit-equal to those that were saved, tokens equal a recompute's.

Every engine is run once a session and looked at by several tests; see engine.py and scenarios.py.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

KV_NOISE = 1e-4  # float32 sums in another order (another batch, another chunk of a prefill) differ by about 1e-5

WITH_ASYNC, WITHOUT_ASYNC = {"async_scheduling": True}, {"async_scheduling": False}
"""On a CPU vLLM turns it off whatever is asked for; only the second runner is let have it here (second_runner.py)."""


NOTHING_OF_FAILED = {"before": 3, "raised": "simulated", "after": 3, "later": 3}  # records, of failed_forward


def assert_like_recompute(compared: dict[str, Any]) -> None:
    assert all(compared["same_tokens"]), compared
    assert compared["kv_diff"] < KV_NOISE, compared


def assert_loads_equal_saves(results: list[dict[str, Any]]) -> None:
    """Every chunk was loaded as some engine saved it, bit for bit."""
    saved: dict[str, set[str]] = {}
    for result in results:
        for key, digests in result["saved"].items():
            saved.setdefault(key, set()).update(digests)
    loaded = [(key, digest) for result in results for key, digests in result["loaded"].items() for digest in digests]
    assert loaded, "nothing was loaded"
    assert [key for key, digest in loaded if digest not in saved[key]] == []


def load_format(lab: Any, run: str) -> dict[str, Any]:
    """Engine arguments with kvtier's loader, whose plans are stored in a folder of the run."""
    extra = {"plan_cache": str(lab.folder / f"plans-{run}")}
    return {"load_format": "kvtier", "model_loader_extra_config": extra}


def assert_loaded_by_plan(lab: Any, run: str) -> None:
    assert len(list((lab.folder / f"plans-{run}").glob("*.plan"))) == 1


@pytest.fixture(scope="session")
def first(lab: Any) -> dict[str, Any]:
    """One engine with prefix caching, without asynchronous scheduling."""
    scenarios = ["cold_and_warm", "partial_hits", "second_turn", "switches", "stats", "tier_faults", "aborts"]
    spec = {"root": str(lab.folder / "root"), "llm": WITHOUT_ASYNC, "scenarios": scenarios}
    return lab.run("first", [spec])[0]


@pytest.fixture(scope="session")
def fresh(lab: Any, first: dict[str, Any]) -> dict[str, Any]:
    """A later process over what the first one left; no prefix caching, asynchronous scheduling, load format kvtier."""
    llm = WITH_ASYNC | {"enable_prefix_caching": False} | load_format(lab, "fresh")
    spec = {"root": str(lab.folder / "root"), "llm": llm, "scenarios": ["reload", ["second_turn", 40], "aborts"]}
    return lab.run("fresh", [spec])[0]


@pytest.fixture(scope="session")
def damaged(lab: Any) -> dict[str, Any]:
    extra = {"host": {"arena_bytes": "64MiB", "admit": "never"}, "segment_bytes": "4MiB"}
    root = str(lab.folder / "damaged")
    return lab.run("damaged", [{"root": root, "extra": extra, "scenarios": ["corruption", "reset"]}])[0]


def test_cold_own_and_warm(first: dict[str, Any]) -> None:
    """Prompts computed, found in vLLM's own prefix cache, loaded from the tier: the same tokens and KV."""
    results = first["cold_and_warm"]
    for way in ("cold", "own", "warm"):
        assert_like_recompute(results[way])
    assert all(results["warm_as_own"])
    assert results["cold"]["cached"] == [0] * len(results["expected"])
    assert results["warm"]["cached"] == results["expected"]


def test_fresh_process_loads_everything(lab: Any, first: dict[str, Any], fresh: dict[str, Any]) -> None:
    """Weights loaded by kvtier are those of vLLM: the same tokens, and KV of the same namespace."""
    assert_loaded_by_plan(lab, "fresh")
    (found,) = fresh["reload"]
    assert_like_recompute(found)
    assert found["cached"] == found["expected"]
    assert found["recomputed"] == first["cold_and_warm"]["cold"]["recomputed"]


def test_blocks_are_bit_equal(first: dict[str, Any], fresh: dict[str, Any]) -> None:
    assert_loads_equal_saves([first, fresh])


def test_partial_hits(first: dict[str, Any]) -> None:
    """Three shared chunks; and a local hit that ends inside a chunk, whose blocks stay as they were."""
    assert_like_recompute(first["partial_hits"]["branch"])
    assert first["partial_hits"]["branch"]["cached"] == [192]
    assert_like_recompute(first["partial_hits"]["within_a_chunk"])
    assert first["partial_hits"]["within_a_chunk"]["cached"] == [384]


@pytest.mark.parametrize("run", ["first", "fresh"])
def test_second_turn_hits_what_was_generated(run: str, request: pytest.FixtureRequest) -> None:
    turn = request.getfixturevalue(run)["second_turn"]
    assert_like_recompute(turn)
    assert turn["cached"] == [turn["expected"]] and turn["expected"] > 300


def test_switches_of_a_request(first: dict[str, Any]) -> None:
    assert first["switches"] == {
        "not_saved": 0,
        "not_loaded": 0,
        "loaded": 192,
        "skip_reading": 0,
        "other_tenant": 0,
        "same_tenant": 192,
    }


@pytest.mark.parametrize("run", ["first", "fresh"])
def test_aborts_at_any_time(run: str, request: pytest.FixtureRequest) -> None:
    """No request and no block is left behind, and what was saved of aborted requests is right."""
    aborts = request.getfixturevalue(run)["aborts"]
    assert aborts["left"] == 0
    assert len(set(aborts["free_blocks"])) == 1
    assert_like_recompute(aborts)
    assert aborts["cached"][0] == 640


@pytest.mark.parametrize("method", ["lookup", "plan_load", "load", "select_saves", "healthy"])
def test_faults_of_the_tier_are_misses(first: dict[str, Any], method: str) -> None:
    """I9: whatever raises, the request ends with the tokens of a recompute."""
    outcome = first["tier_faults"][method]
    assert_like_recompute(outcome)
    assert outcome["cached"] == [448 if method in ("select_saves", "healthy") else 0]


def test_stats_in_vllms_metrics(first: dict[str, Any]) -> None:
    grown = first["stats"]
    assert grown["vllm:kvtier_hit_tokens"] == 256
    assert grown["vllm:kvtier_load_tokens"] == 256
    assert grown["vllm:kvtier_load_requests"] == 1
    assert grown["vllm:kvtier_save_tokens"] == 256
    token_bytes = 4 * 2 * (32 + 32) * 4  # layers, heads, K and V, float32
    assert grown["vllm:kvtier_load_bytes"] == 256 * token_bytes
    assert grown["vllm:kvtier_save_bytes"] >= 256 * token_bytes
    assert first["prometheus"]["vllm:kvtier_faults"] >= 4, "those of test_faults_of_the_tier_are_misses"
    for name in ("load_failures", "checksum_failures", "skipped_chunks_queue_full"):
        assert f"vllm:kvtier_{name}" in first["prometheus"]


def test_the_engines_report(first: dict[str, Any]) -> None:
    """What both halves counted meets in the scheduler's: vLLM's metrics and the report say the same."""
    report, prometheus = first["stats"]["report"], first["stats"]
    assert report["engine"] == "vllm" and report["engine_version"] and report["model"] and report["ranks"] == 1
    for name in ("hit_tokens", "load_bytes", "save_bytes", "load_tokens"):
        assert report["counters"][name] >= prometheus[f"vllm:kvtier_{name}"] > 0, name
    (arena,) = report["arenas"]
    assert arena["tier"] == "host" and 0 < arena["used_bytes"] <= arena["size_bytes"]
    assert sum(report["load"]["counts"]) >= 1 and sum(report["save"]["counts"]) >= 4
    assert report["top_prefixes"] and report["read_ceiling_bytes_s"] is None, "without a GPU it is not measured"


@pytest.mark.parametrize("way", ["flip_payload", "zero", "truncate", "swap_records", "swap_segments", "remove"])
def test_damaged_segments_are_misses(damaged: dict[str, Any], way: str) -> None:
    outcome = damaged["corruption"][way]
    assert_like_recompute(outcome)
    if way == "remove":  # files that are open still read whole: a hit or a miss, never wrong bytes
        assert outcome["checksum_failures"] == 0
        return
    assert outcome["cached"] == [0]
    what, other = ("gone_chunks", "checksum_failures") if way == "truncate" else ("checksum_failures", "gone_chunks")
    assert outcome["load_failures"] == 1 and outcome[what] >= 1 and outcome[other] == 0


def test_reset_cache_begins_an_epoch(damaged: dict[str, Any]) -> None:
    assert damaged["reset"] == {"found": 256, "gone": 0, "found_again": 256}


def test_preemption(lab: Any) -> None:
    """Blocks of preempted requests are handed on; what was saved of them, generated tokens too, is right.

    After a forward that raises, nothing of it and nothing later is saved.
    """
    llm = WITHOUT_ASYNC | {"num_gpu_blocks_override": 26, "max_model_len": 512}
    scenarios = ["preemption", "failed_forward"]
    run = lab.run("crowd", [{"root": str(lab.folder / "crowd"), "llm": llm, "scenarios": scenarios}])[0]
    results = run["preemption"]
    assert results["preempted"] > 0
    assert_like_recompute(results["crowded"])
    assert_like_recompute(results["turns"])
    assert all(cached >= 256 for cached in results["turns"]["cached"])
    assert_loads_equal_saves([run])
    assert run["failed_forward"] == NOTHING_OF_FAILED


def test_speculative_decoding(lab: Any) -> None:
    """Rejected drafts never reach a chunk: the next turn loads exactly what was accepted."""
    llm = WITHOUT_ASYNC | {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    }
    run = lab.run("drafts", [{"root": str(lab.folder / "drafts"), "llm": llm, "scenarios": ["drafts"]}])[0]
    results = run["drafts"]
    assert results["draft_tokens"] > results["accepted_tokens"] > 0, "both accepted and rejected drafts"
    assert_like_recompute(results["first"])
    assert_like_recompute(results["turns"])
    assert results["turns"]["cached"] == results["expected"]
    assert_loads_equal_saves([run])


@pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="vLLM keeps KV in fp8 on a CPU only with AVX-512 or AMX",
)
def test_layers_that_the_engine_does_not_quantize(lab: Any) -> None:
    """fp8 but for the first and last layer: layers of one model differ in bytes. A second process loads them all.

    Codes of fp8 are coarse, so it is not asked whether KV is that of a recompute: blocks, and tokens, must be equal.
    """
    llm = {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0", "3"]}
    spec = {"root": str(lab.folder / "mixed"), "llm": llm}
    first = lab.run("mixed", [spec | {"scenarios": ["fill"]}])[0]
    later = lab.run("mixed-later", [spec | {"scenarios": ["reload"]}])[0]
    (found,) = later["reload"]
    assert all(found["same_tokens"])
    assert found["cached"] == found["expected"]
    assert_loads_equal_saves([first, later])
    slab_bytes = 2 * 64 * 64 * 4 + 2 * 64 * 64  # 64 tokens' K and V of 32 elements: two layers of float32, two of fp8
    chunks = sum(found["expected"]) // 64
    assert later["prometheus"]["vllm:kvtier_load_bytes"] == chunks * 2 * slab_bytes


def test_layers_with_windows_beside_full_ones(lab: Any) -> None:
    """Gemma 3: as kvtier takes one group of layers, vLLM keeps all KV of those with a window, too."""
    spec = {"kind": "windows", "root": str(lab.folder / "windows-root"), "scenarios": ["cold_and_warm"]}
    run = lab.run("windows-engine", [spec])[0]
    assert_like_recompute(run["cold_and_warm"]["warm"])
    assert run["cold_and_warm"]["warm"]["cached"] == run["cold_and_warm"]["expected"]
    assert_loads_equal_saves([run])


def test_mla_blocks_are_bit_equal(lab: Any) -> None:
    """MLA's latent through save and load. vLLM's MLA for CPUs cannot continue from it, so start-up refuses that
    (test_refusals); here the refusal is switched off and only the loaded blocks are judged."""
    spec = {
        "kind": "mla",
        "root": str(lab.folder / "mla-root"),
        "even_if_it_cannot_continue": True,
        "llm": {"attention_backend": "CPU_MLA"},  # with AMX, vLLM takes one that refuses float32
        "scenarios": ["blocks_of_full_hits"],
    }
    run = lab.run("mla", [spec])[0]
    assert run["blocks_of_full_hits"]["shape"][2:] == [1, 576]
    assert run["blocks_of_full_hits"]["cached"] == [64, 128, 192, 256, 512]
    assert run["blocks_of_full_hits"]["kv_diff"] == 0.0
    assert_loads_equal_saves([run])


OF_OLDER = 60  # seed of the prompts that the older release writes


@pytest.fixture(scope="session")
def older(lab: Any, first: dict[str, Any], older_python: Path) -> list[dict[str, Any]]:
    """vLLM 0.27.1 on the root of the newer release: an engine, then a fresh process over what both left."""
    own = [["cold_and_warm", OF_OLDER], ["partial_hits", 61], ["second_turn", 62], "switches", "aborts"]
    spec = {"root": str(lab.folder / "root"), "llm": WITHOUT_ASYNC, "scenarios": [*own, "failed_forward"]}
    one = lab.run("older", [spec], older_python)
    llm = WITH_ASYNC | {"enable_prefix_caching": False, "num_gpu_blocks_override": 65} | load_format(lab, "older")
    spec |= {"llm": llm, "scenarios": [["reload", [1], [OF_OLDER]], ["second_turn", 63]]}
    return one + lab.run("older-fresh", [spec], older_python)


def test_older_release(older: list[dict[str, Any]]) -> None:
    one, two = older
    for way in ("cold", "own", "warm"):
        assert_like_recompute(one["cold_and_warm"][way])
    assert one["cold_and_warm"]["cold"]["cached"] == [0] * len(one["cold_and_warm"]["expected"])
    assert one["cold_and_warm"]["warm"]["cached"] == one["cold_and_warm"]["expected"]
    assert one["partial_hits"]["branch"]["cached"] == [192]
    assert one["partial_hits"]["within_a_chunk"]["cached"] == [384]
    for run in older:
        assert_like_recompute(run["second_turn"])
        assert run["second_turn"]["cached"] == [run["second_turn"]["expected"]]
    assert one["switches"]["loaded"] == 192 and one["switches"]["skip_reading"] == 0
    assert one["aborts"]["left"] == 0 and len(set(one["aborts"]["free_blocks"])) == 1
    assert_like_recompute(one["aborts"])


def test_older_release_reads_what_both_wrote(lab: Any, first: dict[str, Any], older: list[dict[str, Any]]) -> None:
    """The engine's version is not part of the namespace, nor is the load format."""
    found = older[1]["reload"]
    assert_loaded_by_plan(lab, "older")
    assert found[0]["recomputed"] == first["cold_and_warm"]["cold"]["recomputed"]
    for each in found:
        assert_like_recompute(each)
        assert each["cached"] == each["expected"]
    assert_loads_equal_saves([first, *older])


def test_forwards_that_raise_are_not_saved_by_the_older_release(older: list[dict[str, Any]]) -> None:
    """0.27.1 asks a step without a forward for no `wait_for_save`."""
    assert older[0]["failed_forward"] == NOTHING_OF_FAILED


def test_a_refusal_stops_start_up_with_one_message(lab: Any) -> None:
    """The real engine, with vLLM's own default of kv_load_failure_policy."""
    spec = {"root": str(lab.folder / "refused"), "transfer": {"kv_load_failure_policy": "fail"}, "scenarios": []}
    status, log = lab.start(lab.folder / "refused.json", spec, sys.executable)
    assert status != 0
    assert "ConfigError: kvtier: kv_load_failure_policy = 'fail': add " in log.splitlines()[-1]
    assert "Loading safetensors" not in log, "weights were loaded before the refusal"
