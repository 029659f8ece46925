"""`verify` in the background: one at a time, with its progress; what the last ones found is kept for a while."""

import threading
import uuid
from collections import OrderedDict
from dataclasses import dataclass

from kvtier.admin.answers import BadRecord, VerifyJob
from kvtier.admin.opened import Busy, NotThere, Opened
from kvtier.errors import KVTierError
from kvtier.maintenance.scrub import verify
from kvtier.runtime.threads import ThreadJobs

WAITING_MAX = 2
KEPT_MAX = 20
BAD_SHOWN_MAX = 200


class _Cancelled(Exception):
    """Raised by a job's progress callback to stop the job."""


@dataclass(slots=True)
class _Job:
    answer: VerifyJob
    is_cancelled: bool = False


class Verifying:
    """Thread-safe."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened
        self._jobs = ThreadJobs("verify", 1, WAITING_MAX)
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _Job] = OrderedDict()

    def start(self) -> VerifyJob:
        """Start a verification of the root. Raises Busy if too many wait already."""
        job = _Job(VerifyJob(id=uuid.uuid4().hex, state="waiting", started_s=self._opened.clock()))
        with self._lock:
            if not self._jobs.submit(lambda: self._run(job)):
                raise Busy(f"{WAITING_MAX} verifications are waiting already")
            self._known[job.answer.id] = job
            while len(self._known) > KEPT_MAX:
                self._known.popitem(last=False)
        return job.answer

    def all(self) -> list[VerifyJob]:
        """Return all jobs, the latest first."""
        with self._lock:
            return [job.answer for job in reversed(self._known.values())]

    def find(self, job_id: str) -> VerifyJob:
        """Return a job. Raises NotThere."""
        with self._lock:
            return self._find(job_id).answer

    def cancel(self, job_id: str) -> VerifyJob:
        """Cancel a job; a running one ends after the segment that it is reading. Raises NotThere."""
        with self._lock:
            job = self._find(job_id)
            job.is_cancelled = True
            if job.answer.state == "waiting":
                self._change(job, {"state": "cancelled", "ended_s": self._opened.clock()})
            return job.answer

    def close(self) -> None:
        with self._lock:
            for job in self._known.values():
                job.is_cancelled = True
        self._jobs.close()

    def _find(self, job_id: str) -> _Job:
        if job_id not in self._known:
            raise NotThere(f"there is no job {job_id}, or newer jobs have displaced it")
        return self._known[job_id]

    def _run(self, job: _Job) -> None:
        def tell(done: int, total: int) -> None:
            with self._lock:
                if job.is_cancelled:
                    raise _Cancelled
                self._change(job, {"state": "running", "segments_done": done, "segments_total": total})

        found: dict[str, object] = {"state": "failed", "fault": "a bug of kvtier; the service's log says more"}
        try:
            tell(0, 0)
            signer = self._opened.settings.signing.signer()
            report = verify(self._opened.root, self._opened.index, tell, signer)
            figures = {name: getattr(report, name) for name in ("records", "n_bytes", "unfinished", "unproved")}
            bad = [BadRecord(**finding._asdict()) for finding in report.bad[:BAD_SHOWN_MAX]]
            found = {"state": "done", "n_bad": len(report.bad), "bad": bad, **figures}
        except _Cancelled:
            found = {"state": "cancelled"}
        except (KVTierError, OSError) as fault:
            found = {"state": "failed", "fault": str(fault)}
        finally:
            with self._lock:
                if job.answer.ended_s is None:  # else it was cancelled before its turn came
                    self._change(job, {**found, "ended_s": self._opened.clock()})

    def _change(self, job: _Job, changes: dict[str, object]) -> None:
        job.answer = job.answer.model_copy(update=changes)
