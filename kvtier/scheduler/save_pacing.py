"""SavePacing: limit of the chunks that a step plans to save, after workers refused some of an earlier step. Pure."""

from collections.abc import Iterable

WINDOW_MIN = 8  # chunks of the first step after a refusal
WINDOW_MAX = 1024  # chunks; a window beyond is none
PAUSE_MAX = 31  # steps; longest pause in planning after a slot was lost
# Longest pause, steps, if a chunk was stored since the last pause: then no rank is stuck, but their rates differ.
PAUSE_STORING_MAX = 7


class SavePacing:
    """A refused chunk is planned again in a later step. The window keeps steps from planning hundreds of chunks that
    are refused again: it begins small after each refusal, and doubles with each step without one.

    If one rank refuses a chunk that another takes, the other writes it into a new slot with each attempt. So no chunk
    is planned for a pause after such a refusal: 1 step, then 3, 7 and so on up to PAUSE_MAX, or up to PAUSE_STORING_MAX
    while chunks are stored. After a pause, steps plan no chunk until those planned since are answered, for PAUSE_MAX
    steps at most: an engine that plans ahead of the answers would plan hundreds before the first refusal. Once steps
    without a refusal have opened the window, pauses begin with 1 step again.
    """

    def __init__(self) -> None:
        self._window: int | None = None
        self._was_refused = False
        self._pause = self._pause_left = self._waited = 0  # steps
        self._unanswered: set[bytes] = set()  # chunks that were planned since a pause

    def refused(self) -> None:
        """Note that a chunk could not be taken."""
        self._was_refused = True

    def slot_lost(self) -> None:
        """Note that one rank refused a chunk that another takes: the slot of this attempt is wasted."""
        self._was_refused = True
        if not self._pause_left:  # a loss reported during a pause is of an attempt before it
            self._pause_left = self._pause = min(2 * self._pause + 1, PAUSE_MAX)

    def stored(self) -> None:
        """Note that all ranks have stored a chunk."""
        self._pause = min(self._pause, PAUSE_STORING_MAX // 2)  # the next pause is twice this and 1

    def planned(self, keys: Iterable[bytes]) -> None:
        """Note the chunks that a step plans."""
        if self._pause:
            self._unanswered.update(keys)

    def answered(self, key: bytes) -> None:
        """Note that all ranks have answered for a chunk."""
        self._unanswered.discard(key)

    def next_window(self) -> int | None:
        """Return how many chunks this step may plan: 0 during a pause or a wait; None: any number. Call once a step."""
        if self._pause_left:
            self._pause_left -= 1
            return 0
        if self._unanswered and self._waited < PAUSE_MAX:
            self._waited += 1
            return 0
        self._unanswered.clear()
        self._waited = 0
        if self._was_refused:
            self._was_refused, self._window = False, WINDOW_MIN
        elif self._window is not None and self._window < WINDOW_MAX:
            self._window *= 2
        else:
            self._window, self._pause = None, 0
        return self._window
