"""Turboquant's inline PTX on the CPU: the few instructions it uses, in numpy, so that the interpreter can run it.

PTX ISA 8.5: prmt 9.7.8.7, lop3 9.7.8.6, dp4a 9.7.1.23. Not a general interpreter: anything else raises.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]


def run(ptx: str, inputs: list[Words], n_outputs: int) -> list[Words]:
    """32-bit registers in and out: outputs are $0 ..., inputs follow."""
    registers = {f"${n_outputs + n}": value.astype(np.uint32) for n, value in enumerate(inputs)}
    blank = np.zeros_like(inputs[0], dtype=np.uint32)
    for line in filter(None, (part.strip() for part in ptx.strip().strip("{}").split(";"))):
        name, _, rest = line.partition(" ")
        if name == ".reg":
            continue
        target, *operands = (word.strip() for word in rest.split(","))
        values = [registers[word] if word in registers else blank + _literal(word) for word in operands]
        registers[target] = _INSTRUCTIONS[name](*values)
    return [registers[f"${n}"] for n in range(n_outputs)]


def _literal(word: str) -> np.uint32:
    return np.uint32(int(word[2:], 16) if re.match("0[fx]", word) else int(word))


def _float(x: Words) -> npt.NDArray[np.float32]:
    return x.view(np.float32)


def _difference(x: Words, y: Words) -> Words:
    return np.clip(np.nan_to_num(_float(x) - _float(y)), 0, 1).astype(np.float32).view(np.uint32)


def _fma(a: Words, b: Words, c: Words) -> Words:
    """Rounded twice, which is seen once in 2^29."""
    exact = _float(a).astype(np.float64) * _float(b).astype(np.float64) + _float(c).astype(np.float64)
    return exact.astype(np.float32).view(np.uint32)


def _prmt(a: Words, b: Words, selector: Words) -> Words:
    whole = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(a)
    for place in range(4):
        nibble = selector >> np.uint32(4 * place) & np.uint32(15)
        byte = (whole >> ((nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8))).astype(np.uint32) & np.uint32(255)
        sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
        result |= np.where(nibble & np.uint32(8), sign, byte) << np.uint32(8 * place)
    return result


def _lop3(a: Words, b: Words, c: Words, table: Words) -> Words:
    result = np.zeros_like(a)
    for row in range(8):
        if int(table.flat[0]) >> row & 1:
            terms = [x if row >> n & 1 else ~x for x, n in ((a, 2), (b, 1), (c, 0))]
            result |= terms[0] & terms[1] & terms[2]
    return result


def _dp4a(a: Words, b: Words, c: Words) -> Words:
    products = [(a >> np.uint32(8 * n) & np.uint32(255)) * (b >> np.uint32(8 * n) & np.uint32(255)) for n in range(4)]
    return c + sum(products, np.uint32(0))


def _bf16_pair(upper: Words, lower: Words) -> Words:
    def rounded(x: Words) -> Words:
        return (x + np.uint32(0x7FFF) + (x >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)

    return rounded(upper) << np.uint32(16) | rounded(lower)


def _fp16_pair(upper: Words, lower: Words) -> Words:
    first, second = (_float(x).astype(np.float16).view(np.uint16).astype(np.uint32) for x in (lower, upper))
    return first | second << np.uint32(16)


_INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "xor.b32": np.bitwise_xor,
    "shr.u32": np.right_shift,
    "shl.b32": np.left_shift,
    "abs.f32": lambda a: a & np.uint32(0x7FFFFFFF),
    "sub.rn.sat.f32": _difference,
    "neg.f32": lambda a: a ^ np.uint32(0x80000000),
    "mul.rn.f32": lambda a, b: (_float(a) * _float(b)).view(np.uint32),
    "fma.rn.f32": _fma,
    "rsqrt.approx.ftz.f32": lambda a: (1 / np.sqrt(_float(a).astype(np.float64))).astype(np.float32).view(np.uint32),
    "rcp.approx.ftz.f32": lambda a: (1 / _float(a)).view(np.uint32),
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "dp4a.u32.u32": _dp4a,
    "cvt.rn.bf16x2.f32": _bf16_pair,
    "cvt.rn.f16x2.f32": _fp16_pair,
}
