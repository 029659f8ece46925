"""How much sooner does the first token of a long document come when its KV is there already?

    python -m benchmarks.long_doc_qa --port 8000 --num-documents 20 --document-length 20000 --out RESULT.json
    python -m benchmarks.serving long_doc_qa -- ...    # starts and stops vLLM itself, without and with kvtier

Against any endpoint that speaks OpenAI's API, with the flags, the rounds and the metrics of LMCache's script of that
name: five short prompts that are not timed, a warm-up round that asks each document once, a query round that asks each
--repeat-count times. Beside it stands the floor: one more document, asked and then asked again at once, --floor times,
so that a server with a prefix cache has it there. Where the server has a page /metrics, each round says how many
tokens of its prompts came from vLLM's own cache and how many from its connector. "hi" over and over compresses as no
real text does, and so do repeated vectors of KV: for a codec take --text.

Written are RESULT.json and, beside it, RESULT-<system>/warmup_round.csv and query_round.csv.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.gpu.report import ms, table
from benchmarks.serving import arguments, counters, result
from benchmarks.serving.arguments import at_least
from benchmarks.serving.client import Answer, Endpoint, Prompt, ask_all, find_model
from benchmarks.serving.documents import MODES, PYTHON, Source, documents, repeated, warming, with_misses
from benchmarks.serving.progress import Bar

QUESTION = "how much sooner comes the first token of a long document whose KV is stored"
SETTINGS = (
    "document_length",
    "num_documents",
    "first_document",
    "output_len",
    "repeat_count",
    "repeat_mode",
    "shuffle_seed",
    "max_inflight_requests",
    "completions",
    "hit_miss_ratio",
    "text",
    "eos_token_id",
    "ignore_eos",
    "sleep_time_after_warmup",
    "floor",
)
"""Flags that two systems must have in common to be compared."""
FLOOR_DOCUMENT = 1_000_000
"""Is added to the first document's number: what follows a run's documents may be another run's first one."""
EOS_BIAS = -100
ERRORS_SHOWN = 3


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.long_doc_qa",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    of_rounds(made)
    where = made.add_argument_group("the server")
    where.add_argument("--host", default="localhost")
    where.add_argument("--port", type=int, default=8000)
    where.add_argument("--base-url", help="with or without /v1, instead of --host and --port")
    where.add_argument("--model", help="its name there (default: the first that it lists)")
    where.add_argument("--completions", action="store_true", help="ask /v1/completions, not the chat")
    where.add_argument(
        "--eos-token-id", type=int, help="a token that is to be made impossible, so that answers are full"
    )
    where.add_argument("--ignore-eos", action="store_true", help="vLLM's own way to that")
    where.add_argument("--timeout", type=float, default=3600.0, help="seconds without a piece of an answer")
    out = made.add_argument_group("what is written")
    out.add_argument("--out", type=Path, default=Path("long_doc_qa.json"), help="systems of one --out are compared")
    out.add_argument("--system", default="server", help="what is measured, as --out names it")
    out.add_argument("--output", type=Path, help="a file for all answers' texts")
    out.add_argument("--visualize", action="store_true", help="both rounds as SVG beside their CSV")
    out.add_argument(
        "--json-output", action="store_true", help="one line of JSON at the end, as LMCache's script has it"
    )
    out.add_argument("--expected-ttft-gain", type=float, help="exit status 1 below this warm-up / query ratio")
    out.add_argument("--expected-latency-gain", type=float, help="the same of the rounds' times for each prompt")
    return made


def of_rounds(made: argparse.ArgumentParser) -> None:
    add = made.add_argument_group("the rounds").add_argument
    add("--document-length", type=at_least(1), default=20000, help='words; of "hi", a word is about a token')
    add("--num-documents", type=at_least(1), default=8)
    add("--first-document", type=at_least(0), default=0, help="its number, so that two runs have no document in common")
    add("--output-len", type=at_least(1), default=100, help="tokens of each answer")
    add("--repeat-count", type=at_least(1), default=2, help="how often the query round asks each document")
    add("--repeat-mode", choices=MODES, default="random")
    add("--shuffle-seed", type=int, default=0)
    add("--max-inflight-requests", type=at_least(1), default=2)
    add("--sleep-time-after-warmup", type=float, default=0.0, help="seconds")
    add("--hit-miss-ratio", type=_ratio, help="such as 3:1: of four queries in a row the last is changed to a miss")
    add("--text", help=f'documents of the words of this file, or of Python\'s own ({PYTHON!r}), instead of "hi"')
    add("--floor", type=at_least(0), default=3, help="how often one more document is asked again at once, or 0")


def _ratio(text: str) -> str:
    if not re.fullmatch(r"\d+:\d+", text) or not any(int(part) for part in text.split(":")):
        raise argparse.ArgumentTypeError(f"{text!r} is no ratio such as 3:1")
    return text


def base_url(options: argparse.Namespace) -> str:
    """Without /v1 and the last slash."""
    url = options.base_url or f"http://{options.host}:{options.port}"
    return url.rstrip("/").removesuffix("/v1")


# --- rounds ---


class Rounds:
    """Asks one server; keeps the texts of all answers for --output."""

    def __init__(self, endpoint: Endpoint, inflight: int) -> None:
        self._endpoint, self._inflight = endpoint, inflight
        self.texts: list[str] = []

    def ask(self, name: str, prompts: Sequence[Prompt], inflight: int | None = None) -> tuple[list[Answer], float]:
        bar = Bar(name, len(prompts))
        answers, seconds = asyncio.run(ask_all(self._endpoint, prompts, inflight or self._inflight, bar.show))
        self.texts += [f"--- {name}, document {answer.prompt_id} ---\n{answer.text}\n" for answer in answers]
        return answers, seconds

    def timed(self, name: str, prompts: Sequence[Prompt]) -> tuple[list[Answer], dict[str, Any]]:
        """A round's answers and its figures. Times are of those that succeeded."""
        before = counters.look(self._endpoint.url)
        answers, seconds = self.ask(name, prompts)
        good = [answer for answer in answers if answer.successful]
        figures: dict[str, Any] = {
            "round_time": seconds,
            "prompt_count": len(answers),
            "successful_prompt_count": len(good),
            "ttft": result.spread([answer.ttft for answer in good]),
            "request_time": result.spread([answer.request_end - answer.request_start for answer in good]),
            "tokens": counters.since(self._endpoint.url, before),
            "errors": sorted({answer.error for answer in answers if answer.error})[:ERRORS_SHOWN],
        }
        if any(answer.is_miss for answer in good):
            for what, is_miss in (("ttft_hits", False), ("ttft_misses", True)):
                figures[what] = result.spread([answer.ttft for answer in good if answer.is_miss is is_miss])
        return answers, figures

    def floor(self, prompt: Prompt, count: int) -> dict[str, Any]:
        """Asks once, then again and again at once: by then a prefix cache has the whole prompt."""
        self.ask("floor, its document", [prompt], inflight=1)
        before = counters.look(self._endpoint.url)
        answers, _ = self.ask("floor", [prompt] * count, inflight=1)
        ttft = result.spread([answer.ttft for answer in answers if answer.successful])
        return {"ttft": ttft, "tokens": counters.since(self._endpoint.url, before)}


def measure(options: argparse.Namespace, endpoint: Endpoint) -> tuple[dict[str, Any], dict[str, list[Answer]]]:
    rng = random.Random(options.shuffle_seed)
    source = Source.of(options.text)
    first = options.first_document
    once = documents(source, options.num_documents, options.document_length, first)
    queries = with_misses(repeated(once, options.repeat_count, options.repeat_mode, rng), options.hit_miss_ratio, rng)
    rounds = Rounds(endpoint, options.max_inflight_requests)
    rounds.ask("before the rounds", warming(options.document_length))
    warmup_answers, warmup = rounds.timed("warm-up round", once)
    if options.sleep_time_after_warmup > 0:
        time.sleep(options.sleep_time_after_warmup)
    query_answers, query = rounds.timed("query round", queries)
    found: dict[str, Any] = {"model": endpoint.model, "warmup_round": warmup, "query_round": query}
    found["cache_tokens"] = counters.cache_tokens(endpoint.url)
    if options.floor:
        found["floor"] = rounds.floor(
            documents(source, 1, options.document_length, FLOOR_DOCUMENT + first)[0], options.floor
        )
    if options.output:
        options.output.write_text("".join(rounds.texts))
    return found | gains(warmup, query), {"warmup_round": warmup_answers, "query_round": query_answers}


def gains(warmup: dict[str, Any], query: dict[str, Any]) -> dict[str, float]:
    """How many times as long the warm-up took: to the first token; and of the round, for each prompt.

    Nothing where requests failed, which takes less time than to answer them.
    """
    if any(part["successful_prompt_count"] < part["prompt_count"] for part in (warmup, query)):
        return {}
    per_prompt = [part["round_time"] / part["prompt_count"] for part in (warmup, query)]
    return {"ttft_gain": warmup["ttft"]["mean"] / query["ttft"]["mean"], "latency_gain": per_prompt[0] / per_prompt[1]}


# --- what is shown ---


def say(found: dict[str, Any]) -> None:
    """In the words of LMCache's script, and what that does not have."""
    for title, part in (("Warmup", found["warmup_round"]), ("Query", found["query_round"])):
        print("\n=== WARMUP RESULTS ===" if title == "Warmup" else "\n=== BENCHMARK RESULTS ===")
        if part["ttft"]:
            print(f"{title} round mean TTFT: {part['ttft']['mean']:.3f}s")
            print(
                f"{title} round TTFT "
                + ", ".join(f"p{percent}: {part['ttft'][f'p{percent}']:.3f}s" for percent in result.PERCENTILES)
            )
        print(f"{title} round time: {part['round_time']:.3f}s")
        print(f"{title} round prompt count: {part['prompt_count']}")
        print(f"{title} round successful prompt count: {part['successful_prompt_count']}")
        if part["tokens"]:
            shares = (f"{title} round {name.replace('_', ' ')}: {value:,}" for name, value in part["tokens"].items())
            print("\n".join(shares))
        for error in part["errors"]:
            print(f"{title} round error: {error}")
    if (stored := counters.stored_share(found["warmup_round"]["tokens"])) > counters.STORED_SHARE:
        print(f"\nOf the warm-up round's tokens {stored:.0%} were stored already: its times are not those of computing")
    if (floor_s := counters.floor_s(found.get("floor"))) is not None:
        print(f"\nFloor, the same document again at once, mean TTFT: {floor_s:.3f}s")
    if "ttft_gain" in found:
        print(f"Warmup / query: TTFT {found['ttft_gain']:.2f}x, round time of a prompt {found['latency_gain']:.2f}x")


def table_rows(whole: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return columns and rows, one row a system; TTFT in ms."""
    columns = [
        "system",
        "warm-up TTFT",
        "query TTFT",
        "p99",
        "floor",
        "query/floor",
        "warm-up/query",
        "round time",
        "prefix hits",
        "tier hits",
    ]
    rows = []
    for name, found in whole["systems"].items():
        warmup, query = found["warmup_round"], found["query_round"]
        floor_s = counters.floor_s(found.get("floor"))
        mean_s, tokens = query["ttft"].get("mean"), query["tokens"] or {}
        gains_here = [f"{found[key]:.2f}x" if key in found else "-" for key in ("ttft_gain", "latency_gain")]
        hits = [f"{tokens[key]:,}" if key in tokens else "-" for key in ("prefix_hit_tokens", "external_hit_tokens")]
        rows.append(
            [
                name,
                ms(warmup["ttft"].get("mean")),
                ms(mean_s),
                ms(query["ttft"].get("p99")),
                ms(floor_s),
                f"{mean_s / floor_s:.2f}" if mean_s and floor_s else "-",
                *gains_here,
                *hits,
            ]
        )
    return columns, rows


def summary(found: dict[str, Any]) -> str:
    """The line of --json-output."""
    warmup, query = found["warmup_round"], found["query_round"]
    return json.dumps(
        {
            "query_ttft_per_prompt": query["ttft"].get("mean"),
            "query_round_time_per_prompt": query["round_time"] / query["prompt_count"],
            "warmup_round_time_per_prompt": warmup["round_time"] / warmup["prompt_count"],
        }
    )


def faults(options: argparse.Namespace, found: dict[str, Any]) -> list[str]:
    """Why this was not good enough."""
    said = []
    for part in (found["warmup_round"], found["query_round"]):
        if failed := part["prompt_count"] - part["successful_prompt_count"]:
            said.append(f"{failed} of {part['prompt_count']} requests failed")
    said += counters.failed_loads(found[name]["tokens"] for name in ("warmup_round", "query_round"))
    stored, asked = found["warmup_round"]["tokens"] or {}, found["query_round"]["tokens"] or {}
    if "saved_bytes" in stored and not stored["saved_bytes"] and not asked.get("external_hit_tokens"):
        skipped = stored.get("skipped_chunks", 0)
        said.append(f"kvtier is there, and stored and found nothing; it skipped {skipped} chunks")
    for name in ("ttft_gain", "latency_gain"):
        wanted = getattr(options, f"expected_{name}")
        if wanted is not None and found.get(name, 0.0) < wanted:
            said.append(f"{name} is {found.get(name, 0.0):.2f}, expected were {wanted:.2f}")
    return said


def main(words: Sequence[str] | None = None) -> int:
    options = parser().parse_args(words)
    url = base_url(options)
    extra: dict[str, Any] = {"ignore_eos": True} if options.ignore_eos else {}
    if options.eos_token_id is not None:
        extra["logit_bias"] = {str(options.eos_token_id): EOS_BIAS}
    endpoint = Endpoint(
        url,
        options.model or asyncio.run(find_model(url)),
        not options.completions,
        options.output_len,
        extra,
        os.environ.get("OPENAI_API_KEY", "none"),
        options.timeout,
    )
    settings = {name: getattr(options, name) for name in SETTINGS}
    result.known(options.out, QUESTION, settings, options.system)
    if options.output:
        result.writable(options.output)
    found, rounds = measure(options, endpoint)
    folder = options.out.with_name(f"{options.out.stem}-{options.system}")
    for name, answers in rounds.items():
        result.write_csv(folder / f"{name}.csv", answers)
        if options.visualize:
            plots.requests(folder / f"{name}.svg", f"{name} of {options.system}", answers)
    whole = result.add(options.out, QUESTION, settings, options.system, found)
    say(found)
    print()
    table(*table_rows(whole))
    print(f"written: {options.out} and {folder}")
    if options.json_output:
        print(summary(found))
    said = faults(options, found)
    for fault in said:
        print(f"NOT GOOD: {fault}", file=sys.stderr)
    return int(bool(said))


if __name__ == "__main__":
    arguments.run(main)
