"""Triton's interpreter (3.6.0) with less work a call: the results, and what it checks and refuses, are the same.

Two thirds of its time went into descriptions of types made anew with each value, into patching `triton.language` again
for each call of a device function, and into sums for an overflow check whose outcome it drops without `debug`.
"""

import builtins
import inspect
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from triton.language import core
from triton.runtime import interpreter

_patched: list[set[str]] = []  # a launch's modules of which `triton.language` is patched for


def install() -> None:
    """For this process. A second call changes nothing."""
    if isinstance(core.tuple.__dict__.get("type"), property):
        return
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter._patch_builtin = _patch_builtin
    interpreter._get_np_dtype = _numpy_dtype(interpreter._get_np_dtype)
    interpreter.GridExecutor.__call__ = _launch(interpreter.GridExecutor.__call__)
    interpreter.InterpretedFunction.__call__ = _call
    core.tuple.__init__ = _init_tuple
    core.tuple.type = property(_type_of_tuple, lambda self, value: self.__dict__.update(_type=value))
    core.block_type.__init__ = _init_block_type(core.block_type.__init__)
    core.tensor.__init__ = _init_tensor


def _numpy_dtype(of_type: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def cached(dtype: Any) -> Any:
        if dtype.scalar.is_ptr():
            return np.dtype(np.uint64)
        name = dtype.scalar.name
        if name not in known:
            known[name] = of_type(dtype)
        return known[name]

    return cached


@cache
def _builtins_of(package: Any) -> list[str]:
    return [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]


def _patch_builtin(package: Any, builder: Any, scope: Any) -> None:
    for name in _builtins_of(package):
        member = getattr(package, name)
        if core.is_builtin(member):  # not patched yet
            interpreter._patch_attr(package, name, member, builder, scope)


def _launch(run: Callable[..., None]) -> Callable[..., None]:
    def launch(self: Any, *arguments: Any, **named: Any) -> None:
        _patched.append(set())
        try:
            run(self, *arguments, **named)
        finally:
            _patched.pop()

    return launch


def _call(self: Any, *arguments: Any, **named: Any) -> Any:
    """A device function: the language is patched for the first one of each module in a launch."""
    module = self.fn.__module__
    if not _patched or module not in _patched[-1]:
        interpreter._patch_lang(self.fn)
        if _patched:
            _patched[-1].add(module)
    try:
        return self.rewrite()(*arguments, **named)
    except Exception as fault:
        raise interpreter.InterpreterError(repr(fault)) from fault


def _init_tuple(self: Any, args: Any, type: Any = None) -> None:
    self.values = list(args)
    if isinstance(type, core.tuple_type):
        self._type = type
    elif type is not None:
        self._type = core.tuple_type(type)


def _type_of_tuple(self: Any) -> Any:
    if "_type" not in self.__dict__:
        self._type = core._type_for_tuple_values(self.values)
    return self.__dict__["_type"]


def _init_block_type(init: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    known: dict[builtins.tuple[int, ...], Any] = {}

    def init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = builtins.tuple(core._unwrap_if_constexpr(size) for size in shape)
        if key not in known:
            init(self, element_ty, shape)
            known[key] = (self.shape, self.numel, str(self.shape))
        self.element_ty = element_ty
        self.shape, self.numel, text = known[key]
        self.name = f"<{text}, {element_ty}>"

    return init_block_type


@cache
def _shape_of_tensor(shape: builtins.tuple[int, ...]) -> builtins.tuple[Any, Any]:
    return core.tuple([core.constexpr(size) for size in shape]), core.constexpr(math.prod(shape))


def _init_tensor(self: Any, handle: Any, type: Any) -> None:
    self.handle = handle
    self.type = type
    self.dtype = type.scalar
    self.shape, self.numel = _shape_of_tensor(builtins.tuple(type.shape.values) if type.is_block() else ())
