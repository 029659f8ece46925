"""What the compiler makes of turboquant's kernels for an H200. It needs no GPU, and sees what no result shows: a tile
that changes its layout, or an access that is not believed to be aligned, costs much time and not one wrong byte."""

from __future__ import annotations

from pathlib import Path

from tests.kernels.fresh_process import lines_of


def test_accesses_are_wide_and_operands_stay_in_registers(tmp_path: Path) -> None:
    # Those of 256 elements only have to compile: their vectors do not fit into any registers.
    encode, decode, *_ = lines_of("tests.kernels.compile_turboquant", tmp_path, timeout_s=280)
    tile_loads = 64 * 128 * 2 // (128 * 16)
    assert encode["ld.global.v4.b32"] >= 4 * tile_loads, "K three times, V once"
    assert (encode["st.global.v4.b32"], encode["st.global.v2.b32"]) == (3, 1), "codes: 2 of K, V's 1 and signs"
    assert decode["st.global.v4.b32"] == 2 * tile_loads
    for kernel in (encode, decode):
        assert any(name.startswith("wgmma.mma_async") for name in kernel)
        assert not any("ldmatrix" in name and ".x4" in name or "local" in name for name in kernel), "an operand moved"
    assert not any(name.startswith(("div.", "sqrt.")) for name in encode), "they branch"
    assert not any(name.startswith("mma.") for name in encode), "squares are summed where they are made"
    rounded = [name for name in (*encode, *decode) if ".ftz" in name and "approx" not in name]
    assert not rounded, "denormals count"
