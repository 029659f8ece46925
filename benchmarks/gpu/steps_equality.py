"""Steps of equality.py, and its 20 cases: prompts and the questions that follow them.

A hit in the tier and one in vLLM's own cache end at the same token, so that what follows is computed in the same shapes
from the same bits: the answers must be equal token by token also in bf16, where a computation in other shapes may round
to another token. A case is a first prompt, the number of tokens of its answer, and a question that continues from its
first `shared` tokens, a whole number of chunks; `shared` may reach into the answer (a second turn).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.engine import NO_TIER, MeasuredEngine
from benchmarks.gpu.models import prompt

ANSWER_TOKENS = 16

Answers = list[dict[str, Any]]


@dataclass(frozen=True)
class EqualityCase:
    """Numbers of tokens. n_first: of the first prompt; n_answer: of its answer; shared: kept by the question."""

    n_first: int
    n_answer: int
    shared: int
    n_more: int


def cases(chunk: int) -> list[EqualityCase]:
    """Return the cases: lengths at, beside and within multiples of a chunk; second turns; no hits."""
    # (chunks of the first prompt, tokens beside them, chunks shared, tokens of the question)
    sizes = ((1, 0, 1, 5), (1, 1, 1, 40), (2, -1, 1, chunk), (2, 0, 2, 1), (3, 0, 2, 100), (3, 17, 3, 33), (5, 0, 5, 2))
    sizes += ((6, 3, 4, 300), (8, 0, 8, 16), (9, chunk // 2, 9, 7), (12, 0, 6, 64), (16, 0, 16, 1), (17, 5, 17, 50))
    partial = [EqualityCase(n * chunk + beside, 1, shared * chunk, more) for n, beside, shared, more in sizes]
    # The last token of an answer has no KV yet: one more is generated than what is kept.
    turns = ((2, 30, 20), (4, 60, 9), (7, 11, 100))
    second = [EqualityCase(n * chunk - answer, answer + 1, n * chunk, more) for n, answer, more in turns]
    return partial + second + [EqualityCase(n, 1, 0, 30) for n in (1, chunk // 2, chunk - 1, 30)]


def question(number: int, case: EqualityCase, history: list[int], vocabulary: int) -> list[int]:
    """Return the question after `history`, the first prompt and its answer; it leaves the history at `shared`."""
    more = prompt(f"case-{number}-more", case.n_more, vocabulary)
    if case.shared < len(history) and more[0] == history[case.shared]:
        more[0] = more[0] + 1 if more[0] + 1 < vocabulary else more[0] - 1
    return history[: case.shared] + more


def answer_cases(engine: MeasuredEngine, chunk: int) -> dict[str, Any]:
    """Answer each first prompt and save; then ask its question from vLLM's own prefix cache, without the tier."""
    histories, own = [], []
    for number, case in enumerate(cases(chunk)):
        tokens = prompt(f"case-{number}", case.n_first, engine.vocabulary)
        history = tokens + engine.ask([tokens], case.n_answer, {"kvtier_load": False})[0]["answer"]
        engine.settle()
        own.append(engine.ask([question(number, case, history, engine.vocabulary)], ANSWER_TOKENS, NO_TIER)[0])
        histories.append(history)
        engine.forget()
    return {"histories": histories, "own": own}


def ask_cases(engine: MeasuredEngine, chunk: int, histories: list[list[int]]) -> Answers:
    """Ask each question with only the tier to take its prefix from."""
    answers = []
    for number, case in enumerate(cases(chunk)):
        tokens = question(number, case, histories[number], engine.vocabulary)
        answers += engine.ask([tokens], ANSWER_TOKENS, {"kvtier_save": False})
        if engine.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching:
            engine.forget()
    engine.idle_steps()
    return answers
