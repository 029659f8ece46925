"""Sizes in bytes, as text for people."""

from __future__ import annotations


def size(n_bytes: float) -> str:
    """As "1.5 GiB"."""
    power = min(4, max(0, int(n_bytes).bit_length() - 1) // 10)
    unit = ("bytes", "KiB", "MiB", "GiB", "TiB")[power]
    return f"{n_bytes / 1024**power:.{1 if power else 0}f} {unit}"
