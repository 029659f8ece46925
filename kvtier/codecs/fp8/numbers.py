"""fp8's numbers on the device, two at a time: what kvtier.codecs.fp8.codec defines, to the bit.

Dividing is most of the work, so a reciprocal does for it. x has at most 11 bits and a scale has 11: where x / scale is
not just between two numbers of e4m3fn, of 4 bits, it is at least 2^-16 of itself away from there, and no error of fp32
shows. Where it is just between, it has 5 bits: then one step that takes what is left makes it exact, however the
reciprocal was rounded.

FAST: with PTX of an architecture that has fp8 (sm_89 on); else the same in fp32 and whole numbers, for older GPUs and
for the interpreter.
"""

# mypy: disallow-untyped-decorators=False
# Triton has no types.
from __future__ import annotations

import triton
import triton.language as tl

from kvtier.codecs.fp8.codec import CODE_MAX

_CODE_MAX = tl.constexpr(CODE_MAX)
# What is left of x is taken as q * scale - x, so that the sign of a zero stays.
_PAIR = tl.constexpr(
    "{ .reg .f32 p, q, e; .reg .b16 c; "
    "mul.rn.f32 p, $1, $3; neg.f32 e, $1; fma.rn.f32 e, p, $4, e; neg.f32 e, e; fma.rn.f32 p, e, $3, p; "
    "mul.rn.f32 q, $2, $3; neg.f32 e, $2; fma.rn.f32 e, q, $4, e; neg.f32 e, e; fma.rn.f32 q, e, $3, q; "
    "cvt.rn.satfinite.e4m3x2.f32 c, q, p; cvt.u32.u16 $0, c; }"
)


@triton.jit
def _e4m3(x: tl.tensor) -> tl.tensor:
    """int32: codes of fp32, rounded to nearest even and held within +-448. Not of NaN."""
    bits = tl.clamp(x, -_CODE_MAX, _CODE_MAX).to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # 4 bits stay, and the exponent's bias becomes 7; below 2^-6 codes count 2^-9, and adding 2^14 rounds to that.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    return tl.where(magnitude < 0x3C800000, small, normal) | ((bits >> 24) & 0x80)


@triton.jit
def codes_of(low: tl.tensor, high: tl.tensor, scale: tl.tensor, FAST: tl.constexpr) -> tl.tensor:
    """int16: codes of low / scale in the lower and of high / scale in the upper byte. All fp32; scale > 0."""
    if FAST:
        inverse = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [scale], tl.float32, True, 1)
        pair = tl.inline_asm_elementwise(_PAIR, "=r,f,f,f,f", [low, high, inverse, scale], tl.int32, True, 1)
    else:
        pair = _e4m3(tl.div_rn(low, scale)) | (_e4m3(tl.div_rn(high, scale)) << 8)
    return pair.to(tl.int16)


@triton.jit
def halves_of(codes: tl.tensor) -> tl.tensor:
    """int32: two fp16 of two codes, int16, each 2^-8 of what its code stands for. Exact; not of NaN."""
    pair = codes.to(tl.int32)
    return ((pair & 0x7F) << 7) | ((pair & 0x80) << 8) | ((pair & 0x7F00) << 15) | ((pair & 0x8000) << 16)
