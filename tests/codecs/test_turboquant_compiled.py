"""What the compiler makes of turboquant's kernels for an H200. It needs no GPU, and sees what no result shows: a tile
that changes its layout, or an access that is not believed to be aligned, costs much time and not one wrong byte."""

from pathlib import Path

from tests.kernels.fresh_process import lines_of


def test_accesses_are_wide_and_operands_stay_in_registers(tmp_path: Path) -> None:
    # Those of 256 elements only have to compile: their vectors do not fit into any registers.
    warps, encode, decode, warps6, decode6, *_ = lines_of("tests.codecs.compile_turboquant", tmp_path, timeout_s=280)
    tile_loads = 8 * 128 * 2 // (32 * 16)
    assert loads(warps) >= 4 * tile_loads, "K three times, V once"
    assert warps["st.global.v2.b32"] == 4, "codes: 2 of K, V's 1 and signs"
    assert warps["st.global.b16"] == 2 and "ld.shared.b16" not in warps, "scales: no data moves between warps"
    assert loads(encode) >= 4 * 64 * 96 * 2 // (128 * 16)
    assert decode["st.global.v4.b32"] == 2 * 64 * 128 * 2 // (128 * 16)
    assert warps6["st.global.v2.b32"] == 5 and warps6["st.global.b32"] == warps["st.global.b32"] + 1, "V's single bits"
    assert decode6["st.global.v4.b32"] == decode["st.global.v4.b32"]
    for with_tables, without in ((warps6, warps), (decode6, decode)):
        assert with_tables["bar.sync"] == without["bar.sync"], "codes moved to where a table is read"
    assert not any(name.startswith("ld.shared") for name in decode6)
    for kernel in (warps, warps6):
        assert any(name.startswith("mma.sync") for name in kernel), "wgmma has four warps wait for each other"
        assert sum(count for name, count in kernel.items() if "ldmatrix" in name) <= 3, "an operand moved"
    for kernel in (encode, decode, decode6):
        assert any(name.startswith("wgmma.mma_async") for name in kernel)
        assert not any("ldmatrix" in name and ".x4" in name or "local" in name for name in kernel), "an operand moved"
    for kernel in (warps, warps6, encode):
        assert not any(name.startswith(("div.", "sqrt.")) for name in kernel), "they branch"
    assert not any(name.startswith("mma.") for name in encode), "squares are summed where they are made"
    rounded = [
        name
        for kernel in (warps, warps6, encode, decode, decode6)
        for name in kernel
        if ".ftz" in name and "approx" not in name
    ]
    assert not rounded, "denormals count"


def loads(kernel: dict[str, int]) -> int:
    """Of 16 bytes a thread, whatever is to become of them in the caches."""
    return sum(count for name, count in kernel.items() if name.startswith("ld.global") and name.endswith("v4.b32"))
