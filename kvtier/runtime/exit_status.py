"""Exit status and JSON output of the commands.

A command that reads returns OK or FOUND_BAD; one that changes something returns OK or NOT_DONE.
"""

import json
from typing import Any

OK, FOUND_BAD, NOT_DONE = 0, 1, 2
INTERRUPTED = 130  # 128 + SIGINT, as in shells
MEANINGS = (
    "Exit status: 0 done, and all is well; 1 done, and the answer is no: something is bad, does not fit, or nothing is "
    "stored of it; 2 not done, or not all of it, and one line on standard error says why; 130 interrupted."
)


def print_json(values: Any) -> None:
    print(json.dumps(values, indent=2, sort_keys=True))
