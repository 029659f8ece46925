"""benchmarks/aiperf_ttft.py: what it makes of files that aiperf wrote, and (with `make soak`) aiperf itself."""

import json
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import aiperf_ttft
from benchmarks.aiperf_ttft import AiperfFailed, command, parse, parser
from tests.benchmarks.rounds import Wrapper, is_gone

HERE = Path(__file__).parent


def recorded(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / "recorded" / f"{name}.json").read_text())
    return found


@pytest.fixture
def aiperf(tmp_path: Path) -> Path:
    """A program that leaves recorded files."""
    program = tmp_path / "aiperf"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {HERE / "recorded_aiperf.py"} "$@"\n')
    program.chmod(0o755)
    return program


def test_what_aiperf_wrote_is_read() -> None:
    export = recorded("cache")
    found = parse(export, 4)
    assert found["aiperf"] == "0.13.0" and found["requests"] == 4
    assert found["ttft_ms"]["avg"] == export["time_to_first_token"]["avg"] > 0
    assert found["ttft_ms"]["p50"] <= found["ttft_ms"]["p99"] <= found["ttft_ms"]["max"]
    assert found["prompt_tokens"] > 1024


@pytest.mark.parametrize(
    "change",
    [
        {"error_request_count": {"unit": "requests", "avg": 1.0}},
        {"was_cancelled": True},
        {"error_summary": [{"count": 1}]},
        {"request_count": {"unit": "requests", "avg": 0.0}},
        {"request_count": {"unit": "requests", "avg": 3.0}},
        {"time_to_first_token": {"unit": "ms", "avg": float("nan")}},
        {"time_to_first_token": {"unit": "s", "avg": 1.0}},
    ],
)
def test_what_is_no_whole_measurement_is_none(change: dict[str, Any]) -> None:
    with pytest.raises(AiperfFailed):
        parse(recorded("cache") | change, 4)


def test_the_command_is_that_of_the_slides() -> None:
    options = parser().parse_args(["--base-url", "http://x", "--model", "m", "--tokenizer", "t"])
    words = command(Path("aiperf"), options, 102400, 2, Path("out"))
    flags = dict(zip(words[1:], words[2:], strict=False))
    slides = {
        "--concurrency": "2",
        "--request-count": "100",
        "--num-prefix-prompts": "1",
        "--endpoint-type": "chat",
        "--synthetic-input-tokens-mean": "1",
        "--prefix-prompt-length": "102400",
        "--random-seed": "176",
        "--dataset-sampling-strategy": "shuffle",
        "--warmup-request-count": "4",
        "--output-tokens-mean": "100",
        "--extra-inputs": "ignore_eos:true",
        "--artifact-dir": "out",
        "--tokenizer": "t",
    }
    assert {name: flags[name] for name in slides} == slides and "--streaming" in words
    assert aiperf_ttft.LENGTHS[0] == 1024 and aiperf_ttft.LENGTHS[-1] == 102400 and len(aiperf_ttft.LENGTHS) == 8


def row(isl: int, concurrency: int, ms: float) -> dict[str, Any]:
    return {"isl": isl, "concurrency": concurrency, "ttft_ms": {"avg": ms}}


def test_the_table_is_that_of_the_slides(tmp_path: Path) -> None:
    whole = {
        "systems": {
            "nocache": {"rows": [row(1024, 1, 385.6), row(102400, 1, 44384.3), row(1024, 2, 744.9)]},
            "cache": {"rows": [row(1024, 1, 87.7), row(102400, 1, 1014.5)]},
        }
    }
    columns, rows = aiperf_ttft.table_rows(whole)
    assert columns == [
        "ISL",
        "nocache CONC=1",
        "cache CONC=1",
        "nocache/cache",
        "nocache CONC=2",
        "cache CONC=2",
        "nocache/cache",
    ]
    assert rows[0] == ["1K", "385.6", "87.7", "4.4x", "744.9", "-", "-"]
    assert rows[1] == ["100K", "44,384.3", "1,014.5", "43.7x", "-", "-", "-"]
    aiperf_ttft.draw(tmp_path / "result.svg", whole)
    assert "nocache, 2 at once" in (tmp_path / "result.svg").read_text()


SWEEP = ["--isl", "512,1024", "--concurrency", "1,2", "--requests", "4", "--osl", "8"]


def test_the_sweep_over_recorded_runs(aiperf: Path, tmp_path: Path) -> None:
    wrapper = Wrapper(tmp_path)
    status, printed = wrapper.run("aiperf_ttft", ["--systems", "nocache,cache"], [*SWEEP, "--aiperf", str(aiperf)])
    assert status == 0, printed
    whole = wrapper.result()
    for name in ("nocache", "cache"):
        rows = whole["systems"][name]["rows"]
        assert [(row["isl"], row["concurrency"]) for row in rows] == [(512, 1), (512, 2), (1024, 1), (1024, 2)]
        assert all(row["ttft_ms"] == parse(recorded(name), 4)["ttft_ms"] for row in rows)
        folder = tmp_path / "result-aiperf" / name / "ISL1024_CON2"
        words = json.loads((folder / "arguments.json").read_text())
        assert words[words.index("--concurrency") + 1] == "2" and words[words.index("--model") + 1] == "a-model"
    assert "nocache CONC=1" in printed and (tmp_path / "result.svg").exists()


def test_interrupted_nothing_of_aiperf_is_left(aiperf: Path, tmp_path: Path) -> None:
    wrapper, left = Wrapper(tmp_path), tmp_path / "pid"
    flags = [*SWEEP, "--aiperf", str(aiperf)]
    process = wrapper.start("aiperf_ttft", ["--systems", "nocache"], flags, RECORDED_AIPERF_WAITS=str(left))
    wrapper.wait_until(lambda: left.exists() and left.read_text() != "")
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode == 1 and is_gone(int(left.read_text())) and is_gone(wrapper.engine_pid())


def test_aiperf_that_fails_or_is_not_there_fails_the_sweep(aiperf: Path, tmp_path: Path) -> None:
    wrapper = Wrapper(tmp_path)
    flags = [*SWEEP, "--aiperf", str(aiperf)]
    status, printed = wrapper.run("aiperf_ttft", ["--systems", "nocache"], flags, RECORDED_AIPERF_FAILS="all")
    assert status == 1 and "no such tokenizer" in printed and not wrapper.out.exists()
    with pytest.raises(AiperfFailed, match="status 0"):
        aiperf_ttft.run(["true"], tmp_path / "nothing", 4)


def test_cells_before_one_that_fails_are_kept(aiperf: Path, tmp_path: Path) -> None:
    wrapper = Wrapper(tmp_path)
    flags = [*SWEEP, "--aiperf", str(aiperf)]
    status, printed = wrapper.run("aiperf_ttft", ["--systems", "nocache"], flags, RECORDED_AIPERF_FAILS="1024")
    assert status == 1 and "no such tokenizer" in printed
    rows = wrapper.result()["systems"]["nocache"]["rows"]
    assert [(row["isl"], row["concurrency"]) for row in rows] == [(512, 1), (512, 2)]


@pytest.mark.parametrize("written", ["{", "[]", '{"request_count": null}', '{"request_count": {"avg": 4.0}}'])
def test_files_of_another_aiperf_are_named(written: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    words = ["sh", "-c", f"printf '%s' {shlex.quote(written)} > {folder / aiperf_ttft.EXPORT}"]
    with pytest.raises(AiperfFailed, match="is not as expected"):
        aiperf_ttft.run(words, folder, 4)
