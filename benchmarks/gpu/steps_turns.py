"""The step of in_turns.py: reloads with a constant of kvtier's at different values, in turns."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu.engine import Engine
from benchmarks.gpu.prompts import timed_prompt

LOAD_ONLY = {"kvtier_save": False}


def constants_in_turns(
    engine: Engine, n_tokens: int, rounds: int, constants: Sequence[tuple[str, str, list[Any]]]
) -> list[list[dict[str, Any]]]:
    """Rows of each constant (module, name, values), one after another: the others keep their values."""
    return [_in_turns(engine, n_tokens, rounds, module, name, values) for module, name, values in constants]


def _in_turns(
    engine: Engine, n_tokens: int, rounds: int, module: str, name: str, values: Sequence[Any]
) -> list[dict[str, Any]]:
    """One stored prompt, reloaded with each value in each round, vLLM's own prefix cache emptied before; each round
    begins with another value. The first round is of no use: `round` 0."""
    owner = importlib.import_module(module)
    usual = getattr(owner, name)
    tokens = timed_prompt(n_tokens, 0, engine.vocabulary)
    rows = []
    try:
        for number in range(rounds + 1):
            first = number % len(values)
            for value in [*values[first:], *values[:first]]:
                engine.forget()
                setattr(owner, name, value)
                rows.append(engine.first_token(tokens, LOAD_ONLY) | {"round": number, "value": value})
    finally:
        setattr(owner, name, usual)
    return rows
