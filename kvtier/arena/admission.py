"""Which chunks stay in an arena after they passed through it. Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from kvtier.config.settings import Admit

SEEN_KEYS_MAX = 65_536


class Admission:
    """`second_hit` keeps what is loaded a second time, so that one scan does not push out what is used often; `saved`
    keeps that and what was just saved, which costs nothing where saves pass through the arena anyway.

    Not thread-safe; a lost race admits a chunk one load later.
    """

    def __init__(self, policy: Admit) -> None:
        self._policy = policy
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def keeps_saved(self) -> bool:
        """Whether a chunk that was just saved stays."""
        return self._policy in ("always", "saved")

    def keeps_loaded(self, key: bytes) -> bool:
        """Whether a chunk that was just loaded from below stays. Remembers the key, so ask once a load."""
        if self._policy in ("always", "never"):
            return self._policy == "always"
        if key in self._seen:
            return True
        self._seen[key] = None
        if len(self._seen) > SEEN_KEYS_MAX:
            self._seen.popitem(last=False)
        return False


class Admissions(NamedTuple):
    """arena: to the one that gather and scatter work on. host: to the host arena below it, where there is one."""

    arena: Admission
    host: Admission
