"""The plot of a result: KL to the model on bf16 KV, of each method under each condition. SVG, written by hand.

python -m benchmarks.quality.plot RESULT.json OUT.svg
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

LEFT, TOP, BOTTOM = 60, 56, 60
COLUMN, PLOT_HEIGHT = 64, 320
COLOURS = ("#1f5fa8", "#c2571a", "#3d8a3d")
TEXT_STYLE = 'font-family="sans-serif" font-size="11" fill="#222"'
DECADES_MAX = 9
SPREAD = 9
"""Pixels between the conditions of one method."""


def svg(result: dict[str, Any]) -> str:
    """Filled marks are what the tier ships, hollow ones controls; bars are 95% intervals; KL on a logarithmic axis."""
    rows = result["rows"]
    sizes = {row["method"]: row["vector_bytes"] for row in rows}
    top = math.ceil(math.log10(max(max(row["kl_mean"]["high"] for row in rows), 1e-9)))
    lowest = min((row["kl_mean"]["value"] for row in rows if row["kl_mean"]["value"] > 0), default=1e-9)
    decades = min(max(1, top - math.floor(math.log10(lowest))), DECADES_MAX)
    width, height = LEFT + COLUMN * len(sizes) + 20, TOP + PLOT_HEIGHT + BOTTOM

    def y(value: float) -> float:
        above = min(max(math.log10(max(value, 1e-30)) - top + decades, 0.0), decades)
        return TOP + PLOT_HEIGHT * (1 - above / decades)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        _text(
            LEFT, 18, "KL to the model on bf16 KV, mean, nats a token; below: bytes of one K and one V vector", "start"
        ),
    ]
    for decade in range(top - decades, top + 1):
        parts += [_line((LEFT, width - 20), (y(10.0**decade),) * 2, "#ddd"),
                  _text(LEFT - 8, y(10.0**decade) + 4, f"1e{decade}", "end")]  # fmt: skip
    middles = {name: LEFT + COLUMN * (place + 0.5) for place, name in enumerate(sizes)}
    for name, n_bytes in sizes.items():
        words = (*name.rsplit(" ", 1), f"{n_bytes:.0f} B")
        parts += [_text(middles[name], TOP + PLOT_HEIGHT + 16 * (line + 1), word) for line, word in enumerate(words)]
    for number, condition in enumerate(dict.fromkeys(row["condition"] for row in rows)):
        colour = COLOURS[number % len(COLOURS)]
        parts += [_dot(LEFT + 8 + 140 * number, 36, colour, colour),
                  _text(LEFT + 18 + 140 * number, 40, condition, "start")]  # fmt: skip
        for row in (row for row in rows if row["condition"] == condition):
            x, kl = middles[row["method"]] + SPREAD * (number - 1), row["kl_mean"]
            parts += [_line((x, x), (y(kl["low"]), y(kl["high"])), colour),
                      _dot(x, y(kl["value"]), "white" if row["is_control"] else colour, colour)]  # fmt: skip
    return "\n".join([*parts, "</svg>", ""])


def _dot(x: float, y: float, fill: str, colour: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{colour}"/>'


def _line(x: tuple[float, float], y: tuple[float, float], colour: str) -> str:
    return f'<line x1="{x[0]:.1f}" y1="{y[0]:.1f}" x2="{x[1]:.1f}" y2="{y[1]:.1f}" stroke="{colour}"/>'


def _text(x: float, y: float, words: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {TEXT_STYLE}>{words}</text>'


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(svg(json.loads(Path(sys.argv[1]).read_text())))
