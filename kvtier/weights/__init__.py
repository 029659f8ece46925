"""Weights: plain safetensors files straight into tensors on host or device.

    from kvtier.weights import load_file, load_files

    tensors = load_files(sorted(Path(folder).glob("*.safetensors")), "cuda")

torch is imported by the first call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def load_file(filename: str | os.PathLike[str], device: str | int | torch.device = "cpu") -> dict[str, torch.Tensor]:
    """Load all tensors of a file, as `safetensors.torch.load_file` does. See `load_files`."""
    return load_files([filename], device)


def load_files(
    filenames: Iterable[str | os.PathLike[str]],
    device: str | int | torch.device = "cpu",
    *,
    progress: Callable[[int], object] | None = None,
) -> dict[str, torch.Tensor]:
    """Load all tensors of safetensors files, by name.

    device: as in torch, the CPU or a CUDA device. The tensors are parts of buffers of about 1 GiB, at multiples of 256
    bytes; a buffer is freed with the last of its tensors. Each tensor has a storage of its own. progress: is called
    about 20 times a second with the bytes that have landed.

    Files that a manifest beside them lists (`kvtier weights verify FOLDER --write`) are compared with it.

    Raises Corrupt for a malformed file, a dtype that torch does not have and a tensor in two files; WeightsDamaged
    where bytes are not those of the manifest; WeightsUnreadable for a file that is missing, cannot be read, or changed
    during the read; TierUnavailable without memory or without the device.
    """
    from kvtier.weights.load import load

    return load(filenames, device, progress)
