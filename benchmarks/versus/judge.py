"""What the entries say: a cell for each place, length and system, who is ahead, and whether the goals are met."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from statistics import median
from typing import Any

from benchmarks.versus.contestants import CONTESTANTS

OURS = ("kvtier", "kvtier-k4v4")
PEERS = ("native", "lmcache", "lmcache-mp")
SHORT_TOKENS = 256
"""A hit that lacks this much of its prompt is not whole."""

NEARLY = 0.95
"""Pinned copies are timed too, and vary by less than the rest."""

GOALS = [("tmpfs", "kvtier", 2.0), ("tmpfs", "kvtier-k4v4", 4.0), ("disk", "kvtier-k4v4", 4.0)]
"""Place, system, and how many times as fast as vLLM's own tiering at the largest length."""


@dataclass(frozen=True)
class Cell:
    """One system at one length. Times in seconds, one of each repetition, to the first token; rates in bytes a second.

    rate: bytes of the engine's KV over the time above the floor. ceiling: the smaller of pinned copies and of what the
    folder gives, `Entries.of_folder`. copies: pinned ones alone. cold: to the first token while it stores. stored:
    bytes of all lengths together.
    """

    place: str
    tokens: int
    system: str
    times: list[float]
    hit_tokens: int
    computed: float | None
    floor: float | None
    cold: float | None
    kv_bytes: int
    ceiling: float | None
    copies: float | None
    stored: int | None
    boots: frozenset[str]

    @property
    def ttft(self) -> float:
        return median(self.times)

    @property
    def is_whole(self) -> bool:
        return self.hit_tokens > self.tokens - SHORT_TOKENS

    @property
    def least(self) -> float | None:
        """Seconds that the KV needs at least to pass PCIe; None: not known, or encoded, which is fewer bytes."""
        is_encoded = "codec" in CONTESTANTS[self.system].extra
        return None if is_encoded or not self.copies else self.kv_bytes / self.copies

    @property
    def has_loaded(self) -> bool:
        """False: the first token was there before the KV can have been, so it was computed without it."""
        return self.least is None or self.ttft > NEARLY * self.least

    @property
    def rate(self) -> float | None:
        return None if self.floor is None or self.ttft <= self.floor else self.kv_bytes / (self.ttft - self.floor)

    @property
    def of_ceiling(self) -> float | None:
        return self.rate / self.ceiling if self.rate and self.ceiling else None

    @property
    def cold_cost(self) -> float | None:
        """What storing adds to the time that computing takes, as a share of it."""
        return self.cold / self.computed - 1 if self.cold and self.computed else None


class Entries:
    """runs: of a result file. token_bytes: KV of a token, of all layers and heads."""

    def __init__(self, runs: list[dict[str, Any]], token_bytes: int) -> None:
        self._runs = [run for run in runs if "failed" not in run]
        self.failed = [run for run in runs if "failed" in run]
        self._token_bytes = token_bytes

    def places(self) -> list[str]:
        return list(dict.fromkeys(run["place"] for run in self._of("reload")))

    def commits(self) -> list[str]:
        return sorted({run["commit"][:7] for run in self._runs if run.get("commit")})

    def machines(self) -> int:
        """Of how many, or of one that was started so often."""
        return len({run["boot"] for run in self._runs})

    def lengths(self, place: str) -> list[int]:
        return sorted({row["tokens"] for run in self._of("reload", place) for row in run["rows"]})

    def cells(self) -> dict[tuple[str, int, str], Cell]:
        found = {}
        for place in self.places():
            systems = {run["system"] for run in self._of("reload", place)}
            for tokens in self.lengths(place):
                for system in (name for name in CONTESTANTS if name in systems):
                    if (cell := self._cell(place, tokens, system)) is not None:
                        found[place, tokens, system] = cell
        return found

    def kvikio(self, place: str) -> dict[int, list[float]]:
        """Tokens -> seconds of each repetition, of as many bytes."""
        found: dict[int, list[float]] = {}
        for run in self._of("alone", place):
            for n_bytes, seconds in run.get("kvikio_s", {}).items():
                found.setdefault(int(n_bytes) // self._token_bytes, []).extend(seconds)
        return found

    def bare(self, tokens: int, boots: frozenset[str] = frozenset()) -> tuple[float | None, float | None]:
        """Computed, and the floor (vLLM's own prefix hit): medians of `bare_times`."""
        computed, own = self.bare_times(tokens, boots)
        return (median(computed) if computed else None), (median(own) if own else None)

    def bare_times(self, tokens: int, boots: frozenset[str] = frozenset()) -> tuple[list[float], list[float]]:
        """Seconds without a tier, computed and of own hits: of the same machine where that was measured there too."""
        runs = [run for run in self._of("bare") if run["boot"] in boots] or self._of("bare")
        computed = [row["ttft_s"] for run in runs for row in run["computed"] if row["tokens"] == tokens]
        return computed, [row["ttft_s"] for run in runs for row in run["own"] if row["tokens"] == tokens][1::2]

    def transfers(self, place: str, tokens: int, system: str) -> list[float]:
        """Of each reload that counted them: bytes a second from the start of its load to its last block."""
        runs = [run for run in self._of("reload", place) if run["system"] == system]
        rows = [row for run in runs for row in run["rows"] if row["tokens"] == tokens and row.get("load_seconds")]
        return [row["load_bytes"] / row["load_seconds"] for row in rows]

    def copies(self, boots: frozenset[str] = frozenset()) -> float | None:
        """Pinned copies to the GPU, bytes a second."""
        runs = [run for run in self._of("alone") if run["boot"] in boots] or self._of("alone")
        rates = [run["copies"]["h2d_bytes_s"] for run in runs if run.get("copies")]
        return median(rates) if rates else None

    def reads(self, place: str, system: str | None = None) -> list[float]:
        """Direct reads right before and after the repetitions, bytes a second."""
        runs = [run for run in self._of("reload", place) if system in (None, run["system"])]
        return [rate for run in runs for rate in run.get("read_bytes_s", [])]

    def of_folder(self, place: str, system: str) -> float | None:
        """Bytes a second that the folder gives: the larger of direct reads around the system's repetitions (mean) and
        of KvikIO alone on the longest prompt's bytes (median): a disk's rate may change by the minute."""
        reads, alone = self.reads(place, system), self.kvikio(place)
        longest = max(alone, default=0)
        rates = [sum(reads) / len(reads)] if reads else []
        rates += [longest * self._token_bytes / median(alone[longest])] if alone else []
        return max(rates, default=None)

    def _of(self, kind: str, place: str | None = None) -> list[dict[str, Any]]:
        return [run for run in self._runs if run["kind"] == kind and place in (None, run["place"])]

    def _cell(self, place: str, tokens: int, system: str) -> Cell | None:
        runs = [run for run in self._of("reload", place) if run["system"] == system]
        rows = [row for run in runs for row in run["rows"] if row["tokens"] == tokens]
        if not rows:
            return None
        boots = frozenset(run["boot"] for run in runs)
        computed, floor = self.bare(tokens, boots)
        stored = [run for run in self._of("store", place) if run["system"] == system]
        cold = [row["ttft_s"] for run in stored for row in run["rows"] if row["tokens"] == tokens]
        copies = self.copies(boots)
        limits = [rate for rate in (copies, self.of_folder(place, system)) if rate]
        hit = min(row["hit_tokens"] for row in rows)
        return Cell(
            place,
            tokens,
            system,
            [row["ttft_s"] for row in rows],
            hit,
            computed,
            floor,
            median(cold) if cold else None,
            hit * self._token_bytes,
            min(limits) if limits else None,
            copies,
            stored[-1]["stored_bytes"] if stored else None,
            boots,
        )


Cells = dict[tuple[str, int, str], Cell]


def losses(cells: Cells) -> list[tuple[Cell, Cell]]:
    """Every pair of one of ours and of a peer that is ahead of it, or level, in the same place and at the same length.

    A peer that did not hit the whole prompt has computed the rest, and counts with the time that it took.
    """
    return [(mine, peer) for mine, peer in compared(cells) if mine.ttft >= peer.ttft]


def compared(cells: Cells) -> list[tuple[Cell, Cell]]:
    """Every pair of one of ours and of a peer, in the same place and at the same length; not of what loaded nothing."""
    return [
        (cells[place, tokens, name], peer)
        for (place, tokens, system), peer in cells.items()
        if system in PEERS and peer.has_loaded
        for name in OURS
        if (place, tokens, name) in cells and cells[place, tokens, name].has_loaded
    ]


def slower_than_computing(cells: Cells) -> list[Cell]:
    return [cell for cell in cells.values() if cell.system in OURS and cell.computed and cell.ttft >= cell.computed]


def goals(cells: Cells) -> list[tuple[bool, str]]:
    """Of GOALS whose both sides were measured, and loaded: whether it is met, and which it is.

    Times are rounded down: none that misses its goal reads as if it met it.
    """
    found = []
    for place, system, times in GOALS:
        pairs = [
            (cell, cells.get((place, tokens, "native")))
            for (at, tokens, name), cell in sorted(cells.items())
            if (at, name) == (place, system)
        ]
        if not pairs or pairs[-1][1] is None:
            continue
        cell, native = pairs[-1]
        assert native is not None
        if not (cell.has_loaded and native.has_loaded):
            continue
        ratio = native.ttft / cell.ttft
        found.append(
            (
                ratio >= times,
                f"{CONTESTANTS[system].title} from {place}, {cell.tokens:,} tokens: "
                f"{floor(100 * ratio) / 100:.2f}x vLLM's own tiering (goal {times:g}x)",
            )
        )
    return found
