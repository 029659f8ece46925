"""What the commands have in common: exit status, and how they print."""

from __future__ import annotations

import json
from typing import Any

OK, FOUND_BAD, NOT_DONE = 0, 1, 2
INTERRUPTED = 130  # as shells have it: 128 + SIGINT


def print_json(values: Any) -> None:
    print(json.dumps(values, indent=2, sort_keys=True))
