"""Compiles turboquant's kernels for an H200, on any machine, and prints their instructions, a kernel a line."""

import triton

from kvtier.codecs.turboquant.decode import decode_chunks
from kvtier.codecs.turboquant.device import DECODE_TILINGS, ENCODE_TILINGS, WHOLE_TILING, TurboquantTiling
from kvtier.codecs.turboquant.encode import encode_chunks
from kvtier.codecs.turboquant.layout import PRESETS
from kvtier.codecs.turboquant.tables import TurboquantChunkShape, plane_code
from tests.kernels.compile_for_hopper import compiled

MATRICES = ("k_matrix", "v_matrix", "k_centroids", "v_centroids")
ALIGNED = {
    **dict.fromkeys(("signs", "k_squares", "v_squares"), "*i32"),
    **dict.fromkeys(("k_rotation", "v_rotation"), "*i16"),
    **dict.fromkeys(MATRICES, "*i8"),
    "angles": "*fp32",
}  # types of the parameters that the kernels declare to be aligned
TYPES = ALIGNED | dict.fromkeys(("planes", "table", "answers"), "*i64")


def compile_turboquant(
    kernel: triton.JITFunction, tiling: TurboquantTiling, size: int, preset: str = "k4v4", by_warps: bool = False
) -> None:
    bits = PRESETS[preset]
    k, v = plane_code(size, bits.k, True, size != 96, True), plane_code(size, bits.v, False, False, True)
    shape = TurboquantChunkShape(256, 16, True, tiling.rows, tiling.warps, True, by_warps)
    options = {
        "num_warps": tiling.warps,
        "num_stages": 1,
        "maxnreg": tiling.registers_for(k, v),
        "enable_fp_fusion": False,
    }
    constants = {"K": k, "V": v, "C": shape, "PAIRS": 512}
    types = TYPES if preset == "k4v4" else TYPES | dict.fromkeys(MATRICES, "*fp16")
    compiled(kernel, types, constants, options, aligned=[name for name in kernel.arg_names if name in ALIGNED])


if __name__ == "__main__":
    compile_turboquant(encode_chunks, ENCODE_TILINGS[0], 128, by_warps=True)
    compile_turboquant(encode_chunks, WHOLE_TILING, 96)
    compile_turboquant(decode_chunks, DECODE_TILINGS[0], 128)
    compile_turboquant(encode_chunks, ENCODE_TILINGS[0], 128, "k6v5", by_warps=True)
    compile_turboquant(decode_chunks, DECODE_TILINGS[0], 128, "k6v5")
    compile_turboquant(encode_chunks, WHOLE_TILING, 256)
    compile_turboquant(decode_chunks, DECODE_TILINGS[0], 256)
