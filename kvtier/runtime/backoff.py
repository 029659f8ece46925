"""Exponential backoff after refusals. The clock is passed in. A clock that is set back far ends a pause."""

PAUSE_FIRST_S, PAUSE_MAX_S = 1.0, 60.0  # seconds; each refusal doubles the pause


class Backoff:
    """Backoff of one resource. Not thread-safe."""

    def __init__(self) -> None:
        self._pause_s = PAUSE_FIRST_S
        self._paused_s = self._resume_at_s = 0.0

    def is_resting(self, now_s: float) -> bool:
        # Threads may pass their readings out of order: only a reading far before the pause shows a clock set back.
        return self._paused_s - PAUSE_MAX_S <= now_s < self._resume_at_s

    def refused(self, now_s: float) -> float:
        """Begin a pause. Return its length in seconds."""
        pause_s = self._pause_s
        self.pause(now_s, pause_s)
        self._pause_s = min(PAUSE_MAX_S, 2 * pause_s)
        return pause_s

    def pause(self, now_s: float, pause_s: float) -> None:
        """Begin a pause of this length; the next one of `refused` is as long as it would be without."""
        self._paused_s, self._resume_at_s = now_s, now_s + pause_s

    def worked(self) -> None:
        """Reset the next pause to the shortest."""
        self._pause_s = PAUSE_FIRST_S

    def clear(self) -> None:
        """End the pause, and reset the next one."""
        self.worked()
        self._resume_at_s = 0.0
