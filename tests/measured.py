"""What stands in a result that tests write: when, where and of which commit it was measured, and how."""

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any


def about(command: str) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return {
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "command": command,
    }
