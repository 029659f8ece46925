"""What the compiler makes of the kernels for an H200. It needs no GPU, and sees what no result shows: an alignment that
the compiler does not believe costs half of the rate and not one wrong byte."""

from pathlib import Path

from tests.kernels.device_rig import device, device_block_sums, device_checksum
from tests.kernels.fresh_process import lines_of


def test_accesses_are_sixteen_bytes_wide_and_no_register_is_spilled(tmp_path: Path) -> None:
    *moves, sums, block_sums, code = lines_of("tests.kernels.compile_for_hopper", tmp_path, timeout_s=120)
    tile, warps = device.TILINGS[0]
    for accesses in moves:
        vectors = tile // (warps * 32) // 2
        assert accesses["ld.global.v2.b64"] == accesses["st.global.v2.b64"] == vectors
        assert accesses["ld.global.b64"] == 7, "scalars out of the tables"
        assert set(accesses) == {"ld.global.v2.b64", "st.global.v2.b64", "ld.global.b64"}
    walk = device_checksum.WALKS[0]
    a_page = 512 // (walk.warps * 32) // 2
    assert sums["ld.global.v2.b64"] == (walk.step + 1) * a_page
    assert sums["ld.global.b64"] == 2
    assert not any("local" in name for name in [*sums, *block_sums]), "spilled"
    lanes = 512 // (device_block_sums.WARPS * 32)
    assert block_sums["ld.global.b64"] == (device_block_sums.STEP + 1) * lanes + 4
    assert sums["st.shared.b64"] == 2, "only the last sum goes over the warps"
    assert code == {"name": "_sum_pieces", "threads": 32 * device_block_sums.WARPS, "is_elf": True}
