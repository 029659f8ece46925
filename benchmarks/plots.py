"""Plots of results as SVG, by matplotlib.

python -m benchmarks.plots            # draws the plots of benchmarks/README.md again
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.serving.client import Answer
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
    figure, axes = _page(title)
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
    _save(figure, path)


def requests(path: Path, title: str, answers: Sequence[Answer]) -> None:
    """Draw when each request was sent, when its first token came and when it ended, in seconds of the round."""
    figure, axes = _page(title)
    numbers = range(len(answers))
    axes.vlines(numbers, [a.request_start for a in answers], [a.request_end for a in answers], color="#ccc")
    for name, key in (("sent", "request_start"), ("first token", "ttft_time"), ("end", "request_end")):
        axes.plot(numbers, [getattr(answer, key) for answer in answers], "o", markersize=3, label=name)
    axes.set(xlabel="requests in the order in which they were sent", ylabel="seconds")
    axes.legend(fontsize=7)
    _save(figure, path)


def kl(path: Path, result: dict[str, Any]) -> None:
    """Draw the mean KL of each method of benchmarks.quality under each condition, with 95% intervals."""
    figure, axes = _page("KL to the model on bf16 KV, mean, nats a token")
    methods = list(dict.fromkeys(row["method"] for row in result["rows"]))
    for number, condition in enumerate(dict.fromkeys(row["condition"] for row in result["rows"])):
        for row in (row for row in result["rows"] if row["condition"] == condition):
            found = row["kl_mean"]
            axes.errorbar(
                methods.index(row["method"]) + 0.15 * number,
                found["value"],
                [[found["value"] - found["low"]], [found["high"] - found["value"]]],
                color=f"C{number}",
                marker="o",
                markersize=4,
                markerfacecolor="white" if row["is_control"] else None,
            )
        axes.plot([], [], "o", color=f"C{number}", label=condition)
    axes.set_yscale("log")
    axes.set_xticks(range(len(methods)), methods, rotation=45, ha="right", fontsize=7)
    axes.legend(fontsize=7)
    _save(figure, path)


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


def data_path(path: Path) -> None:
    """Draw how a save goes down to the files and a load comes up from them: the picture of README.md."""
    from matplotlib.patches import FancyBboxPatch

    figure, axes = _page("", (8.0, 4.3))
    axes.set(xlim=(0, 100), ylim=(0, 54))
    axes.axis("off")

    def box(x: float, y: float, width: float, height: float, text: str, colour: str) -> None:
        axes.add_patch(FancyBboxPatch((x, y), width, height, "round,pad=0.6", facecolor=colour, edgecolor="#456"))
        axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=8.5)

    def arrow(start: tuple[float, float], end: tuple[float, float], text: str, align: str, style: str = "-") -> None:
        axes.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": "#234", "lw": 1.4, "linestyle": style})
        side = 1.0 if align == "left" else -1.0
        axes.text((start[0] + end[0]) / 2 + side, (start[1] + end[1]) / 2, text, ha=align, va="center", fontsize=8)

    for x, title in (
        (3, "vLLM worker that computed a prompt"),
        (59, "any other worker, at any TP size, any time later"),
    ):
        axes.text(x + 19, 52, title, ha="center", fontsize=9, fontweight="bold")
        box(x, 41, 38, 7, "GPU memory: paged KV cache of the engine", "#dbe9f6")
    box(3, 23, 38, 7, "pinned host memory: cache of encoded chunks", "#e6f2dd")
    unit = "a chunk of 256 tokens is one slab with a checksum for each KV head"
    box(3, 3, 63, 9, f"POSIX path (NVMe, NFS, Lustre, ...): segment files\n{unit}", "#f6ecd7")
    box(76, 3, 21, 9, "index: LMDB or Redis\nprefix hash -> place", "#f1dfee")
    arrow((14, 40.2), (14, 31), "gather, encode, sum", "left")
    arrow((14, 22.2), (14, 13), "direct writes, header last", "left")
    arrow((63, 13), (63, 40.2), "direct reads into the GPU;\neach slab is verified\nthere, then scattered", "left")
    arrow((92, 40.2), (92, 13), "one lookup\na prompt", "left", "--")
    arrow((67.2, 7.5), (75, 7.5), "", "left", "--")
    axes.text(71, 9, "publish", ha="center", fontsize=8)
    _save(figure, path)


def short(number: float) -> str:
    """Return 4096 as 4K; other numbers with thousands separators."""
    return f"{number / 1024:.0f}K" if number >= 1024 and number % 1024 == 0 else f"{number:,.0f}"


def _page(title: str, inches: tuple[float, float] = (6.4, 4.0)) -> tuple[Figure, Any]:
    import matplotlib  # only where a plot is drawn: GPU hosts may not have it
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"svg.hashsalt": "kvtier", "svg.fonttype": "none"})  # same data, same file; text as text
    figure = Figure(figsize=inches, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=10, loc="left")
    return figure, axes


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, format="svg", metadata={"Date": None})


if __name__ == "__main__":
    from benchmarks import aiperf_ttft, capacity

    data_path(RESULTS.parents[1] / "docs" / "data_path.svg")
    for name, draw in (
        ("gpu/versus", versus),
        ("gpu/quality", kl),
        ("capacity", capacity.draw),
        ("aiperf_ttft", aiperf_ttft.draw),
    ):
        draw(RESULTS / f"{name}.svg", json.loads((RESULTS / f"{name}.json").read_text()))
