"""Common parts of the command lines of benchmarks that ask a server."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

BAR_WIDTH = 30


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
        prog=f"python -m benchmarks.{module}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--base-url", type=base_url, default="http://localhost:8000", help="of the server, with or without /v1")
    add("--model", help="its name there (default: the first that the server lists)")
    add("--system", default="server", help="name of what is measured in --out")
    add("--out", type=Path, default=Path(f"{module}.json"), help="systems of one --out are compared")
    return made


def base_url(text: str) -> str:
    return text.rstrip("/").removesuffix("/v1")


class ProgressBar:
    """Bar of one line on a terminal, with estimated seconds to the end; elsewhere one line when the work is done."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, total
        self._start_s = time.monotonic()
        self.show(0)

    def show(self, done: int) -> None:
        seconds = time.monotonic() - self._start_s
        if not sys.stderr.isatty():
            if done == self._total:
                print(f"{self._what}: {done} in {seconds:.1f} s", file=sys.stderr, flush=True)
            return
        full = BAR_WIDTH * done // self._total if self._total else BAR_WIDTH
        left = f", {seconds / done * (self._total - done):.0f} s left" if 0 < done < self._total else ""
        line = f"{self._what} [{'#' * full}{'.' * (BAR_WIDTH - full)}] {done}/{self._total}, {seconds:.0f} s{left}"
        print(f"\r\033[K{line}", end="\n" if done == self._total else "", file=sys.stderr, flush=True)
