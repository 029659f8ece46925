"""20 prompts and what is asked after each, so that a hit in the tier and one in vLLM's own cache end at the same token.

What follows a hit is then computed in the same shapes from the same bits, and the answers must be equal token by token
also in bf16, where a computation in other shapes may round to another token. A case is a first prompt, how many tokens
of answer it gets, and a question that goes on from its first `shared` tokens, a whole number of chunks; `shared` may
reach into the answer (a second turn). Of the last cases nothing can be shared.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.gpu.prompts import prompt

ANSWER_TOKENS = 16


@dataclass(frozen=True)
class Case:
    """All in tokens. n_first: of the first prompt; n_answer: generated after it; shared: kept by the question."""

    n_first: int
    n_answer: int
    shared: int
    n_more: int


def cases(chunk: int) -> list[Case]:
    """In multiples of a chunk: exact, one beside it, within one; many short, some long; second turns; no hits."""
    partial = [
        Case(n, 1, shared * chunk, more)
        for n, shared, more in (
            (chunk, 1, 5),
            (chunk + 1, 1, 40),
            (2 * chunk - 1, 1, chunk),
            (2 * chunk, 2, 1),
            (3 * chunk, 2, 100),
            (3 * chunk + 17, 3, 33),
            (5 * chunk, 5, 2),
            (6 * chunk + 3, 4, 300),
            (8 * chunk, 8, 16),
            (9 * chunk + chunk // 2, 9, 7),
            (12 * chunk, 6, 64),
            (16 * chunk, 16, 1),
            (17 * chunk + 5, 17, 50),
        )
    ]
    # The last token of an answer has no KV yet: one more is generated than what is kept.
    turns = [Case(n * chunk - g, g + 1, n * chunk, more) for n, g, more in ((2, 30, 20), (4, 60, 9), (7, 11, 100))]
    misses = [Case(n, 1, 0, 30) for n in (1, chunk // 2, chunk - 1, 30)]
    return partial + turns + misses


def first_prompt(number: int, case: Case, vocabulary: int) -> list[int]:
    return prompt(f"case-{number}", case.n_first, vocabulary)


def question(number: int, case: Case, history: list[int], vocabulary: int) -> list[int]:
    """What is asked after `history`, the first prompt and its answer; it leaves the history at token `shared`."""
    more = prompt(f"case-{number}-more", case.n_more, vocabulary)
    if case.shared < len(history) and more[0] == history[case.shared]:
        more[0] = more[0] + 1 if more[0] + 1 < vocabulary else more[0] - 1
    return history[: case.shared] + more
