"""Reports: what engines say of themselves, bounded, and read as what anybody may have written."""

import json
import pickle
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.admin import figures
from kvtier.errors import Corrupt
from kvtier.runtime import metrics as names
from kvtier.runtime.metrics import Metrics
from kvtier.runtime.threads import run_within
from kvtier.scheduler import engine_report
from kvtier.scheduler.engine_report import (
    BOUNDS_S,
    COUNTED_PREFIXES_MAX,
    REPORT_BYTES_MAX,
    TOP_PREFIXES,
    About,
    ArenaFill,
    RankFigures,
    Reporter,
    Times,
    WorkerReport,
)
from kvtier.scheduler.load_threshold import LoadThreshold
from tests.scheduler.test_slow_writers import by_hand
from tests.support.rig import Engine

SPACE = bytes(16)


def reporter(about: About | None = None, metrics: Metrics | None = None, start_s: float = 100.0) -> Reporter:
    return Reporter("host-1-a", about or About(2, "vllm", "0.32.0", "m"), metrics or Metrics(), lambda: start_s)


class StepWatch:
    """Passes steps on as the connector does."""

    def __init__(self, made: Reporter) -> None:
        self._made = made
        self._limit = LoadThreshold()

    def saw_step(self, tokens: int, seconds: float) -> None:
        token_s = self._limit.saw_step(tokens, seconds)
        if token_s is not None:
            self._made.saw_prefill(token_s)


def test_figures_come_in_while_a_report_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's thread does not wait for files of the installation, which may be on a network."""
    made_by, has_come = reporter(), list[bool]()

    def installed(package: str) -> str:
        has_come.append(run_within("figures", 10.0, lambda: made_by.took("load", 0.5)))
        return "1"

    monkeypatch.setattr(engine_report, "installed", installed)
    assert sum(made_by.report(110.0, SPACE).load.counts) == 0 and has_come == [True]
    assert sum(made_by.report(120.0, SPACE).load.counts) == 1


def test_what_is_written_is_read() -> None:
    made = reporter().report(110.0, SPACE)
    assert WorkerReport.read(made.note()) == made
    assert (made.ranks, made.engine, made.interval_s, made.started_s) == (2, "vllm", 10.0, 100.0)


def test_counters_are_sums_and_recent_is_what_grew() -> None:
    metrics = Metrics()
    made = reporter(metrics=metrics)
    metrics.add(names.LOOKUP_TOKENS, 100)
    made.add(RankFigures({names.LOAD_BYTES: 5.0}))
    one = made.report(110.0, SPACE)
    metrics.add(names.LOOKUP_TOKENS, 20)
    made.add(RankFigures({names.LOAD_BYTES: 7.0}))
    two = made.report(115.0, SPACE)
    assert one.counters == one.recent == {names.LOOKUP_TOKENS: 100, names.LOAD_BYTES: 5}
    assert two.counters == {names.LOOKUP_TOKENS: 120, names.LOAD_BYTES: 12}
    assert two.recent == {names.LOOKUP_TOKENS: 20, names.LOAD_BYTES: 7} and two.interval_s == 5
    assert made.report(120.0, SPACE).recent == {}


def test_ranks_are_merged_and_travel() -> None:
    one = RankFigures({names.LOAD_BYTES: 1.0}, (ArenaFill(tier="host", size_bytes=10, used_bytes=4),), 3e9)
    two = RankFigures({names.LOAD_BYTES: 2.0}, (ArenaFill(tier="host", size_bytes=10, used_bytes=5),), 2e9)
    merged = pickle.loads(pickle.dumps(one)).merged(two)
    assert merged.counters == {names.LOAD_BYTES: 3.0} and merged.read_ceiling_bytes_s == 3e9
    assert merged.arenas == (ArenaFill(tier="host", size_bytes=20, used_bytes=9),)


def test_what_loads_saved_is_known_once_a_prefill_was_measured() -> None:
    made = reporter()
    for _ in range(2):  # both ranks of one load
        made.saw_load(1000, 0.1)
    engine = StepWatch(made)
    engine.saw_step(100, 5.0)  # too short to tell
    unknown = made.report(101.0, SPACE)
    assert unknown.ttft_saved_s is unknown.ttft_saved_recent_s is unknown.prefill_token_s is None, "0 would be a figure"
    engine.saw_step(1000, 1.0)
    for _ in range(2):
        made.saw_load(2000, 0.5)
    found = made.report(102.0, SPACE)
    assert found.prefill_token_s == pytest.approx(0.001) and found.ttft_saved_s == pytest.approx(0.9 + 1.5)
    assert found.ttft_saved_recent_s == pytest.approx(2.4) and made.report(103.0, SPACE).ttft_saved_recent_s == 0


def test_a_prefill_that_compiled_a_kernel_does_not_make_loads_look_better() -> None:
    made = reporter()
    engine = StepWatch(made)
    for seconds in (23.0, 1.0, 1.0):
        engine.saw_step(1000, seconds)
    for _ in range(2):  # both ranks of one load
        made.saw_load(1000, 0.1)
    found = made.report(101.0, SPACE)
    assert found.prefill_token_s == pytest.approx(0.001) and found.ttft_saved_s == pytest.approx(0.9)


def test_what_loads_saved_is_known_from_an_engine_like_this_one() -> None:
    """A new process may load long before it computes as much as a prefill."""
    made = reporter()
    for _ in range(2):
        made.saw_load(1000, 0.1)
    made.expect(0.002)
    found = made.report(101.0, SPACE)
    assert found.ttft_saved_s == pytest.approx(1.9) and found.prefill_token_s is None


def test_top_prefixes_are_the_most_loaded_ones() -> None:
    made, rng = reporter(), random.Random(3)
    often = [rng.randbytes(16) for _ in range(5)]
    for number in range(4 * COUNTED_PREFIXES_MAX):
        made.saw_hit(often[number % 5], 512)
        made.saw_hit(rng.randbytes(16), 64)
    found = made.report(101.0, SPACE).top_prefixes
    assert len(found) == TOP_PREFIXES and {prefix.key for prefix in found[:5]} == {key.hex() for key in often}
    assert len(made._seen.hits) == COUNTED_PREFIXES_MAX


def test_a_report_has_a_bound() -> None:
    long = "x" * 100_000
    made = Reporter(long, About(1, long, long, long, long), Metrics(), lambda: 0.0)
    for number in range(500):
        made.saw_hit(number.to_bytes(16, "big"), 1)
    made.add(RankFigures(dict.fromkeys(names.NAMES, 1e300)))
    note = made.report(1.0, SPACE).note()
    assert len(note) <= REPORT_BYTES_MAX and WorkerReport.read(note).counters


@pytest.mark.parametrize(
    "change",
    [
        {"owner": "x" * 300},
        {"pid": -1},
        {"pid": "1"},
        {"namespace": "../.."},
        {"counters": {"x": "y"}},
        {"counters": {"../x": 1}},
        {"counters": {f"c{n}": 1 for n in range(65)}},
        {"at_s": None},
        {"lookup": {"counts": []}},
        {"load": {"counts": [1] * 20}},
        {"ttft_saved_s": "NaN"},
        {"arenas": [{"tier": "disk", "size_bytes": 1}]},
    ],
    ids=str,
)
def test_a_note_that_is_no_report(change: dict[str, object]) -> None:
    values = json.loads(reporter().report(101.0, SPACE).note())
    WorkerReport.read(json.dumps(values | {"from a later version": 1}).encode())
    with pytest.raises(Corrupt):
        WorkerReport.read(json.dumps(values | change).encode())


def test_too_long_a_note_is_not_parsed() -> None:
    with pytest.raises(Corrupt, match="bytes"):
        WorkerReport.read(b" " * (REPORT_BYTES_MAX + 1))


@given(st.lists(st.floats(0, 20), min_size=1, max_size=50), st.floats(0, 1))
def test_quantiles_lie_in_the_right_bucket(seconds: list[float], fraction: float) -> None:
    times = Times()
    for value in seconds:
        times.add(value)
    latency = times.latency()
    assert sum(latency.counts) == len(seconds) and latency.sum_s == pytest.approx(sum(seconds))
    rank = min(len(seconds) - 1, max(0, -(-fraction * len(seconds) // 1) - 1))
    exact = sorted(seconds)[int(rank)]
    upper = next((bound for bound in BOUNDS_S if exact <= bound), BOUNDS_S[-1])
    estimated = latency.quantile_s(fraction)
    assert estimated is not None and estimated <= upper + 1e-9


def test_figures_add_up_over_engines_and_hosts() -> None:
    reports = []
    for number, (host, ceiling) in enumerate([("a", 2e9), ("a", 3e9), ("b", 1e9), ("b", None)]):
        made = reporter()
        made.add(RankFigures({names.LOOKUP_TOKENS: 100.0, names.HIT_TOKENS: 25.0 * number}, (), ceiling))
        made.saw_hit(SPACE, 64 * number)
        reports.append(made.report(110.0, SPACE).model_copy(update={"host": host, "owner": str(number)}))
    assert figures.ceiling_of(reports) == 4e9 and figures.ceiling_of(reports[3:]) is None
    assert figures.totals_of(reports).hit_ratio == 150 / 400 and figures.totals_of([]).hit_ratio is None
    assert figures.rates_of(reports).hit_tokens_s == pytest.approx(15)
    (prefix,) = figures.prefixes_of(reports, {SPACE.hex()})
    assert (prefix.hits, prefix.workers, prefix.tokens, prefix.is_pinned) == (4, 4, 192, True)
    assert figures.latencies_of([]).load.p99_s is None


def test_an_engine_reports_while_it_lives(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "kv", changes={"index": {"kind": "memory"}})
    tokens = list(range(64 * 3))
    saved = engine.save(tokens, list(range(12)))
    assert engine.load(tokens, list(range(20, 32)))[0] == 3
    keeper, index = by_hand(engine), engine.store._keeper._index
    keeper._due.renew_s = 0.0
    keeper.tick()
    (note,) = index.notes("worker/", 0.0).values()
    report = WorkerReport.read(note)
    assert report.namespace == engine.store.namespace_id.hex() and report.counters[names.HIT_TOKENS] == len(tokens)
    assert sum(report.save.counts) == 3 and sum(report.lookup.counts) == 1
    assert report.save.sum_s == pytest.approx(sum(done.took_s for done in saved)) and all(d.took_s > 0 for d in saved)
    assert [(prefix.key, prefix.tokens) for prefix in report.top_prefixes] == [
        (engine.keys(tokens)[-1].hex(), len(tokens))
    ]
    engine.close()
    assert index.notes("worker/", 0.0) == {}
