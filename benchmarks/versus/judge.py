"""Judgement of a result file: a cell for each storage, length and system, peers that are faster, and the goals.

The file has one entry for each process that ran, so that pieces of it may run in several calls:
{"kind", "place", "system", "repetition", "boot", "commit", "date", ...}. `place` is the storage, "tmpfs" or "disk".
Kinds: alone (no engine), bare (an engine without a tier: computed, and from its own prefix cache), store, reload.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import floor
from statistics import mean, median
from typing import Any

from benchmarks.report import Table, ms, spread
from benchmarks.versus.contestants import CONTESTANTS

OURS = ("kvtier", "kvtier-k4v4")
PEERS = ("native", "lmcache", "lmcache-mp")
SHORT_TOKENS = 256  # a hit that lacks so many tokens of its prompt is not whole
NEARLY = 0.95  # pinned copies are timed too, and vary by less than the rest
# Storage, system, and how many times as fast as vLLM's own tiering it must be at the largest length.
GOALS = (("tmpfs", "kvtier", 2.0), ("tmpfs", "kvtier-k4v4", 4.0), ("disk", "kvtier-k4v4", 4.0))

Runs = list[dict[str, Any]]


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None


@dataclass(frozen=True)
class VersusCell:
    """One system at one length. Times in seconds, one of each repetition, to the first token; rates in bytes a second.

    rate: bytes of the engine's KV over the time above the floor. ceiling: the smaller of pinned copies (`copies`) and
    of the folder's rate.
    """

    storage: str
    tokens: int
    system: str
    times: list[float]
    hit_tokens: int
    computed: float | None
    floor: float | None
    kv_bytes: int
    ceiling: float | None
    copies: float | None

    @property
    def title(self) -> str:
        return CONTESTANTS[self.system].title

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
        """False: the first token came before the KV can have come, so it was computed without it."""
        return self.least is None or self.ttft > NEARLY * self.least

    @property
    def rate(self) -> float | None:
        return None if self.floor is None or self.ttft <= self.floor else self.kv_bytes / (self.ttft - self.floor)

    @property
    def of_ceiling(self) -> float | None:
        return self.rate / self.ceiling if self.rate and self.ceiling else None


class Entries:
    """Entries of a result file. token_bytes: KV of a token, of all layers and heads."""

    def __init__(self, runs: Runs, token_bytes: int) -> None:
        self._runs = [run for run in runs if "failed" not in run]
        self._token_bytes = token_bytes

    def storages(self) -> list[str]:
        return list(dict.fromkeys(run["place"] for run in self._of("reload")))

    def commits(self) -> list[str]:
        return sorted({run["commit"][:7] for run in self._runs if run.get("commit")})

    def machines(self) -> int:
        """Return the number of machines, or of starts of one machine."""
        return len({run["boot"] for run in self._runs})

    def lengths(self, storage: str) -> list[int]:
        return sorted({row["tokens"] for run in self._of("reload", storage) for row in run["rows"]})

    def cells(self) -> dict[tuple[str, int, str], VersusCell]:
        keys = [
            (storage, tokens, system)
            for storage in self.storages()
            for tokens in self.lengths(storage)
            for system in CONTESTANTS
        ]
        return {key: cell for key in keys if (cell := self._cell(*key)) is not None}

    def kvikio(self, storage: str) -> dict[int, list[float]]:
        """Return {tokens: seconds of each repetition} of reads of as many bytes."""
        found: dict[int, list[float]] = {}
        for run in self._of("alone", storage):
            for n_bytes, seconds in run.get("kvikio_s", {}).items():
                found.setdefault(int(n_bytes) // self._token_bytes, []).extend(seconds)
        return found

    def bare(self, tokens: int, boots: Iterable[str] = ()) -> tuple[float | None, float | None]:
        """Return the medians of computing and of the floor (vLLM's own prefix hit), on these machines if possible."""
        runs = [run for run in self._of("bare") if run["boot"] in boots] or self._of("bare")
        computed, own = ([row for run in runs for row in run[kind]] for kind in ("computed", "own"))
        of_length = [[row["ttft_s"] for row in rows if row["tokens"] == tokens] for rows in (computed, own)]
        return _median(of_length[0]), _median(of_length[1][1::2])

    def _of(self, kind: str, storage: str | None = None, system: str | None = None) -> Runs:
        runs = [run for run in self._runs if run["kind"] == kind and storage in (None, run["place"])]
        return [run for run in runs if system in (None, run["system"])]

    def _copies(self, boots: Iterable[str]) -> float | None:
        """Return the rate of pinned copies to the GPU."""
        runs = [run for run in self._of("alone") if run["boot"] in boots] or self._of("alone")
        return _median(run["copies"]["h2d_bytes_s"] for run in runs if run.get("copies"))

    def _of_folder(self, storage: str, system: str) -> float | None:
        """Return the folder's rate: the larger of direct reads around the system's repetitions (mean) and of KvikIO
        alone on the longest prompt's bytes (median), because a disk's rate may change by the minute."""
        reads = [rate for run in self._of("reload", storage, system) for rate in run.get("read_bytes_s", [])]
        alone = self.kvikio(storage)
        longest = max(alone, default=0)
        rates = [mean(reads)] if reads else []
        rates += [longest * self._token_bytes / median(alone[longest])] if alone else []
        return max(rates, default=None)

    def _cell(self, storage: str, tokens: int, system: str) -> VersusCell | None:
        runs = self._of("reload", storage, system)
        rows = [row for run in runs for row in run["rows"] if row["tokens"] == tokens]
        if not rows:
            return None
        boots = {run["boot"] for run in runs}
        computed, floor = self.bare(tokens, boots)
        copies = self._copies(boots)
        limits = [rate for rate in (copies, self._of_folder(storage, system)) if rate]
        hit = min(row["hit_tokens"] for row in rows)
        return VersusCell(
            storage,
            tokens,
            system,
            [row["ttft_s"] for row in rows],
            hit,
            computed,
            floor,
            hit * self._token_bytes,
            min(limits, default=None),
            copies,
        )


Cells = dict[tuple[str, int, str], VersusCell]


def losses(cells: Cells) -> list[tuple[VersusCell, VersusCell]]:
    """Return each pair of kvtier and a peer that is as fast or faster, on the same storage at the same length.

    A peer that did not hit the whole prompt has computed the rest, and counts with the time that it took. Cells that
    loaded nothing are left out.
    """
    pairs = [
        (cells[storage, tokens, name], peer)
        for (storage, tokens, system), peer in cells.items()
        if system in PEERS
        for name in OURS
        if (storage, tokens, name) in cells
    ]
    return [(mine, peer) for mine, peer in pairs if mine.has_loaded and peer.has_loaded and mine.ttft >= peer.ttft]


def goals(cells: Cells) -> list[tuple[bool, str]]:
    """Return of GOALS whose both sides were measured, and loaded: whether it is met, and its text.

    Ratios are rounded down: none that misses its goal reads as if it met it.
    """
    found = []
    for storage, system, times in GOALS:
        lengths = [tokens for at, tokens, name in cells if (at, name) == (storage, system)]
        key = (storage, max(lengths, default=0))
        cell, native = cells.get((*key, system)), cells.get((*key, "native"))
        if cell and native and cell.has_loaded and native.has_loaded:
            ratio = native.ttft / cell.ttft
            head = f"{cell.title} from {storage}, {cell.tokens:,} tokens: {floor(100 * ratio) / 100:.2f}x"
            found.append((ratio >= times, f"{head} vLLM's own tiering (goal {times:g}x)"))
    return found


def table_rows(entries: Entries) -> Table:
    """Return columns and rows, one row a storage and length: TTFT of reloads by fresh processes."""
    cells = entries.cells()
    systems = [system for system in (*OURS, *PEERS) if any(key[2] == system for key in cells)]
    lines = []
    for place, tokens in [(at, length) for at in entries.storages() for length in entries.lengths(at)]:
        found = [cells.get((place, tokens, system)) for system in systems]
        raw = cells.get((place, tokens, "kvtier"))
        share = f"{raw.of_ceiling:.0%}" if raw and raw.of_ceiling else "-"
        lines.append([place, f"{tokens:,}", *map(ms, entries.bare(tokens)), *map(_text_of, found), share])
    titles = [CONTESTANTS[system].title for system in systems]
    return ["storage", "tokens", "computed", "hit in vLLM's cache", *titles, "kvtier / ceiling"], lines


def verdict(cells: Cells) -> str:
    """Return a sentence on goals and losses."""
    judged = [f"{text}: {'met' if is_met else '**missed**'}" for is_met, text in goals(cells)]
    behind = [f"{mine.system} to {peer.system} at {mine.tokens:,}" for mine, peer in losses(cells)]
    slower = f"kvtier is slower than a peer in: {', '.join(behind) or 'no comparison'}."
    return f"Goals: {'; '.join(judged) or 'none in this run'}. {slower}"


def _text_of(cell: VersusCell | None) -> str:
    if cell is None:
        return "-"
    notes = [] if cell.has_loaded else ["**loaded nothing**"]
    notes += [] if cell.is_whole else [f"hit of {cell.hit_tokens:,}"]
    return f"{spread(cell.times)}{'; ' if notes else ''}{', '.join(notes)}"
