"""benchmarks/capacity.py over stand-ins: what is drawn, what is counted, and the shape of the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import capacity
from tests.benchmarks.rounds import Wrapper


def test_shares_over_growing_working_sets(tmp_path: Path) -> None:
    wrapper = Wrapper(tmp_path)
    flags = ["--documents", "4,2", "--document-length", "20", "--queries", "6"]
    status, printed = wrapper.run("capacity", ["--systems", "prefix,kvtier"], flags)
    assert status == 0, printed
    whole = wrapper.result()
    for name, share, other in (("prefix", "prefix_share", "tier_share"), ("kvtier", "tier_share", "prefix_share")):
        found = whole["systems"][name]
        assert [row["documents"] for row in found["rows"]] == [2, 4]
        for row in found["rows"]:
            assert row[share] == 1.0 and row[other] == 0.0, "the stand-in forgets nothing"
            assert row["working_set_tokens"] == 21 * row["documents"] and row["failed"] == 0
            assert row["computed_ttft"]["mean"] > 0 and row["ttft"]["p99"] >= row["ttft"]["p50"] > 0
        assert found["floor"]["tokens"]["prompt_tokens"] == 3 * 21
    assert "100.0%" in printed and (tmp_path / "result.svg").exists()


def test_requests_that_fail_are_the_status(tmp_path: Path) -> None:
    (tmp_path / "book").write_text("refused words")
    flags = ["--documents", "2", "--document-length", "4", "--queries", "2", "--text", str(tmp_path / "book")]
    status, printed = Wrapper(tmp_path).run("capacity", ["--systems", "prefix"], flags)
    assert status == 1 and "NOT GOOD: 4 requests failed" in printed


def test_documents_that_were_stored_already_are_not_called_computed(tmp_path: Path) -> None:
    wrapper = Wrapper(tmp_path)
    flags = ["--documents", "2", "--document-length", "20", "--queries", "3"]
    status, printed = wrapper.run("capacity", ["--systems", "prefix"], [*flags, "--", *flags])
    assert status == 0, printed
    (again,) = json.loads((tmp_path / "result-2.json").read_text())["systems"]["prefix"]["rows"]
    assert wrapper.result()["systems"]["prefix"]["rows"][0]["computed_ttft"] and again["computed_ttft"] == {}


def test_the_working_set_is_all_documents() -> None:
    """Of real text, of which no two have as many tokens."""
    part: dict[str, Any] = {"prompt_count": 2, "successful_prompt_count": 2, "ttft": {"mean": 1.0}, "errors": []}
    fresh = part | {"tokens": {"prompt_tokens": 30, "prefix_hit_tokens": 0, "external_hit_tokens": 0}}
    row = capacity.row_of(4, 20 + 30, fresh, fresh)
    assert row["working_set_tokens"] == 50 and row["computed_ttft"] == {"mean": 1.0}
