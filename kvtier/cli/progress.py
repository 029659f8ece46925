"""Progress bar, on standard error if that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int], None]


@contextmanager
def progress(doing: str, unit: str) -> Iterator[Progress]:
    """Return a function of (done, total) that draws the bar as long as the context lasts."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console  # a tenth of a second, which programs do not wait for
    from rich.progress import BarColumn, MofNCompleteColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        MofNCompleteColumn(" of "),
        TextColumn(unit),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(file=sys.stderr)) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
