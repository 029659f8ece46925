"""Plots as SVG, written by hand: lines over a logarithmic axis, and the requests of a round as points."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from benchmarks.serving.client import Answer

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 400, 70, 20, 40, 50
COLOURS = ("#1f5fa8", "#c2571a", "#3d8a3d", "#8a3d8a", "#555555", "#b08900")
TEXT_STYLE = 'font-family="sans-serif" font-size="11" fill="#222"'
DASHES = ("", "6 3")
KEY_LINE = 15


@dataclass(frozen=True)
class Line:
    """points: (x, y), both above zero. style: 0 is drawn through, 1 dashed. colour: a number."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int = 0
    style: int = 0


@dataclass(frozen=True)
class Axes:
    """Where values lie on the page. Both axes are logarithmic, y by decades."""

    low: tuple[float, float]
    high: tuple[float, float]

    @classmethod
    def around(cls, points: Sequence[tuple[float, float]]) -> Axes:
        xs, ys = [x for x, _ in points], [y for _, y in points]
        low_y, high_y = 10.0 ** math.floor(math.log10(min(ys))), 10.0 ** math.ceil(math.log10(max(ys)))
        wide = (min(xs), max(xs)) if min(xs) < max(xs) else (min(xs) / 2, max(xs) * 2)
        return cls((wide[0], low_y), (wide[1], high_y if high_y > low_y else low_y * 10))

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * _share(value, self.low[0], self.high[0])

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * _share(value, self.low[1], self.high[1])


def lines(title: str, x_name: str, y_name: str, drawn: Sequence[Line]) -> str:
    """Each line's own points are the marks of the x axis. Raises ValueError where there is nothing to draw."""
    every = [point for line in drawn for point in line.points]
    if not every:
        raise ValueError("nothing to draw")
    axes = Axes.around(every)
    parts = [_text(LEFT, 18, title, "start"), _text(WIDTH / 2, HEIGHT - 8, x_name), _text(8, TOP - 8, y_name, "start")]
    for power in range(round(math.log10(axes.low[1])), round(math.log10(axes.high[1])) + 1):
        height = axes.y(10.0**power)
        parts += [_segment((LEFT, height), (WIDTH - RIGHT, height), "#ddd"),
                  _text(LEFT - 6, height + 4, f"{10.0**power:,g}", "end")]  # fmt: skip
    parts += [_text(axes.x(x), HEIGHT - BOTTOM + 16, short(x)) for x in sorted({x for x, _ in every})]
    for number, line in enumerate(drawn):
        colour, dash = COLOURS[line.colour % len(COLOURS)], DASHES[line.style % len(DASHES)]
        places = [(axes.x(x), axes.y(y)) for x, y in sorted(line.points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-dasharray="{dash}"/>')
        parts += [_dot(place, colour) for place in places]
        key = TOP + 12 + KEY_LINE * number
        parts += [_dot((LEFT + 12, key - 4), colour), _text(LEFT + 22, key, line.name, "start")]
    return _page(parts)


def requests(title: str, answers: Sequence[Answer]) -> str:
    """Of each request: when it was sent, when its first token came, when it ended; seconds from the round's start."""
    last_s = max((answer.request_end for answer in answers), default=0.0) or 1.0
    step = (WIDTH - LEFT - RIGHT) / max(len(answers), 1)
    parts = [_text(LEFT, 18, title, "start"), _text(WIDTH / 2, HEIGHT - 8, "requests as they were sent")]
    parts += [_text(LEFT - 6, TOP + 4, f"{last_s:.3g} s", "end"), _text(LEFT - 6, HEIGHT - BOTTOM, "0 s", "end")]
    for number, name in enumerate(("sent", "first token", "end")):
        parts += [_dot((LEFT + 12 + 110 * number, 32), COLOURS[number]),
                  _text(LEFT + 22 + 110 * number, 36, name, "start")]  # fmt: skip
    for place, answer in enumerate(answers):
        x = LEFT + step * (place + 0.5)
        times = (answer.request_start, answer.ttft_time, answer.request_end)
        heights = [HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * seconds / last_s for seconds in times]
        parts.append(_segment((x, heights[0]), (x, heights[2]), "#ccc"))
        parts += [_dot((x, height), COLOURS[number]) for number, height in enumerate(heights)]
    return _page(parts)


def short(number: float) -> str:
    """4096 as 4K; what is no whole number of K as it is."""
    return f"{number / 1024:.0f}K" if number >= 1024 and number % 1024 == 0 else f"{number:,.0f}"


def _share(value: float, low: float, high: float) -> float:
    return math.log(value / low) / math.log(high / low)


def _page(parts: Sequence[str]) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *parts, "</svg>", ""])


def _dot(place: tuple[float, float], colour: str) -> str:
    return f'<circle cx="{place[0]:.1f}" cy="{place[1]:.1f}" r="3" fill="{colour}"/>'


def _segment(start: tuple[float, float], end: tuple[float, float], colour: str) -> str:
    return f'<line x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {TEXT_STYLE}>{escape(words)}</text>'
