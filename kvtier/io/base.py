"""Interface of the engines that read records: the ring, which defines it, and KvikIO."""

from collections.abc import Sequence
from typing import Any, Protocol

from kvtier.io.ring import CLEAN, FAILED, UNDER_WAY, OpResult, ReadOp


class Reads(Protocol):
    """Operations submitted together; see `ring.Batch`."""

    def wait(self, timeout_s: float) -> bool: ...
    def cancel(self) -> None: ...
    def results(self) -> list[OpResult]: ...


class Reader(Protocol):
    """Engine of loads; see `ring.Ring` for the methods. The ring takes all batches in one native call, the defaults
    here take one after the other. never_waits: True if `submit` and `submit_each` do not wait."""

    never_waits: bool = False

    def submit(self, ops: Sequence[ReadOp]) -> Reads: ...
    def close(self, timeout_s: float = 1.0) -> bool: ...

    def submit_each(self, batches: Sequence[Sequence[ReadOp]]) -> Sequence[Reads]:
        submitted: list[Reads] = []
        for ops in batches:
            try:
                submitted.append(self.submit(ops))
            except BaseException:
                if submitted:  # whatever the fault is, the caller is to know which are under way
                    break
                raise
        return submitted

    def states(self, batches: Sequence[Any]) -> Sequence[int]:
        return [state_of(reads) for reads in batches]


def state_of(reads: Reads) -> int:
    """Return UNDER_WAY, CLEAN or FAILED, as `ring.Ring.states` does."""
    if not reads.wait(0):
        return UNDER_WAY
    return CLEAN if all(result.ok for result in reads.results()) else FAILED
