"""Tokenizers: turn a prompt's text into tokens. Engines name their tokenizer in their reports; its folder must be on
this machine or in its Hugging Face cache. Nothing is downloaded, and no code of a model is run.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvtier.admin.opened import AdminRefusal, Opened
from kvtier.admin.stats import read_reports

TOKENIZER_FILE = "tokenizer.json"


class NoTokenizer(AdminRefusal):
    """None can be had here; ask with token ids. reason: the text without this advice."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}: send token ids")
        self.reason = reason


def tokenize(opened: Opened, text: str, namespace: bytes | None) -> list[int]:
    """Tokenize text as an engine tokenizes the prompt of a completion, with special tokens. Raises NoTokenizer."""
    reports, _ = read_reports(opened, opened.clock())
    wanted = {report.tokenizer for report in reports if namespace is None or report.namespace == namespace.hex()}
    wanted.discard("")
    if len(wanted) != 1:
        what = "running engines have different tokenizers" if wanted else "no running engine reports a tokenizer"
        raise NoTokenizer(what)
    return list(_tokenizer(wanted.pop()).encode(text).ids)


@lru_cache(maxsize=4)
def _tokenizer(name: str) -> Any:
    path = _file(name)
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise NoTokenizer("the package tokenizers is not installed here (`pip install tokenizers`)") from None
    return Tokenizer.from_str(_text(path))


def _text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
        json.loads(text)
    except (OSError, ValueError, RecursionError) as fault:
        raise NoTokenizer(f"{path} cannot be read: {fault}") from None
    return text


def _file(name: str) -> Path:
    folder = Path(name)
    if folder.is_absolute():
        path = folder / TOKENIZER_FILE
        if path.is_file():
            return path
        raise NoTokenizer(f"there is no {path} on this machine")
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        raise NoTokenizer("the package huggingface_hub is not installed here") from None
    try:
        cached = try_to_load_from_cache(name, TOKENIZER_FILE)
    except ValueError:  # a path within that engine's own folder, say
        raise NoTokenizer(f"{name} is neither a folder nor a name on the hub") from None
    if isinstance(cached, str):
        return Path(cached)
    raise NoTokenizer(f"the tokenizer of {name} is not in this machine's Hugging Face cache")
