"""Plan of a load: the byte ranges of checkpoint files that go into an engine's parameters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvtier.errors import KVTierError
from kvtier.weights.copies import ROW_BYTES, ROWS, Table, contiguous, extent_bytes
from kvtier.weights.reader import Sums, WeightReader

CONVERTED_BYTES = 1 << 28  # most bytes of files that are read together for conversions


class PlanMismatch(KVTierError):
    """A plan was made for other parameters than these."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter or buffer: its name, shape, strides in elements, and torch's name of its dtype."""

    name: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Parameter:
        return cls(name, tuple(tensor.shape), tuple(tensor.stride()), dtype_name(tensor.dtype))


@dataclass(frozen=True, slots=True)
class Elements:
    """Elements of a file or a target: its number, byte offset of the first element, shape, strides in elements."""

    number: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, number: int, offset: int, tensor: torch.Tensor) -> Elements:
        return cls(number, offset, tuple(tensor.shape), tuple(tensor.stride()), dtype_name(tensor.dtype))

    def part(self, dim: int, begin: int, size: int) -> Elements:
        """Return `size` of the slices along a dimension, from number `begin` on."""
        offset = self.offset + begin * self.strides[dim] * self.itemsize
        return replace(self, offset=offset, shape=(*self.shape[:dim], size, *self.shape[dim + 1 :]))

    @property
    def itemsize(self) -> int:
        return int(getattr(torch, self.dtype).itemsize)

    @property
    def content_bytes(self) -> int:
        """Return the bytes of the elements, without those between them."""
        return math.prod(self.shape) * self.itemsize

    @property
    def n_bytes(self) -> int:
        """Return the bytes from the first element to the end of the last."""
        return extent_bytes(self.shape, self.strides, self.itemsize)


@dataclass(frozen=True, slots=True)
class Conversion:
    """An assignment that is no copy of bytes: the dtypes differ, or single elements would be copied."""

    source: Elements
    target: Elements


@dataclass(frozen=True, slots=True)
class Fill:
    """A part of a target that gets one value, as rows of a vocabulary that only pad it."""

    target: Elements
    value: float


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """A whole load. No two copies or conversions write the same byte, so their order is free; fills come first.

    materialized_bytes: bytes that the recording read at once, because loaders computed with them. They are in the
    parameters already: a plan with `is_replayable` False loads nothing complete by itself.
    """

    files: tuple[Path, ...]
    targets: tuple[Parameter, ...]
    copies: Table
    conversions: tuple[Conversion, ...] = ()
    fills: tuple[Fill, ...] = ()
    materialized_bytes: int = 0
    is_replayable: bool = True

    @property
    def n_bytes(self) -> int:
        """Return the bytes of checkpoint files that end in parameters."""
        return self.copied_bytes + sum(conversion.source.content_bytes for conversion in self.conversions)

    @property
    def copied_bytes(self) -> int:
        """Return the bytes that are copied as they are."""
        return int((self.copies[:, ROWS] * self.copies[:, ROW_BYTES]).sum())

    def bind(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> list[torch.Tensor]:
        """Return the tensor of each target. Raises PlanMismatch if one is missing or laid out in another way."""
        by_name = dict(tensors)
        found = []
        for target in self.targets:
            tensor = by_name.get(target.name)
            if tensor is None:
                raise PlanMismatch(f"the model has no parameter {target.name}")
            if (here := Parameter.of(target.name, tensor)) != target:
                raise PlanMismatch(f"parameter {target.name}: planned as {target}, but it is {here}")
            found.append(tensor)
        return found

    def load(
        self, reader: WeightReader, tensors: Sequence[torch.Tensor], expected: Mapping[Path, Sums] | None = None
    ) -> None:
        """Fill the targets' tensors. Return when all bytes have landed. expected and errors: as WeightReader.read."""
        for fill in self.fills:
            _part_of(tensors[fill.target.number], fill.target).fill_(fill.value)
        reader.read(self.files, self.copies, tensors, expected)
        convert(reader, self.files, self.conversions, tensors, expected)


def convert(
    reader: WeightReader,
    files: Sequence[Path],
    conversions: Iterable[Conversion],
    tensors: Sequence[torch.Tensor],
    expected: Mapping[Path, Sums] | None,
) -> None:
    """Read sources on the host and assign them to their parts of the targets. expected: as WeightReader.read."""
    for batch in _batches(conversions):
        values = read_views(reader, files, [conversion.source for conversion in batch], expected)
        for conversion, value in zip(batch, values, strict=True):
            _part_of(tensors[conversion.target.number], conversion.target).copy_(value)


def _batches(conversions: Iterable[Conversion]) -> Iterator[list[Conversion]]:
    """Yield conversions that are read together: each read opens its files, which takes as long as reading 1 GiB."""
    batch: list[Conversion] = []
    n_bytes = 0
    for conversion in itertools.chain.from_iterable(map(_slices, conversions)):
        n_bytes += conversion.source.n_bytes
        if batch and n_bytes > CONVERTED_BYTES:
            yield batch
            batch, n_bytes = [], conversion.source.n_bytes
        batch.append(conversion)
    if batch:
        yield batch


def _slices(conversion: Conversion) -> Iterator[Conversion]:
    """Yield a conversion in slices of about CONVERTED_BYTES at most, which bounds the host's memory."""
    source, target = conversion.source, conversion.target
    if source.n_bytes <= CONVERTED_BYTES:
        yield conversion
        return
    dim = max(range(len(source.shape)), key=source.strides.__getitem__)
    step = max(1, source.shape[dim] * CONVERTED_BYTES // source.n_bytes)
    for begin in range(0, source.shape[dim], step):
        size = min(step, source.shape[dim] - begin)
        yield Conversion(source.part(dim, begin, size), target.part(dim, begin, size))


def _part_of(target: torch.Tensor, view: Elements) -> torch.Tensor:
    return tensor_at(target, first_byte(target) + view.offset, view)


def read_views(
    reader: WeightReader, files: Sequence[Path], views: Sequence[Elements], expected: Mapping[Path, Sums] | None
) -> list[torch.Tensor]:
    """Read the elements of files that views cover, and those between them, into new tensors on the host."""
    used = sorted({view.number for view in views if view.n_bytes})
    # vLLM loads weights under a default device of its own.
    raw = [torch.empty(view.n_bytes, dtype=torch.uint8, device="cpu") for view in views]
    copies = [
        contiguous(used.index(view.number), view.offset, view.n_bytes, number)
        for number, view in enumerate(views)
        if view.n_bytes
    ]
    if copies:
        reader.read([files[number] for number in used], copies, raw, expected)
    return [tensor_at(one, 0, view) for one, view in zip(raw, views, strict=True)]


def tensor_at(owner: torch.Tensor, first_byte: int, view: Elements) -> torch.Tensor:
    """Return `view` as a tensor in the storage of `owner`, with its first element at `first_byte` of the storage."""
    dtype: torch.dtype = getattr(torch, view.dtype)
    made = torch.empty(0, dtype=dtype, device=owner.device)
    made.set_(owner.untyped_storage(), first_byte // dtype.itemsize, view.shape, view.strides)
    return made


def first_byte(tensor: torch.Tensor) -> int:
    """Return the offset of a tensor's first element in its storage, in bytes."""
    return int(tensor.storage_offset()) * tensor.element_size()


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def byte_strides(tensor: torch.Tensor) -> list[int]:
    return [stride * tensor.element_size() for stride in tensor.stride()]
