"""Common parts of the command lines of benchmarks that ask a server."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress


def at_least(least: int) -> Callable[[str], int]:
    """Return an argparse type of numbers that are not smaller."""

    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: this must be {least} or more")
        return int(text)

    return number


def numbers(text: str) -> list[int]:
    found = [int(part) for part in text.split(",")]
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: these must be above 0")
    return found


def parser(module: str, about: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that name the server and the result."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = made.add_argument
    add("--base-url", type=base_url, default="http://localhost:8000", help="of the server, with or without /v1")
    add("--model", help="its name there (default: the first that the server lists)")
    add("--system", default="server", help="name of what is measured in --out")
    add("--out", type=Path, default=Path(f"{module}.json"), help="systems of one --out are compared")
    return made


def base_url(text: str) -> str:
    return text.rstrip("/").removesuffix("/v1")


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Draw a bar on standard error. Yield a function that takes the number of what is done."""
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)
