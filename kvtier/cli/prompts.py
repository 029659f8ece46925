"""Options shared by commands: a namespace, and a prompt by its tokens or its text."""

import json
import sys
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from kvtier.admin.lookup import TOKENS_MAX, prefix_keys
from kvtier.admin.opened import Opened
from kvtier.admin.prompts import NoTokenizer, tokenize
from kvtier.cli.app import NotDone, refuse_together
from kvtier.config.types import DAY_S, REQUEST_SECONDS_MAX, parse_bytes, parse_seconds

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
    if seconds > REQUEST_SECONDS_MAX:
        raise typer.BadParameter(f"{text!r:.40}: must be at most {REQUEST_SECONDS_MAX // DAY_S:,.0f} days")
    return seconds


class PromptOptions(NamedTuple):
    """A prompt as the options name it: by its tokens, its text or a file with its text; None: not given."""

    tokens: str | None
    prompt: str | None
    prompt_file: str | None
    salt: str

    def is_given(self, ctx: typer.Context) -> bool:
        """Tell whether there is a prompt. Raises NotDone for a salt alone, which would say nothing."""
        refuse_together(ctx, {"--tokens": self.tokens, "--prompt": self.prompt, "--prompt-file": self.prompt_file})
        found = any(text is not None for text in self[:3])
        if self.salt and not found:
            raise NotDone("--salt belongs to a prompt: add --tokens, --prompt or --prompt-file")
        return found


NamespaceOption = Annotated[
    str | None,
    typer.Option("--namespace", metavar="ID", help="Id of a namespace, or how it begins, as `kvtier stats` shows it."),
]
TokensOption = Annotated[
    str | None,
    typer.Option(
        "--tokens",
        metavar="FILE",
        help="A prompt by its token ids: a JSON list, what vLLM's /tokenize answers, or numbers between blanks; - is "
        "standard input.",
    ),
]
PromptOption = Annotated[
    str | None,
    typer.Option(
        "--prompt", metavar="TEXT", help="A prompt by its text; the engines' tokenizer must be on this machine."
    ),
]
PromptFileOption = Annotated[
    str | None,
    typer.Option("--prompt-file", metavar="FILE", help="A prompt by a file with its text; - is standard input."),
]
SaltOption = Annotated[
    str, typer.Option("--salt", metavar="TEXT", help="The cache salt of the prompt's requests.", show_default=False)
]


def tokens_of(options: PromptOptions, opened: Opened, namespace: bytes | None) -> list[int]:
    """Read the prompt. Raises NotDone."""
    if options.tokens is not None:
        tokens = _tokens(_read(options.tokens), options.tokens)
    else:
        text = options.prompt if options.prompt is not None else _read(options.prompt_file or STANDARD_INPUT)
        try:
            tokens = tokenize(opened, text, namespace)
        except NoTokenizer as fault:
            raise NotDone(f"{fault.reason}: send token ids with --tokens") from None
    if len(tokens) > TOKENS_MAX:
        raise NotDone(f"a prompt of {len(tokens)} tokens: at most {TOKENS_MAX}")
    return tokens


def keys_of(options: PromptOptions, opened: Opened, namespace: bytes) -> list[bytes]:
    """Return the keys of the prompt's whole chunks. Raises NotDone, AdminRefusal."""
    return prefix_keys(opened, tokens_of(options, opened, namespace), options.salt, namespace)


def namespace_of(given: str, opened: Opened) -> bytes:
    """Find a namespace by the beginning of its id. Raises NotDone unless exactly one begins so."""
    wanted = given.lower()
    if not wanted:
        raise NotDone("--namespace is empty; is a variable of your shell not set?")
    found = [known for known in opened.book.ids() if known.hex().startswith(wanted)]
    if len(found) != 1:
        what = f"{len(found)} namespaces begin so" if found else "there is no such namespace"
        raise NotDone(f"--namespace {given}: {what} in {opened.root.path}; kvtier stats shows the ids")
    return found[0]


def _read(name: str) -> str:
    try:
        return sys.stdin.read() if name == STANDARD_INPUT else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        why = getattr(fault, "strerror", None) or fault
        fix = f"--tokens and --prompt-file name a file, or {STANDARD_INPUT} for the standard input"
        raise NotDone(f"{name}: no prompt can be read there: {why}; {fix}") from None


def _tokens(text: str, name: str) -> list[int]:
    try:
        found = json.loads(text) if text.lstrip()[:1] in ("[", "{") else [int(word) for word in text.split()]
        found = found["tokens"] if isinstance(found, dict) else found
    except (ValueError, KeyError, RecursionError):
        found = None
    if (
        not isinstance(found, list)
        or not found
        or not all(type(token) is int and 0 <= token < 1 << 32 for token in found)
    ):
        raise NotDone(f"{name}: no token ids: --tokens takes a JSON list, what vLLM's /tokenize answers, or numbers")
    return found
