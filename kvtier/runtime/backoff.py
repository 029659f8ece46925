"""How long to leave alone what refused: doubling from one refusal to the next. Pure: the clock is passed in."""

from __future__ import annotations

PAUSE_FIRST_S, PAUSE_MAX_S = 1.0, 60.0


class Backoff:
    """Not thread-safe."""

    def __init__(self) -> None:
        self._pause_s = PAUSE_FIRST_S
        self._resume_at_s = 0.0

    def is_resting(self, now_s: float) -> bool:
        return now_s < self._resume_at_s

    def refused(self, now_s: float) -> float:
        """Begins a pause; its length in seconds."""
        pause_s = self._pause_s
        self._resume_at_s = now_s + pause_s
        self._pause_s = min(PAUSE_MAX_S, 2 * pause_s)
        return pause_s

    def pause(self, now_s: float, pause_s: float) -> None:
        """Begin a pause of this length; the next one of `refused` is as long as it would be without."""
        self._resume_at_s = now_s + pause_s

    def worked(self) -> None:
        """The next pause is the shortest again."""
        self._pause_s = PAUSE_FIRST_S

    def clear(self) -> None:
        """Ends the pause, too."""
        self.worked()
        self._resume_at_s = 0.0
