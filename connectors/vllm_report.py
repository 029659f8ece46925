"""What vLLM's workers tell the scheduler's half, once a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata

from kvtier.breakeven import LoadCost
from kvtier.plan import SaveDone


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):
    """saves: answers. timings: (tokens, seconds) of loads. cost: what a load should cost, said once."""

    saves: list[SaveDone]
    timings: list[tuple[int, float]] = field(default_factory=list)
    cost: LoadCost | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ReportMetadata:
        """Of two ranks. A request waits for the slower one, so of their costs the higher counts."""
        assert isinstance(other, ReportMetadata)
        costs = [cost for cost in (self.cost, other.cost) if cost is not None]
        cost = max(costs, key=lambda cost: cost.token_s, default=None)
        return ReportMetadata(self.saves + other.saves, self.timings + other.timings, cost)
