"""What engines' counters add up to for the dashboard: no kind of skipped chunk or error is forgotten."""

import pytest

from kvtier.admin import figures
from kvtier.admin.answers import Rates, Totals
from kvtier.runtime import metrics as names
from kvtier.runtime.metrics import Metrics
from kvtier.scheduler.engine_report import About, Reporter, WorkerReport

CONSTANTS = [value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)]


def report(**counters: float) -> WorkerReport:
    """Of an engine that counted this within ten seconds."""
    metrics = Metrics()
    reporter = Reporter("host-1-a", About(1, "vllm", "0.32.0", "m"), metrics, lambda: 100.0)
    for name, value in counters.items():
        metrics.add(name, value)
    return reporter.report(110.0, bytes(16))


def test_each_counter_is_exported_once() -> None:
    assert sorted(names.NAMES) == sorted(CONSTANTS)


@pytest.mark.parametrize("name", [name for name in CONSTANTS if name.startswith("skipped_chunks_")])
def test_each_kind_of_skipped_chunks_counts_but_those_that_somebody_had_saved(name: str) -> None:
    counted = 0.0 if name == names.SKIPPED_PRESENT else 40.0
    one = report(**{name: 40.0})
    assert figures.totals_of([one, one]).skipped_chunks == 2 * counted
    assert figures.rates_of([one, one]).skipped_chunks_s == 2 * counted / 10
    assert [worker.skipped_chunks for worker in figures.workers_of([one], 110.0)] == [counted]


@pytest.mark.parametrize("name", ["load_failures", "checksum_failures", "index_errors"])
def test_each_kind_of_error_counts(name: str) -> None:
    one = report(**{name: 3.0})
    assert figures.totals_of([one]).errors == 3 and figures.rates_of([one]).errors_s == pytest.approx(0.3)
    assert [worker.errors for worker in figures.workers_of([one], 110.0)] == [3]


def test_totals_and_rates_are_told_of_the_same() -> None:
    counted = {
        "lookup_tokens": 400.0,
        "hit_tokens": 300.0,
        "load_bytes": 5e6,
        "file_read_bytes": 4e6,
        "save_bytes": 2e6,
        "evicted_bytes": 1e6,
    }
    one = report(**counted)
    rest = {"skipped_chunks": 0.0, "errors": 0.0}
    assert figures.totals_of([one]) == Totals(hit_ratio=0.75, ttft_saved_s=None, **counted, **rest)
    per_second = {f"{name}_s": value / 10 for name, value in (counted | rest).items()}
    expected = Rates(hit_ratio=0.75, ttft_saved_s_per_s=None, **per_second)
    assert figures.rates_of([one]).model_dump() == pytest.approx(expected.model_dump())


def test_saved_time_is_summed_over_the_engines_that_measured_it() -> None:
    unknown = report()
    known = unknown.model_copy(update={"ttft_saved_s": 4.0, "ttft_saved_recent_s": 2.0})
    assert figures.totals_of([unknown, known]).ttft_saved_s == 4.0
    assert figures.rates_of([unknown, known]).ttft_saved_s_per_s == pytest.approx(0.2)


def test_an_engine_s_hit_ratio_is_since_its_start_as_the_sums_beside_it() -> None:
    one = report(lookup_tokens=400.0, hit_tokens=300.0).model_copy(update={"recent": {"lookup_tokens": 10.0}})
    assert [worker.hit_ratio for worker in figures.workers_of([one], 110.0)] == [0.75]
