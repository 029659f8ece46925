"""Command lines of the benchmarks that ask a server: what cannot be measured is refused before anything is asked."""

from __future__ import annotations

import pytest

from benchmarks import aiperf_ttft, capacity, long_doc_qa, scale
from benchmarks.serving import arguments


@pytest.mark.parametrize(
    ("benchmark", "flag", "value"),
    [
        (long_doc_qa, "--num-documents", "0"),
        (long_doc_qa, "--document-length", "-5"),
        (long_doc_qa, "--repeat-count", "0"),
        (long_doc_qa, "--max-inflight-requests", "0"),  # would wait for ever
        (long_doc_qa, "--floor", "-1"),
        (capacity, "--queries", "0"),
        (capacity, "--documents", "2,0"),
        (aiperf_ttft, "--requests", "0"),
        (scale, "--chunks", "0"),
    ],
)
def test_numbers_that_are_too_small(
    benchmark: object, flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        benchmark.main([f"{flag}={value}", "--out", "/proc/none.json"])  # type: ignore[attr-defined]
    assert ended.value.code == 2 and flag in capsys.readouterr().err


def test_interrupted_a_benchmark_ends_with_a_line() -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit, match="interrupted"):
        arguments.run(interrupted)
    with pytest.raises(SystemExit) as ended:
        arguments.run(lambda: 3)
    assert ended.value.code == 3
