"""Rows of tokens: text, and two synthetic tasks that can only be solved by attention to earlier tokens.

    copy     BOS COPY s1..sp s1..sp s1..           a block of random symbols, repeated
    recall   BOS text PAIRS k1 v1..kn vn ASK k v k v ..   MQAR of arXiv 2312.04927: keys are distinct, any is asked

Judged are the tokens that earlier ones determine: later copies, values that are asked for, and text.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.quality.data import ASK, BOS, COPY, FIRST_SYMBOL, PAIRS, SYMBOLS


@dataclass(frozen=True)
class TaskRows:
    """tokens (rows, n) int64; is_judged (rows, n) bool, of the token itself, not of the place that predicts it."""

    tokens: Tensor
    is_judged: Tensor

    @classmethod
    def joined(cls, *parts: Tensor | int | tuple[Tensor, bool]) -> TaskRows:
        """Join columns: tensors (rows, n), or a mark; judged only where a pair says so."""
        pairs = [part if isinstance(part, tuple) else (part, False) for part in parts]
        shaped = next(tokens for tokens, _ in pairs if isinstance(tokens, Tensor))
        tokens = [t if isinstance(t, Tensor) else shaped.new_full((shaped.shape[0], 1), t) for t, _ in pairs]
        judged = [torch.full_like(t, mark, dtype=torch.bool) for t, (_, mark) in zip(tokens, pairs, strict=True)]
        return cls(torch.cat(tokens, dim=1), torch.cat(judged, dim=1))


@dataclass(frozen=True)
class TaskSource:
    """Source of rows: bytes of text (n,), and a generator on the same device."""

    text: Tensor
    random: torch.Generator

    @property
    def device(self) -> torch.device:
        return self.text.device

    def windows(self, rows: int, n: int) -> Tensor:
        """Return text from random places, (rows, n) int64."""
        first = torch.randint(self.text.numel() - n, (rows, 1), generator=self.random, device=self.device)
        return self.text[first + torch.arange(n, device=self.device)].long()

    def symbols(self, rows: int, n: int) -> Tensor:
        return torch.randint(FIRST_SYMBOL, FIRST_SYMBOL + SYMBOLS, (rows, n), generator=self.random, device=self.device)

    def order(self, rows: int, n: int) -> Tensor:
        """Return a permutation of range(n) in each row, (rows, n)."""
        return torch.rand(rows, n, generator=self.random, device=self.device).argsort(dim=1)


def text(source: TaskSource, rows: int, length: int) -> TaskRows:
    return TaskRows.joined(BOS, (source.windows(rows, length - 1), True))


def copy(source: TaskSource, rows: int, length: int, periods: tuple[int, int]) -> TaskRows:
    """Return rows of a block of symbols, repeated up to `length` tokens in all.

    periods: the least and the largest size of a row's block, drawn log-uniformly: with a row of each batch for every
    distance the model has to find what stood before the same symbol.
    """
    low, high = periods
    u = torch.rand(rows, 1, generator=source.random, device=source.device)
    period = (low * (high / low) ** u).round().long()
    place = torch.arange(length - 2, device=source.device).expand(rows, -1)
    found = TaskRows.joined(BOS, COPY, source.symbols(rows, high).gather(1, place % period))
    found.is_judged[:, 2:] = place >= period
    return found


def recall(source: TaskSource, rows: int, length: int, n_pairs: int, n_asked: int) -> TaskRows:
    """Return rows of `n_pairs` pairs, then `n_asked` questions; every pair is asked once before any is asked again.

    Text fills the front up to `length`.
    """
    filler = source.windows(rows, length - 3 - 2 * n_pairs - 2 * n_asked)
    keys, values = FIRST_SYMBOL + source.order(rows, SYMBOLS)[:, :n_pairs], source.symbols(rows, n_pairs)
    rounds = -(-n_asked // n_pairs)
    asked = torch.cat([source.order(rows, n_pairs) for _ in range(rounds)], dim=1)[:, :n_asked]
    given = torch.stack((keys, values), dim=2).flatten(1)
    questions = torch.stack((keys.gather(1, asked), values.gather(1, asked)), dim=2).flatten(1)
    found = TaskRows.joined(BOS, (filler, True), PAIRS, given, ASK, questions)
    found.is_judged[:, length - 2 * n_asked + 1 :: 2] = True
    return found
