"""Stored kernels: code comes back, what is refused is compiled anew once, and other sources have another key."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from kvtier.errors import Corrupt
from kvtier.kernels import block_sums
from kvtier.kernels.device_code import DeviceCode, unpack
from kvtier.storage.cache_folder import CacheFolder
from tests.kernels.device_rig import device_block_sums

CODE = DeviceCode("kernel", 128, 48, bytes(range(256)))
REFUSED = CODE._replace(cubin=b"of another driver")


class Driver:
    """Stands for the compiler and the CUDA driver. code: what is compiled."""

    def __init__(self) -> None:
        self.code = CODE
        self.compiled: list[int] = []
        self.loaded: list[DeviceCode] = []

    def compile(self, capability: int) -> DeviceCode:
        self.compiled.append(capability)
        return self.code

    def load(self, code: DeviceCode) -> object:
        if code == REFUSED:
            raise RuntimeError("cuModuleLoadData of the CUDA driver failed with error 200")
        self.loaded.append(code)
        return object()


@pytest.fixture(name="driver")
def _driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(device_block_sums, "compiled", driver.compile)
    monkeypatch.setattr(block_sums, "load", driver.load)
    monkeypatch.setattr(block_sums, "_loaded", {})
    monkeypatch.setattr(block_sums, "_capability", lambda device: 90)
    monkeypatch.setattr(block_sums, "on_device", lambda device: nullcontext())
    return driver


@pytest.fixture(name="own")
def _own(tmp_path: Path) -> CacheFolder:
    return CacheFolder(tmp_path, "kernel", b"TESTING1")


def test_code_is_compiled_once_for_a_device(own: CacheFolder, driver: Driver) -> None:
    for capability in (90, 90, 100, 90):
        block_sums.load_kernel(capability, own)
    assert driver.compiled == [90, 100] and driver.loaded == [CODE] * 4
    block_sums.load_kernel(90, None)
    assert len(driver.compiled) == 3


def test_sources_decide_the_key(monkeypatch: pytest.MonkeyPatch, own: CacheFolder, driver: Driver) -> None:
    block_sums.load_kernel(90, own)
    monkeypatch.setattr(block_sums, "SOURCES", block_sums.SOURCES[:1])
    block_sums.load_kernel(90, own)
    assert len(driver.compiled) == 2


def test_what_is_no_code_is_compiled_again(own: CacheFolder, driver: Driver, caplog: pytest.LogCaptureFixture) -> None:
    for body in (b"", b"\x05\0\0\0{}", b"\x02\0\0\0[]", CODE.pack()[:6]):
        with pytest.raises(Corrupt, match="no kernel of this kvtier"):
            unpack(body)
        own.put(block_sums._key(90), body)
        block_sums.load_kernel(90, own)
    assert caplog.text.count("is not used") == len(driver.compiled) == len(driver.loaded) == 4


def test_code_that_the_driver_refuses_is_replaced(
    own: CacheFolder, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    """The driver refused it at every start, and the CPU computed the sums."""
    own.put(block_sums._key(90), REFUSED.pack())
    for _ in range(2):
        block_sums.load_kernel(90, own)
    assert driver.compiled == [90] and driver.loaded == [CODE] * 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "is not used, and made anew: cuModuleLoadData" in caplog.text


def test_new_code_that_the_driver_refuses_is_not_stored(own: CacheFolder, driver: Driver) -> None:
    driver.code = REFUSED
    own.put(block_sums._key(90), REFUSED.pack())
    with pytest.raises(RuntimeError, match="error 200"):
        block_sums.load_kernel(90, own)
    assert driver.compiled == [90] and own.get(block_sums._key(90)) is None


def test_a_kernel_is_loaded_once_for_a_device(own: CacheFolder, driver: Driver) -> None:
    """The driver kept a module of each load of weights."""
    devices = [torch.device("cuda", number % 2) for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        kernels = list(pool.map(lambda device: block_sums.kernel_on(device, own), devices))
    assert len(driver.loaded) == len(set(kernels)) == 2 and kernels[:2] * 4 == kernels


def test_a_load_that_failed_is_tried_again(own: CacheFolder, driver: Driver) -> None:
    driver.code = REFUSED
    with pytest.raises(RuntimeError, match="error 200"):
        block_sums.kernel_on(torch.device("cuda", 0), own)
    driver.code = CODE
    block_sums.kernel_on(torch.device("cuda", 0), own)
    assert driver.compiled == [90, 90] and driver.loaded == [CODE]


class Metadata(NamedTuple):
    """Stands for what Triton tells of a compiled kernel."""

    name: str = "kernel"
    shared: int = 48
    global_scratch_size: int = 0
    profile_scratch_size: int = 0


@pytest.mark.parametrize("name", ["global_scratch_size", "profile_scratch_size"])
def test_a_kernel_with_scratch_memory_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """kvtier.io.cuda launches it with null pointers in place of that memory."""
    found = SimpleNamespace(metadata=Metadata(), asm={"cubin": CODE.cubin})
    monkeypatch.setattr(device_block_sums, "ASTSource", lambda *_: None)
    monkeypatch.setattr(device_block_sums.triton, "compile", lambda *_, **__: found)
    assert device_block_sums.compiled(90) == CODE
    found.metadata = Metadata()._replace(**{name: 128})
    with pytest.raises(RuntimeError, match=f"scratch memory.*{name}.*128"):
        device_block_sums.compiled(90)
