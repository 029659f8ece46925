"""Prefill and load costs of an engine, kept in the index for the next one: metadata record `costs/<digest>`.

A process that has just started has computed nothing and would load every hit, also from storage that is slower than
computing. An earlier engine with the same model, release, device, ranks and host has measured both. The record is only
a prior: it is replaced by what the engine measures itself.

    {"prefill_token_s": 6.5e-05, "load_fixed_s": 0.004, "load_token_s": 2.4e-06}
"""

import json
import math
from contextlib import suppress

from blake3 import blake3

from kvtier.errors import Corrupt
from kvtier.format.namespace import canonical_text
from kvtier.index.base import Index
from kvtier.scheduler.engine_report import About
from kvtier.scheduler.load_threshold import Costs, LoadCost
from kvtier.storage.root_owner import host_key

PREFIX = "costs/"
KEPT_S = 30 * 86400.0  # time until an unchanged record expires, seconds
CHANGE = 0.1  # relative change of a cost from which on the record is rewritten
_NAMES = ("prefill_token_s", "load_fixed_s", "load_token_s")
NOTE_BYTES_MAX = 1024  # longest record that is read, bytes


def note_name(namespace_id: bytes, about: About) -> str:
    """Return the record's name, made of everything that costs depend on except the load on the machine."""
    engine = [about.engine, about.engine_version, about.device, about.ranks, host_key()]
    return PREFIX + blake3(namespace_id + canonical_text(engine).encode()).hexdigest()[:32]


def _values(costs: Costs) -> dict[str, float]:
    return dict(zip(_NAMES, (costs.prefill_token_s, costs.load.fixed_s, costs.load.token_s), strict=True))


def pack(costs: Costs) -> bytes:
    return canonical_text(_values(costs)).encode()


def unpack(note: bytes) -> Costs:
    """Parse a record. Raises Corrupt, for every process with access to the index can write one."""
    try:
        if len(note) > NOTE_BYTES_MAX:
            raise ValueError(f"{len(note)} bytes")
        values = json.loads(note)
        prefill, fixed, token = (float(values[name]) for name in _NAMES)
        if not (0 < prefill < math.inf and 0 <= fixed < math.inf and 0 <= token < math.inf):
            raise ValueError("no costs")
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as fault:
        raise Corrupt(f"note of costs: {fault}") from None
    return Costs(prefill, LoadCost(fixed, token))


class CostHistory:
    """Record of costs in the index. One thread calls `refresh`, which waits for the index. Any thread may use the
    attributes.

    expected: costs of an earlier engine like this one; None: not known. latest: costs that this engine has measured.
    """

    def __init__(self, index: Index, name: str) -> None:
        self.expected: Costs | None = None
        self.latest: Costs | None = None
        self._index = index
        self._name = name
        self._kept: Costs | None = None
        self._was_recalled = False

    def refresh(self, now_s: float) -> None:
        """Read the record in the first call, and replace it when the measured costs differ. Raises IndexUnavailable."""
        if not self._was_recalled:
            note = self._index.notes(self._name, now_s).get(self._name)
            self._was_recalled = True
            if note is not None:
                with suppress(Corrupt):  # a later refresh replaces it
                    self.expected = self._kept = unpack(note)
        latest = self.latest
        if latest is not None and (self._kept is None or not is_close(latest, self._kept)):
            self._index.put_note(self._name, pack(latest), now_s + KEPT_S)
            self._kept = latest


def is_close(one: Costs, other: Costs) -> bool:
    pairs = zip(_values(one).values(), _values(other).values(), strict=True)
    return all(math.isclose(a, b, rel_tol=CHANGE) for a, b in pairs)
