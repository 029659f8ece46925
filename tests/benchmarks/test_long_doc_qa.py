"""benchmarks/long_doc_qa.py: its rounds, what it writes, and that it fails when requests do."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import long_doc_qa
from benchmarks.long_doc_qa import repeated
from benchmarks.serving import counters, result
from benchmarks.serving.client import _text
from benchmarks.serving.documents import DocumentSource
from tests.benchmarks.rounds import Wrapper

# --- prompts ---


def test_repeat_modes() -> None:
    assert repeated("abc", 2, "tile", 0) == list("abcabc")
    assert repeated("abc", 2, "interleave", 0) == list("aabbcc")
    shuffled = [repeated("abc", 20, "random", seed) for seed in (0, 0, 1)]
    assert shuffled[0] == shuffled[1] != shuffled[2]
    assert sorted(shuffled[2]) == sorted("abc" * 20)


@pytest.mark.parametrize("text", [None, "python"])
def test_no_document_is_the_beginning_of_another_one(text: str | None) -> None:
    texts = [DocumentSource.of(text).document(number, 50) for number in range(12)]
    assert all(len(text.split()) == 51 for text in texts)
    assert not any(a is not b and b.startswith(a) for a in texts for b in texts)


def test_real_text_is_the_files_and_goes_round(tmp_path: Path) -> None:
    (tmp_path / "book").write_text("the quick brown\nfox")
    source = DocumentSource.of(str(tmp_path / "book"))
    assert source.document(1, 3) == "1 fox the quick" and source.document(2, 6) == "2 the quick brown fox the quick"
    (tmp_path / "empty").write_text("")
    with pytest.raises(SystemExit):
        DocumentSource.of(str(tmp_path / "empty"))


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
    tokens = counters.grown({"vllm:prompt_tokens_total": 1000.0}, counters.parse(page))
    assert tokens == {"prompt_tokens": 1000, "prefix_hit_tokens": 64, "external_hit_tokens": 256}
    page += "vllm:kvtier_skipped_chunks_refused_total 7.0\nvllm:kvtier_skipped_chunks_failed_total 2.0\n"
    assert counters.grown({}, counters.parse(page))["skipped_chunks"] == 9


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
    tokens = counters.since("http://x", counters.parse(before))
    assert (tokens or {}).get("prefix_hit_tokens") == hits


def test_tokens_of_the_prompts_before_are_counted_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM counts a little after it has answered."""
    answered_s = time.monotonic()
    late_s = counters.COUNTED_S / 2
    monkeypatch.setattr(counters, "page", lambda url: page_of(float(time.monotonic() > answered_s + late_s), "0.0"))
    found = counters.read("http://x")
    assert found is not None and found[counters.PROMPT] == 1.0


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, None),  # comes before the first token
        ({"choices": [{"delta": {"role": "assistant", "content": "a"}}]}, "a"),
        ({"choices": [{"delta": {"content": ""}}]}, ""),  # half a character
        ({"choices": [{"delta": {"reasoning_content": "hm"}}]}, "hm"),
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
    status, printed = wrapper.run("long_doc_qa", ["--systems", "prefix,kvtier"], FLAGS)
    assert status == 0, printed
    whole = wrapper.result()
    assert list(whole["systems"]) == ["prefix", "kvtier"] and whole["settings"]["num_documents"] == 4
    for name, hits in (("prefix", "prefix_hit_tokens"), ("kvtier", "external_hit_tokens")):
        found = whole["systems"][name]
        warmup, query = found["warmup_round"], found["query_round"]
        assert (warmup["prompt_count"], query["prompt_count"], query["successful_prompt_count"]) == (4, 8, 8)
        assert warmup["tokens"][hits] == 0 and warmup["tokens"]["prompt_tokens"] == 4 * 31
        assert query["tokens"][hits] == query["tokens"]["prompt_tokens"] == 8 * 31
        assert found["floor"]["tokens"][hits] == 2 * 31
        assert set(query["ttft"]) == {"mean", "p50", "p90", "p95", "p99", "min", "max"}
        assert len(query["all_ttft"]) == 8 and min(query["all_ttft"]) == query["ttft"]["min"] > 0
        assert found["ttft_gain"] == pytest.approx(warmup["ttft"]["mean"] / query["ttft"]["mean"])
    assert "query TTFT" in printed


def test_failed_requests_are_the_status(tmp_path: Path) -> None:
    (tmp_path / "book").write_text("refused words")
    wrapper = Wrapper(tmp_path)
    status, printed = wrapper.run("long_doc_qa", ["--systems", "prefix"], [*FLAGS, "--text", str(tmp_path / "book")])
    assert status == 1 and "NOT GOOD: 4 of 4 requests failed" in printed and "HTTP 400" in printed
    assert wrapper.result()["systems"]["prefix"]["query_round"]["successful_prompt_count"] == 0


@pytest.mark.parametrize(("saved", "hits", "is_good"), [(0, 0, False), (1, 0, True), (0, 1, True)])
def test_a_tier_that_does_nothing_is_not_good(saved: int, hits: int, is_good: bool) -> None:
    part = {"prompt_count": 1, "successful_prompt_count": 1, "errors": []}
    stored = {**part, "tokens": {"saved_bytes": saved, "skipped_chunks": 12}}
    asked = {**part, "tokens": {"external_hit_tokens": hits}}
    said = long_doc_qa.faults({"warmup_round": stored, "query_round": asked})
    assert said == ([] if is_good else ["kvtier stored and found nothing; it skipped 12 chunks"])


def test_loads_that_failed_are_no_hits() -> None:
    part = {"prompt_count": 1, "successful_prompt_count": 1, "errors": []}
    asked = {**part, "tokens": {"external_hit_tokens": 9, "failed_loads": 2}}
    said = long_doc_qa.faults({"warmup_round": {**part, "tokens": None}, "query_round": asked})
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
