"""Whether the forwards of a worker ended, told from the hooks that vLLM calls around each.

A forward may raise: out of memory, a fault of a collective, SIGTERM. vLLM's first model runner calls `wait_for_save`
while the exception passes through, as if all had been computed; the second one does not call it, and where the engine
goes on, its next step gathers what the scheduler takes for computed. And vLLM's own prefix cache has taken the step's
blocks in when it was planned. So after such a step nothing in the blocks is known to be what its tokens stand for.
"""

from __future__ import annotations

import logging
import sys

log = logging.getLogger("kvtier")


class Forwards:
    """One worker's. Steps are numbered one by one, so that one that never came here is missed, too."""

    def __init__(self) -> None:
        self.has_failed = False
        """Since the start; vLLM has no way back from it that would be known to connectors."""
        self._number: int | None = None
        self._has_ended = True
        self._handled: BaseException | None = None

    def begins(self, number: int) -> None:
        """Call with each step's number before anything is done for it."""
        if not self._has_ended or (self._number is not None and number != self._number + 1):
            self._failed(None)
        self._number, self._has_ended = number, False
        # An engine may run in a caller's handler of another exception.
        self._handled = sys.exc_info()[1]

    def ends(self) -> None:
        """Call where vLLM says that the step's KV is there, and where it is done with the step."""
        raised = sys.exc_info()[1]
        if raised is not None and raised is not self._handled:
            self._failed(raised)
        self._has_ended = True

    def _failed(self, fault: BaseException | None) -> None:
        if not self.has_failed:
            why = "it did not end" if fault is None else repr(fault)[:200]
            log.error("a forward failed (%s): what vLLM's blocks hold is not known, and nothing more is saved", why)
        self.has_failed = True
