"""Memory that a process may have: where an arena that can't be had is refused before it is asked for."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.config.settings import HostSettings, Settings
from kvtier.errors import ConfigError
from kvtier.runtime import memory_limits
from kvtier.runtime.memory_limits import MachineMemory, beyond_available, check_host_arena, memory_here
from kvtier.worker import arenas
from kvtier.worker.arenas import host_memory

GIB = 1 << 30


@pytest.fixture(name="kernel")
def _kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 32 GiB, 16 of them free."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {32 << 20} kB\nMemAvailable:   {16 << 20} kB\n")
    monkeypatch.setattr(memory_limits.resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return tmp_path


def found(kernel: Path) -> MachineMemory:
    return memory_here(kernel / "proc", kernel / "sys")


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_a_machine_without_limits(kernel: Path) -> None:
    assert found(kernel) == MachineMemory(32 * GIB, "this machine's memory", 16 * GIB)
    assert memory_here(kernel / "absent", kernel / "absent") == MachineMemory(None, "", None)


@pytest.mark.parametrize("place", ["", "pod/worker/", "pod/"])
def test_a_limit_of_any_cgroup_above(place: str, kernel: Path) -> None:
    write(kernel / "proc/self/cgroup", "0::/pod/worker\n")
    write(kernel / f"sys/fs/cgroup/{place}memory.max", f"{8 * GIB}\n")
    write(kernel / f"sys/fs/cgroup/{place}memory.current", f"{3 * GIB}\n")
    here = found(kernel)
    assert (here.limit_bytes, here.available_bytes) == (8 * GIB, 5 * GIB) and "container" in here.limit
    write(kernel / f"sys/fs/cgroup/{place}memory.max", "max\n")
    assert found(kernel).limit_bytes == 32 * GIB


def test_a_limit_of_version_1(kernel: Path) -> None:
    write(kernel / "proc/self/cgroup", "4:memory:/pod\n0::/\n")
    write(kernel / "sys/fs/cgroup/memory/memory.limit_in_bytes", f"{(1 << 63) - 4096}\n")  # none
    assert found(kernel).limit_bytes == 32 * GIB
    write(kernel / "sys/fs/cgroup/memory/pod/memory.limit_in_bytes", f"{4 * GIB}\n")
    assert found(kernel).limit_bytes == 4 * GIB


def test_a_limit_of_the_process(kernel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limits.resource, "getrlimit", lambda _: (2 * GIB, 2 * GIB))
    assert found(kernel).limit_bytes == 2 * GIB and "ulimit -v" in found(kernel).limit


def test_an_arena_beyond_all_memory_is_refused(kernel: Path) -> None:
    check_host_arena(32 * GIB, found(kernel))
    with pytest.raises(ConfigError) as caught:
        check_host_arena(500 * GIB, found(kernel))
    text = str(caught.value)
    assert text.startswith("kvtier: host.arena_bytes = 536870912000: 500.0 GiB, more than this machine's memory")
    assert "(32.0 GiB)" in text and "8GiB is a start" in text


def test_an_arena_beyond_what_is_free_is_warned_of(kernel: Path) -> None:
    assert beyond_available(16 * GIB, found(kernel)) == ""
    assert "may kill an engine" in beyond_available(17 * GIB, found(kernel))
    assert beyond_available(17 * GIB, MachineMemory(None, "", None)) == ""


def test_an_engine_stops_at_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start died of "[Errno 12] Cannot allocate memory", without a word of the setting."""
    settings = Settings(root=Path("/x"), host=HostSettings(arena_bytes=1 << 50))
    with pytest.raises(ConfigError, match=r"^kvtier: host.arena_bytes = 1125899906842624: .* more than "):
        host_memory(settings, 1 << 20)

    def refuses(n_bytes: int) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(arenas, "AlignedBuffer", refuses)
    settings = Settings(root=Path("/x"), host=HostSettings(arena_bytes=64 << 20))
    with pytest.raises(ConfigError, match=r"host.arena_bytes = 67108864: cannot be had: Cannot allocate memory; set"):
        host_memory(settings, 1 << 20)


def test_under_a_real_limit() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
        "from kvtier.runtime.memory_limits import memory_here; print(memory_here().limit_bytes == 3 << 30)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "True\n"
