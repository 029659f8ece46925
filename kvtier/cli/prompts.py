"""Options that several commands share: a namespace, and a prompt by its tokens or its text."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from kvtier.admin.lookup import TOKENS_MAX, Prompt, keys_of
from kvtier.admin.opened import Opened
from kvtier.admin.prompts import Tokenizers
from kvtier.cli.place import NotDone
from kvtier.config.types import parse_bytes, parse_seconds

STANDARD_INPUT = "-"


def size_argument(text: str) -> int:
    try:
        return parse_bytes(int(text) if text.isdecimal() else text)
    except ValueError as fault:
        raise argparse.ArgumentTypeError(str(fault)) from None


def duration_argument(text: str) -> float:
    """Read a time with its unit, as settings take it. Returns seconds."""
    try:
        seconds = 0.0 if text.strip()[-1:].isdecimal() else float(str(parse_seconds(text)))
    except ValueError:
        seconds = 0.0
    if not seconds:
        raise argparse.ArgumentTypeError(f'{text!r}: must be a time with a unit: "90s", "15m", "12h", "7d" or "2w"')
    return seconds


def add_namespace(parser: argparse._ActionsContainer) -> None:
    text = "id of a namespace, or how it begins, as `kvtier stats` shows it"
    parser.add_argument("--namespace", metavar="ID", help=text)


def add_prompt(parser: argparse.ArgumentParser, what: str) -> None:
    group = parser.add_argument_group("a prompt", what)
    one = group.add_mutually_exclusive_group()
    text = "token ids: a JSON list, or numbers between blanks; - is standard input"
    one.add_argument("--tokens", metavar="FILE", help=text)
    text = "its text; the engines' tokenizer must lie on this machine"
    one.add_argument("--prompt", metavar="TEXT", help=text)
    one.add_argument("--prompt-file", metavar="FILE", help="a file with its text; - is standard input")
    group.add_argument("--salt", metavar="TEXT", default="", help="the cache salt that its requests bring")


def has_prompt(options: argparse.Namespace) -> bool:
    """Raises NotDone for a salt alone, which would say nothing."""
    found = any(getattr(options, name) is not None for name in ("tokens", "prompt", "prompt_file"))
    if options.salt and not found:
        raise NotDone("--salt belongs to a prompt: add --tokens, --prompt or --prompt-file")
    return found


def prompt_of(options: argparse.Namespace, opened: Opened, namespace: bytes | None) -> Prompt:
    """Raises NotDone, NoTokenizer."""
    if options.tokens is not None:
        tokens = _tokens(_read(options.tokens), options.tokens)
    else:
        text = options.prompt if options.prompt is not None else _read(options.prompt_file)
        tokens = Tokenizers().tokens(opened, text, namespace)
    if len(tokens) > TOKENS_MAX:
        raise NotDone(f"a prompt of {len(tokens)} tokens: at most {TOKENS_MAX}")
    return Prompt(tokens, options.salt)


def prefix_keys(options: argparse.Namespace, opened: Opened, namespace: bytes) -> tuple[bytes, ...]:
    """Of the prompt's whole chunks. Raises NotDone where it has none, UnknownNamespace, NoTokenizer, OSError."""
    prompt = prompt_of(options, opened, namespace)
    keys = keys_of(opened, prompt, namespace)
    if not keys:
        raise NotDone(f"{len(prompt.tokens)} tokens are less than a chunk: nothing is stored of them")
    return tuple(keys)


def namespace_of(options: argparse.Namespace, opened: Opened) -> bytes | None:
    """By the beginning of its id. Raises NotDone unless exactly one begins so."""
    if options.namespace is None:
        return None
    wanted = options.namespace.lower()
    if not wanted:
        raise NotDone("--namespace is empty; is a variable of your shell not set?")
    found = [known for known in opened.book.ids() if known.hex().startswith(wanted)]
    if len(found) != 1:
        what = f"{len(found)} namespaces begin so" if found else "there is no such namespace"
        raise NotDone(f"--namespace {options.namespace}: {what} in {opened.root.path}")
    return found[0]


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == STANDARD_INPUT else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise NotDone(f"{name}: no prompt can be read there: {getattr(fault, 'strerror', None) or fault}") from None


def _tokens(text: str, name: str) -> list[int]:
    try:
        found = json.loads(text) if text.lstrip().startswith("[") else [int(word) for word in text.split()]
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(type(token) is int and 0 <= token < 1 << 32 for token in found):
        raise NotDone(f"{name}: no token ids: --tokens takes a JSON list, or numbers between blanks")
    return found
