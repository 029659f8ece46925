"""Compiles turboquant's kernels for an H200, on any machine, and prints their instructions, a kernel a line."""

from __future__ import annotations

import json
import re
from collections import Counter

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvtier.codecs.turboquant.decode import decode_chunks
from kvtier.codecs.turboquant.device import DECODE_TILINGS, ENCODE_TILINGS, WHOLE_TILING, TurboquantTiling
from kvtier.codecs.turboquant.encode import encode_chunks
from kvtier.codecs.turboquant.tables import TurboquantChunkShape, plane_code

INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+ )?([a-z]\w*(?:\.[\w:]+)+)", re.MULTILINE)
TYPES = {
    "planes": "*i64",
    "table": "*i64",
    "answers": "*i64",
    "signs": "*i32",
    "k_rotation": "*i16",
    "v_rotation": "*i16",
    "angles": "*fp32",
    "k_squares": "*i32",
    "v_squares": "*i32",
    "k_matrix": "*i8",
    "v_matrix": "*i8",
    "k_centroids": "*i8",
    "v_centroids": "*i8",
}
UNALIGNED = ("planes", "table", "answers")  # as the kernels are declared


def compiled(kernel: triton.JITFunction, tiling: TurboquantTiling, size: int, by_warps: bool = False) -> None:
    k, v = plane_code(size, 4, True, size != 96, True), plane_code(size, 4, False, False, True)
    shape = TurboquantChunkShape(256, 16, True, tiling.rows, tiling.warps, True, by_warps)
    constants = {"K": k, "V": v, "C": shape, "PAIRS": 512}
    signature = {n: "constexpr" if n in constants else TYPES.get(n, "i32") for n in kernel.arg_names}
    places = {(n,): constants[name] for n, name in enumerate(kernel.arg_names) if name in constants}
    aligned = {
        (n,): [["tt.divisibility", 16]]
        for n, name in enumerate(kernel.arg_names)
        if name in TYPES and name not in UNALIGNED
    }
    options = {
        "num_warps": tiling.warps,
        "num_stages": 1,
        "maxnreg": tiling.registers_for(k, v),
        "enable_fp_fusion": False,
    }
    found = triton.compile(
        ASTSource(kernel, signature, places, aligned), target=GPUTarget("cuda", 90, 32), options=options
    )
    print(json.dumps(Counter(INSTRUCTION.findall(found.asm["ptx"]))))


if __name__ == "__main__":
    compiled(encode_chunks, ENCODE_TILINGS[0], 128, by_warps=True)
    compiled(encode_chunks, WHOLE_TILING, 96)
    compiled(decode_chunks, DECODE_TILINGS[0], 128)
    compiled(encode_chunks, WHOLE_TILING, 256)
    compiled(decode_chunks, DECODE_TILINGS[0], 256)
