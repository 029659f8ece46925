"""How far two passes over the same requests differ: in answers, and in the leads of tokens up to where answers part.

A lead is by how much a token's log probability exceeds the second best one's (nats). Another batch is another order of
sums, so an engine need not answer as it did before; by how much its leads move without any tier is what can be blamed
on that, and so the width of a tie. Up to the token where two answers part, their contexts are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Answer = dict[str, Any]
"""Of Engine.ask: answer, its tokens; leads, one of each; hit_tokens."""
Part = list[Answer]


def compared(mine: Sequence[Part], reference: Sequence[Part]) -> dict[str, Any]:
    """One pass against another one. Parts: the requests on the shared prefix alone, then those of each round.

    largest_shift: the most that a lead moved (nats); an answer that parts moved it by both leads, for one token was
    ahead and now the other one is. differing: round is "shared" for the first part; lead is the reference's.
    """
    differing, shifts = [], [0.0]
    names = ("shared", *range(len(reference) - 1))
    for name, ours, theirs in zip(names, mine, reference, strict=True):
        for request, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            parting = _parting(a["answer"], b["answer"])
            shifts += [abs(x - y) for x, y in zip(a["leads"][:parting], b["leads"][:parting], strict=True)]
            if parting is not None:
                moved = a["leads"][parting] + b["leads"][parting]
                shifts.append(moved)
                differing.append(
                    {
                        "round": name,
                        "request": request,
                        "token": parting,
                        "lead": b["leads"][parting],
                        "moved": round(moved, 7),
                        "hit_tokens": a["hit_tokens"],
                    }
                )
    n_shared, n_rounds = len(reference[0]), sum(map(len, reference[1:]))
    shared_differing = sum(row["round"] == "shared" for row in differing)
    return {
        "same_answers": n_rounds - len(differing) + shared_differing,
        "answers": n_rounds,
        "same_shared_answers": n_shared - shared_differing,
        "shared_answers": n_shared,
        "differing": differing,
        "hit_tokens": sum(a["hit_tokens"] for part in mine[1:] for a in part),
        "tokens_compared": len(shifts) - 1,
        "largest_shift": round(max(shifts), 7),
    }


def within(parts: Sequence[Part], width: float) -> tuple[int, int]:
    """How many tokens lead by no more than `width`, and of how many."""
    leads = [lead for part in parts for answer in part for lead in answer["leads"]]
    return sum(lead <= width for lead in leads), len(leads)


def _parting(mine: list[int], reference: list[int]) -> int | None:
    """The first token that is another one; None if all are the same."""
    return next((n for n, (a, b) in enumerate(zip(mine, reference, strict=True)) if a != b), None)
