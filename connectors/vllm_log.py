"""kvtier's lines in vLLM's log."""

from __future__ import annotations

import logging

log = logging.getLogger("kvtier")


def join_log() -> None:
    """Lets kvtier's lines appear as vLLM's own do, unless the caller has arranged for logging."""
    if not log.handlers and not logging.getLogger().handlers:
        log.handlers = list(logging.getLogger("vllm").handlers)
        log.setLevel(logging.getLogger("vllm").level)
        log.propagate = False
