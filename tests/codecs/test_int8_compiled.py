"""Instructions of int8's kernels as compiled for an H200. It needs no GPU, and sees what no result shows: data that
moves between threads, or an access that is not believed to be aligned, costs much time and not one wrong byte."""

from pathlib import Path

from tests.codecs.int8_rig import int8_device
from tests.kernels.fresh_process import lines_of


def test_accesses_are_wide_and_vectors_stay_where_they_are(tmp_path: Path) -> None:
    kernels = lines_of("tests.codecs.compile_int8", tmp_path, timeout_s=280)
    encoded, decoded = (
        tilings[0].elements // (tilings[0].warps * 32) // 8  # a thread's vectors of 16 bytes in a tile of V
        for tilings in (int8_device.ENCODE_TILINGS, int8_device.DECODE_TILINGS)
    )
    for encode, decode in zip(kernels[::2], kernels[1::2], strict=True):
        # A tile of K has half as many vectors, and an iteration of the encoding's loops has two tiles of it.
        loads = {
            evict: sum(n for name, n in encode.items() if f"evict_{evict}" in name and name.endswith("v4.b32"))
            for evict in ("last", "first")
        }
        assert loads["last"] == encoded, "K, for its ranges"
        assert loads["first"] == 3 * encoded, "K, V before its loop, and there"
        assert encode["ld.global.v4.b32"] == 7, "what the channels of K have"
        assert encode["st.global.v2.b32"] == encoded, "codes of V"
        assert encode["st.global.v4.b32"] == encoded // 2 + encoded, "codes of K, and V's first token"
        assert decode["ld.global.v2.b32"] == decoded, "codes of V"
        assert decode["ld.global.v4.b32"] == decoded // 4 + 6, "codes of K, and what its channels have"
        assert decode["st.global.v4.b32"] == decoded // 2 + decoded and decode["ld.global.b32"] == 2, "first tokens"
        moved = sum(n for name, n in decode.items() if name.startswith(("st.shared", "bar")))
        assert moved == 0, "no vector moves between threads"
        for kernel in (encode, decode):
            assert not any("local" in name or name.startswith("div") for name in kernel), "spilled, or divided slowly"
            assert not any(".ftz" in name and "approx" not in name for name in kernel), "denormals count"
