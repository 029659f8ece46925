"""Every metric that a dashboard or an alert names is exported by somebody; both are well formed."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvtier.runtime import metrics
from kvtier.server.prometheus import exposition
from tests.ui.overview import busy

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DASHBOARD: dict[str, Any] = json.loads((CONFIGS / "grafana" / "kvtier.json").read_text())
ALERTS = CONFIGS / "prometheus" / "alerts.yaml"
RULES: list[dict[str, Any]] = yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]
NAME = re.compile(r"\b(?:kvtier_|vllm:)[A-Za-z0-9_:]*")


def names_in(text: str) -> set[str]:
    return set(NAME.findall(text))


def expressions() -> Iterator[str]:
    yield from (target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"])
    yield from (variable["definition"] for variable in DASHBOARD["templating"]["list"] if "definition" in variable)
    yield from (rule["expr"] for rule in RULES)


def exported_by_the_service() -> set[str]:
    """Of the admin service, as Prometheus would store them."""
    families = text_string_to_metric_families(exposition(busy()).decode())
    return {sample.name for family in families for sample in family.samples}


def exported_by_engines() -> set[str]:
    """What the connector adds to vLLM's metrics, and those of vLLM's own that its sources name."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    from kvtier.connectors.vllm.metrics import HELP, PREFIX

    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    loggers = (Path(spec.origin).parent / "v1" / "metrics" / "loggers.py").read_text()
    own = set(re.findall(r'"(vllm:\w+)"', loggers))
    return {f"{PREFIX}{name}_total" for name in HELP} | own | {f"{name}_bucket" for name in own}


def test_each_reason_for_which_chunks_are_not_saved_is_shown() -> None:
    shown = set().union(*map(names_in, expressions()))
    assert {f"kvtier_{name}_total" for name in metrics.UNSAVED} <= shown


def test_each_metric_is_exported() -> None:
    named = set().union(*map(names_in, expressions()))
    assert len(named) > 30
    assert {name for name in named if name.startswith("kvtier_")} - exported_by_the_service() == set()
    assert {name for name in named if name.startswith("vllm:")} - exported_by_engines() == set()


def test_a_metric_that_nobody_exports_is_found() -> None:
    assert names_in("rate(kvtier_hits_total[5m]) / x") == {"kvtier_hits_total"}
    assert "kvtier_hits_total" not in exported_by_the_service()
    assert "kvtier_hit_tokens_total" in exported_by_the_service()


def test_each_alert_says_what_is_so_and_what_to_do() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning", "info"), rule["alert"]
        assert rule["annotations"]["summary"] and rule["annotations"]["description"].endswith("."), rule["alert"]


def test_promtool_finds_nothing() -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed: apt install prometheus")
    done = subprocess.run(["promtool", "check", "rules", str(ALERTS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_panels_lie_beside_each_other_and_name_their_source() -> None:
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"} and panel["title"]
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"]) > 0
    for one, two in combinations([panel["gridPos"] for panel in panels], 2):
        apart_x = one["x"] + one["w"] <= two["x"] or two["x"] + two["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= two["y"] or two["y"] + two["h"] <= one["y"]
        assert apart_x or apart_y, (one, two)
    assert {"datasource", "host"} == {variable["name"] for variable in DASHBOARD["templating"]["list"]}
