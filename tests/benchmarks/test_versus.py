"""benchmarks/versus over made-up entries: who is ahead, what is gone on with, and that engines have their turns."""

import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import plots, processes, report, tables
from benchmarks.gpu.setup import EngineSetup
from benchmarks.versus import __main__ as versus
from benchmarks.versus import lmcache_server, turns
from benchmarks.versus.__main__ import ResultFile, short
from benchmarks.versus.contestants import VersusFolder
from benchmarks.versus.judge import Entries, goals, losses
from benchmarks.versus.turns import Member
from tests.waiting import wait_until

TOKEN_BYTES = 1_000_000
LENGTHS = (1_000, 2_000)


def entry(kind: str, place: str, system: str, repetition: int = 0) -> dict[str, Any]:
    return {"kind": kind, "place": place, "system": system, "repetition": repetition, "boot": "one"}


def row(tokens: int, ttft_s: float, hit_tokens: int | None = None) -> dict[str, Any]:
    return {"tokens": tokens, "hit_tokens": tokens if hit_tokens is None else hit_tokens, "ttft_s": ttft_s}


def reload(place: str, system: str, times: dict[int, list[float]]) -> list[dict[str, Any]]:
    """times: of each length, one of each repetition."""
    return [
        entry("reload", place, system, number)
        | {"read_bytes_s": [4e9, 6e9], "rows": [row(tokens, seconds[number]) for tokens, seconds in times.items()]}
        for number in range(len(next(iter(times.values()))))
    ]


def made(**times: dict[int, list[float]]) -> list[dict[str, Any]]:
    """A machine that copies 10 GB/s and computes 1,000 tokens in a second; floors of 0.1 s."""
    runs = [
        entry("alone", "tmpfs", "none")
        | {"copies": {"h2d_bytes_s": 10e9}, "kvikio_s": {"1000000000": [0.5, 0.4, 0.3]}},
        entry("bare", "", "none")
        | {
            "computed": [row(tokens, tokens / 1000, 0) for tokens in LENGTHS],
            "own": [row(tokens, seconds) for tokens in LENGTHS for seconds in (9.0, 0.1)],
        },
    ]
    for name, of in times.items():
        system = name.replace("_", "-")
        stored = {"rows": [row(tokens, tokens / 1000 * 1.5, 0) for tokens in LENGTHS], "stored_bytes": 3_000_000_000}
        runs += [entry("store", "tmpfs", system) | stored, *reload("tmpfs", system, of)]
    return runs


def test_a_cell_is_the_median_over_the_floor_and_the_ceiling() -> None:
    cells = Entries(made(kvtier={1_000: [0.5, 0.2, 0.3]}), TOKEN_BYTES).cells()
    cell = cells["tmpfs", 1_000, "kvtier"]
    assert (cell.ttft, cell.floor, cell.computed) == (0.3, 0.1, 1.0), "of a pair of own hits the second"
    assert cell.rate == pytest.approx(1e9 / 0.2) and cell.ceiling == 5e9, "the disk's mean is below the copies"
    assert cell.of_ceiling == pytest.approx(1.0)


def test_a_folder_that_gave_kvikio_more_than_the_reads_around_is_no_slower_than_that() -> None:
    """A disk lent gave 0.7 GB/s around repetitions in which every system had more, and 1.7 to KvikIO."""
    runs = made(kvtier={1_000: [0.5, 0.2, 0.3]})
    runs[0]["kvikio_s"] = {"1000000000": [0.16, 0.125, 0.12], "9000000": [0.001] * 3}
    assert Entries(runs, TOKEN_BYTES).cells()["tmpfs", 1_000, "kvtier"].ceiling == 8e9, "the longest prompt's median"


def test_a_peer_that_is_ahead_is_named_at_its_length_alone() -> None:
    runs = made(kvtier={1_000: [0.4] * 3, 2_000: [0.5] * 3}, native={1_000: [0.3] * 3, 2_000: [2.0] * 3})
    cells = Entries(runs, TOKEN_BYTES).cells()
    assert [(mine.system, peer.system, peer.tokens) for mine, peer in losses(cells)] == [("kvtier", "native", 1_000)]
    assert goals(cells) == [(True, "kvtier from tmpfs, 2,000 tokens: 4.00x vLLM's own tiering (goal 2x)")]


def test_a_reload_that_was_no_whole_hit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tmpfs was full, and what one system had stored was evicted for another's: its times were those of computing."""
    runs = made(kvtier={1_000: [0.4] * 3}, native={1_000: [0.9] * 3})
    (short_hit,) = [run for run in runs if run["kind"] == "reload" and run["system"] == "kvtier"][-1]["rows"]
    short_hit["hit_tokens"] = 300
    assert "| 400 (400-400); hit of 300 | 900 (900-900) |" in written(monkeypatch, tmp_path, runs)


def test_an_answer_sooner_than_its_kv_can_have_come_is_no_reload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache's connector loaded nothing where a forward was one whole CUDA graph, and was ahead of all by that."""
    runs = made(
        kvtier={1_000: [0.4], 2_000: [0.5]},
        kvtier_k4v4={1_000: [0.04], 2_000: [0.05]},
        lmcache={1_000: [0.09], 2_000: [0.6]},
    )
    entries = Entries(runs, TOKEN_BYTES)
    cells = entries.cells()
    assert [key for key, cell in cells.items() if not cell.has_loaded] == [("tmpfs", 1_000, "lmcache")], (
        "a gigabyte takes 100 ms at 10 GB/s; what is encoded is fewer bytes"
    )
    assert losses(cells) == []
    text = written(monkeypatch, tmp_path, runs)
    assert "| 90; **loaded nothing** |" in text and "slower than a peer in: no comparison" in text


def test_a_peer_runs_with_the_one_kind_of_graphs_it_works_with(tmp_path: Path) -> None:
    compiled = {"compilation_config": {"cudagraph_capture_sizes": [1, 2]}, "max_model_len": 7}
    for llm, expected in (
        (compiled, {"cudagraph_capture_sizes": [1, 2], "cudagraph_mode": "PIECEWISE"}),
        ({"enforce_eager": True}, None),
    ):
        place = VersusFolder("tmpfs", EngineSetup("tiny", tmp_path, tmp_path, tmp_path, 1.0, llm, {}))
        assert place.member("lmcache", "store", [], 300).job["llm"].get("compilation_config") == expected
        assert place.settings("lmcache").get("compilation_config") == expected, "it is printed and written down"
        assert place.member("kvtier", "store", [], 300).job["llm"] == llm


def test_a_result_names_the_peers_releases_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BUNDLE_PEERS", str(tmp_path))
    assert "lmcache" not in report.versions()
    (tmp_path / "lmcache-0.5.3.dist-info").mkdir()
    (tmp_path / "lmcache-0.5.3.dist-info" / "METADATA").write_text("Name: lmcache\nVersion: 0.5.3\n")
    assert report.versions()["lmcache"] == "0.5.3" and "torch" in report.versions()


def test_a_server_of_lmcache_leaves_none_of_its_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, others = tmp_path / "shm", tmp_path / "shm" / "lmcache_l1_pool_1"
    memory.mkdir()
    others.touch()
    own = "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch(); time.sleep(60)"
    command = [sys.executable, "-c", own, str(memory / "lmcache_l1_pool_2")]
    monkeypatch.setattr(lmcache_server.pools, "__defaults__", (memory,))
    monkeypatch.setattr(lmcache_server, "launch", lambda words, *rest: processes.launch(command, *rest))
    server = lmcache_server.LMCacheServer([], tmp_path / "server.log")
    wait_until(lambda: len(list(memory.iterdir())) == 2)
    server.stop()
    assert list(memory.iterdir()) == [others]


@pytest.mark.parametrize(("native_s", "is_met"), [(1.99, False), (2.0, True)])
def test_a_goal_is_of_the_largest_length(native_s: float, is_met: bool) -> None:
    runs = made(kvtier_k4v4={1_000: [0.1], 2_000: [0.5]}, native={1_000: [9.0], 2_000: [native_s]})
    ((met, said),) = goals(Entries(runs, TOKEN_BYTES).cells())
    assert met is is_met and f": {native_s / 0.5:.2f}x vLLM's own tiering (goal 4x)" in said


def test_a_goal_that_is_missed_does_not_read_as_met() -> None:
    runs = made(kvtier_k4v4={2_000: [1.0]}, native={2_000: [3.9995]})
    assert goals(Entries(runs, TOKEN_BYTES).cells()) == [
        (False, "kvtier, k4v4 from tmpfs, 2,000 tokens: 3.99x vLLM's own tiering (goal 4x)")
    ]


@pytest.mark.parametrize(("ours_s", "native_s"), [(0.1, 9.0), (0.5, 0.1)])
def test_what_has_loaded_nothing_meets_no_goal(ours_s: float, native_s: float) -> None:
    """Two gigabytes take 200 ms at 10 GB/s."""
    runs = made(kvtier={1_000: [0.3], 2_000: [ours_s]}, native={1_000: [0.9], 2_000: [native_s]})
    assert goals(Entries(runs, TOKEN_BYTES).cells()) == []


def test_entries_of_two_machines_and_commits_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is gone on with on another machine, or put together of two: the table's head was the last one's."""
    runs = made(kvtier={1_000: [0.4, 0.4]}, native={1_000: [0.9, 0.9]})
    for run in runs:
        run["commit"] = "aaaaaaa"
    runs[-1] |= {"commit": "bbbbbbb", "boot": "two"}
    assert "of 2 machines, commits aaaaaaa, bbbbbbb" in written(monkeypatch, tmp_path, runs)


def test_what_failed_is_in_no_cell() -> None:
    runs = [*made(kvtier={1_000: [0.2]}), entry("reload", "tmpfs", "lmcache", 1) | {"failed": "why", "rows": []}]
    entries = Entries(runs, TOKEN_BYTES)
    assert {system for _, _, system in entries.cells()} == {"kvtier"}


def written(monkeypatch: pytest.MonkeyPatch, folder: Path, runs: list[dict[str, Any]]) -> str:
    """Write the runs as a result and return its table."""
    content = {
        "date": "2026-01-01",
        "commit": "c0ffee",
        "versions": {"vllm": "0"},
        "machine": {"cores": 2},
        "runs": runs,
        "settings": {"token_bytes": TOKEN_BYTES},
    }
    (folder / "gpu").mkdir()
    (folder / "gpu" / "versus.json").write_text(json.dumps(content))
    monkeypatch.setattr(tables, "RESULTS", folder)
    return "\n".join(tables.TABLES["versus"]())


def test_the_table_and_the_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = made(kvtier={1_000: [0.4], 2_000: [0.5]}, native={1_000: [0.3], 2_000: [2.0]})
    text = written(monkeypatch, tmp_path, runs)
    assert "| tmpfs | 1,000 | 1,000 | 100 | 400 | 300 |" in text, "computed, hit in vLLM's cache, kvtier, native"
    assert "slower than a peer in: kvtier to native at 1,000." in text
    plots.versus(tmp_path / "versus.svg", json.loads((tmp_path / "gpu" / "versus.json").read_text()))
    drawn = (tmp_path / "versus.svg").read_text()
    assert "<svg" in drawn and "vLLM's own tiering" in drawn


@pytest.mark.parametrize(("lengths", "is_known"), [([10], True), ([10, 20], True), ([10, 30], False)])
def test_what_was_measured_of_more_lengths_is_not_measured_again(
    tmp_path: Path, lengths: list[int], is_known: bool
) -> None:
    """A later call for the longest one alone took the place of all lengths' times without a tier."""
    ResultFile(tmp_path / "a.json", {"lengths": [10, 20]}).add("bare", "", "none", 0, {"computed": []})
    found = ResultFile(tmp_path / "a.json", {"lengths": lengths}).find("bare", "", "none")
    assert (found is not None) is is_known


def test_a_result_file_is_continued(tmp_path: Path) -> None:
    first, run = ResultFile(tmp_path / "a.json", {"token_bytes": 1}), ("reload", "tmpfs", "kvtier", 1)
    first.add(*run, {"failed": "why"})
    assert first.find(*run) is None, "what failed is tried again"
    first.add(*run, {"rows": short([row(10, 0.5) | {"counted": {"load_bytes": 3.0, "rchar": 9.0}, "number": 0}])})
    again = ResultFile(tmp_path / "a.json", {})
    found = again.find(*run)
    assert ResultFile(tmp_path / "a.json", {"lengths": [20]}).find(*run) is None, "other lengths are another question"
    assert len(again.entries) == 1 and found is not None and found["rows"] == [row(10, 0.5) | {"load_bytes": 3.0}]


STAND_IN = """
import json, sys, time
from pathlib import Path
job = json.loads(Path(sys.argv[1]).read_text())
(turn,) = [step for step in job["steps"] if step[0] == "take_turn"]
if job["fails"] == "hangs":
    time.sleep(600)
if job["fails"]:
    sys.exit("cannot start")
Path(turn[1]).touch()
while not Path(turn[2]).exists():
    time.sleep(0.01)
began = time.time()
time.sleep(0.2)
Path(sys.argv[2]).write_text(json.dumps({"turn": [began, time.time()]}))
"""


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of an engine: waits for its turn and says when it had it."""
    script = tmp_path / "engine.py"
    script.write_text(STAND_IN)
    launch = processes.launch

    def launched(words: list[str], log_path: Path, environment: dict[str, str]) -> Any:
        return launch([sys.executable, str(script), *words[3:]], log_path, environment)

    monkeypatch.setattr(processes, "launch", launched)


def member(name: str, fails: str = "") -> Member:
    return Member(name, {"environment": {}, "extra": {}, "fails": fails}, [], [["work"]])


def test_engines_that_start_together_work_one_after_another(tmp_path: Path, stand_in: None) -> None:
    found = turns.in_turns([member("a"), member("broken", fails="at once"), member("b")], tmp_path, 60.0, 60.0)
    assert "exit status 1" in found[1]["failed"] and "cannot start" in found[1]["failed"]
    assert found[0]["turn"][1] <= found[2]["turn"][0], "the first is over before the last begins"


def test_an_engine_that_is_never_ready_is_stopped(
    tmp_path: Path, stand_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other engine still has its turn. The clock passes the time limit of a start once that engine is ready."""
    clock = SimpleNamespace(monotonic=lambda: 100.0 * (tmp_path / "a.ready").exists(), sleep=time.sleep)
    monkeypatch.setattr(turns, "time", clock)
    found = turns.in_turns([member("stuck", fails="hangs"), member("a")], tmp_path, 60.0, 60.0)
    assert "exit status -9" in found[0]["failed"] and "turn" in found[1]


def test_nothing_is_begun_for_which_there_is_no_time(tmp_path: Path) -> None:
    words = ["--out", str(tmp_path / "out.json"), "--folder", str(tmp_path), "--models", str(tmp_path)]
    comparison = versus.Comparison(versus.parse([*words, "--systems", "kvtier", "--seconds", "1"]))
    done: list[str] = []
    assert not comparison.in_time("repetition", "1 of kvtier", lambda: done.append("done"))
    assert done == [] and comparison.left_out == ["repetition 1 of kvtier"]


def test_repetitions_are_expected_to_take_as_long_as_repetitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storing takes twice as long, and once kept the last repetition from a machine that had time for it."""
    now = [0.0]
    monkeypatch.setattr(versus.time, "monotonic", lambda: now[0])
    words = ["--out", str(tmp_path / "out.json"), "--folder", str(tmp_path), "--models", str(tmp_path)]
    comparison = versus.Comparison(versus.parse([*words, "--systems", "kvtier", "--seconds", "500"]))

    def lasts(seconds: float) -> None:
        now[0] += seconds

    assert comparison.in_time("store", "kvtier", lambda: lasts(150.0))
    assert comparison.in_time("repetition", "1", lambda: lasts(85.0)) and comparison.in_time(
        "repetition", "2", lambda: lasts(70)
    )
    lasts(100.0)
    assert comparison.in_time("repetition", "3", lambda: lasts(70.0))
    assert not comparison.in_time("repetition", "4", lambda: lasts(70.0))


REFUSED = ["--together=0", "--repetitions=0", "--lengths=", "--lengths=8k", "--systems=nosuch", "--out=nowhere/x.json"]


@pytest.mark.parametrize("flag", REFUSED)
def test_wrong_flags_are_refused(flag: str) -> None:
    with pytest.raises(SystemExit):
        versus.parse(["--out", "x.json", flag])
