"""What the compiler makes of turboquant's kernels for an H200. It needs no GPU, and sees what no result shows: a tile
that changes its layout, or an access that is not believed to be aligned, costs much time and not one wrong byte."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_accesses_are_wide_and_operands_stay_in_registers(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    answer = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compile_turboquant"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr[-2000:]  # vectors of 256 elements do not fit into any registers
    encode, decode, *_ = map(json.loads, answer.stdout.splitlines())
    tile_loads = 64 * 128 * 2 // (128 * 16)
    assert encode["ld.global.v4.b32"] >= 4 * tile_loads, "K three times, V once"
    assert (encode["st.global.v4.b32"], encode["st.global.v2.b32"]) == (3, 1), "codes: 2 of K, V's 1 and signs"
    assert decode["st.global.v4.b32"] == 2 * tile_loads
    for kernel in (encode, decode):
        assert any(name.startswith("wgmma.mma_async") for name in kernel)
        assert not any("ldmatrix" in name and ".x4" in name or "local" in name for name in kernel), "an operand moved"
    assert encode["div.rn.f32"] == 1 and "sqrt.rn.f32" not in encode, "only the mean's may branch"
    rounded = [name for name in (*encode, *decode) if ".ftz" in name and "approx" not in name]
    assert set(rounded) <= {"cvt.rmi.ftz.f32.f32"}, "denormals count, but in floor(threshold)"
