"""What a worker with a GPU measures of its io_setup, and when it measures anew. No GPU here: nothing is really read."""

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.io.calibration import Ask, Calibration, engines_for
from kvtier.io.engines import EngineChoice, Target
from kvtier.io.ring import sizes_for
from kvtier.storage.filesystem import FileSystem
from kvtier.storage.root import open_root
from kvtier.worker import io_setup
from tests.support.rig import settings

ARENA: Any = SimpleNamespace(is_device=True, address=lambda slot: 1 << 40, n_slots=64, slot_bytes=1 << 20)
RING = EngineChoice("ring", 4, 1 << 20, 2)


class Machine:
    """A host with a GPU, with or without KvikIO. asked: the engines of each measuring."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.settings = settings(root)
        self.root = open_root(self.settings)
        self.has_kvikio = False
        self.asked: list[tuple[str, ...]] = []
        monkeypatch.setattr(importlib.util, "find_spec", self._find)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
        monkeypatch.setattr(io_setup, "calibrate", self._measure)
        monkeypatch.setattr(io_setup, "open_engine", lambda *_: SimpleNamespace(close=lambda timeout_s=1.0: True))

    def start_worker(self) -> None:
        io_setup.open_io(self.settings, self.root, True, ARENA, torch.device("cuda", 0))[0].close()

    def _find(self, name: str) -> ModuleSpec | None:
        assert name == "kvikio"
        return ModuleSpec(name, None) if self.has_kvikio else None

    def _measure(self, ask: Ask) -> Calibration:
        self.asked.append(ask.engines)
        return Calibration(RING, 40e9, 5e9, 1e-4, 0.5, ("as measured",))


def test_a_mount_is_measured_anew_when_kvikio_comes_or_goes_and_else_once_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, monkeypatch)
    machine.start_worker()
    machine.start_worker()
    assert machine.asked == [("ring",)], "kept"
    machine.has_kvikio = True
    machine.start_worker()
    machine.start_worker()
    assert machine.asked == [("ring",), ("ring", "kvikio")]
    machine.has_kvikio = False
    machine.start_worker()
    assert machine.asked[2:] == [("ring",)]


@pytest.mark.parametrize("in_memory", [True, False])
def test_pages_that_were_written_are_read_once_on_a_file_system_in_memory_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    root, rings = open_root(settings(tmp_path)), []

    def ring(threads: int, piece_bytes: int, **options: Any) -> Any:
        rings.append((threads, piece_bytes, options))
        return SimpleNamespace(close=lambda timeout_s=1.0: True)

    monkeypatch.setattr(
        io_setup, "file_system_of", lambda path: FileSystem("tmpfs" if in_memory else "ext4", False, "/")
    )
    monkeypatch.setattr("kvtier.io.ring.Ring", ring)
    arena: Any = SimpleNamespace(is_device=False)
    own = settings(tmp_path)
    io_setup.open_io(own, root, True, arena, torch.device("cpu"))[0].close()
    sizes = sizes_for(in_memory, own.io.threads)
    options = {"write_piece_bytes": sizes.write_piece_bytes}
    assert rings == [(sizes.threads, sizes.piece_bytes, options)]


@pytest.mark.parametrize("has_kvikio", [True, False])
def test_a_worker_asks_what_the_doctor_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_kvikio: bool) -> None:
    machine = Machine(tmp_path, monkeypatch)
    machine.has_kvikio = has_kvikio
    machine.start_worker()
    assert machine.asked == [engines_for(machine.settings.io.engine, Target(1 << 40, 64 << 20, 0))]
