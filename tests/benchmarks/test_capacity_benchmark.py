"""benchmarks/capacity.py over stand-ins: what is drawn, what is counted, and the shape of the result."""

from __future__ import annotations

from pathlib import Path

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
