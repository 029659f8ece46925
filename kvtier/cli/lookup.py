"""`kvtier lookup`: how much of a prompt is stored, and where."""

from __future__ import annotations

import argparse

from kvtier.admin.answers import LookupAnswer
from kvtier.admin.lookup import look_up
from kvtier.cli.place import NotDone, add_place, deployment
from kvtier.cli.prompts import add_namespace, add_prompt, has_prompt, namespace_of, prompt_of
from kvtier.cli.tables import counted, print_table
from kvtier.runtime.exit_status import FOUND_BAD, OK, print_json


def add_options(parser: argparse.ArgumentParser) -> None:
    add_place(parser)
    add_namespace(parser)
    add_prompt(parser, "one of these is needed")


def run_lookup(options: argparse.Namespace) -> int:
    """Status 1 when nothing is stored of it."""
    if not has_prompt(options):
        raise NotDone("which prompt? name one with --tokens, --prompt or --prompt-file")
    with deployment(options, needs_settings=False) as opened:
        namespace = namespace_of(options, opened)
        answer = look_up(opened, prompt_of(options, opened, namespace), namespace)
    if options.json:
        print_json(answer.model_dump(mode="json"))
    else:
        _print(answer)
    return OK if any(hit.hit_tokens for hit in answer.hits) else FOUND_BAD


def _print(answer: LookupAnswer) -> None:
    found = [hit for hit in answer.hits if hit.hit_tokens]
    if not found:
        print(
            f"nothing is stored of these {counted(answer.tokens, 'token')}, in {counted(len(answer.hits), 'namespace')}"
        )
    for hit in found:
        name = f"{hit.namespace[:12]}{f' ({hit.model})' if hit.model else ''}"
        print(
            f"{name}: {hit.hit_tokens:,} of {answer.tokens:,} tokens, {hit.hit_chunks:,} of {hit.chunks:,} chunks; "
            f"the last one's key is {hit.last_key}"
        )
        rows = [("set", "from chunk", "chunks", "files", "written by")]
        rows += [
            (place.set_id, f"{place.first_chunk:,}", f"{place.chunks:,}", " ".join(place.files), place.owner or "-")
            for place in hit.sets
        ]
        print_table(rows, right=(1, 2))
