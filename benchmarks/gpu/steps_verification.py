"""The step of verification.py: reloads with and without the look at the checksums, in turns.

kvtier has no switch for it: who loads without looking loads wrong KV one day. Here a method is replaced.
"""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.engine import Engine
from benchmarks.gpu.prompts import timed_prompt

LOAD_ONLY = {"kvtier_save": False}


def verified_in_turns(engine: Engine, n_tokens: int, pairs: int) -> list[dict[str, Any]]:
    """One stored prompt, reloaded again and again, vLLM's own prefix cache emptied before each; which of a pair comes
    first alternates. The first two are of no pair: `verifies` None."""
    from kvtier.fetch import Fetcher

    check, launches = Fetcher.check, [0]

    def counted(self: Fetcher, fetches: Any) -> int:
        launches[0] += 1
        return check(self, fetches)

    def unseen(self: Fetcher, fetches: Any) -> int:
        return len(fetches)

    tokens = timed_prompt(n_tokens, 0, engine.vocabulary)
    orders: list[list[bool | None]] = [[None, None]]
    orders += [[True, False] if number % 2 else [False, True] for number in range(pairs)]
    rows = []
    try:
        for number, order in enumerate(orders):
            for verifies in order:
                engine.forget()
                launches[0] = 0
                Fetcher.check = unseen if verifies is False else counted  # type: ignore[method-assign]
                row = engine.first_token(tokens, LOAD_ONLY)
                assert bool(launches[0]) is (verifies is not False), "the method was not replaced"
                rows.append(row | {"pair": number, "verifies": verifies})
    finally:
        Fetcher.check = check  # type: ignore[method-assign]
    return rows
