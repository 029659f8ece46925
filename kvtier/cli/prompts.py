"""Options shared by commands: a namespace, and a prompt by its tokens."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from kvtier.admin.lookup import TOKENS_MAX, prefix_keys
from kvtier.admin.opened import Opened
from kvtier.cli.app import NotDone
from kvtier.config.types import parse_bytes, parse_seconds

STANDARD_INPUT = "-"


def size_argument(text: str) -> int:
    try:
        return parse_bytes(int(text) if text.isdecimal() else text)
    except ValueError as fault:
        raise typer.BadParameter(f"{text!r:.40}: {fault}") from None


def duration_argument(text: str) -> float:
    """Read a time with its unit, as settings take it. Returns seconds."""
    try:
        seconds = 0.0 if text.strip()[-1:].isdecimal() else float(str(parse_seconds(text)))
    except ValueError:
        seconds = 0.0
    if not seconds:
        raise typer.BadParameter(f'{text!r}: must be a time with a unit: "90s", "15m", "12h", "7d" or "2w"')
    return seconds


NamespaceOption = Annotated[
    str | None,
    typer.Option("--namespace", metavar="ID", help="Id of a namespace, or how it begins, as `kvtier stats` shows it."),
]
TokensOption = Annotated[
    str | None,
    typer.Option(
        "--tokens",
        metavar="FILE",
        help="A prompt by its token ids: a JSON list, or numbers between blanks; - is standard input.",
    ),
]
SaltOption = Annotated[
    str, typer.Option("--salt", metavar="TEXT", help="The cache salt of the prompt's requests.", show_default=False)
]


def has_prompt(tokens: str | None, salt: str) -> bool:
    """Tell whether there is a prompt. Raises NotDone for a salt alone, which would say nothing."""
    if salt and tokens is None:
        raise NotDone("--salt belongs to a prompt: add --tokens")
    return tokens is not None


def keys_of(tokens: str, salt: str, opened: Opened, namespace: bytes) -> list[bytes]:
    """Return the keys of the whole chunks of the prompt in the file `tokens`. Raises NotDone, AdminRefusal."""
    return prefix_keys(opened, read_tokens(tokens), salt, namespace)


def namespace_of(given: str, opened: Opened) -> bytes:
    """Find a namespace by the beginning of its id. Raises NotDone unless exactly one begins so."""
    wanted = given.lower()
    if not wanted:
        raise NotDone("--namespace is empty; is a variable of your shell not set?")
    found = [known for known in opened.book.ids() if known.hex().startswith(wanted)]
    if len(found) != 1:
        what = f"{len(found)} namespaces begin so" if found else "there is no such namespace"
        raise NotDone(f"--namespace {given}: {what} in {opened.root.path}")
    return found[0]


def read_tokens(name: str) -> list[int]:
    """Read the token ids of a prompt; name: of a file, or STANDARD_INPUT. Raises NotDone."""
    try:
        text = sys.stdin.read() if name == STANDARD_INPUT else Path(name).read_text(encoding="utf-8")
        found = json.loads(text) if text.lstrip().startswith("[") else [int(word) for word in text.split()]
    except OSError as fault:
        raise NotDone(f"{name}: no prompt can be read there: {fault.strerror}") from None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(type(token) is int and 0 <= token < 1 << 32 for token in found):
        raise NotDone(f"{name}: no token ids: --tokens takes a JSON list, or numbers between blanks")
    if len(found) > TOKENS_MAX:
        raise NotDone(f"a prompt of {len(found)} tokens: at most {TOKENS_MAX}")
    return found
