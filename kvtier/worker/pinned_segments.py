"""Segments on tmpfs that a GPU copies out of: registered with CUDA, while nobody waits for the GPU or the storage."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from kvtier.errors import Corrupt, TierUnavailable
from kvtier.format.geometry import PAGE_BYTES
from kvtier.runtime import metrics as names
from kvtier.runtime.file_descriptors import most_open
from kvtier.runtime.threads import Jobs, Ticker
from kvtier.storage.open_segments import OPEN_FILES_MAX, Name, OpenSegment
from kvtier.storage.segments import SegmentFiles
from kvtier.worker.arenas import PIN_BYTES
from kvtier.worker.context import WorkerContext
from kvtier.worker.cuda_events import Mark

log = logging.getLogger("kvtier")

LOOK_INTERVAL_S = 2.0
"""How long an evicted segment keeps its memory here, about; and how soon a new one is pinned."""
QUIET_S = 0.5
"""Without a step of the engine for so long, and with nothing of it left on the GPU, it has nothing to do. (Of a long
prompt one step takes longer than that.)"""
CLOSE_TIMEOUT_S = 1.0
FILES_MAX = OPEN_FILES_MAX // 2  # segments held at most, where RLIMIT_NOFILE allows


@dataclass(slots=True)
class Pinned:
    """A segment in use, so that its descriptor stays, and how much of it is pinned, from its start."""

    segment: OpenSegment
    n_bytes: int = 0


class PinnedSegments:
    """Pins what is written of a namespace's segments, the newest first, and lets go of those that were evicted.

    At full speed while the engine starts; later only while it has nothing to do, because the driver holds locks that
    launches and copies need (kvtier.worker.arenas.PIN_BYTES). What is not pinned is read by the ring as ever.

    Args:
        worker: who loads. What other ranks' segments hold is left alone.
        files: of a namespace by its id. Raises TierUnavailable as long as it has no folder.
        namespace: the one that the engine begins in.
        budget_bytes: so much at most.
    """

    def __init__(
        self, worker: WorkerContext, files: Callable[[bytes], SegmentFiles], namespace: bytes, budget_bytes: int
    ) -> None:
        self._worker = worker
        self._files = files
        self._namespace = self._held_of = namespace
        self._budget_bytes = budget_bytes
        self.n_bytes = 0  # pinned
        self._held: dict[Name, Pinned] = {}
        self._left_alone: set[Name] = set()  # of other ranks, or such as can't be pinned
        self._busy_s = float("-inf")  # when the engine was seen at work last
        self._launched: Mark = None  # what it had given the GPU by then
        self._is_closed = threading.Event()
        self._is_refused = False
        self._is_full = False
        self._loads: Jobs | None = None
        self._ticker: Ticker | None = None

    def start(self, loads: Jobs) -> None:
        """Begins, in the background; not beside these jobs."""
        self._loads = loads
        self._ticker = Ticker("pin-files", LOOK_INTERVAL_S, self.look)

    def at_work(self) -> None:
        """The engine has work. Called on its thread with each of its steps."""
        self._launched = self._worker.order.mark()
        self._busy_s = self._worker.clock()

    def moves_in(self, namespace: bytes) -> None:
        """The engine saves into this one and loads from it: another one than before when its weights have changed."""
        self._namespace = namespace

    def close(self) -> None:
        """Ends the background work. Before the ring is closed, which lets go of all that is pinned."""
        self._is_closed.set()
        has_ended = self._ticker is None or self._ticker.close(CLOSE_TIMEOUT_S)
        if has_ended:  # else the segments stay open under a call that hangs
            self._release_all()

    def look(self) -> None:
        """Lets go of what was evicted, and pins what there is, as far as that goes now."""
        started_s, before_bytes = self._worker.clock(), self.n_bytes
        with suppress(TierUnavailable, Corrupt, OSError):  # the next look may find the storage better
            self._leave_former()
            files = self._files(self._held_of)
            self._let_go(files)
            for name in self._newest_first(files) if self._may_pin() else ():
                with suppress(TierUnavailable, Corrupt, OSError):
                    if self._pin_segment(files, name):
                        self._let_go(files)  # after an engine's start a look takes long
        if (pinned := self.n_bytes - before_bytes) > 0:
            log.info(
                "%d MiB of segments are pinned, %d in all, after %.1f s: the GPU copies out of them",
                pinned >> 20,
                self.n_bytes >> 20,
                self._worker.clock() - started_s,
            )
        self._say_if_full()

    def _say_if_full(self) -> None:
        """Once, until there is room again: no other sign tells why what is newest loads slower than what is older."""
        was_full, self._is_full = self._is_full, self._has_no_room() or len(self._held) >= files_max()
        if self._is_full and not was_full:
            log.info(
                "%d MiB in %d segments are pinned, which is all that io.pin_bytes (%d MiB) and %d files allow: "
                "what is newer is read through the ring until these are evicted",
                self.n_bytes >> 20,
                len(self._held),
                self._budget_bytes >> 20,
                files_max(),
            )

    def _has_no_room(self) -> bool:
        return self.n_bytes + PIN_BYTES > self._budget_bytes

    def _leave_former(self) -> None:
        """Nobody asks for what a namespace holds that the engine has left."""
        former, self._held_of = self._held_of, self._namespace
        if former != self._held_of and self._held:
            self._release_all()
            self._files(former).close()

    def _release_all(self) -> None:
        for name in list(self._held):
            held = self._held.pop(name)
            self.n_bytes -= held.n_bytes
            held.segment.release()

    def _let_go(self, files: SegmentFiles) -> None:
        for name, held in list(self._held.items()):
            if held.segment.is_forgotten or held.segment.is_unlinked() is not False:
                del self._held[name]
                self.n_bytes -= held.n_bytes
                held.segment.release()
        files.close_unlinked()

    def _newest_first(self, files: SegmentFiles) -> list[Name]:
        """By their ids, which begin with the time. (Of what was pinned, the time of the last write is that.)"""
        names = files.ids()
        self._left_alone.intersection_update(names)
        return [name for name in reversed(names) if name not in self._left_alone]

    def _pin_segment(self, files: SegmentFiles, name: Name) -> bool:
        """As far as it is written, and as that goes now. False: nothing of it was pinned. Raises TierUnavailable,
        Corrupt, OSError."""
        if not self._may_pin() or self._has_no_room():
            return False
        held = self._held.get(name) or self._hold(files, name)
        if held is None:
            return False
        before_bytes, file = held.n_bytes, os.fstat(held.segment.fd)
        if held.n_bytes >= file.st_size:
            return False
        try:
            self._pin_up_to(held, written_up_to(held.segment.fd, held.n_bytes), file.st_size)
        except TierUnavailable as fault:
            if os.fstat(held.segment.fd).st_size < file.st_size:
                self._leave_alone(name)  # CUDA met the end of a file that was cut just now
            else:
                self._is_refused = True
                log.warning("%d MiB of segments are pinned, and no more will be: %s", self.n_bytes >> 20, fault)
        except OSError:
            self._leave_alone(name)  # it was cut just now, or can't be mapped
        if held.n_bytes > before_bytes:  # upkeep asks how long ago a segment was written
            os.utime(held.segment.fd, ns=(file.st_atime_ns, file.st_mtime_ns))
        return held.n_bytes > before_bytes

    def _pin_up_to(self, held: Pinned, end: int, size: int) -> None:
        """In steps, smaller than a whole one only at the end of a file. Raises TierUnavailable, OSError."""
        while held.n_bytes < end and (end == size or end - held.n_bytes >= PIN_BYTES):
            step = min(PIN_BYTES, end - held.n_bytes)
            if self.n_bytes + step > self._budget_bytes or not self._may_pin():
                return
            self._worker.io.ring.pin_file(held.segment.fd, held.n_bytes + step)
            held.n_bytes += step
            self.n_bytes += step
            self._worker.metrics.add(names.PINNED_FILE_BYTES, step)

    def _hold(self, files: SegmentFiles, name: Name) -> Pinned | None:
        if len(self._held) >= files_max():
            return None
        segment = files.lease(*name)
        if segment is None:
            return None
        if segment.header.extent.intersect(self._worker.share.reads) is None:
            self._left_alone.add(name)
            segment.release()
            return None
        self._held[name] = Pinned(segment)
        return self._held[name]

    def _leave_alone(self, name: Name) -> None:
        """What is pinned of it stays so."""
        self._left_alone.add(name)
        if not self._held[name].n_bytes:
            self._held.pop(name).segment.release()

    def _may_pin(self) -> bool:
        if self._is_refused or self._is_closed.is_set() or (self._loads is not None and self._loads.pending()):
            return False
        if self._launched is not None and not self._worker.order.is_done(self._launched):
            self._busy_s = self._worker.clock()
        return self._worker.clock() - self._busy_s >= QUIET_S


def files_max() -> int:
    """Return how many segments may be held: half of those that may be open (kvtier.storage.open_segments)."""
    return most_open(2 * FILES_MAX) // 2


def written_up_to(fd: int, start: int) -> int:
    """Where the first hole behind `start` begins, in whole pages: to pin a hole gives it memory."""
    return os.lseek(fd, start, os.SEEK_HOLE) // PAGE_BYTES * PAGE_BYTES
