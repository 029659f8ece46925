"""Long documents as prompts: the word "hi" as LMCache's script has it, or real text."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

PYTHON = "python"  # instead of a file: the language reference that every Python carries, some 700 kB of English
WARMING_WORDS, WARMING_PROMPTS = 1000, 5


@dataclass(frozen=True)
class DocumentSource:
    """words: of the text that documents are cut from; none: "hi" repeated, which compresses like nothing real."""

    words: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str | None) -> DocumentSource:
        """Read a file's words, or those of PYTHON. Raise SystemExit if there are fewer than two."""
        if name is None:
            return cls()
        try:
            words = tuple(python_text().split() if name == PYTHON else Path(name).read_text(errors="replace").split())
        except OSError as error:
            raise SystemExit(f"--text {name}: {error.strerror}") from None
        if len(words) < 2:
            raise SystemExit(f"--text {name}: that is no text")
        return cls(words)

    def document(self, number: int, length: int) -> str:
        """Return `length` words after the number, which keeps any document from being the beginning of another one.

        Documents of real text follow each other in it; at its end they continue at its beginning.
        """
        if not self.words:
            return " ".join((str(number), *("hi",) * length))
        first = number * length
        return " ".join((str(number), *(self.words[(first + place) % len(self.words)] for place in range(length))))


def warming(length: int) -> list[str]:
    """Return short prompts that come before anything is timed, because first requests are slow for other reasons."""
    hi = " ".join(("hi",) * min(WARMING_WORDS, length))
    return [f"{number}warm {hi}" for number in range(WARMING_PROMPTS)]


def python_text() -> str:
    return "\n\n".join(topics[name] for name in sorted(topics))
