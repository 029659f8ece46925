"""Disks of our own to fill or to forbid, skipped without the right to mount. Engines end with their test."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.ends import engines_end as engines_end  # a fixture

Mount = Callable[[Path, str], None]


@pytest.fixture
def mount_tmpfs() -> Iterator[Mount]:
    """Mounts a tmpfs with the given options on an existing folder until the end of the test."""
    mounted: list[Path] = []

    def mount(folder: Path, options: str) -> None:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
        mounted.append(folder)

    yield mount
    for folder in reversed(mounted):
        subprocess.run(["umount", str(folder)], check=True)
