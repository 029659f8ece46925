"""The steps of equality.py and two_gpus.py: answering cases, and asking their questions."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.cases import ANSWER_TOKENS, cases, first_prompt, question
from benchmarks.gpu.engine import Engine

NO_TIER = {"kvtier_load": False, "kvtier_save": False}


def answer_cases(engine: Engine, chunk: int) -> dict[str, Any]:
    """Answers each first prompt and saves; then its question, from vLLM's own prefix cache and without the tier."""
    histories, own = [], []
    for number, case in enumerate(cases(chunk)):
        tokens = first_prompt(number, case, engine.vocabulary)
        first = engine.ask([tokens], case.n_answer, {"kvtier_load": False})[0]
        history = tokens + first["answer"]
        engine.settle()
        own.append(engine.ask([question(number, case, history, engine.vocabulary)], ANSWER_TOKENS, NO_TIER)[0])
        histories.append(history)
        engine.forget()
    return {"histories": histories, "own": own}


def ask_cases(engine: Engine, chunk: int, histories: list[list[int]]) -> list[dict[str, Any]]:
    """Each question with nothing but the tier to answer it from."""
    answers = []
    for number, case in enumerate(cases(chunk)):
        tokens = question(number, case, histories[number], engine.vocabulary)
        answers.append(engine.ask([tokens], ANSWER_TOKENS, {"kvtier_save": False})[0])
        if engine.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching:
            engine.forget()
    engine.idle_steps()
    return answers


def compute_cases(engine: Engine, chunk: int, histories: list[list[int]]) -> list[dict[str, Any]]:
    """Each question computed whole: the control, at this engine's own tensor-parallel size."""
    answers = []
    for number, case in enumerate(cases(chunk)):
        tokens = question(number, case, histories[number], engine.vocabulary)
        engine.forget()
        answers.append(engine.ask([tokens], ANSWER_TOKENS, NO_TIER)[0])
    return answers
