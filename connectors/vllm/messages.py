"""What vLLM's scheduler's half tells its workers once a step, and they it."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from kvtier.connectors.bridge import Step
from kvtier.connectors.vllm.metrics import stats_of
from kvtier.plan import SaveDone
from kvtier.scheduler.engine_report import RankFigures
from kvtier.scheduler.load_threshold import LoadCost
from kvtier.worker.transfer import Transfer


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers. number: of the engine's steps, one by one."""

    step: Step
    number: int = 0


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):
    """saves: answers. timings: (tokens, seconds) of loads. cost: what a load should cost, said once. figures: what the
    ranks report of themselves, now and then. has_failed: a forward did; nothing more is saved. (vLLM's own statistics
    are no way to the scheduler's half: some releases add its counters to the workers' before it sees those.)"""

    saves: list[SaveDone]
    timings: list[tuple[int, float]] = field(default_factory=list)
    cost: LoadCost | None = None
    figures: RankFigures | None = None
    has_failed: bool = False

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ReportMetadata:
        """Of two ranks. A request waits for the slower one, so of their costs the higher counts."""
        assert isinstance(other, ReportMetadata)
        costs = [cost for cost in (self.cost, other.cost) if cost is not None]
        cost = max(costs, key=lambda cost: cost.token_s, default=None)
        figures = self.figures or other.figures
        if self.figures is not None and other.figures is not None:
            figures = self.figures.merged(other.figures)
        has_failed = self.has_failed or other.has_failed
        return ReportMetadata(self.saves + other.saves, self.timings + other.timings, cost, figures, has_failed)


class RankReport:
    """What one rank's transfer counted since it was last asked. Of counts that all ranks share, the first rank's."""

    def __init__(self, transfer: Transfer, is_first_rank: bool) -> None:
        self._transfer = transfer
        self._is_first_rank = is_first_rank
        self._told: dict[str, float] = {}

    def take(self) -> RankFigures:
        total = self._transfer.metrics.total()
        grown = {name: value - self._told.get(name, 0.0) for name, value in total.items()}
        self._told = total
        stats = stats_of(grown, 0, self._is_first_rank)
        return self._transfer.figures({} if stats is None else stats.data)
