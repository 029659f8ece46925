"""Progress bar, on standard error if that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Progress = Callable[[int, int], None]


@contextmanager
def progress(doing: str, unit: str) -> Iterator[Progress]:
    """Return a function of (done, total) that draws the bar as long as the context lasts."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import MofNCompleteColumn, TextColumn  # a tenth of a second, which programs do not wait for

    with _bar(doing, MofNCompleteColumn(" of "), TextColumn(unit)) as draw:
        yield draw


@contextmanager
def byte_progress(doing: str) -> Iterator[Progress]:
    """Return a function of (done, total) in bytes that draws the bar with sizes and rate."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.progress import DownloadColumn, TransferSpeedColumn

    with _bar(doing, DownloadColumn(), TransferSpeedColumn()) as draw:
        yield draw


@contextmanager
def _bar(doing: str, *amounts: Any) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), *amounts, TimeRemainingColumn())
    with Bar(*columns, console=Console(file=sys.stderr)) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
