"""How do hit ratio and time to the first token change as the working set outgrows each tier?

    python -m benchmarks.serving capacity --out RESULT.json [-- --documents 2,4,8,16,32]
    python -m benchmarks.capacity --port 8000 --system kvtier --out RESULT.json

For each working set of so many documents: those that are new are asked once, which is what computing takes; then
--queries documents, drawn at random from all of the working set, are asked one after another. Of these: the share of
prompt tokens that came from vLLM's own cache and from its connector, and the time to the first token. Beside them the
floor: one document asked again at once. Without a tier (`prefix`) hits fall as soon as the set outgrows HBM; with one
they fall where its capacity ends, later with a codec.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.gpu.report import ms, table
from benchmarks.long_doc_qa import Rounds, base_url
from benchmarks.serving import arguments, counters, result
from benchmarks.serving.arguments import at_least, numbers
from benchmarks.serving.client import Endpoint, find_model
from benchmarks.serving.documents import PYTHON, Source, documents, warming

QUESTION = "hit ratio and time to the first token over the size of the working set"
SETTINGS = ("documents", "document_length", "queries", "output_len", "seed", "text", "floor")


def measure(options: argparse.Namespace, endpoint: Endpoint) -> dict[str, Any]:
    rng, source = random.Random(options.seed), Source.of(options.text)
    rounds = Rounds(endpoint, 1)
    rounds.ask("before the rounds", warming(options.document_length))
    rows: list[dict[str, Any]] = []
    known, size = 0, 0
    for count in sorted(set(options.documents)):
        every = documents(source, count, options.document_length)
        _, fresh = rounds.timed(f"{count - known} new documents", every[known:])
        _, drawn = rounds.timed(f"{options.queries} of {count}", rng.choices(every, k=options.queries))
        size += fresh["tokens"]["prompt_tokens"] if fresh["tokens"] else 0
        rows.append(row_of(count, size, fresh, drawn))
        known = count
    floor = rounds.floor(documents(source, 1, options.document_length, first=known)[0], options.floor)
    return {"model": endpoint.model, "cache_tokens": counters.cache_tokens(endpoint.url), "floor": floor, "rows": rows}


def row_of(count: int, size: int, fresh: dict[str, Any], drawn: dict[str, Any]) -> dict[str, Any]:
    """Shares are of the tokens of the prompts that were drawn; None where the server does not count them. size: tokens
    of all documents. New documents that were stored already were not computed."""
    tokens, is_stored = drawn["tokens"], counters.stored_share(fresh["tokens"]) > counters.STORED_SHARE
    asked = tokens["prompt_tokens"] if tokens else 0
    return {
        "documents": count,
        "computed_ttft": {} if is_stored else fresh["ttft"],
        "ttft": drawn["ttft"],
        "working_set_tokens": size or None,
        "prefix_share": tokens["prefix_hit_tokens"] / asked if asked else None,
        "tier_share": tokens["external_hit_tokens"] / asked if asked else None,
        "tokens": tokens,
        "failed": sum(part["prompt_count"] - part["successful_prompt_count"] for part in (fresh, drawn)),
        "errors": fresh["errors"] + drawn["errors"],
    }


def table_rows(whole: dict[str, Any], nothing: str = "-") -> tuple[list[str], list[list[str]]]:
    """Columns and rows, one for each system and working set. nothing: what stands where nothing was measured."""
    columns = [
        "system",
        "documents",
        "tokens",
        "of the engine's cache",
        "hits there",
        "hits in the tier",
        "mean TTFT",
        "computed",
        "TTFT of computed",
        "p99",
        "floor",
    ]
    rows = []
    for name, found in whole["systems"].items():
        for row in found["rows"]:
            tokens, room = row["working_set_tokens"], found["cache_tokens"]
            shares = [nothing if row[key] is None else f"{row[key]:.1%}" for key in ("prefix_share", "tier_share")]
            first_s, computed_s = row["ttft"].get("mean"), row["computed_ttft"].get("mean")
            rows.append(
                [
                    name,
                    f"{row['documents']}",
                    nothing if tokens is None else f"{tokens:,}",
                    f"{tokens / room:.2f}" if tokens and room else nothing,
                    *shares,
                    ms(first_s, nothing),
                    ms(computed_s, nothing),
                    # Of the same server, minutes apart: a shared machine is slower for one system than for the next.
                    f"{first_s / computed_s:.0%}" if first_s and computed_s else nothing,
                    ms(row["ttft"].get("p99"), nothing),
                    ms(counters.floor_s(found["floor"]), nothing),
                ]
            )
    return columns, rows


def show(whole: dict[str, Any]) -> None:
    print()
    table(*table_rows(whole))


def draw(path: Path, whole: dict[str, Any]) -> None:
    lines = [
        plots.Line(
            name, [(row["documents"], 1000 * row["ttft"]["mean"]) for row in found["rows"] if row["ttft"]], number
        )
        for number, (name, found) in enumerate(whole["systems"].items())
    ]
    plots.lines(path, "Mean time to the first token as the working set grows", "documents", "ms", lines)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.capacity", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--host", default="localhost")
    add("--port", type=int, default=8000)
    add("--base-url")
    add("--model")
    add("--documents", type=numbers, default=[2, 4, 8, 16], help="sizes of working sets, with commas between")
    add("--document-length", type=at_least(1), default=2000, help="words")
    add("--queries", type=at_least(1), default=16, help="drawn from each working set")
    add("--output-len", type=at_least(1), default=8)
    add("--seed", type=int, default=0)
    add("--text", default=PYTHON, help="a file; Python's own text unless it is given")
    add("--floor", type=at_least(0), default=3)
    add("--system", default="server", help="what is measured, as --out names it")
    add("--out", type=Path, default=Path("capacity.json"), help="systems of one --out are compared")
    return made


def main(words: Sequence[str] | None = None) -> int:
    options = parser().parse_args(words)
    url = base_url(options)
    model = options.model or asyncio.run(find_model(url))
    key = os.environ.get("OPENAI_API_KEY", "none")
    settings = {name: getattr(options, name) for name in SETTINGS}
    result.known(options.out, QUESTION, settings, options.system)
    found = measure(options, Endpoint(url, model, output_tokens=options.output_len, api_key=key))
    whole = result.add(options.out, QUESTION, settings, options.system, found)
    show(whole)
    failed = sum(row["failed"] for row in found["rows"])
    if any(row["ttft"] for row in found["rows"]):
        draw(options.out.with_suffix(".svg"), whole)
    print(f"written: {options.out}")
    said = counters.failed_loads(row["tokens"] for row in found["rows"])
    if failed:
        errors = sorted({error for row in found["rows"] for error in row["errors"]})
        said.append(f"{failed} requests failed: {errors}")
    for fault in said:
        print(f"NOT GOOD: {fault}", file=sys.stderr)
    return int(bool(said))


if __name__ == "__main__":
    arguments.run(main)
