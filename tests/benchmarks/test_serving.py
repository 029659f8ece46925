"""benchmarks/serving: which servers are started, and that none is left, however the benchmark ends."""

import json
import signal
from pathlib import Path

import pytest

from benchmarks import plots
from benchmarks.serving import __main__ as serving
from benchmarks.serving.server import SYSTEMS, ServerSetup
from tests.benchmarks.rounds import Wrapper, is_gone

FLAGS = ["--num-documents", "2", "--document-length", "5", "--floor", "0"]


def test_each_system_is_started_as_what_it_is(tmp_path: Path) -> None:
    wrapper = Wrapper(tmp_path)
    own = ["--systems", "nocache,prefix,cache,kvtier,restarted", "--tier", '{"chunk_tokens": 64}']
    own += ["--vllm", "--max-model-len 99"]
    status, printed = wrapper.run("long_doc_qa", own, FLAGS)
    assert status == 0, printed
    lines = wrapper.engines()
    assert [line for line in lines if line == "interrupted"] == ["interrupted"] * 5, "each was stopped in order"
    for name, line in zip(own[1].split(","), lines[::2], strict=True):
        words = line["arguments"]
        assert ("--enable-prefix-caching" in words) is (name not in ("nocache", "cache"))
        assert ("--no-enable-prefix-caching" in words) is (name in ("nocache", "cache"))
        assert words[-2:] == ["--max-model-len", "99"] and words[words.index("--model") + 1] == "a-model"
        assert ("--kv-transfer-config" in words) is (name in ("cache", "kvtier", "restarted"))
        if "--kv-transfer-config" in words:
            transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
            assert transfer["kv_load_failure_policy"] == "recompute"
            root = str(tmp_path / "benchmark-tier")
            assert transfer["kv_connector_extra_config"] == {"chunk_tokens": 64, "root": root}
    assert list(wrapper.result()["systems"]) == own[1].split(",")


def test_what_lies_in_a_named_root_stays(tmp_path: Path) -> None:
    """Somebody's tier may lie there."""
    theirs, ours = tmp_path / "kv" / "v2" / "theirs", tmp_path / "kv" / "benchmark-tier" / "left"
    for path in (theirs, ours):
        path.parent.mkdir(parents=True)
        path.write_text("bytes")
    wrapper = Wrapper(tmp_path / "work")
    tier = ["--tier", json.dumps({"root": str(tmp_path / "kv")})]
    (tmp_path / "work").mkdir()
    status, printed = wrapper.run("long_doc_qa", ["--systems", "kvtier", *tier], FLAGS)
    assert status == 0, printed
    assert theirs.exists() and not ours.exists()


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_nothing_is_left_in_the_tier(is_interrupted: bool, tmp_path: Path) -> None:
    """It may lie in /dev/shm."""
    wrapper = Wrapper(tmp_path)
    process = wrapper.start("long_doc_qa", ["--systems", "kvtier"], FLAGS, FAKE_ENGINE="slow" if is_interrupted else "")
    stored = tmp_path / "benchmark-tier" / "v2" / "segment"
    wrapper.wait_until(lambda: bool(wrapper.engines()))
    stored.parent.mkdir(parents=True, exist_ok=True)
    stored.write_text("bytes")
    if is_interrupted:
        wrapper.wait_for("asked")
        process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == int(is_interrupted), printed
    assert list((tmp_path / "benchmark-tier").iterdir()) == []


def test_a_codec_is_a_system_of_its_own(tmp_path: Path) -> None:
    setup = ServerSetup("m", tmp_path, {"codec": "raw", "chunk_tokens": 64})
    words = setup.command(SYSTEMS["kvtier-k4v4"], 1)
    extra = json.loads(words[words.index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
    assert extra == {"codec": "k4v4", "chunk_tokens": 64, "root": str(tmp_path / "benchmark-tier")}


def test_vllms_own_tiering_lies_in_the_same_root(tmp_path: Path) -> None:
    setup = ServerSetup("m", tmp_path, {"root": str(tmp_path / "kv")}, native={"cpu_bytes_to_use": 7})
    words = setup.command(SYSTEMS["native"], 1)
    transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
    assert transfer["kv_connector"] == "OffloadingConnector"
    extra = transfer["kv_connector_extra_config"]
    assert extra["secondary_tiers"] == [{"type": "fs", "root_dir": str(tmp_path / "kv" / "benchmark-tier")}]
    assert extra["cpu_bytes_to_use"] == 7


def test_one_server_is_asked_more_than_once(tmp_path: Path) -> None:
    """Each time for other documents, with a result of its own."""
    wrapper = Wrapper(tmp_path)
    two = [*FLAGS, "--", *FLAGS, "--max-inflight-requests", "1", "--first-document", "9"]
    status, printed = wrapper.run("long_doc_qa", ["--systems", "prefix,native"], two)
    assert status == 0, printed
    assert wrapper.engines()[1::2] == ["interrupted"] * 2 and len(wrapper.engines()) == 4, "a server for each system"
    results = [json.loads((tmp_path / name).read_text()) for name in ("result.json", "result-2.json")]
    assert [found["settings"]["first_document"] for found in results] == [0, 9]
    assert all(list(found["systems"]) == ["prefix", "native"] for found in results)


@pytest.mark.parametrize(
    ("systems", "why"),
    [
        ("restarted", "needs what kvtier stored"),
        ("prefix,restarted", "needs what kvtier stored"),
        ("kvtier,native,restarted", "needs what kvtier stored"),
        ("kvtier-k4v4,restarted", "needs what kvtier stored"),
        ("prefix,nosuch", "there is no 'nosuch'"),
    ],
)
def test_systems_that_cannot_be(systems: str, why: str) -> None:
    with pytest.raises(SystemExit, match=why):
        serving.main(["long_doc_qa", "--systems", systems, "--", *FLAGS])


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    status, printed = Wrapper(tmp_path).run("long_doc_qa", [], FLAGS, FAKE_ENGINE="fails")
    assert status == 1 and "the server ended with status 1" in printed and "kvtier: root: is not to be had" in printed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_the_server_is_stopped_in_order(number: int, tmp_path: Path) -> None:
    wrapper = Wrapper(tmp_path)
    process = wrapper.start("long_doc_qa", [], FLAGS, FAKE_ENGINE="slow")
    wrapper.wait_for("asked")
    process.send_signal(number)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 1 and "interrupted; the server is stopped" in printed
    assert wrapper.engines()[-1] == "interrupted" and is_gone(wrapper.engine_pid())


def test_a_server_does_not_outlive_a_killed_benchmark(tmp_path: Path) -> None:
    wrapper = Wrapper(tmp_path)
    process = wrapper.start("long_doc_qa", [], FLAGS, FAKE_ENGINE="slow")
    wrapper.wait_for("asked")
    process.kill()
    process.communicate(timeout=300)
    assert is_gone(wrapper.engine_pid())


def test_a_second_interrupt_kills_a_server_that_does_not_stop(tmp_path: Path) -> None:
    wrapper = Wrapper(tmp_path)
    process = wrapper.start("long_doc_qa", [], FLAGS, FAKE_ENGINE="deaf")
    wrapper.wait_for("interrupted")  # it was asked to stop, the rounds being over
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    assert process.returncode == 1 and is_gone(wrapper.engine_pid())


def test_lines_are_drawn(tmp_path: Path) -> None:
    plots.lines(
        tmp_path / "plot.svg", "t", "x", "y", [plots.Line("a < b", [(1024, 10.0), (4096, 100.0), (2048, 1000.0)])]
    )
    drawn = (tmp_path / "plot.svg").read_text()
    assert "a &lt; b" in drawn and "4K" in drawn
    with pytest.raises(ValueError):
        plots.lines(tmp_path / "plot.svg", "t", "x", "y", [])
