"""Compiles int8's kernels for an H200, on any machine, and prints their instructions, a kernel a line."""

from __future__ import annotations

import json
from collections import Counter

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvtier.codecs.int8.chunks import Int8ChunkShape, PlaneShape, decode_chunks, encode_chunks
from kvtier.codecs.int8.device import DECODE_TILINGS, ENCODE_TILINGS, Int8Tiling
from tests.codecs.compile_turboquant import INSTRUCTION

TYPES = {"planes": "*i64", "table": "*i64", "answers": "*i64"}


def compiled(kernel: triton.JITFunction, tiling: Int8Tiling, size: int, is_bf16: bool) -> None:
    plane = PlaneShape(size, 128 if size <= 128 else 256)
    shape = Int8ChunkShape(256, 16, is_bf16, tiling.elements // plane.padded, True)
    constants = {"K": plane, "V": plane, "C": shape, "PAIRS": 512}
    signature = {n: "constexpr" if n in constants else TYPES.get(n, "i32") for n in kernel.arg_names}
    places = {(n,): constants[name] for n, name in enumerate(kernel.arg_names) if name in constants}
    found = triton.compile(
        ASTSource(kernel, signature, places),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": tiling.warps, "enable_fp_fusion": False},
    )
    print(json.dumps(Counter(INSTRUCTION.findall(found.asm["ptx"]))))


if __name__ == "__main__":
    for size, is_bf16 in ((128, True), (80, True), (256, True)):
        compiled(encode_chunks, ENCODE_TILINGS[0], size, is_bf16)
        compiled(decode_chunks, DECODE_TILINGS[0], size, is_bf16)
