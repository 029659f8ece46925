"""Stored kernels: code comes back, anything else is compiled again, and other sources have another key."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.errors import Corrupt
from kvtier.kernels import block_sums
from kvtier.kernels.device_code import DeviceCode, unpack
from kvtier.storage.own_files import OwnFiles
from tests.kernels.device_rig import device_block_sums

CODE = DeviceCode("kernel", 128, 48, bytes(range(256)))


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []

    def compiled(capability: int) -> DeviceCode:
        found.append(capability)
        return CODE

    monkeypatch.setattr(device_block_sums, "compiled", compiled)
    return found


def test_code_is_compiled_once_for_a_device(tmp_path: Path, compilations: list[int]) -> None:
    for capability in (90, 90, 100, 90):
        assert block_sums.device_code(capability, OwnFiles(tmp_path, "kernel", b"TESTING1")) == CODE
    assert compilations == [90, 100]
    assert block_sums.device_code(90, None) == CODE and len(compilations) == 3


def test_sources_decide_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compilations: list[int]) -> None:
    own = OwnFiles(tmp_path, "kernel", b"TESTING1")
    block_sums.device_code(90, own)
    monkeypatch.setattr(block_sums, "SOURCES", block_sums.SOURCES[:1])
    block_sums.device_code(90, own)
    assert len(compilations) == 2


def test_what_is_no_code_is_compiled_again(
    tmp_path: Path, compilations: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    own = OwnFiles(tmp_path, "kernel", b"TESTING1")
    for body in (b"", b"\x05\0\0\0{}", b"\x02\0\0\0[]", CODE.pack()[:6]):
        with pytest.raises(Corrupt, match="no kernel of this kvtier"):
            unpack(body)
        own.put(block_sums._key(90), body)
        assert block_sums.device_code(90, own) == CODE
    assert caplog.text.count("is not used") == len(compilations) == 4
