"""A bar on standard error for what takes long; nothing where that is no terminal."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable

Progress = Callable[[int, int], None]
WIDTH_MAX = 30
REDRAW_S = 0.1
RATE_AFTER_S = 2.0
"""Before that, what is left is a guess."""
EIGHTHS = " ▏▎▍▌▋▊▉"


def progress(doing: str, unit: str, clock: Callable[[], float] = time.monotonic) -> Progress:
    """To be called with (done, total): rewrites one line on a terminal."""
    started_s = drawn_s = clock()

    def show(done: int, total: int) -> None:
        nonlocal drawn_s
        now_s = clock()
        is_over = done >= total
        if not is_over and 0 < now_s - drawn_s < REDRAW_S:
            return
        drawn_s = now_s
        text = line(doing, unit, (done, total), now_s - started_s)
        columns = shutil.get_terminal_size().columns
        print(f"\r\033[K{text[: columns - 1]}", end="\n" if is_over else "", file=sys.stderr, flush=True)

    def stay_silent(done: int, total: int) -> None:
        pass

    return show if sys.stderr.isatty() else stay_silent


def line(doing: str, unit: str, place: tuple[int, int], elapsed_s: float) -> str:
    """place: (done, total)."""
    done, total = place
    share = min(1.0, done / total) if total else 1.0
    left = ""
    if 0 < done < total and elapsed_s > RATE_AFTER_S:
        left = f", {duration(elapsed_s / done * (total - done))} left"
    return f"{doing} {bar(share)} {100 * share:3.0f} %  {done:,} of {total:,} {unit}{left}"


def bar(share: float) -> str:
    eighths = round(share * WIDTH_MAX * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (EIGHTHS[rest] if rest else "")).ljust(WIDTH_MAX, "·")


def duration(seconds: float) -> str:
    """As "3 min 20 s"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
