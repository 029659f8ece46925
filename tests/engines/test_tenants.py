"""From a request's cache salt to the tenant whose segment sets its chunks lie in."""

from typing import Any

import pytest

from kvtier.config.capacity import TenantSettings
from kvtier.connectors.bridge import SchedulerBridge
from kvtier.connectors.faults import Faults
from kvtier.connectors.tracked_request import BlockShape
from kvtier.connectors.vllm.lora import Adapters
from kvtier.connectors.vllm.requests import view_of
from kvtier.model.tenants import NO_TENANTS, Tenants
from kvtier.scheduler.load_threshold import FixedThreshold
from tests.engines.fakes import FakeStore
from tests.engines.test_requests import request

TENANTS = Tenants(
    (
        TenantSettings(name="any-a", cache_salts=("a*",)),
        TenantSettings(name="ab", cache_salts=("ab*", "exact[1]")),
        TenantSettings(name="exact", cache_salts=("abc", "?")),
    )
)


@pytest.mark.parametrize(
    ("salt", "label"),
    [
        (None, ""),
        ("", ""),
        ("other", ""),
        ("a", "any-a"),
        ("abd", "any-a"),
        ("abc", "exact"),
        ("x", "exact"),
        ("exact1", "ab"),
        ("exact[1]", "ab"),
        ("A", "exact"),
        ("Ab", ""),
    ],
)
def test_a_salt_that_stands_in_the_settings_counts_before_patterns_and_the_first_pattern_counts(
    salt: str | None, label: str
) -> None:
    assert TENANTS.label(salt) == label
    assert NO_TENANTS.label(salt) == ""


class ExpectingStore(FakeStore):
    def __init__(self) -> None:
        super().__init__()
        self.expected: list[str] = []

    def expect(self, tenant: str) -> None:
        self.expected.append(tenant)


def test_chunks_of_a_request_are_its_tenants_and_are_expected_when_it_comes() -> None:
    store = ExpectingStore()
    bridge = SchedulerBridge(store, BlockShape(64, 16), FixedThreshold(64), 2.0, Faults())  # type: ignore[arg-type]
    bridge.track(view_of(request(cache_salt="abc", num_prompt_tokens=300), 64, Adapters(), tenants=TENANTS))
    assert store.expected == ["exact"]
    bridge.advance("r", 300, range(20))
    bridge.take_step()
    assert {chunk.tenant for chunk in store.wanted} == {"exact"} and len(store.wanted) == 4


@pytest.mark.parametrize("changes", [{"kv_transfer_params": {"kvtier_save": False}}, {"cache_salt": None}])
def test_nothing_is_made_ready_for_who_saves_nothing_or_is_nobody(changes: dict[str, Any]) -> None:
    store = ExpectingStore()
    bridge = SchedulerBridge(store, BlockShape(64, 16), FixedThreshold(64), 2.0, Faults())  # type: ignore[arg-type]
    bridge.track(
        view_of(request(**{"cache_salt": "abc", "num_prompt_tokens": 300} | changes), 64, Adapters(), tenants=TENANTS)
    )
    assert store.expected == []
