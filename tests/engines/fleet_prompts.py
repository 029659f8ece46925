"""Prompts of the fleet's tests by number, the same in every process."""

from __future__ import annotations

import random

CHUNK_TOKENS = 64
GROUP = 1000
"""Prompts of one group of numbers share some beginnings; those of different groups share nothing."""
SHARED_TOKENS = (128, 192, 320)
OWN_TOKENS = (40, 64, 130, 200, 333)
VOCABULARY = range(3, 512)


def prompt(number: int) -> list[int]:
    """One of three shared beginnings of its group, and an end of its own."""
    family, own = number % len(SHARED_TOKENS), random.Random(f"own {number}")
    shared = random.Random(f"shared {number // GROUP} {family}")
    n_own = OWN_TOKENS[number // len(SHARED_TOKENS) % len(OWN_TOKENS)]
    return shared.choices(VOCABULARY, k=SHARED_TOKENS[family]) + own.choices(VOCABULARY, k=n_own)


def whole_tokens(number: int) -> int:
    """Of the prompt's whole chunks: what a full hit brings."""
    return len(prompt(number)) // CHUNK_TOKENS * CHUNK_TOKENS
