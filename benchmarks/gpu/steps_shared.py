"""Steps of two_engines.py: one engine's part of a list of prompts that several engines share."""

from __future__ import annotations

import fcntl
import json
import random
import time
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO

from benchmarks.gpu import inside
from benchmarks.gpu.engine import MeasuredEngine, parameters
from benchmarks.gpu.models import prompt
from benchmarks.gpu.steps import take_turn

TAKE_S = 2.0  # between notes of digests, which a killed engine loses
START_TIMEOUT_S = 300.0

Plan = dict[str, Any]
Row = dict[str, Any]


def prefix_of(item: int, mix: dict[str, int]) -> tuple[str, int]:
    """Return name and tokens of the prefix of an item of the list: private, or a document that others share.

    mix: private_every: one item of so many is private; window: documents in use at a time; document_every: items until
    the oldest of them is replaced; shortest, longest: tokens of a prefix; tail: tokens behind it.
    """
    dice = random.Random(f"item-{item}")
    name = f"private-{item}"
    if dice.randrange(mix["private_every"]):
        name = f"document-{item // mix['document_every'] + dice.randrange(mix['window'])}"
    return name, random.Random(name).randint(mix["shortest"], mix["longest"])


def serve(engine: MeasuredEngine, plan: Plan) -> None:
    """Answer items until the time that the file `go` names, and append a line of JSON for each to the records.

    plan: ready, go, counter, records: paths; first: items to answer whatever the time is; in_flight, answer, mix.
    """
    take_turn(engine, plan["ready"], plan["go"], START_TIMEOUT_S)
    until_s = float(Path(plan["go"]).read_text())
    with open(plan["records"], "a", buffering=1) as records:
        _answer(engine, _items(plan, until_s), plan, records)


def answer_again(engine: MeasuredEngine, plan: Plan, count: int) -> None:
    """Answer the first `count` items of the records again, batched otherwise: what a control differs from itself."""
    done = [row for row in map(json.loads, Path(plan["records"]).read_text().splitlines()) if "answer" in row]
    engine.forget()
    with open(Path(plan["records"]).with_name("again.jsonl"), "w") as records:
        _answer(engine, reversed([row["item"] for row in done[:count]]), plan, records)


def _items(plan: Plan, until_s: float) -> Iterator[int]:
    """Yield the plan's first items and then, while there is time, those that no engine has taken."""
    yield from plan["first"]
    while time.monotonic() < until_s:
        with open(plan["counter"], "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            item = int(file.read())
            file.seek(0)
            file.write(str(item + 1))
        yield item


def _answer(engine: MeasuredEngine, items: Iterable[int], plan: Plan, records: TextIO) -> None:
    llm, left, under_way = engine.llm.llm_engine, iter(items), dict[int, Row]()
    taken_s, is_watched = time.monotonic(), bool(engine.system == "kvtier")
    while True:
        while len(under_way) < plan["in_flight"] and (item := next(left, None)) is not None:
            under_way[item] = _ask(engine, item, plan)
            print(json.dumps({"asked": item}), file=records, flush=True)
        if not under_way:
            break
        for output in llm.step():
            item = int(output.request_id.partition("-")[0])
            _note(under_way[item], output)
            if output.finished:
                print(json.dumps(under_way.pop(item)), file=records, flush=True)
        if is_watched and time.monotonic() > taken_s + TAKE_S:
            taken_s = _take(engine, records)
    if is_watched:
        _take(engine, records)


def _ask(engine: MeasuredEngine, item: int, plan: Plan) -> Row:
    name, n_tokens = prefix_of(item, plan["mix"])
    tokens = _prefix(name, n_tokens, engine.vocabulary)
    tokens = tokens + prompt(f"tail-{item}", plan["mix"]["tail"], engine.vocabulary)
    row = {"item": item, "prefix": name, "prefix_tokens": n_tokens, "tokens": len(tokens), "began_s": time.monotonic()}
    request = parameters(plan["answer"], None)
    engine.llm.llm_engine.add_request(str(item), {"prompt_token_ids": tokens}, request)
    return row


@lru_cache(64)
def _prefix(name: str, n_tokens: int, vocabulary: int) -> list[int]:
    return prompt(name, n_tokens, vocabulary)


def _note(row: Row, output: Any) -> None:
    best = output.outputs[0]
    if best.token_ids:
        row.setdefault("first_s", time.monotonic())
    if output.finished:
        row |= {"ended_s": time.monotonic(), "hit_tokens": output.num_cached_tokens or 0}
        row |= {"answer": list(best.token_ids), "reason": str(best.finish_reason)}


def _take(engine: MeasuredEngine, records: TextIO) -> float:
    """Append the digests of blocks that were saved and loaded; return the time."""
    for seen in engine.llm.collective_rpc(inside.take_watch):
        if seen["saved"] or seen["loaded"] or seen["failed_loads"]:
            print(json.dumps({"blocks": seen}), file=records, flush=True)
    return time.monotonic()
