"""Compiles the kernels for an H200, on any machine, and prints what their memory accesses became, a kernel a line."""

from __future__ import annotations

import json
import re
from collections import Counter

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvtier.kernels import device, device_block_sums, device_checksum

ACCESS = re.compile(r"(?:ld|st)\.(?:global|shared|local)[\w.:]*")


def compiled(kernel: triton.JITFunction, types: dict[str, str], constants: dict[str, object], warps: int) -> None:
    signature = types | dict.fromkeys(constants, "constexpr")
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    found = triton.compile(
        ASTSource(kernel, signature, places), target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}
    )
    print(json.dumps(Counter(ACCESS.findall(found.asm["ptx"]))))


def main() -> None:
    tile, warps = device.TILINGS[0]
    numbers = ("page_layer", "slab_layer", "first_head", "n_heads", "n_blocks", "slab_bytes")
    types = {"planes": "*i64", "table": "*i64"} | dict.fromkeys(numbers, "i32")
    for to_pages, row in ((False, 32), (True, 32), (False, 20), (True, 144)):
        constants = {
            "K_ROW": row,
            "V_ROW": 0 if row == 144 else row,
            "BLOCK_TOKENS": 16,
            "WORD": tl.int64,
            "WORD_BYTES": 8,
            "VECTOR": 2,
            "TO_PAGES": to_pages,
            "TILE": tile,
        }
        compiled(device._move, types, constants, warps)
    walk = device_checksum.WALKS[0]
    types = {"table": "*i64", "sums": "*i64", "n_pages": "i32", "n_parts": "i32"}
    compiled(device_checksum._sum_pages, types, {"PAIRS": 512, "PAGES": walk.pages, "STEP": walk.step}, walk.warps)
    types = {"table": "*i64", "sums": "*i64", "seed": "i64"}
    compiled(device_block_sums._sum_pieces, types, device_block_sums.CONSTANTS, device_block_sums.WARPS)
    code = device_block_sums.compiled(90)
    print(json.dumps({"name": code.name, "threads": code.threads, "is_elf": code.cubin.startswith(b"\x7fELF")}))


if __name__ == "__main__":
    main()
