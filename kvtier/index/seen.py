"""What a look at a remote index tells, before any engine uses it. Its own module, for who looks knows no client."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seen:
    """url: without credentials. said: what lies there, in words; where it does not answer, why."""

    url: str
    does_answer: bool
    said: str
