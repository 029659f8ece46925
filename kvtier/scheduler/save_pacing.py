"""SavePacing: how many chunks a step may plan to save after workers could not take all of an earlier step's. Pure."""

WINDOW_MIN = 8  # chunks of the first step after a refusal
WINDOW_MAX = 1024  # chunks; a window beyond is none


class SavePacing:
    """A refused chunk is planned again in a later step. The window keeps steps from planning hundreds of chunks that
    are refused again: it begins small after each refusal, and doubles with each step without one."""

    def __init__(self) -> None:
        self._window: int | None = None
        self._was_refused = False

    def refused(self) -> None:
        """Note that a chunk could not be taken."""
        self._was_refused = True

    def next_window(self) -> int | None:
        """Return the chunks that this step may plan; None: any number. Call once a step."""
        if self._was_refused:
            self._was_refused, self._window = False, WINDOW_MIN
        elif self._window is not None:
            self._window = self._window * 2 if self._window < WINDOW_MAX else None
        return self._window
