"""Codes of elements of a rotated vector without a table: a curve, rounded.

    v = 1/2 + z * n, rounded to fp16, held within [0, 1]     z: the element, n: makes 1 / (2 * reach) of a deviation
    code = curve(v), rounded to a whole number               0 is the most negative, 2^bits - 1 the most positive

Up to 4 bits the curve is (2^bits - 1) * (3 v^2 - 2 v^3): it is steep in the middle, where values are many, and its
buckets are Lloyd's and Max's (`codebooks` has the error) at four operations for two elements, without a comparison.
More bits take a curve of the fifth degree. Its terms are evaluated by Horner's rule, each a fused multiplication and
addition: in fp16 up to 4 bits, else in fp32. As v is one of 15361 numbers, what the curve makes of them all is known:
`thresholds` are what the definition (`reference`) has instead.
"""

from functools import cache

import numpy as np
import numpy.typing as npt

from kvtier.codecs.turboquant.codebooks import CODEBOOKS

WHOLE16, WHOLE32 = 1024.0, 8388608.0  # from here on fp16 and fp32 have whole numbers only: so the last sum rounds


def codes(bits: int, v: npt.NDArray[np.float16]) -> npt.NDArray[np.int64]:
    """Return the curve, rounded, at v in [0, 1]. Every step is exact in fp64 (numpy rounds it to fp16 once)."""
    book, x = CODEBOOKS[bits], v.astype(np.float64)
    kind, whole = (np.float16, WHOLE16) if bits <= 4 else (np.float32, WHOLE32)
    value = np.full(v.shape, book.curve[-1])
    for coefficient in (*book.curve[-2::-1], whole):
        value = (value * x + coefficient).astype(kind).astype(np.float64)
    return (value - whole).astype(np.int64)


@cache
def thresholds(bits: int) -> tuple[float, ...]:
    """2^bits - 1 fp32 numbers, ascending: the code of z is how many of them are at most z * n, exactly.

    z and n are fp16, so that fp32 holds their product. Between the last v of one code and the first of the next is
    the place from which on 1/2 + z * n is rounded up; of two equally near numbers to the even one.
    """
    every = np.arange(0x3C01, dtype=np.uint16).view(np.float16)
    found = codes(bits, every)
    firsts = np.searchsorted(found, np.arange(1, 1 << bits))
    middles = (every[firsts].astype(np.float64) + every[firsts - 1].astype(np.float64)) / 2 - 0.5
    is_odd = every[firsts].view(np.uint16) % 2 == 1
    least = np.where(is_odd, np.nextafter(middles.astype(np.float32), np.float32(np.inf)), middles.astype(np.float32))
    return tuple(least.tolist())
