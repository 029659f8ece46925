"""Gain in time to the first token of long documents whose KV is stored, over HTTP.

    python -m benchmarks.long_doc_qa --base-url http://localhost:8000 --num-documents 20 --out RESULT.json
    python -m benchmarks.serving long_doc_qa -- ...    # starts and stops vLLM itself, without and with kvtier

Works with any endpoint of OpenAI's API, with the rounds and the metrics of LMCache's script of that name: five short
prompts that are not timed, a warm-up round that asks each document once, a query round that asks each --repeat-count
times. Beside it the floor: one more document, asked and then asked again at once, --floor times, so that a server with
a prefix cache has it there. Where the server has a page /metrics, each round says how many tokens of its prompts came
from vLLM's own cache and how many from its connector. "hi" repeated compresses as no real text does, and so do repeated
vectors of KV: for a codec take --text.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import report
from benchmarks.report import ms
from benchmarks.serving import arguments, counters, result
from benchmarks.serving.arguments import at_least, progress
from benchmarks.serving.client import Endpoint, ask_all, find_model
from benchmarks.serving.documents import PYTHON, DocumentSource, warming

QUESTION = "how much sooner comes the first token of a long document whose KV is stored"
# Options that two systems must have in common to be compared.
SETTINGS = ("document_length", "num_documents", "first_document", "output_len", "repeat_count", "repeat_mode")
SETTINGS += ("shuffle_seed", "max_inflight_requests", "text", "ignore_eos", "floor")
FLOOR_DOCUMENT = 1_000_000  # added to the first document's number: no other run has this document
ERRORS_SHOWN = 3
COLUMNS = ["system", "warm-up TTFT", "query TTFT", "p99", "floor", "query/floor", "warm-up/query", "round time"]
COLUMNS += ["prefix hits", "tier hits"]


def parser() -> argparse.ArgumentParser:
    made = arguments.parser("long_doc_qa", __doc__)
    add = made.add_argument
    add("--document-length", type=at_least(1), default=20000, help='words; of "hi", a word is about a token')
    add("--num-documents", type=at_least(1), default=8)
    add("--first-document", type=at_least(0), default=0, help="its number, so that two runs share no document")
    add("--output-len", type=at_least(1), default=100, help="tokens of each answer")
    add("--ignore-eos", action="store_true", help="answers have all tokens (vLLM's option)")
    add("--repeat-count", type=at_least(1), default=2, help="how often the query round asks each document")
    add("--repeat-mode", choices=("random", "tile", "interleave"), default="random")
    add("--shuffle-seed", type=int, default=0)
    add("--max-inflight-requests", type=at_least(1), default=2)
    add("--text", help=f'documents of the words of this file, or of Python\'s own ({PYTHON!r}), instead of "hi"')
    add("--floor", type=at_least(0), default=3, help="how often one more document is asked again at once, or 0")
    return made


def repeated(prompts: Sequence[str], count: int, mode: str, seed: int) -> list[str]:
    """Repeat the prompts: [1, 2, 1, 2] as tile, [1, 1, 2, 2] as interleave, or shuffled."""
    if mode == "interleave":
        return [prompt for prompt in prompts for _ in range(count)]
    several = list(prompts) * count
    if mode == "random":
        random.Random(seed).shuffle(several)
    return several


def ask(endpoint: Endpoint, name: str, prompts: Sequence[str], inflight: int = 1) -> dict[str, Any]:
    """Run one round and return its figures. Times are of the requests that succeeded."""
    before = counters.read(endpoint.url)
    with progress(name, len(prompts)) as show:
        answers, seconds = asyncio.run(ask_all(endpoint, prompts, inflight, show))
    good = [answer for answer in answers if not answer.error]
    return {
        "round_time": seconds,
        "prompt_count": len(answers),
        "successful_prompt_count": len(good),
        "ttft": result.spread([answer.ttft_s for answer in good]),
        "all_ttft": [answer.ttft_s for answer in good],
        "request_time": result.spread([answer.end_s for answer in good]),
        "tokens": counters.since(endpoint.url, before),
        "errors": sorted({answer.error for answer in answers if answer.error})[:ERRORS_SHOWN],
    }


def measure(options: argparse.Namespace, endpoint: Endpoint) -> dict[str, Any]:
    source, first, length = DocumentSource.of(options.text), options.first_document, options.document_length
    once = [source.document(number, length) for number in range(first, first + options.num_documents)]
    queries = repeated(once, options.repeat_count, options.repeat_mode, options.shuffle_seed)
    ask(endpoint, "before the rounds", warming(length))
    warmup = ask(endpoint, "warm-up round", once, options.max_inflight_requests)
    query = ask(endpoint, "query round", queries, options.max_inflight_requests)
    found = {"model": endpoint.model, "warmup_round": warmup, "query_round": query} | gains(warmup, query)
    if options.floor:
        document = source.document(FLOOR_DOCUMENT + first, length)
        ask(endpoint, "floor, its document", [document])
        found["floor"] = ask(endpoint, "floor", [document] * options.floor)
    return found


def gains(warmup: dict[str, Any], query: dict[str, Any]) -> dict[str, float]:
    """Return the ratios of warm-up to query: of the time to the first token, and of the round's time for each prompt.

    Return {} if requests failed, which takes less time than to answer them.
    """
    if any(part["successful_prompt_count"] < part["prompt_count"] for part in (warmup, query)):
        return {}
    per_prompt = [part["round_time"] / part["prompt_count"] for part in (warmup, query)]
    return {"ttft_gain": warmup["ttft"]["mean"] / query["ttft"]["mean"], "latency_gain": per_prompt[0] / per_prompt[1]}


def table_rows(whole: dict[str, Any]) -> report.Table:
    """Return columns and rows, one row a system; TTFT in ms."""
    rows = []
    for name, found in whole["systems"].items():
        warmup, query = found["warmup_round"]["ttft"], found["query_round"]["ttft"]
        floor_s, mean_s = counters.floor_s(found.get("floor")), query.get("mean")
        tokens = found["query_round"]["tokens"] or {}
        over_floor = f"{mean_s / floor_s:.2f}" if mean_s and floor_s else "-"
        ratios = [f"{found[key]:.2f}x" if key in found else "-" for key in ("ttft_gain", "latency_gain")]
        hits = [f"{tokens[key]:,}" if key in tokens else "-" for key in ("prefix_hit_tokens", "external_hit_tokens")]
        times = map(ms, (warmup.get("mean"), mean_s, query.get("p99"), floor_s))
        rows.append([name, *times, over_floor, *ratios, *hits])
    return COLUMNS, rows


def faults(found: dict[str, Any]) -> list[str]:
    """Return the reasons why this is no good measurement."""
    said = []
    warmup, query = found["warmup_round"], found["query_round"]
    for part in (warmup, query):
        if failed := part["prompt_count"] - part["successful_prompt_count"]:
            said.append(f"{failed} of {part['prompt_count']} requests failed: {part['errors']}")
    said += counters.failed_loads((warmup["tokens"], query["tokens"]))
    stored, asked = warmup["tokens"] or {}, query["tokens"] or {}
    if "saved_bytes" in stored and not stored["saved_bytes"] and not asked.get("external_hit_tokens"):
        said.append(f"kvtier stored and found nothing; it skipped {stored.get('skipped_chunks', 0)} chunks")
    return said


def main(words: Sequence[str] | None = None) -> int:
    options = parser().parse_args(words)
    model = options.model or asyncio.run(find_model(options.base_url))
    settings = {name: getattr(options, name) for name in SETTINGS}
    result.known(options.out, QUESTION, settings, options.system)
    found = measure(options, Endpoint(options.base_url, model, options.output_len, options.ignore_eos))
    whole = result.add(options.out, QUESTION, settings, options.system, found)
    report.table(*table_rows(whole))
    if (stored := counters.stored_share(found["warmup_round"]["tokens"])) > counters.STORED_SHARE:
        print(f"Of the warm-up round's tokens {stored:.0%} were stored already: its times are not those of computing")
    for fault in faults(found):
        print(f"NOT GOOD: {fault}", file=sys.stderr)
    return int(bool(faults(found)))


if __name__ == "__main__":
    sys.exit(main())
