"""Prompts of random tokens: the same in every process for the same seed, and sharing nothing for different ones."""

from __future__ import annotations

import random

FIRST_TOKEN = 10
"""Below it lie the special tokens."""


def prompt(seed: str, n_tokens: int, vocabulary: int) -> list[int]:
    return random.Random(seed).choices(range(FIRST_TOKEN, vocabulary), k=n_tokens)


def timed_prompt(n_tokens: int, number: int, vocabulary: int) -> list[int]:
    """The `number`-th prompt of a length whose time to the first token is measured."""
    return prompt(f"timed-{n_tokens}-{number}", n_tokens, vocabulary)
