"""Messages between the halves of vLLM's connector: the scheduler's to the workers once a step, and their answers."""

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
    """Work of a step, scheduler to workers. number: of the engine's steps, consecutive."""

    step: Step
    number: int = 0


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):
    """Report of a worker to the scheduler's half.

    saves: answers. timings: (tokens, seconds) of loads. cost: expected cost of a load, sent once. figures: the rank's
    figures, sent once in a while. has_failed: a forward failed, and nothing more is saved. (vLLM's own statistics do
    not serve: some releases add the scheduler's counters to the workers' before its half sees them.)
    """

    saves: list[SaveDone]
    timings: list[tuple[int, float]] = field(default_factory=list)
    cost: LoadCost | None = None
    figures: RankFigures | None = None
    has_failed: bool = False

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ReportMetadata:
        """Merge the reports of two ranks. A request waits for the slower one, so the higher cost counts."""
        assert isinstance(other, ReportMetadata)
        costs = [cost for cost in (self.cost, other.cost) if cost is not None]
        cost = max(costs, key=lambda cost: cost.token_s, default=None)
        figures = self.figures or other.figures
        if self.figures is not None and other.figures is not None:
            figures = self.figures.merged(other.figures)
        has_failed = self.has_failed or other.has_failed
        return ReportMetadata(self.saves + other.saves, self.timings + other.timings, cost, figures, has_failed)


class RankReport:
    """Growth of one rank's counters since the last report. Counters that all ranks share are taken from the first."""

    def __init__(self, transfer: Transfer, is_first_rank: bool) -> None:
        self._transfer = transfer
        self._is_first_rank = is_first_rank
        self._reported: dict[str, float] = {}

    def take(self) -> RankFigures:
        total = self._transfer.metrics.total()
        grown = {name: value - self._reported.get(name, 0.0) for name, value in total.items()}
        self._reported = total
        stats = stats_of(grown, 0, self._is_first_rank)
        return self._transfer.figures({} if stats is None else stats.data)
