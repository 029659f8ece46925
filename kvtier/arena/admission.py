"""Admission policy of an arena: which chunks stay cached after a load or a save. Pure."""

from collections import OrderedDict
from typing import NamedTuple

from kvtier.config.settings import Admit

SEEN_KEYS_MAX = 65_536  # keys remembered by `second_hit`


class Admission:
    """Policy of one arena. `second_hit` keeps a chunk from its second load on, so that a scan does not evict chunks in
    frequent use; `saved` also keeps saved chunks, which costs nothing where saves pass through the arena anyway.

    Not thread-safe: a lost race admits a chunk one load later.
    """

    def __init__(self, policy: Admit) -> None:
        self._policy = policy
        self._seen: OrderedDict[bytes, None] = OrderedDict()

    def keeps_saved(self) -> bool:
        """Return True if a chunk that was just saved stays."""
        return self._policy in ("always", "saved")

    def keeps_loaded(self, key: bytes) -> bool:
        """Return True if a chunk that was just loaded from below stays. Remembers the key, so call it once a load."""
        if self._policy in ("always", "never"):
            return self._policy == "always"
        if key in self._seen:
            return True
        self._seen[key] = None
        if len(self._seen) > SEEN_KEYS_MAX:
            self._seen.popitem(last=False)
        return False


class Admissions(NamedTuple):
    """Policies of a worker. arena: for the one that gather and scatter work on. host: for the host arena below it."""

    arena: Admission
    host: Admission
