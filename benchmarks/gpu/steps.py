"""Steps of one engine that take times. Each gets the engine and returns facts as JSON; the scripts judge them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.gpu import inside
from benchmarks.gpu.engine import NO_TIER, MeasuredEngine, parameters
from benchmarks.gpu.models import prompt

STORE_PASSES = 3  # at most, to store a prompt whose chunks were skipped
TURN_POLL_S = 0.02
ANSWER_TOKENS = 24  # of each question of the demo

Row = dict[str, Any]


def timed_prompt(engine: MeasuredEngine, n_tokens: int, number: int = 0) -> list[int]:
    """Return the `number`-th prompt of a length whose time to the first token is measured."""
    return prompt(f"timed-{n_tokens}-{number}", n_tokens, engine.vocabulary)


def warm_up(engine: MeasuredEngine, n_tokens: int) -> list[Row]:
    """Compute, store and load two prompts of no other use.

    Kernels are compiled and kvtier's first segment sets are made here, and not in what is timed.
    """
    done = []
    for number, size in enumerate((n_tokens, 300)):
        tokens = prompt(f"warm-up-{engine.system}-{number}", size, engine.vocabulary)
        done.append(engine.first_token(tokens))
        if engine.system in ("none", "kvtier"):
            engine.settle()
            engine.forget()
        done.append(engine.first_token(tokens))
    engine.idle_steps()
    return done


def take_turn(engine: MeasuredEngine, ready: str, go: str, timeout_s: float) -> float:
    """Make the file `ready`, wait for the file `go` while others are measured, and return the seconds."""
    started = time.monotonic()
    Path(ready).touch()
    while not Path(go).exists():
        if time.monotonic() - started > timeout_s:
            raise TimeoutError(f"no turn within {timeout_s:.0f} s")
        time.sleep(TURN_POLL_S)
    return time.monotonic() - started


def store(engine: MeasuredEngine, lengths: list[int]) -> list[Row]:
    """Compute a prompt of each length with the tier on, and wait until each is stored whole."""
    return [_store_whole(engine, timed_prompt(engine, n_tokens)) for n_tokens in lengths]


def first_tokens(engine: MeasuredEngine, lengths: list[int]) -> list[Row]:
    """Measure the time to the first token of each prompt, one at a time."""
    return [engine.first_token(timed_prompt(engine, n_tokens)) for n_tokens in lengths]


def computed_and_own(engine: MeasuredEngine, lengths: list[int], count: int) -> dict[str, list[Row]]:
    """Compute each prompt, then ask twice from vLLM's own prefix cache: the floor of what a reload can reach."""
    rows: dict[str, list[Row]] = {"computed": [], "own": []}
    for n_tokens in lengths:
        for number in range(count):
            tokens = timed_prompt(engine, n_tokens, number)
            rows["computed"].append(engine.first_token(tokens))
            rows["own"] += [engine.first_token(tokens) for _ in range(2)]
    return rows


def in_one_process(engine: MeasuredEngine, lengths: list[int], reloads: int) -> dict[str, list[Row]]:
    """Measure one prompt of each length: computed and saved, twice from vLLM's own prefix cache, then `reloads` times
    from the tier, with vLLM's cache emptied each time. The first reload may fill an arena, later ones come from it."""
    rows: dict[str, list[Row]] = {"computed": [], "own": [], "reloaded": []}
    for n_tokens in lengths:
        tokens = timed_prompt(engine, n_tokens)
        rows["computed"].append(_store_whole(engine, tokens))
        rows["own"] += [engine.first_token(tokens) for _ in range(2)]
        for _ in range(reloads):
            engine.settle()
            engine.forget()
            rows["reloaded"].append(engine.first_token(tokens))
    return rows


def saving_on_and_off(engine: MeasuredEngine, n_tokens: int, pairs: int) -> dict[str, list[Row]]:
    """Measure cold prompts that share nothing, saved and not saved in turn; each pair in the other order."""
    rows: dict[str, list[Row]] = {"on": [], "off": []}
    for number in range(pairs):
        for kind in ("on", "off") if number % 2 == 0 else ("off", "on"):
            tokens = prompt(f"saving-{kind}-{number}", n_tokens, engine.vocabulary)
            row = engine.first_token(tokens, NO_TIER if kind == "off" else {"kvtier_load": False})
            row["settle_s"] = engine.settle()
            rows[kind].append(row)
    return rows


def write_burst(engine: MeasuredEngine, n_tokens: int, count: int, seconds: float) -> dict[str, Any]:
    """Measure durable bytes a second when more is offered than the storage takes.

    Prompts are computed unsaved, then asked again from vLLM's own cache, saved now, until the time is up. Counted from
    the first of these to the last chunk published.
    """
    prompts = [prompt(f"burst-{number}", n_tokens, engine.vocabulary) for number in range(count)]
    for tokens in prompts:
        engine.ask([tokens], 1, NO_TIER)
    before, started, asked = engine.counters(), time.perf_counter(), 0
    while time.perf_counter() - started < seconds and asked < 4 * count:
        engine.ask([prompts[asked % count]], 1, {"kvtier_load": False})
        asked += 1
    engine.settle()
    elapsed = time.perf_counter() - started
    saved = engine.counters().get("save_bytes", 0.0) - before.get("save_bytes", 0.0)
    return {"asked": asked, "elapsed_s": elapsed, "saved_bytes": saved, "bytes_s": saved / elapsed}


def answer_documents(
    engine: MeasuredEngine, prompts: list[list[int]], questions: int, n_tokens: int, has_own: bool
) -> dict[str, list[Row]]:
    """Store documents, then answer n_tokens to each prompt with its document from the tier, one at a time.

    questions: prompts of one document, one after the other. has_own: answer as well without the tier, from the KV that
    the engine computed.
    """
    rows: dict[str, list[Row]] = {"own": [], "loaded": []}
    engine.forget()
    for first in range(0, len(prompts), questions):
        _store_whole(engine, prompts[first])
        for tokens in prompts[first : first + questions] if has_own else ():
            rows["own"] += engine.ask([tokens], n_tokens, NO_TIER)
        engine.forget()
    for tokens in prompts:
        rows["loaded"] += engine.ask([tokens], n_tokens, {"kvtier_save": False})
        engine.forget()
    return rows


def answer_questions(engine: MeasuredEngine, questions: list[Row]) -> list[Row]:
    """Answer one question after another. Each has name, tokens, shared (whether the tier may be used); one that
    `follows` an earlier one continues its conversation: its tokens, its answer, then these."""
    engine.ask([list(range(10, 110))], ANSWER_TOKENS, NO_TIER)  # less than a chunk, so that nothing of it is stored
    conversations: dict[str | None, list[int]] = {}
    rows = []
    for question in questions:
        name, may = question["name"], question["shared"]
        tokens = conversations.get(question.get("follows"), []) + question["tokens"]
        sampling = parameters(ANSWER_TOKENS, {"kvtier_load": may, "kvtier_save": may})
        llm, first_s = engine.llm.llm_engine, 0.0
        final: Any = None
        started = time.perf_counter()
        llm.add_request(name, {"prompt_token_ids": tokens}, sampling)
        while llm.has_unfinished_requests():
            for output in llm.step():
                first_s = first_s or time.perf_counter() - started
                final = output
        answer = list(final.outputs[0].token_ids)
        row = {"name": name, "tokens": len(tokens), "hit_tokens": final.num_cached_tokens or 0, "ttft_s": first_s}
        rows.append(row | {"answer": answer})
        conversations[name] = tokens + answer
    return rows


def answer_in_bf16(engine: MeasuredEngine, prompts: list[list[int]], n_kept: int, n_tokens: int) -> list[Row]:
    """Answer n_tokens to each prompt without the tier, with the KV of its first n_kept tokens rounded to bf16."""
    rows = []
    for tokens in prompts:
        engine.forget()
        engine.ask([tokens[:n_kept]], 1, NO_TIER)
        engine.llm.collective_rpc(inside.round_to_bf16)
        rows += engine.ask([tokens], n_tokens, NO_TIER)
    engine.forget()
    return rows


def _store_whole(engine: MeasuredEngine, tokens: list[int]) -> Row:
    """Compute a prompt and offer what kvtier skipped again: it skips chunks rather than hold a forward back."""
    before = _skipped(engine)
    row = engine.first_token(tokens)
    row |= {"settle_s": engine.settle(), "passes": 1}
    row["skipped"] = newly = (now := _skipped(engine)) - before
    while newly and row["passes"] < STORE_PASSES:
        engine.ask([tokens], 1)  # a hit in vLLM's own cache offers all chunks once more
        engine.settle()
        row["passes"] += 1
        before, now = now, _skipped(engine)
        newly = now - before
    return row


def _skipped(engine: MeasuredEngine) -> float:
    counted = engine.counters()
    return sum(value for name, value in counted.items() if name.startswith("skipped") and "present" not in name)
