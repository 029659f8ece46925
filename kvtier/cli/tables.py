"""Tables for people, and the texts of what stands in them."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from kvtier.runtime.units import size

UNKNOWN = "-"


def print_table(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> None:
    """The first row is the titles. right: numbers of the columns that are set to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print("  ".join(cells).rstrip())


def counted(count: int, noun: str) -> str:
    """As "1 namespace", "2,000 namespaces". noun: in the singular, with a plural in s."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def percent(ratio: float | None) -> str:
    return UNKNOWN if ratio is None else f"{100 * ratio:.1f} %"


def seconds(value: float | None) -> str:
    """Of a latency, or of what was saved in days."""
    if value is None:
        return UNKNOWN
    magnitude = abs(value)
    if not magnitude:
        return "0 s"
    if magnitude < 1e-3:
        return f"{1e6 * value:.0f} us"
    if magnitude < 1:
        return f"{1e3 * value:.3g} ms"
    if magnitude < 7200:
        return f"{value:,.3g} s" if magnitude < 1000 else f"{value:,.0f} s"
    return f"{value / 3600:,.1f} h"


def share(used_bytes: float, of_bytes: float | None) -> str:
    """As "3.9 TiB of 4.0 TiB"."""
    return size(used_bytes) if of_bytes is None else f"{size(used_bytes)} of {size(of_bytes)}"


def when(at_s: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_s)) if at_s else "never"
