"""Which releases of packages are installed, kvtier's own among them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def installed(package: str, otherwise: str = "") -> str:
    """The release. otherwise: the answer where there is none; of kvtier that is a checkout that was never installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return otherwise
