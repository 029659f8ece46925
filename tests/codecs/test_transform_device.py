"""The transform codec's kernels against the torch reference, interpreted: bytes of slabs, verdicts, sums and values."""

from pathlib import Path

import pytest
import torch

from tests.codecs.transform_rig import check_transform
from tests.kernels.device_rig import INTERPRETED, as_interpreted

with as_interpreted():
    import kvtier.codecs.transform.device  # noqa: F401

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="tests/gpu has it on the device")


@pytest.mark.parametrize(("size", "dtype"), [(64, torch.bfloat16), (80, torch.float16), (256, torch.bfloat16)])
def test_bytes_are_those_of_the_reference(tmp_path: Path, size: int, dtype: torch.dtype) -> None:
    check_transform(tmp_path, (size, size), dtype, "cpu")


def test_k_and_v_of_different_sizes(tmp_path: Path) -> None:
    check_transform(tmp_path, (96, 128), torch.bfloat16, "cpu", "tc3")


def test_chunks_that_are_no_whole_tiles(tmp_path: Path) -> None:
    check_transform(tmp_path, (128, 64), torch.bfloat16, "cpu", tokens=48)
