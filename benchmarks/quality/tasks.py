"""Rows of tokens: text, and three synthetic tasks that can only be solved by looking back. For training and evaluation.

    copy     BOS COPY s1..sp s1..sp s1..           a block of random symbols, again and again
    recall   BOS text PAIRS k1 v1..kn vn ASK k v k v ..   MQAR of arXiv 2312.04927: keys are distinct, any is asked
    needles  BOS text with NEEDLE k v1..v4 put in at places ASK k v1..v4 ..

Judged are the tokens that those before them give away: later copies, values that are asked for, and text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.quality.data import ASK, BOS, COPY, FIRST_SYMBOL, NEEDLE, PAIRS, SYMBOLS

NEEDLE_VALUES = 4
NEEDLE_TOKENS = 2 + NEEDLE_VALUES
SLOT_TOKENS = 16
"""Needles lie in slots of this many tokens, so that none lies over another."""


@dataclass(frozen=True)
class Rows:
    """tokens (rows, n) int64; is_judged (rows, n) bool, of the token itself, not of the place that predicts it."""

    tokens: Tensor
    is_judged: Tensor


@dataclass(frozen=True)
class Source:
    """Where rows come from: bytes of text (n,), and a generator on the same device."""

    text: Tensor
    random: torch.Generator

    @property
    def device(self) -> torch.device:
        return self.text.device

    def windows(self, rows: int, n: int) -> Tensor:
        """Text from random places, (rows, n) int64."""
        first = torch.randint(self.text.numel() - n, (rows, 1), generator=self.random, device=self.device)
        return self.text[first + torch.arange(n, device=self.device)].long()

    def symbols(self, rows: int, n: int) -> Tensor:
        return torch.randint(FIRST_SYMBOL, FIRST_SYMBOL + SYMBOLS, (rows, n), generator=self.random, device=self.device)

    def order(self, rows: int, n: int) -> Tensor:
        """A permutation of range(n) in each row, (rows, n)."""
        return torch.rand(rows, n, generator=self.random, device=self.device).argsort(dim=1)

    def distinct_symbols(self, rows: int, n: int) -> Tensor:
        return FIRST_SYMBOL + self.order(rows, SYMBOLS)[:, :n]


def joined(*parts: Tensor | int | tuple[Tensor, bool]) -> Rows:
    """Rows from columns one after the other: tensors (rows, n), or a mark; judged only where a pair says so."""
    pairs = [part if isinstance(part, tuple) else (part, False) for part in parts]
    shaped = next(tokens for tokens, _ in pairs if isinstance(tokens, Tensor))
    tokens = [t if isinstance(t, Tensor) else shaped.new_full((shaped.shape[0], 1), t) for t, _ in pairs]
    judged = [torch.full_like(t, is_judged, dtype=torch.bool) for t, (_, is_judged) in zip(tokens, pairs, strict=True)]
    return Rows(torch.cat(tokens, dim=1), torch.cat(judged, dim=1))


def text(source: Source, rows: int, length: int) -> Rows:
    return joined(BOS, (source.windows(rows, length - 1), True))


def copy(source: Source, rows: int, length: int, periods: tuple[int, int]) -> Rows:
    """A block of symbols, repeated up to `length` tokens in all; each row's block is of a size of its own.

    periods: the least and the largest size, drawn log-uniformly; a row of each batch for every distance leaves no way
    but to look for what stood there before.
    """
    low, high = periods
    u = torch.rand(rows, 1, generator=source.random, device=source.device)
    period = (low * (high / low) ** u).round().long()
    place = torch.arange(length - 2, device=source.device).expand(rows, -1)
    found = joined(BOS, COPY, source.symbols(rows, high).gather(1, place % period))
    found.is_judged[:, 2:] = place >= period
    return found


def recall(source: Source, rows: int, length: int, n_pairs: int, n_asked: int) -> Rows:
    """`n_pairs` pairs, then `n_asked` questions; every pair is asked once before any is asked again.

    Text fills the front up to `length`.
    """
    filler = source.windows(rows, length - 3 - 2 * n_pairs - 2 * n_asked)
    keys, values = source.distinct_symbols(rows, n_pairs), source.symbols(rows, n_pairs)
    rounds = -(-n_asked // n_pairs)
    asked = torch.cat([source.order(rows, n_pairs) for _ in range(rounds)], dim=1)[:, :n_asked]
    found = joined(
        BOS,
        (filler, True),
        PAIRS,
        torch.stack((keys, values), dim=2).flatten(1),
        ASK,
        torch.stack((keys.gather(1, asked), values.gather(1, asked)), dim=2).flatten(1),
    )
    found.is_judged[:, length - 2 * n_asked + 1 :: 2] = True
    return found


def needles(source: Source, rows: int, length: int, counts: tuple[int, int], depth: float | None = None) -> Rows:
    """Text with counts[0] needles, of which the first counts[1] are asked for. Raises ValueError without room for them.

    `depth`: where the first needle lies, 0 at the front and 1 at the end; None: anywhere, as the others.
    """
    n_needles, n_asked = counts
    hay = length - n_asked * NEEDLE_TOKENS
    n_slots = (hay - 1) // SLOT_TOKENS
    if n_slots < n_needles:
        raise ValueError(f"{n_needles} needles do not fit into {hay} tokens")
    rank = torch.rand(rows, n_slots, generator=source.random, device=source.device)
    if depth is not None:
        rank[:, round(depth * (n_slots - 1))] = -1.0
    first = 1 + SLOT_TOKENS * rank.argsort(dim=1)[:, :n_needles]
    marks = first.new_full((rows, n_needles, 1), NEEDLE)
    keys = source.distinct_symbols(rows, n_needles)[:, :, None]
    values = source.symbols(rows, n_needles * NEEDLE_VALUES).view(rows, n_needles, NEEDLE_VALUES)
    places = (first[:, :, None] + torch.arange(NEEDLE_TOKENS, device=source.device)).flatten(1)
    front = text(source, rows, hay)
    front.tokens.scatter_(1, places, torch.cat((marks, keys, values), dim=2).flatten(1))
    front.is_judged.scatter_(1, places, False)
    asks = torch.cat((torch.full_like(marks, ASK), keys, values), dim=2)[:, :n_asked]
    is_asked = torch.zeros_like(asks, dtype=torch.bool)
    is_asked[:, :, 2:] = True
    return Rows(
        torch.cat((front.tokens, asks.flatten(1)), dim=1), torch.cat((front.is_judged, is_asked.flatten(1)), dim=1)
    )
