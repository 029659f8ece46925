"""Recording of a load: vLLM's own weight loaders run on tensors without data, and their copies are written down.

Each tensor of the checkpoint is a meta tensor, so that loaders can slice, transpose and reshape it for nothing. What
they do with it decides:

    a view of it                            stays without data
    a clone of a whole one                  is another tensor without data (vLLM's pooling models clone the first ones)
    parameter.copy_(it)                     is recorded, as byte ranges of the file and of the parameter
    an operation that changes it in place   reads it, for good
    any other operation on it               reads what the operation needs
    an operation on a parameter             performs first what was recorded for this parameter

What cannot be followed raises TraceRefused: the caller then loads with real tensors.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from kvtier.errors import KVTierError
from kvtier.model.safetensors import Header, TensorEntry
from kvtier.weights.copies import Copy, contiguous, pack
from kvtier.weights.dtypes import TORCH_DTYPES
from kvtier.weights.plan import (
    Conversion,
    Elements,
    Fill,
    Parameter,
    WeightPlan,
    byte_strides,
    convert,
    first_byte,
    read_views,
    tensor_at,
)
from kvtier.weights.reader import Sums, WeightReader, extent
from kvtier.weights.strided import copies_between, overlapping

COPY = torch.ops.aten.copy_.default
CLONE = torch.ops.aten.clone.default
FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default)


class TraceRefused(KVTierError):
    """A loader did something that a recording cannot follow."""


@dataclass(slots=True)
class _Source:
    """A tensor of the checkpoint. lazy: its meta tensor; real: its content, once a loader has changed it."""

    file: int
    offset: int
    lazy: torch.Tensor
    real: torch.Tensor | None = None


@dataclass(slots=True)
class _Written:
    """A parameter or buffer, and what was recorded for it, by the part of it that is written."""

    tensor: torch.Tensor
    storage: torch.UntypedStorage  # kept: the address of a freed storage may be that of another one
    first_byte: int
    pending: dict[Any, list[Copy] | Conversion] = field(default_factory=dict)


class LoadTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Recorder of the operations under it. Only of its own thread."""

    def __init__(
        self,
        headers: dict[Path, Header],
        tensors: Iterable[tuple[str, torch.Tensor]],
        reader: WeightReader,
        expected: Mapping[Path, Sums] | None = None,
    ) -> None:
        """expected: checksums that what is read at once must have, as WeightReader.read takes them."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._headers, self._files, self._reader, self._expected = headers, tuple(headers), reader, expected
        self._sources: dict[int, _Source] = {}
        # Made now: under the mode itself that would be an operation like others.
        self._lazy = {
            path: {name: self._make_lazy(file, entry) for name, entry in header.tensors.items()}
            for file, (path, header) in enumerate(headers.items())
        }
        owners = distinct(tensors)
        self._names = [name for name, _ in owners]
        self._targets = [_Written(t.data, t.untyped_storage(), first_byte(t)) for _, t in owners]
        self._numbers = {target.storage._cdata: number for number, target in enumerate(self._targets)}
        self._plan_fills: list[Fill] = []
        self._materialized_bytes, self._is_replayable = 0, True

    def checkpoint(self, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and lazy tensor of all tensors in one of the files, in the order of their names.

        That is vLLM's order, which matters where two tensors fill one parameter: the later one counts.
        """
        for name, tensor in sorted(self._lazy[path].items(), key=itemgetter(0)):
            if tensor is None:
                raise TraceRefused(f"{name} is of dtype {self._headers[path].tensors[name].dtype}, which torch has not")
            yield name, tensor

    def _make_lazy(self, file: int, entry: TensorEntry) -> torch.Tensor | None:
        """Return a tensor without data that stands for one of the checkpoint; None for a dtype that torch has not."""
        dtype = TORCH_DTYPES.get(entry.dtype)
        return None if dtype is None else self._stand_in(file, entry.start, entry.shape, dtype)

    def _stand_in(self, file: int, offset: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(shape, dtype=dtype, device="meta")
        self._sources[made.untyped_storage()._cdata] = _Source(file, offset, made)
        return made

    def plan(self) -> WeightPlan:
        """Return what was recorded. Raises TraceRefused if two of its copies write the same bytes."""
        copies: list[Copy] = []
        conversions: list[Conversion] = []
        for target, name in zip(self._targets, self._names, strict=True):
            parts = _parts(target)
            if len(parts) > 1 and overlapping(parts):
                raise TraceRefused(f"parts of {name} may overlap: they are converted, or loaded again in another way")
            for entry in target.pending.values():
                if isinstance(entry, Conversion):
                    conversions.append(entry)
                else:
                    copies += entry
        targets = tuple(Parameter.of(name, t.tensor) for name, t in zip(self._names, self._targets, strict=True))
        return WeightPlan(
            files=self._files,
            targets=targets,
            copies=pack(copies),
            conversions=tuple(conversions),
            fills=tuple(self._plan_fills),
            materialized_bytes=self._materialized_bytes,
            is_replayable=self._is_replayable,
        )

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the plan's targets."""
        return [target.tensor for target in self._targets]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch not to wrap each operation against compilation: loaders are not compiled, and it takes as long as
        recording."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is COPY:
            source = self._source_of(args[1])
            if source is not None and source.real is None and self._source_of(args[0]) is None:
                self._record(args[0], args[1], source)
                return args[0]
        if _is_view(func):
            return func(*args, **kwargs)
        if func is CLONE and args[0].is_contiguous():
            source = self._source_of(args[0])
            if source is not None and source.real is None:
                return self._stand_in(source.file, source.offset + first_byte(args[0]), args[0].shape, args[0].dtype)
        if torch.device("meta") == kwargs.get("device"):  # made beside a lazy tensor, to hold values
            kwargs = kwargs | {"device": "cpu"}
        flat, spec = tree_flatten((args, kwargs))
        places = [(n, x, self._source_of(x)) for n, x in enumerate(flat) if isinstance(x, torch.Tensor)]
        lazy = [(n, x, source) for n, x, source in places if source is not None]
        if func in FILLS and not lazy and self._fills(args[0], *args[1:]):
            return func(*args, **kwargs)
        self._perform_for([x for _, x, source in places if source is None], _changes_input(func))
        if not lazy:
            return func(*args, **kwargs)
        if _changes_input(func):
            self._make_real(func, args)
        for n, x, source in lazy:
            flat[n] = self._value(x, source)
        args, kwargs = tree_unflatten(flat, spec)
        return func(*args, **kwargs)

    def _source_of(self, tensor: Any) -> _Source | None:
        if not isinstance(tensor, torch.Tensor) or not tensor.is_meta:
            return None
        source = self._sources.get(tensor.untyped_storage()._cdata)
        if source is None:
            raise TraceRefused("a loader made a tensor without data")
        return source

    def _record(self, there: torch.Tensor, here: torch.Tensor, source: _Source) -> None:
        """Write down `there.copy_(here)`; do it at once where `there` is no parameter."""
        number = self._numbers.get(there.untyped_storage()._cdata)
        if number is None:
            there.copy_(self._value(here, source))
            return
        target = self._targets[number]
        begin = first_byte(there) - target.first_byte
        if begin < 0 or begin + extent(there) > extent(target.tensor):
            self._perform(target)
            there.copy_(self._value(here, source))
            return
        if here.shape != there.shape:
            here = here.expand(there.shape)
        at = source.offset + first_byte(here)
        entry: list[Copy] | Conversion | None = None
        if here.dtype == there.dtype and here.is_contiguous() and there.is_contiguous():
            entry = [contiguous(source.file, at, here.nbytes, number, begin)] if here.nbytes else []
        elif here.dtype == there.dtype:
            one, other = (source.file, at, byte_strides(here)), (number, begin, byte_strides(there))
            entry = copies_between(here.shape, one, other, here.element_size())
        if entry is None:
            entry = Conversion(Elements.of(source.file, at, here), Elements.of(number, begin, there))
        key = (begin, tuple(there.shape), there.stride(), there.element_size())
        target.pending.pop(key, None)  # loaded twice: the later one counts
        target.pending[key] = entry

    def _fills(self, there: torch.Tensor, value: float | torch.Tensor = 0.0) -> bool:
        """Write down a fill of a part of a parameter that nothing was recorded for yet. Return whether it is one."""
        number = self._numbers.get(there.untyped_storage()._cdata)
        if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in self._numbers:
            return False
        if number is None or there.numel() == 0:
            return there.numel() == 0
        target = self._targets[number]
        begin = first_byte(there) - target.first_byte
        part = Elements.of(number, begin, there)
        if begin < 0 or begin + extent(there) > extent(target.tensor):
            return False
        if overlapping([*_parts(target), *_rows_of(part)]):
            return False
        self._plan_fills.append(Fill(part, float(value)))
        return True

    def _perform_for(self, tensors: list[torch.Tensor], is_changed: bool) -> None:
        for tensor in tensors:
            number = self._numbers.get(tensor.untyped_storage()._cdata)
            if number is not None and (is_changed or self._targets[number].pending):
                self._perform(self._targets[number])

    def _perform(self, target: _Written) -> None:
        """Do what was recorded for a parameter, in its order: an operation is about to use or change it."""
        self._is_replayable = False
        entries, target.pending = target.pending, {}
        # Fills of it have run, and are not to be repeated over what follows.
        number = self._numbers[target.storage._cdata]
        self._plan_fills = [fill for fill in self._plan_fills if fill.target.number != number]
        for entry in entries.values():
            if isinstance(entry, Conversion):
                convert(self._reader, self._files, [entry], self.tensors, self._expected)
                self._materialized_bytes += extent(target.tensor)
            elif entry:
                moved = [replace(copy, file=0, target=0) for copy in entry]
                report = self._reader.read([self._files[entry[0].file]], moved, [target.tensor], self._expected)
                self._materialized_bytes += report.bytes_landed

    def _make_real(self, func: Any, args: Any) -> None:
        """Read whole each lazy tensor that `func` changes: from here on it has a content of its own."""
        for argument, value in zip(func._schema.arguments, args, strict=False):
            source = self._source_of(value)
            if source is not None and source.real is None and argument.alias_info and argument.alias_info.is_write:
                whole = Elements.of(source.file, source.offset, source.lazy)
                source.real = self._read(whole)

    def _value(self, tensor: torch.Tensor, source: _Source) -> torch.Tensor:
        """Return the content of a lazy tensor, on the host."""
        if source.real is None:
            return self._read(Elements.of(source.file, source.offset + first_byte(tensor), tensor))
        return tensor_at(source.real, first_byte(tensor), Elements.of(0, 0, tensor))

    def _read(self, view: Elements) -> torch.Tensor:
        self._is_replayable = False
        (found,) = read_views(self._reader, self._files, [view], self._expected)
        self._materialized_bytes += found.numel() * found.element_size()
        return found


def distinct(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Return one tensor for each storage, with its name: the longest, and of equal ones the first by name."""
    chosen: dict[int, tuple[int, str, torch.Tensor]] = {}
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        if tensor.is_meta:
            raise TraceRefused(f"parameter {name} has no memory yet")
        place, n_bytes = tensor.untyped_storage()._cdata, extent(tensor)
        if place not in chosen or n_bytes > chosen[place][0]:
            chosen[place] = (n_bytes, name, tensor)
    return sorted((name, tensor) for _, name, tensor in chosen.values())


def _parts(target: _Written) -> list[Copy]:
    found: list[Copy] = []
    for entry in target.pending.values():
        if not isinstance(entry, Conversion):
            found += entry
        elif 0 not in entry.target.shape:
            found += _rows_of(entry.target)
    return found


def _rows_of(view: Elements) -> list[Copy]:
    """Return the rows of bytes of a part of a target. Where they would be too many, return one range, gaps included."""
    strides = [stride * view.itemsize for stride in view.strides]
    rows = copies_between(view.shape, (0, 0, strides), (view.number, view.offset, strides), view.itemsize)
    return rows if rows is not None else [contiguous(0, 0, view.n_bytes, view.number, view.offset)]


@cache
def _is_view(func: Any) -> bool:
    """Return whether the result of an operation is a view of its input, which is not changed."""
    returned = func._schema.returns
    return any(value.alias_info is not None and not value.alias_info.is_write for value in returned)


@cache
def _changes_input(func: Any) -> bool:
    return any(value.alias_info is not None and value.alias_info.is_write for value in func._schema.arguments)
