"""Storage whose answers a test holds back."""

import threading
from collections.abc import Sequence

from kvtier.io.base import Reader
from kvtier.io.ring import Batch, OpResult, ReadOp, Ring, WriteOp


class HeldBatch:
    """Operations that seem to be under way until they are let go. A cancel is too late: the kernel has them."""

    def __init__(self, inner: Batch, let_go: threading.Event) -> None:
        self._inner = inner
        self._let_go = let_go

    def wait(self, timeout_s: float) -> bool:
        return self._let_go.wait(timeout_s) and self._inner.wait(timeout_s)

    def cancel(self) -> None:
        pass

    def results(self) -> list[OpResult]:
        return self._inner.results()


class HeldRing(Reader):
    never_waits = True

    def __init__(self, inner: Ring) -> None:
        self._inner = inner
        self.n_submitted = 0
        self.let_go = threading.Event()

    def submit(self, ops: Sequence[ReadOp | WriteOp]) -> HeldBatch:
        self.n_submitted += len(ops)
        return HeldBatch(self._inner.submit(ops), self.let_go)

    def close(self, timeout_s: float = 1.0) -> bool:
        return self._inner.close(timeout_s)
