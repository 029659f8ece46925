"""Progress bar, on standard error if that is a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int], None]


@contextmanager
def progress(doing: str, unit: str = "") -> Iterator[Progress]:
    """Yield a function of (done, total) that updates a bar on a terminal. unit: of the counts; "" for bytes, which are
    shown with their rate."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich import progress as bars  # its import takes 0.1 s; not needed without a terminal
    from rich.console import Console

    counts = (bars.MofNCompleteColumn(" of "), bars.TextColumn(unit))
    amounts = counts if unit else (bars.DownloadColumn(), bars.TransferSpeedColumn())
    columns = (bars.TextColumn("{task.description}"), bars.BarColumn(), bars.TaskProgressColumn(), *amounts)
    with bars.Progress(*columns, bars.TimeRemainingColumn(), console=Console(file=sys.stderr)) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
