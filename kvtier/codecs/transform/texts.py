"""Text to calibrate with and to measure on: what packages and the system of this machine hold, by kind.

dialogue is made of code: questions about functions, answered by their docstrings.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

KINDS = {
    "prose": (".rst", ".md", ".txt", ".pod", ""),
    "code": (".py", ".c", ".h", ".js"),
    "tables": (".csv", ".json", ".tab", ".tsv", ".xml", ".yaml", ".yml"),
    "dialogue": (".py",),
}  # endings of files, by kind
FILE_BYTES = (6_000, 1 << 20)  # smaller files give no row, larger ones are generated
ROW_CHARS = 24_000  # of a file, enough for a row in any of the tokenizers
GRAM = 12  # rows share no run of so many tokens

Tokenize = Callable[[str], Sequence[int]]
Chat = Callable[[Sequence[tuple[str, str]]], str]


def texts_of(kind: str, chat: Chat) -> Iterator[str]:
    """Yield the starts of text files of a kind, in an order that mixes the packages and is equal in each run. chat:
    writes pairs of a question and an answer as the model has them."""
    paths = sysconfig.get_paths()
    folders = [paths["stdlib"], paths["purelib"], "/usr/share/common-licenses", "/usr/share/doc", "/usr/share/perl"]
    found: set[Path] = set()
    for folder in folders:
        for place, inner, names in os.walk(folder):
            inner[:] = [name for name in inner if name not in ("__pycache__", "tests", "test")]
            found.update(Path(place, name) for name in names if os.path.splitext(name)[1] in KINDS[kind])
    # The common start of all dialogues, such as a system prompt, is left out: rows must not share tokens.
    start = len(os.path.commonprefix([chat([(text, text)]) for text in ("a", "b")]))
    order = -1 if kind == "dialogue" else 1  # not of the files that code begins with
    for path in sorted(found, key=lambda path: hashlib.blake2b(path.name.encode()).digest())[::order]:
        try:
            if FILE_BYTES[0] <= path.stat().st_size <= FILE_BYTES[1]:
                text = path.read_text()
                yield chat(_questions(text))[start:][:ROW_CHARS] if kind == "dialogue" else text[:ROW_CHARS]
        except (OSError, UnicodeDecodeError, SyntaxError, ValueError, RecursionError):
            continue


def rows_of(
    texts: Iterable[str], tokenize: Tokenize, n_rows: int, n_tokens: int, seen: set[tuple[int, ...]]
) -> list[list[int]]:
    """Return up to n_rows rows, of one text each, that share no GRAM tokens with each other or with `seen`, which
    grows."""
    rows: list[list[int]] = []
    for text in texts:
        if len(rows) == n_rows:
            break
        ids = list(tokenize(text))[:n_tokens]
        grams = {tuple(ids[i : i + GRAM]) for i in range(len(ids) - GRAM + 1)}
        if len(ids) == n_tokens and len(grams) > 0.8 * n_tokens and not grams & seen:
            rows.append(ids)
            seen |= grams
    return rows


def _questions(source: str) -> list[tuple[str, str]]:
    """Return pairs of a question and its answer, about the functions and classes of a Python file."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            answer = ast.get_docstring(node)
            if answer and len(answer) > 60:
                found.append((f"What does {node.name.strip('_').replace('_', ' ')} do?", answer))
    return found
