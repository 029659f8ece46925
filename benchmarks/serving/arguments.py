"""What the benchmarks that ask a server have in common on their command lines: numbers, and their end by Ctrl-C."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn


def at_least(least: int) -> Callable[[str], int]:
    """A type of argparse's: no smaller number."""

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


def run(main: Callable[[], int]) -> NoReturn:
    """Ends the process with main's status; interrupted, with a line."""
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("interrupted")
