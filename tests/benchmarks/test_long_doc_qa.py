"""benchmarks/long_doc_qa.py: its rounds, what it writes, and that it fails when requests do."""

from __future__ import annotations

import argparse
import csv
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import long_doc_qa
from benchmarks.serving import counters, result
from benchmarks.serving.client import Prompt, _text
from benchmarks.serving.counters import Counters
from benchmarks.serving.documents import Source, documents, repeated, with_misses
from tests.benchmarks.rounds import Wrapper

THREE = [Prompt(number, f"text {number}") for number in range(3)]


def ids(prompts: list[Prompt]) -> list[int]:
    return [prompt.prompt_id for prompt in prompts]


# --- prompts ---


def test_repeat_modes() -> None:
    assert ids(repeated(THREE, 2, "tile", random.Random(0))) == [0, 1, 2, 0, 1, 2]
    assert ids(repeated(THREE, 2, "interleave", random.Random(0))) == [0, 0, 1, 1, 2, 2]
    shuffled = [ids(repeated(THREE, 20, "random", random.Random(seed))) for seed in (0, 0, 1)]
    assert shuffled[0] == shuffled[1] != shuffled[2]
    assert sorted(shuffled[2]) == sorted([0, 1, 2] * 20)


def test_misses_are_prompts_that_were_never_sent() -> None:
    several = repeated(THREE, 4, "tile", random.Random(0))
    changed = with_misses(several, "3:1", random.Random(0))
    assert [prompt.is_miss for prompt in changed] == [False, False, False, True] * 3
    texts = [prompt.text for prompt in changed if prompt.is_miss]
    assert len(set(texts)) == 3 and all(text.split(" ", 1)[1] in {p.text for p in THREE} for text in texts)
    assert with_misses(several, None, random.Random(0)) == several


@pytest.mark.parametrize("bad", ["3", "a:b", "0:0", "1:2:3", ":1"])
def test_a_ratio_that_is_none_is_refused(bad: str) -> None:
    with pytest.raises(SystemExit):
        long_doc_qa.parser().parse_args(["--hit-miss-ratio", bad])


@pytest.mark.parametrize("text", [None, "python"])
def test_no_document_is_the_beginning_of_another_one(text: str | None) -> None:
    texts = [prompt.text for prompt in documents(Source.of(text), 12, 50)]
    assert all(len(text.split()) == 51 for text in texts)
    assert not any(a is not b and b.startswith(a) for a in texts for b in texts)


def test_real_text_is_the_files_and_goes_round(tmp_path: Path) -> None:
    (tmp_path / "book").write_text("the quick brown\nfox")
    source = Source.of(str(tmp_path / "book"))
    assert source.document(1, 3) == "1 fox the quick" and source.document(2, 6) == "2 the quick brown fox the quick"
    (tmp_path / "empty").write_text("")
    with pytest.raises(SystemExit):
        Source.of(str(tmp_path / "empty"))


# --- what the server says ---


def test_counters_are_sums_over_engines() -> None:
    page = "\n".join(
        [
            "# HELP vllm:prompt_tokens_total Number of prefill tokens processed.",
            'vllm:prompt_tokens_total{engine="0",model_name="x"} 1.5e+03',
            'vllm:prompt_tokens_total{engine="1"} 500.0',
            'vllm:prompt_tokens_created{engine="0"} 1.79e+09',
            'vllm:external_prefix_cache_hits_total{engine="0"} 256.0',
            "vllm:prefix_cache_hits_total 64.0",
            "process_cpu_seconds_total 3",
            "",
        ]
    )
    tokens = Counters.parse(page).since(Counters({"vllm:prompt_tokens_total": 1000.0}))
    assert tokens == {"prompt_tokens": 1000, "prefix_hit_tokens": 64, "external_hit_tokens": 256}
    page += "vllm:kvtier_skipped_chunks_refused_total 7.0\nvllm:kvtier_skipped_chunks_failed_total 2.0\n"
    assert Counters.parse(page).since(Counters({}))["skipped_chunks"] == 9


def page_of(prompts: float, hits: str) -> str:
    return f"vllm:prompt_tokens_total {prompts}\nvllm:prefix_cache_hits_total {hits}\n"


@pytest.mark.parametrize(
    ("before", "after", "hits"),
    [
        (page_of(100.0, "10.0"), page_of(300.0, "25.0"), 15),
        (page_of(100.0, "10.0"), page_of(300.0, "10.0") + 'vllm:prefix_cache_hits_total{engine="1"} NaN\n', 0),
        (page_of(100.0, "10.0"), page_of(300.0, "+Inf"), None),  # no number any more
        (page_of(100.0, "10.0"), page_of(120.0, "5.0"), None),  # another process since
        (page_of(100.0, "10.0"), "", None),
    ],
)
def test_what_counters_cannot_say_is_not_said(
    before: str, after: str, hits: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "COUNTED_S", 0.0)
    monkeypatch.setattr(counters, "page", lambda url: after)
    tokens = counters.since("http://x", Counters.parse(before))
    assert (tokens or {}).get("prefix_hit_tokens") == hits


def test_tokens_of_the_prompts_before_are_counted_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM counts a little after it has answered."""
    answered_s = time.monotonic()
    late_s = counters.COUNTED_S / 2
    monkeypatch.setattr(counters, "page", lambda url: page_of(float(time.monotonic() > answered_s + late_s), "0.0"))
    found = counters.look("http://x")
    assert found is not None and found.values[counters.PROMPT] == 1.0


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, None),  # comes before the first token
        ({"choices": [{"delta": {"role": "assistant", "content": "a"}}]}, "a"),
        ({"choices": [{"delta": {"content": ""}}]}, ""),  # half a character
        ({"choices": [{"delta": {"reasoning_content": "hm"}}]}, "hm"),
        ({"choices": [{"text": " b"}]}, " b"),
        ({"choices": [], "usage": {"prompt_tokens": 3}}, None),
        ({"error": {"message": "no"}}, None),
    ],
)
def test_pieces_of_a_stream(event: dict[str, Any], text: str | None) -> None:
    assert _text(event) == text


# --- results ---


def test_percentiles() -> None:
    found = result.spread([0.1 * number for number in range(1, 12)])
    assert found["mean"] == pytest.approx(0.6) and found["p50"] == pytest.approx(0.6)
    assert found["p90"] == pytest.approx(1.0) and found["min"] == pytest.approx(0.1)
    assert result.spread([]) == {}


def test_other_settings_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "r.json"
    monkeypatch.setenv("COMMIT", "1111111")
    result.add(out, "q", {"n": 1, "sizes": (1, 2)}, "a", {"x": 1})
    monkeypatch.setenv("COMMIT", "2222222")
    whole = result.add(out, "q", {"n": 1, "sizes": (1, 2)}, "b", {"x": 2})
    assert [whole["systems"][name]["x"] for name in "ab"] == [1, 2]
    assert [whole["systems"][name]["commit"] for name in "ab"] == ["1111111", "2222222"]
    assert {"machine", "versions", "date", "commit"} <= set(whole) and "command" in whole["systems"]["a"]
    with pytest.raises(SystemExit, match="other settings"):
        result.add(out, "q", {"n": 2, "sizes": (1, 2)}, "b", {})


FLAGS = ["--num-documents", "4", "--document-length", "30", "--repeat-count", "2", "--floor", "2"]


def test_both_systems_are_asked_and_compared(tmp_path: Path) -> None:
    wrapper = Wrapper(tmp_path)
    flags = [*FLAGS, "--json-output", "--visualize", "--hit-miss-ratio", "3:1", "--output", str(tmp_path / "said")]
    status, printed = wrapper.run("long_doc_qa", ["--systems", "prefix,kvtier"], flags)
    assert status == 0, printed
    whole = wrapper.result()
    assert list(whole["systems"]) == ["prefix", "kvtier"] and whole["settings"]["num_documents"] == 4
    for name, hits in (("prefix", "prefix_hit_tokens"), ("kvtier", "external_hit_tokens")):
        found = whole["systems"][name]
        warmup, query = found["warmup_round"], found["query_round"]
        assert (warmup["prompt_count"], query["prompt_count"], query["successful_prompt_count"]) == (4, 8, 8)
        assert warmup["tokens"][hits] == 0 and warmup["tokens"]["prompt_tokens"] == 4 * 31
        assert query["tokens"][hits] == 6 * 31 and query["tokens"]["prompt_tokens"] == 6 * 31 + 2 * 32
        assert found["floor"]["tokens"][hits] == 2 * 31 and set(query["ttft"]) == {
            "mean",
            "p50",
            "p90",
            "p95",
            "p99",
            "min",
            "max",
        }
        assert set(query["ttft_misses"]) == set(query["ttft_hits"]) == set(query["ttft"])
        assert found["ttft_gain"] == pytest.approx(warmup["ttft"]["mean"] / query["ttft"]["mean"])
        assert found["cache_tokens"] == 160
        rows = list(csv.DictReader((tmp_path / f"result-{name}" / "query_round.csv").open()))
        assert list(rows[0]) == list(result.ROUND_COLUMNS) and [row["is_miss"] for row in rows].count("True") == 2
        for row in rows:
            assert 0 < float(row["ttft"]) <= float(row["request_end"]) - float(row["request_start"])
            assert float(row["ttft_time"]) == pytest.approx(float(row["request_start"]) + float(row["ttft"]))
            assert row["cached_tokens"] == ("0" if row["is_miss"] == "True" else "31")
        assert (tmp_path / f"result-{name}" / "warmup_round.svg").read_text().startswith("<?xml")
    last = json.loads([line for line in printed.splitlines() if line.startswith("{")][-1])
    assert set(last) == {"query_ttft_per_prompt", "query_round_time_per_prompt", "warmup_round_time_per_prompt"}
    assert last["query_round_time_per_prompt"] == whole["systems"]["kvtier"]["query_round"]["round_time"] / 8
    assert "Query round mean TTFT: " in printed and "Warmup round successful prompt count: 4" in printed
    assert (tmp_path / "said").read_text().count("a first answer") == 5 + 4 + 8 + 3


def test_failed_requests_and_a_gain_that_is_missed_are_the_status(tmp_path: Path) -> None:
    (tmp_path / "book").write_text("refused words")
    wrapper = Wrapper(tmp_path)
    flags = [*FLAGS, "--text", str(tmp_path / "book"), "--completions"]
    status, printed = wrapper.run("long_doc_qa", ["--systems", "prefix"], flags)
    assert status == 1 and "NOT GOOD: 4 of 4 requests failed" in printed and "HTTP 400" in printed
    assert wrapper.result()["systems"]["prefix"]["query_round"]["successful_prompt_count"] == 0
    status, printed = wrapper.run("long_doc_qa", ["--systems", "prefix"], [*FLAGS, "--expected-ttft-gain", "1e9"])
    assert status == 1 and "NOT GOOD: ttft_gain" in printed


@pytest.mark.parametrize(("saved", "hits", "is_good"), [(0, 0, False), (1, 0, True), (0, 1, True)])
def test_a_tier_that_does_nothing_is_not_good(saved: int, hits: int, is_good: bool) -> None:
    part = {"prompt_count": 1, "successful_prompt_count": 1}
    stored = {**part, "tokens": {"saved_bytes": saved, "skipped_chunks": 12}}
    asked = {**part, "tokens": {"external_hit_tokens": hits}}
    options = argparse.Namespace(expected_ttft_gain=None, expected_latency_gain=None)
    said = long_doc_qa.faults(options, {"warmup_round": stored, "query_round": asked})
    assert said == ([] if is_good else ["kvtier is there, and stored and found nothing; it skipped 12 chunks"])


def test_loads_that_failed_are_no_hits() -> None:
    part = {"prompt_count": 1, "successful_prompt_count": 1}
    asked = {**part, "tokens": {"external_hit_tokens": 9, "failed_loads": 2}}
    options = argparse.Namespace(expected_ttft_gain=None, expected_latency_gain=None)
    said = long_doc_qa.faults(options, {"warmup_round": {**part, "tokens": None}, "query_round": asked})
    assert said == ["2 loads failed: their tokens count as hits, and were computed"]


@pytest.mark.parametrize(("answered", "has_gains"), [(6, True), (1, False), (0, False)])
def test_a_round_that_failed_is_no_gain(answered: int, has_gains: bool) -> None:
    """Requests fail sooner than they are answered."""
    warmup = {"prompt_count": 3, "successful_prompt_count": 3, "round_time": 3.0, "ttft": {"mean": 1.0}}
    query = {"prompt_count": 6, "successful_prompt_count": answered, "round_time": 0.1, "ttft": {"mean": 0.5}}
    assert (long_doc_qa.gains(warmup, query) != {}) is has_gains


@pytest.mark.parametrize(
    ("tokens", "seconds"),
    [
        ({"prompt_tokens": 100, "prefix_hit_tokens": 96, "external_hit_tokens": 0}, 0.5),
        ({"prompt_tokens": 100, "prefix_hit_tokens": 0, "external_hit_tokens": 96}, None),  # the tier alone
        ({"prompt_tokens": 100, "prefix_hit_tokens": 0, "external_hit_tokens": 0}, None),  # computed
        (None, 0.5),  # the server does not say
    ],
)
def test_the_floor_is_a_hit_in_the_gpus_own_cache(tokens: dict[str, int] | None, seconds: float | None) -> None:
    assert counters.floor_s({"ttft": {"mean": 0.5}, "tokens": tokens}) == seconds
    assert counters.floor_s(None) is None and counters.floor_s({"ttft": {}, "tokens": tokens}) is None


def test_documents_that_were_there_before_are_named(tmp_path: Path) -> None:
    """The same server is asked the same twice, and each document three times in the query round."""
    wrapper = Wrapper(tmp_path)
    flags = ["--num-documents", "2", "--document-length", "9", "--repeat-count", "3"]
    status, printed = wrapper.run("long_doc_qa", ["--systems", "prefix"], [*flags, "--", *flags])
    assert status == 0 and printed.count("warm-up round's tokens 100% were stored already") == 1


def test_a_run_that_goes_on_where_another_one_ended_finds_nothing_stored(tmp_path: Path) -> None:
    """Not the floor's document either."""
    wrapper = Wrapper(tmp_path)
    flags = ["--num-documents", "2", "--document-length", "9"]
    status, printed = wrapper.run("long_doc_qa", ["--systems", "prefix"], [*flags, "--", *flags, "--first-document=2"])
    again = json.loads((tmp_path / "result-2.json").read_text())["systems"]["prefix"]
    assert status == 0 and again["warmup_round"]["tokens"]["prefix_hit_tokens"] == 0, printed
