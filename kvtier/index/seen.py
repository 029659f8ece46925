"""What a look at a remote index tells, before any engine uses it. Its own module, for who looks knows no client."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Seen:
    """url: without credentials. said: what is stored there, in words; where it does not answer, why. warning: what is
    wrong with the server, and what to do; "" where nothing is known to be."""

    url: str
    does_answer: bool
    said: str
    warning: str = ""
