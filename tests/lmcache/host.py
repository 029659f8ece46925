"""What LMCache's NativeConnectorL2Adapter does with a connector: submits, waits for the descriptor, drains, routes."""

import select
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvtier.connectors.lmcache import Completion, LMCacheConnector
from tests.objects.rig import SMALL, content

REQUIRED = ("event_fd", "submit_batch_get", "submit_batch_set", "submit_batch_exists", "drain_completions", "close")
"""What LMCache 0.5.3 and 0.5.6 look for; `submit_batch_delete` is looked for, too, and may lack."""


def key(number: int, salt: str = "", model: str = "org/model") -> str:
    return f"{model}@01000100@0@{number:064x}" + (f"@{salt}" if salt else "")


def connector_at(root: Path, **changes: object) -> LMCacheConnector:
    return LMCacheConnector(settings={"root": str(root), **SMALL, **changes})


class Host:
    """One thread's use of a connector; several may share it only if they take each other's completions."""

    def __init__(self, connector: LMCacheConnector) -> None:
        self.connector = connector
        self.ended: dict[int, Completion] = {}
        self._poller = select.poll()
        self._poller.register(connector.event_fd(), select.POLLIN)

    def wait(self, tasks: Iterable[int], timeout_s: float = 30.0) -> list[Completion]:
        tasks = list(tasks)
        deadline = time.monotonic() + timeout_s
        while not self.ended.keys() >= set(tasks):
            assert time.monotonic() < deadline, "a task was never answered"
            if self._poller.poll(500):
                for completion in self.connector.drain_completions():
                    assert completion.future_id not in self.ended, "answered twice"
                    self.ended[completion.future_id] = completion
        return [self.ended[task] for task in tasks]

    def put(self, keys: Sequence[str], size: int = 5000) -> Completion:
        memory = [memoryview(bytearray(content(key, size))) for key in keys]
        return self.wait([self.connector.submit_batch_set(keys, memory)])[0]

    def get(self, keys: Sequence[str], size: int = 5000) -> list[bytes | None]:
        memory = [bytearray(size) for _ in keys]
        done = self.wait([self.connector.submit_batch_get(keys, [memoryview(into) for into in memory])])[0]
        assert done.results is not None and done.ok == all(done.results)
        return [bytes(into) if is_here else None for into, is_here in zip(memory, done.results, strict=True)]

    def exists(self, keys: Sequence[str]) -> list[bool]:
        done = self.wait([self.connector.submit_batch_exists(keys)])[0]
        assert done.ok and done.results is not None
        return done.results

    def delete(self, keys: Sequence[str]) -> list[bool]:
        done = self.wait([self.connector.submit_batch_delete(keys)])[0]
        assert done.ok and done.results is not None
        return done.results
