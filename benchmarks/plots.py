"""Plots of results as SVG, by matplotlib.

python -m benchmarks.plots            # draws the plots of benchmarks/README.md again
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.versus.contestants import CONTESTANTS
from benchmarks.versus.judge import Entries

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parent / "results"
STYLES = ("-", "--")


@dataclass(frozen=True)
class Line:
    """points: (x, y), both above zero. colour: number in matplotlib's cycle. style: index into STYLES."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    style: int = 0


def lines(path: Path, title: str, x_name: str, y_name: str, drawn: Sequence[Line]) -> None:
    """Draw lines over logarithmic axes. Raise ValueError if there is no point."""
    xs = sorted({x for line in drawn for x, _ in line.points})
    if not xs:
        raise ValueError("nothing to draw")
    figure, axes = page(title)
    for line in drawn:
        x, y = zip(*sorted(line.points), strict=True)
        axes.plot(
            x, y, STYLES[line.style % len(STYLES)], marker="o", markersize=3, color=f"C{line.colour}", label=line.name
        )
    axes.set(xscale="log", yscale="log", xlabel=x_name, ylabel=y_name)
    axes.set_xticks(xs, [short(x) for x in xs])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    save(figure, path)


def versus(path: Path, result: dict[str, Any]) -> None:
    """Draw the TTFT of each system of benchmarks.versus over prompt length."""
    cells = Entries(result["runs"], result["settings"]["token_bytes"]).cells()
    drawn = []
    for number, (name, contestant) in enumerate(CONTESTANTS.items()):
        points = [
            (float(tokens), 1e3 * cell.ttft)
            for (_, tokens, system), cell in cells.items()
            if system == name and cell.has_loaded
        ]
        drawn += [Line(contestant.title, points, number)] if points else []
    computed = {(float(cell.tokens), 1e3 * cell.computed) for cell in cells.values() if cell.computed}
    drawn.append(Line("computed", sorted(computed), len(CONTESTANTS), 1))
    lines(path, "Time to the first token of a stored prompt", "tokens", "ms", drawn)


def short(number: float) -> str:
    """Return 4096 as 4K; other numbers with thousands separators."""
    return f"{number / 1024:.0f}K" if number >= 1024 and number % 1024 == 0 else f"{number:,.0f}"


def page(title: str, inches: tuple[float, float] = (6.4, 4.0)) -> tuple[Figure, Any]:
    """Return a figure and its axes."""
    import matplotlib  # only where a plot is drawn: GPU hosts may not have it
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"svg.hashsalt": "kvtier", "svg.fonttype": "none"})  # same data, same file; text as text
    figure = Figure(figsize=inches, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=10, loc="left")
    return figure, axes


def save(figure: Figure, path: Path) -> None:
    figure.savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    from benchmarks import aiperf_ttft

    for name, draw in (
        ("gpu/versus", versus),
        ("aiperf_ttft", aiperf_ttft.draw),
    ):
        draw(RESULTS / f"{name}.svg", json.loads((RESULTS / f"{name}.json").read_text()))
