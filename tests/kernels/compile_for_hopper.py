"""Compiles the kernels for an H200, on any machine, and prints what their memory accesses became, a kernel a line."""

import json
import re
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvtier.kernels import device, device_block_sums, device_checksum

ACCESS = re.compile(r"(?:ld|st)\.(?:global|shared|local)[\w.:]*")
INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+ )?([a-z]\w*(?:\.[\w:]+)+)", re.MULTILINE)


def compiled(
    kernel: triton.JITFunction,
    types: Mapping[str, Any],
    constants: Mapping[str, object],
    options: Mapping[str, object],
    pattern: re.Pattern[str] = INSTRUCTION,
    aligned: Collection[str] = (),
) -> None:
    """Compile a kernel and print how often it has each of what `pattern` finds. types: of parameters that are no i32.
    aligned: parameters that are multiples of 16."""
    numbers = {name: (n,) for n, name in enumerate(kernel.arg_names)}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in numbers}
    places = {numbers[name]: value for name, value in constants.items() if name in numbers}
    multiples = {numbers[name]: [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, places, multiples) if aligned else ASTSource(kernel, signature, places)
    found = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(options))
    print(json.dumps(Counter(pattern.findall(found.asm["ptx"]))))


def main() -> None:
    tile, warps = device.TILINGS[0]
    types = {"planes": "*i64", "table": "*i64"}
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
        compiled(device._move, types, constants, {"num_warps": warps}, ACCESS)
    walk = device_checksum.WALKS[0]
    types = {"table": "*i64", "sums": "*i64"}
    constants = {"PAIRS": 512, "PAGES": walk.pages, "STEP": walk.step}
    compiled(device_checksum._sum_pages, types, constants, {"num_warps": walk.warps}, ACCESS)
    types = {"table": "*i64", "sums": "*i64", "seed": "i64"}
    options = {"num_warps": device_block_sums.WARPS}
    compiled(device_block_sums._sum_pieces, types, device_block_sums.CONSTANTS, options, ACCESS)
    code = device_block_sums.compiled(90)
    print(json.dumps({"name": code.name, "threads": code.threads, "is_elf": code.cubin.startswith(b"\x7fELF")}))


if __name__ == "__main__":
    main()
