"""Weights: plain safetensors files straight into tensors on host or device.

    from kvtier.weights import load_file, load_files

    tensors = load_files(sorted(Path(folder).glob("*.safetensors")), "cuda")

torch is imported with them, not with this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.weights.load import load_file, load_files

__all__ = ["load_file", "load_files"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvtier.weights import load

    return getattr(load, name)
