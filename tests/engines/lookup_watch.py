"""What an engine's lookups came to, for the scripts of engines: how long they took, and whether the index answered."""

import logging
import time
from typing import Any

NOT_ASKED = object()


class LookupWatch(logging.Handler):
    """Of one engine's scheduler half. What it finds goes into the answers to requests."""

    def __init__(self, half: Any) -> None:
        super().__init__(logging.WARNING)
        self._seen: dict[str, dict[str, Any]] = {}
        self._pauses: list[str] = []
        self._found: Any = NOT_ASKED
        self._ask, half.matched_tokens = half.matched_tokens, self._matched_tokens
        lookups = half._store._lookups
        self._resolve, lookups.resolve = lookups.resolve, self._resolved
        log = logging.getLogger("kvtier")
        log.setLevel(logging.WARNING)
        log.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the reason of each pause of the index."""
        if "no calls of the index" in str(record.msg):
            self._pauses.append(record.getMessage())

    def _resolved(self, *asked: Any) -> Any:
        self._found = self._resolve(*asked)
        return self._found

    def _matched_tokens(self, request: Any, computed_tokens: int) -> Any:
        self._found = NOT_ASKED
        began = time.monotonic()
        answer = self._ask(request, computed_tokens)
        ended = time.monotonic()
        new = {"first_s": began, "longest_s": 0.0, "is_answered": True}
        seen = self._seen.setdefault(request.request_id.split("-")[0], new)
        seen["longest_s"] = max(seen["longest_s"], ended - began)
        if answer[0] is not None:
            seen["answered_s"], seen["tier_tokens"] = ended, answer[0]
            if self._found is not NOT_ASKED:  # None: given up
                seen["is_answered"] = self._found is not None and self._found.is_answer
        return answer

    def note(self, answers: dict[str, dict[str, Any]]) -> None:
        """By names of requests.

        lookup_s: from when its lookup was first asked for until the answer; longest_call_s: of one call of that;
        tier_tokens: what was offered; is_answered: whether the index said so, and not that it does not answer;
        pauses: reasons of the pauses of the index since the last answers.
        """
        pauses, self._pauses = self._pauses, []
        for name, answer in answers.items():
            answer["pauses"] = pauses
            if name in self._seen:
                seen = self._seen.pop(name)
                answer["lookup_s"] = seen.get("answered_s", seen["first_s"]) - seen["first_s"]
                answer["longest_call_s"] = seen["longest_s"]
                answer["tier_tokens"] = seen.get("tier_tokens", 0)
                answer["is_answered"] = seen["is_answered"]
