"""Releases of installed packages, and the git commit of kvtier."""

import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def installed(package: str, otherwise: str = "") -> str:
    """Return the release of a package, or `otherwise` where it is not installed, as kvtier in a plain checkout."""
    try:
        return version(package)
    except PackageNotFoundError:
        return otherwise


def commit() -> str:
    """Return the git commit that kvtier was built from, or that of the checkout in an editable install; "": unknown."""
    package = Path(__file__).parents[1]
    with suppress(FileNotFoundError):
        return (package / "COMMIT").read_text().strip()
    if (package.parent / ".git").exists():
        command = ["git", "-C", str(package.parent), "describe", "--always", "--dirty", "--exclude=*"]
        with suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
            return done.stdout.strip()
    return ""
