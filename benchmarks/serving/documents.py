"""Long documents as prompts: the word "hi" as the field's script has it, or real text; and their order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.serving.client import Prompt

MODES = ("random", "tile", "interleave")
PYTHON = "python"
"""Instead of a file: the language reference that every Python carries, some 700 kB of English."""
WARMING_WORDS, WARMING_PROMPTS = 1000, 5


@dataclass(frozen=True)
class Source:
    """words: of the text that documents are cut from; none: "hi" over and over, which compresses like nothing real."""

    words: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str | None) -> Source:
        """A file's words, or those of PYTHON. Raises SystemExit where there is too little of it, or none."""
        if name is None:
            return cls()
        try:
            words = tuple(_python_text().split() if name == PYTHON else Path(name).read_text(errors="replace").split())
        except OSError as error:
            raise SystemExit(f"--text {name}: {error.strerror}") from None
        if len(words) < 2:
            raise SystemExit(f"--text {name}: that is no text")
        return cls(words)

    def document(self, number: int, length: int) -> str:
        """`length` words after the number, which keeps any document from being the beginning of another one.

        Documents of real text begin one after another in it; where it ends they go on at its beginning.
        """
        if not self.words:
            return " ".join((str(number), *("hi",) * length))
        first = number * length
        return " ".join((str(number), *(self.words[(first + place) % len(self.words)] for place in range(length))))


def documents(source: Source, count: int, length: int, first: int = 0) -> list[Prompt]:
    return [Prompt(number, source.document(number, length)) for number in range(first, first + count)]


def warming(length: int) -> list[Prompt]:
    """Prompts that come before anything is timed: first requests are slow for reasons of their own. length: of the
    documents; these are no longer, and short where those are long."""
    hi = " ".join(("hi",) * min(WARMING_WORDS, length))
    return [Prompt(number, f"{number}warm {hi}") for number in range(WARMING_PROMPTS)]


def repeated(prompts: Sequence[Prompt], count: int, mode: str, rng: random.Random) -> list[Prompt]:
    """Each prompt `count` times: [1, 2, 1, 2] as tile, [1, 1, 2, 2] as interleave, or shuffled."""
    if mode == "interleave":
        return [prompt for prompt in prompts for _ in range(count)]
    several = list(prompts) * count
    if mode == "random":
        rng.shuffle(several)
    return several


def with_misses(prompts: Sequence[Prompt], ratio: str | None, rng: random.Random) -> list[Prompt]:
    """Of each hit + miss prompts in a row the last `miss` begin with a random number. ratio: "hit:miss"."""
    if ratio is None:
        return list(prompts)
    hit, miss = (int(part) for part in ratio.split(":"))
    return [
        replace(prompt, text=f"{rng.getrandbits(48)} {prompt.text}", is_miss=True)
        if place % (hit + miss) >= hit
        else prompt
        for place, prompt in enumerate(prompts)
    ]


def _python_text() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))
