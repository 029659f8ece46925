"""Tables by rich, and the texts of their cells."""

import io
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from pydantic import BaseModel

from kvtier.runtime.exit_status import print_json
from kvtier.runtime.units import significant, size

A = TypeVar("A", bound=BaseModel)

UNKNOWN = "-"
WIDTH_MAX = 10_000  # width of tables that no terminal shows, columns: no cell is broken into lines


def print_table(rows: Sequence[Sequence[str]], right: Collection[int]) -> None:
    """Print a table whose first row is the titles. right: numbers of the columns that are set to the right. A terminal
    folds cells that are too wide for it."""
    from rich.console import Console  # a tenth of a second, which programs that ask for JSON do not wait for
    from rich.table import Table

    on_terminal = sys.stdout.isatty()
    # Rendered to text first: rich's console would end the process where the reader of a pipe has gone.
    text = io.StringIO()
    console = Console(
        file=text,
        force_terminal=on_terminal,
        width=None if on_terminal else WIDTH_MAX,
        markup=False,
        emoji=False,
        highlight=False,
    )
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for number, title in enumerate(rows[0]):
        table.add_column(title, justify="right" if number in right else "left", overflow="fold")
    for row in rows[1:]:
        table.add_row(*row)
    console.print(table)
    for line in text.getvalue().splitlines():
        print(line.rstrip())


def show(answer: A, as_json: bool, write: Callable[[A], None]) -> None:
    """Print an answer as JSON, or as text by `write`."""
    if as_json:
        print_json(answer.model_dump(mode="json"))
    else:
        write(answer)


def percent(ratio: float | None) -> str:
    return UNKNOWN if ratio is None else f"{100 * ratio:.1f} %"


def seconds(value: float | None) -> str:
    """Return a time as text, from a latency to days of saved prefill."""
    if value is None:
        return UNKNOWN
    magnitude = abs(value)
    if not magnitude:
        return "0 s"
    if magnitude < 1e-3:
        return f"{1e6 * value:.0f} us"
    if magnitude < 1:
        return f"{significant(1e3 * value)} ms"
    if magnitude < 7200:
        return f"{significant(value)} s"
    return f"{value / 3600:,.1f} h"


def share(used_bytes: float, of_bytes: float | None) -> str:
    """Write a fill, as "3.9 TiB of 4.0 TiB"."""
    return size(used_bytes) if of_bytes is None else f"{size(used_bytes)} of {size(of_bytes)}"


def when(at_s: float | None) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s)) if at_s else "never"
    except (OverflowError, ValueError, OSError):  # an index may hold any time
        return UNKNOWN
