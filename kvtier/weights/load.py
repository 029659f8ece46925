"""Whole files as tensors: packs tensors into few buffers, reads the files into them, and returns parts of those."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from kvtier.errors import Corrupt, TierUnavailable, WeightsUnreadable
from kvtier.model.safetensors import TensorEntry, read_header
from kvtier.runtime.garbage import paused_collection
from kvtier.weights import manifest
from kvtier.weights.copies import Copy, contiguous
from kvtier.weights.dtypes import TORCH_DTYPES
from kvtier.weights.reader import WeightReader, unchanged

BUFFER_BYTES = 1 << 30  # of a buffer, unless a tensor is larger; one allocation a tensor would take a GPU longer
ALIGN_BYTES = 256  # of each tensor: kernels load vectors, and the checksum of a slab needs 16


class _Layout:
    """Places of tensors in buffers, in the order of the files."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.copies: list[Copy] = []
        self.places: dict[str, tuple[int, int, TensorEntry]] = {}

    def add(self, file: int, name: str, entry: TensorEntry) -> None:
        start = -(-self.sizes[-1] // ALIGN_BYTES) * ALIGN_BYTES if self.sizes else 0
        if not self.sizes or start + entry.n_bytes > BUFFER_BYTES:
            self.sizes.append(0)
            start = 0
        number = len(self.sizes) - 1
        self.sizes[number] = start + entry.n_bytes
        self.places[name] = (number, start, entry)
        if entry.n_bytes:
            self.copies.append(contiguous(file, entry.start, entry.n_bytes, number, start))


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
    if isinstance(filenames, str | bytes | os.PathLike):
        raise TypeError(f"filenames must be several paths, not {filenames!r}; load_file loads one file")
    files = [Path(name) for name in filenames]
    place = _device(device)
    with unchanged(files), WeightReader(progress=progress) as reader:
        reader.prepare(place)
        with paused_collection():
            layout = _layout(files)
        buffers = [torch.empty(size, dtype=torch.uint8, device=place) for size in layout.sizes]
        reader.read(files, layout.copies, buffers, manifest.of_files(files))
    with paused_collection():
        return {name: _tensor(buffers[number], start, entry) for name, (number, start, entry) in layout.places.items()}


def _device(device: str | int | torch.device) -> torch.device:
    place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f"device {place}: weights load to the CPU or to CUDA; load to the CPU, then move the tensors")
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        text = f"device {place} cannot be used: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices"
        raise TierUnavailable(text)
    if place.type == "cuda" and place.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return place


def _layout(files: list[Path]) -> _Layout:
    layout = _Layout()
    for number, path in enumerate(files):
        try:
            header = read_header(path)
        except OSError as error:
            raise WeightsUnreadable(path, None, f"it cannot be opened: {error.strerror}") from error
        for name, entry in header.tensors.items():
            if name in layout.places:
                raise Corrupt(f"tensor {name} is in {path} and in another of the files; load one of them")
            if _dtype(entry) is None:
                what = f"tensor {name}, {entry.dtype} {list(entry.shape)}"
                raise Corrupt(f"{path}: torch {torch.__version__} has no dtype for {what}")
            layout.add(number, name, entry)
    return layout


def _dtype(entry: TensorEntry) -> torch.dtype | None:
    if entry.dtype == "F4" and entry.shape[-1] % 2 == 0:  # torch has a dtype for pairs only
        dtype: torch.dtype | None = getattr(torch, "float4_e2m1fn_x2", None)  # from torch 2.8 on
        return dtype
    return TORCH_DTYPES.get(entry.dtype)


def _tensor(buffer: torch.Tensor, start: int, entry: TensorEntry) -> torch.Tensor:
    dtype = _dtype(entry)
    assert dtype is not None
    shape = (*entry.shape[:-1], entry.shape[-1] // 2) if entry.dtype == "F4" else entry.shape
    if not entry.n_bytes:
        return torch.empty(shape, dtype=dtype, device=buffer.device)
    # Each tensor has a storage of its own within the buffer: pickle and torch.save write storages whole, and
    # safetensors.torch.save_model refuses tensors that are parts of one.
    storage = buffer.untyped_storage()[start : start + entry.n_bytes]
    return torch.empty(0, dtype=dtype, device=buffer.device).set_(storage).view(shape)
