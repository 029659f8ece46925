"""Jobs that a test runs when it wants to."""

from kvtier.runtime.threads import Job


class ManualJobs:
    """Runs nothing by itself: queued jobs are run one at a time, in the order that a test or the simulation chooses."""

    threads = 1

    def __init__(self, queued_max: int) -> None:
        self._queued_max = queued_max
        self._queue: list[Job] = []
        self.is_closed = False

    def submit(self, job: Job) -> bool:
        if self.is_closed or len(self._queue) >= self._queued_max:
            return False
        self._queue.append(job)
        return True

    def run(self, position: int = 0) -> None:
        """Runs the queued job at `position`."""
        self._queue.pop(position)()

    def pending(self) -> int:
        return len(self._queue)

    def widen(self, stuck_s: float) -> None:
        pass

    def drain(self, timeout_s: float) -> bool:
        while self._queue:
            self.run()
        return True

    def close(self) -> None:
        self.is_closed = True
        self._queue.clear()
