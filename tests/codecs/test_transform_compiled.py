"""Instructions of the transform codec's kernels as compiled for an H200, which needs no GPU."""

from pathlib import Path

import pytest

from tests.kernels.fresh_process import lines_of


@pytest.mark.soak
def test_products_are_of_tensor_cores(tmp_path: Path) -> None:
    kernels = lines_of("tests.codecs.compile_transform", tmp_path, timeout_s=580)
    for encode, decode in zip(kernels[::2], kernels[1::2], strict=True):
        assert any(".s32.s8.s8" in name for name in encode), "whole numbers"
        assert any(".f32.f16.f16" in name for name in decode)
        assert not any(name.startswith("div") for name in (*encode, *decode)), "divided slowly"
