"""The codecs' inline PTX on the CPU: the few instructions they use, in numpy, so that the interpreter can run it.

PTX ISA 8.5: prmt 9.7.8.7, lop3 9.7.8.6, dp4a 9.7.1.23; halves of words 9.7.4. Not a
general interpreter: anything else raises.
"""

import ctypes
import re
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint32]
Addresses = npt.NDArray[np.uint64]


def run(ptx: str, inputs: Sequence[Words | Addresses], n_outputs: int) -> list[Words]:
    """Run PTX on 32-bit registers, and on addresses (uint64) as inputs. Outputs are $0 ..., inputs follow.

    A register that depends on %laneid has 32 values, one of each lane; only a shuffle may read it beside others.
    """
    registers = {f"${n_outputs + n}": value for n, value in enumerate(inputs)}
    registers["%laneid"] = np.arange(32, dtype=np.uint32)
    blank = np.zeros_like(inputs[0], dtype=np.uint32)
    for line in filter(None, (part.strip() for part in ptx.strip().strip("{}").split(";"))):
        name, _, rest = line.partition(" ")
        if name == ".reg":
            continue
        target, *operands = (word.strip(" []") for word in rest.split(","))
        values = [registers[word] if word in registers else blank + _literal(word) for word in operands]
        registers[target] = _INSTRUCTIONS[name](*values)
    return [registers[f"${n}"] for n in range(n_outputs)]


def _literal(word: str) -> np.uint32:
    return np.uint32(int(word[2:], 16) if re.match("0[fx]", word) else int(word))


def _float(x: Words) -> npt.NDArray[np.float32]:
    return x.view(np.float32)


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


def _bf16(x: npt.NDArray[np.float64]) -> Words:
    """Bits of fp64 rounded once: first to odd in fp32, which keeps what lies between two of bf16."""
    nearest = x.astype(np.float32)
    bits = nearest.view(np.uint32) - (np.abs(nearest.astype(np.float64)) > np.abs(x)).astype(np.uint32)
    bits |= (bits.view(np.float32).astype(np.float64) != x).astype(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isfinite(nearest), rounded, nearest.view(np.uint32) >> np.uint32(16)).astype(np.uint32)


def _fp16(x: npt.NDArray[np.float64]) -> Words:
    return x.astype(np.float16).view(np.uint16).astype(np.uint32)


def _of_bf16(bits: Words) -> npt.NDArray[np.float64]:
    return (bits << np.uint32(16)).view(np.float32).astype(np.float64)


def _of_fp16(bits: Words) -> npt.NDArray[np.float64]:
    return bits.astype(np.uint16).view(np.float16).astype(np.float64)


def _halves(
    of_bits: Callable[[Words], npt.NDArray[np.float64]],
    to_bits: Callable[[npt.NDArray[np.float64]], Words],
    operation: Callable[..., npt.NDArray[np.float64]],
) -> Callable[..., Words]:
    """An instruction on the halves of words, in fp64, rounded at its end."""

    def instruction(*words: Words) -> Words:
        low, high = (
            to_bits(operation(*(of_bits(word >> np.uint32(shift) & np.uint32(0xFFFF)) for word in words)))
            for shift in (0, 16)
        )
        return low | high << np.uint32(16)

    return instruction


def _pairs(name: str, operation: Callable[..., npt.NDArray[np.float64]]) -> dict[str, Callable[..., Words]]:
    return {
        f"{name}.bf16x2": _halves(_of_bf16, _bf16, operation),
        f"{name}.f16x2": _halves(_of_fp16, _fp16, operation),
    }


def _clamped(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.clip(np.where(np.isnan(x), 0, x.astype(np.float16)), 0, 1).astype(np.float64)


def _fp16_pair(upper: Words, lower: Words) -> Words:
    first, second = (_fp16(_float(x).astype(np.float64)) for x in (lower, upper))
    return first | second << np.uint32(16)


def _bf16_pair(upper: Words, lower: Words) -> Words:
    first, second = (_bf16(_float(x).astype(np.float64)) for x in (lower, upper))
    return first | second << np.uint32(16)


def _e4m3(x: Words) -> Words:
    """Codes to the nearest number, of two as near the even one; NaN is 0x7F. By a search among all numbers."""
    code = np.arange(0x7F)
    numbers = np.where(code < 8, code / 512, (8 + code % 8) * 2.0 ** (code // 8 - 10))
    size = np.abs(_float(x).astype(np.float64))
    above = np.searchsorted(numbers[:-1], size)
    nearer = 2 * size - numbers[above - 1] - numbers[above]
    found = above - ((nearer < 0) | ((nearer == 0) & (above % 2 == 1)))
    found = np.where(size == 0, 0, np.where(np.isnan(size), 0x7F, found))
    return found.astype(np.uint32) | x >> np.uint32(24) & np.uint32(0x80)


def _loaded(kind: type[ctypes.c_uint16 | ctypes.c_uint32]) -> Callable[[Addresses], Words]:
    """Return an instruction that loads from this process's memory."""

    def instruction(addresses: Addresses) -> Words:
        places, which = np.unique(addresses, return_inverse=True)
        values = np.array([kind.from_address(int(place)).value for place in places], dtype=np.uint32)
        return values[which].reshape(addresses.shape)

    return instruction


_INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "shfl.sync.idx.b32": lambda a, lane, *_: a[lane & np.uint32(31)],
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "xor.b32": np.bitwise_xor,
    "shr.u32": np.right_shift,
    "shl.b32": np.left_shift,
    "neg.f32": lambda a: a ^ np.uint32(0x80000000),
    "mul.rn.f32": lambda a, b: (_float(a) * _float(b)).view(np.uint32),
    "fma.rn.f32": _fma,
    "rsqrt.approx.ftz.f32": lambda a: (1 / np.sqrt(_float(a).astype(np.float64))).astype(np.float32).view(np.uint32),
    "rcp.approx.ftz.f32": lambda a: (1 / _float(a)).view(np.uint32),
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "dp4a.u32.u32": _dp4a,
    "mul.lo.u32": np.multiply,
    "add.u32": np.add,
    "mad.wide.u32": lambda a, b, c: a.astype(np.uint64) * b + c,
    "prefetch.global.L2": lambda: np.uint32(0),
    "ld.global.nc.b32": _loaded(ctypes.c_uint32),
    "ld.global.nc.u16": _loaded(ctypes.c_uint16),
    **_pairs("mul.rn", np.multiply),
    **_pairs("sub.rn", np.subtract),
    **_pairs("neg", np.negative),
    **_pairs("fma.rn", lambda a, b, c: a * b + c),
    **_pairs("fma.rn.sat", lambda a, b, c: _clamped(a * b + c)),
    **_pairs("min.NaN", np.minimum),
    **_pairs("max.NaN", np.maximum),
    **_pairs("max.NaN.xorsign.abs", lambda a, b: np.maximum(np.abs(a), np.abs(b)) * np.copysign(1, a * b)),
    "cvt.rn.bf16x2.f32": _bf16_pair,
    "cvt.rn.f16x2.f32": _fp16_pair,
    "cvt.rn.satfinite.e4m3x2.f32": lambda a, b: _e4m3(b) | _e4m3(a) << np.uint32(8),
    "cvt.u32.u16": lambda a: a,
}
