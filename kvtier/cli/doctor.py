"""`kvtier doctor [PATH]`: one verdict a line, as each probe answers."""

from __future__ import annotations

from pathlib import Path

from kvtier.cli.place import refuse_missing_file
from kvtier.doctor.report import examine, line
from kvtier.index.open import look_at_redis
from kvtier.runtime.exit_status import FOUND_BAD, OK, print_json


def run_doctor(path: Path | None, as_json: bool, peer: Path | None = None) -> int:
    """Raises ConfigError."""
    refuse_missing_file(path)
    found = []
    for verdict in examine(path, look_at_redis=look_at_redis, peer=peer):
        found.append(verdict)
        if not as_json:
            print(line(verdict), flush=True)
    if as_json:
        print_json([verdict._asdict() for verdict in found])
    return FOUND_BAD if any(verdict.level == "bad" for verdict in found) else OK
