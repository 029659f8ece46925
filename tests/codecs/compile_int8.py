"""Compiles int8's kernels for an H200, on any machine, and prints their instructions, a kernel a line."""

import triton

from kvtier.codecs.int8.chunks import Int8ChunkShape, PlaneShape, decode_chunks, encode_chunks
from kvtier.codecs.int8.device import DECODE_TILINGS, ENCODE_TILINGS, Int8Tiling
from tests.kernels.compile_for_hopper import compiled

TYPES = {"planes": "*i64", "table": "*i64", "answers": "*i64"}


def compile_int8(kernel: triton.JITFunction, tiling: Int8Tiling, size: int, is_bf16: bool) -> None:
    plane = PlaneShape(size, 1 << (size - 1).bit_length())
    shape = Int8ChunkShape(256, 16, is_bf16, tiling.elements // plane.padded, True)
    options = {"num_warps": tiling.warps, "maxnreg": tiling.registers_for(plane), "enable_fp_fusion": False}
    compiled(kernel, TYPES, {"K": plane, "V": plane, "C": shape, "PAIRS": 512}, options)


if __name__ == "__main__":
    for size, is_bf16 in ((128, True), (128, False), (64, True), (80, True), (256, True)):
        compile_int8(encode_chunks, ENCODE_TILINGS[0], size, is_bf16)
        compile_int8(decode_chunks, DECODE_TILINGS[0], size, is_bf16)
