"""Whether processes keep to what they have: memory and descriptors, looked at from outside."""

import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

MEMORY_MIB = 48.0
"""What an engine's own memory may grow by, in the median, after its warm-up, beyond what that of the control grows by,
an engine that computes the same prompts without the tier: malloc's fragments, and the test's own notes of what was
saved and loaded (about 10 MiB in half an hour)."""
CONTROL = "alone"
DESCRIPTORS = 8  # growth of descriptors that are not of segments: connections and files that come and go
WARM_UP = 1 / 3  # of an engine's looks, so many do not count: arenas and caches are touched for the first time
LOOKS_MIN = 40
"""An engine that was looked at less often lived too short to say anything: ten minutes, for within the first ones it
grows by 100 MiB."""


class Look(NamedTuple):
    """anon_mib: memory of the process's own (also what it shares with the one it was forked from). segments:
    descriptors of segment files; others: all other ones."""

    anon_mib: float
    segments: int
    others: int


def look(pid: int) -> Look:
    proc = Path(f"/proc/{pid}")
    (line,) = [line for line in (proc / "status").read_text().splitlines() if line.startswith("RssAnon:")]
    names = []
    for fd in os.listdir(proc / "fd"):
        try:
            names.append(os.readlink(proc / "fd" / fd))
        except FileNotFoundError:
            continue  # it was closed meanwhile
    segments = sum(".kvseg" in name for name in names)
    return Look(int(line.split()[1]) / 1024, segments, len(names) - segments)


class Watch:
    """The looks at each engine, by its name."""

    def __init__(self) -> None:
        self._looks: dict[str, list[Look]] = {}

    def look(self, name: str, pid: int) -> None:
        self._looks.setdefault(name, []).append(look(pid))

    def figures(self) -> dict[str, dict[str, Any]]:
        """Of those engines that were looked at often enough: medians of the first and the second half after warm-up,
        and the most."""
        found = {}
        for name, looks in self._looks.items():
            if len(looks) >= LOOKS_MIN:
                counted = looks[int(len(looks) * WARM_UP) :]
                found[name] = {
                    "looks": len(looks),
                    "memory_mib": _halves([one.anon_mib for one in counted]),
                    "descriptors": _halves([one.others for one in counted]),
                    "segment_descriptors": _halves([one.segments for one in counted]),
                }
        return found


def grown(figures: dict[str, dict[str, Any]]) -> list[str]:
    """What is not flat; [] is what must be."""
    control_mib = max(0.0, _growth(figures[CONTROL], "memory_mib")) if CONTROL in figures else 0.0
    bounds = {"memory_mib": MEMORY_MIB + control_mib, "descriptors": DESCRIPTORS}
    return [
        f"{name}: {what} from {one[what]['first']:.0f} to {one[what]['last']:.0f}"
        for name, one in figures.items()
        for what, bound in bounds.items()
        if name != CONTROL and _growth(one, what) > bound
    ]


def _growth(figures: dict[str, Any], what: str) -> float:
    return float(figures[what]["last"] - figures[what]["first"])


def _halves(values: Sequence[float]) -> dict[str, float]:
    middle = len(values) // 2
    first, last = statistics.median(values[:middle]), statistics.median(values[middle:])
    return {"first": round(first, 1), "last": round(last, 1), "most": round(max(values), 1)}
