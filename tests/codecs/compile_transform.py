"""Compiles the transform codec's kernels for an H200, on any machine, and prints the instructions of each."""

import triton

from kvtier.codecs.transform.decode import decode_chunks
from kvtier.codecs.transform.device import (
    DECODE_TILINGS,
    ENCODE_TILINGS,
    PLACES_MAX,
    WIDE_DECODE_TILING,
    WIDE_ENCODE_TILING,
)
from kvtier.codecs.transform.encode import encode_chunks
from kvtier.codecs.transform.slab import TransformPlane, TransformShape
from tests.kernels.compile_for_hopper import compiled

TABLES = ("*i32", "*i32", "*fp32", "*fp32", "*fp16", "*i32")
TYPES = {"planes": "*i64", "table": "*i64", "answers": "*i64", "tables": TABLES}


def compile_transform(kernel: triton.JITFunction, size: int, is_bf16: bool, tokens: int = 256) -> None:
    padded = 1 << (size - 1).bit_length()
    planes = [TransformPlane(size, max(32, padded // 2), padded, is_k) for is_k in (True, False)]
    if kernel is encode_chunks:
        tiling, matrix = WIDE_ENCODE_TILING if padded > 128 else ENCODE_TILINGS[0], "*i8"
    else:
        tiling, matrix = WIDE_DECODE_TILING if padded > 128 else DECODE_TILINGS[0], "*fp16"
    shape = TransformShape(tokens, 16, is_bf16, tiling.rows_of(padded), tiling.warps, PLACES_MAX, True)
    types = TYPES | dict.fromkeys(("of_k", "of_v"), (matrix, "*fp32", "*i32"))
    options = {"num_warps": tiling.warps, "num_stages": 1, "enable_fp_fusion": False}
    options |= {"maxnreg": tiling.registers} if tiling.registers else {}
    compiled(kernel, types, {"K": planes[0], "V": planes[1], "C": shape, "PAIRS": 512}, options)


if __name__ == "__main__":
    for size, is_bf16 in ((128, True), (80, False), (256, True), (64, True)):
        compile_transform(encode_chunks, size, is_bf16)
        compile_transform(decode_chunks, size, is_bf16)
    compile_transform(encode_chunks, 96, True, 80)
    compile_transform(decode_chunks, 96, True, 80)
