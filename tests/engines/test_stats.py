"""The tier's counters on their way into vLLM's metrics."""

import pytest

pytest.importorskip("vllm")

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from kvtier.connectors.vllm import KVTierConnector
from kvtier.connectors.vllm.metrics import FAULTS, HELP, KVTierStats, stats_of
from kvtier.runtime import metrics as names


def test_every_counter_has_a_help_text() -> None:
    assert set(HELP) >= {*names.NAMES, FAULTS}


def test_ranks_do_not_count_the_same_tokens_twice() -> None:
    counted = {names.LOAD_TOKENS: 64.0, names.LOAD_BYTES: 100.0, names.LOAD_SECONDS: 1.0}
    total = KVTierStats()
    for rank in range(4):
        report = stats_of(counted, faults=rank, is_first_rank=rank == 0)
        assert report is not None
        total = total.aggregate(report)
    assert total.data == {names.LOAD_TOKENS: 64, names.LOAD_BYTES: 400, names.LOAD_SECONDS: 1, FAULTS: 6}


def test_nothing_is_reported_as_nothing() -> None:
    assert stats_of({}, 0, is_first_rank=True) is None
    assert KVTierStats().is_empty()
    assert not KVTierStats(data={names.LOOKUPS: 1}).is_empty()


def test_the_front_end_rebuilds_what_the_engine_sent() -> None:
    rebuilt = KVTierConnector.build_kv_connector_stats({names.LOAD_BYTES: 2e9, names.LOAD_SECONDS: 0.5})
    assert isinstance(rebuilt, KVConnectorStats)
    shown = rebuilt.aggregate(KVTierStats(data={names.CHECKSUM_FAILURES: 2})).reduce()
    assert shown["load GB/s"] == 4.0 and shown["loaded MB"] == 2000.0
    assert shown["checksum failures"] == 2
    assert "load failures" not in shown, "only troubles that happened"


def test_vllms_log_line() -> None:
    logging = KVConnectorLogging.__new__(KVConnectorLogging)
    logging.connector_cls = KVTierConnector
    logging.reset()
    lines: list[str] = []
    for _ in range(2):
        logging.observe({names.HIT_TOKENS: 64})
    logging.log(lambda text, *values: lines.append(text % values))
    assert len(lines) == 1 and "kvtier hit tokens=128" in lines[0]


def test_prometheus_text() -> None:
    types = {kind: kind for kind in (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)}
    config = type("Config", (), {"kv_transfer_config": None})()
    exported = KVTierConnector.build_prom_metrics(
        config, types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}
    )
    exported.observe({names.HIT_TOKENS: 64, FAULTS: 0, "from_a_newer_version": 3}, engine_idx=1)
    exported.observe({names.HIT_TOKENS: 64}, engine_idx=1)
    text = prometheus_client.generate_latest().decode()
    assert 'vllm:kvtier_hit_tokens_total{engine="1",model_name="m"} 128.0' in text
    assert 'vllm:kvtier_hit_tokens_total{engine="0",model_name="m"} 0.0' in text
    assert 'vllm:kvtier_faults_total{engine="1",model_name="m"} 0.0' in text


def test_as_a_child_of_a_multi_connector_its_counts_are_put_together_by_name() -> None:
    """In vLLM's front end, where they come as plain mappings; a class that is not found there ends it."""
    both = MultiConnector.build_kv_connector_stats({"KVTierConnector": {names.LOAD_TOKENS: 64.0}})
    assert both is not None and both["KVTierConnector"].data == {names.LOAD_TOKENS: 64.0}
    assert isinstance(both["KVTierConnector"], KVTierStats)
