"""What the commands have in common: exit status, and how they print.

A command that looks answers with OK or FOUND_BAD; one that changes something has done it, or is NOT_DONE.
"""

from __future__ import annotations

import json
from typing import Any

OK, FOUND_BAD, NOT_DONE = 0, 1, 2
INTERRUPTED = 130  # as shells have it: 128 + SIGINT
MEANINGS = (
    "Exit status: 0 done, and all is well; 1 done, and the answer is no: something is bad, does not fit, or nothing is "
    "stored of it; 2 not done, or not all of it, and one line on standard error says why; 130 interrupted."
)


def print_json(values: Any) -> None:
    print(json.dumps(values, indent=2, sort_keys=True))
