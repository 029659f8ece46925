"""Prompts of the fleet's tests by number, the same in every process."""

import random
from collections.abc import Sequence

CHUNK_TOKENS = 64
GROUP = 1000  # prompts of one group of numbers share some beginnings; those of different groups share nothing
SHARED_TOKENS = (128, 192, 320)
OWN_TOKENS = (40, 64, 130, 200, 333)
VOCABULARY = range(3, 512)
TURNS = 10_000_000  # what answers a second turn: the number of its first turn and this
SAID_TOKENS = 100


def prompt(number: int) -> list[int]:
    """One of three shared beginnings of its group, and an end of its own."""
    family, own = number % len(SHARED_TOKENS), random.Random(f"own {number}")
    shared = random.Random(f"shared {number // GROUP} {family}")
    n_own = OWN_TOKENS[number // len(SHARED_TOKENS) % len(OWN_TOKENS)]
    return shared.choices(VOCABULARY, k=SHARED_TOKENS[family]) + own.choices(VOCABULARY, k=n_own)


def second_turn(number: int, answer: Sequence[int]) -> list[int]:
    """Return the next turn after `answer` to prompt `number - TURNS`: both of them, and new tokens."""
    first = number - TURNS
    return [*prompt(first), *answer, *random.Random(f"said {first}").choices(VOCABULARY, k=SAID_TOKENS)]


def whole_tokens(number: int) -> int:
    """Return the tokens of the prompt's whole chunks, which a full hit loads."""
    return len(prompt(number)) // CHUNK_TOKENS * CHUNK_TOKENS
