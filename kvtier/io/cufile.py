"""cuFile's mode: GPUDirect Storage (storage to GPU directly), or its compatibility mode through host memory.

KvikIO's "compat mode: False" is no proof of GPUDirect Storage: without nvidia-fs, cuFile has a compatibility mode of
its own.
"""

from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

_FAULTS = (OSError, RuntimeError, ValueError, TypeError, AttributeError, KeyError, SystemError)


class CufileState(NamedTuple):
    """Mode of cuFile, and the observations that it was concluded from, a line each."""

    mode: Literal["gds", "compat", "absent"]  # absent: KvikIO is not installed
    reasons: tuple[str, ...]


def nvidia_fs_loaded(proc: Path = Path("/proc")) -> bool:
    """Return whether the kernel module of GPUDirect Storage is loaded."""
    try:
        lines = (proc / "modules").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = []
    return any(line.split(" ")[0] == "nvidia_fs" for line in lines) or (proc / "driver/nvidia-fs").is_dir()


def cufile_state(kvikio: ModuleType | None, proc: Path = Path("/proc")) -> CufileState:
    """Query the kernel and KvikIO (None: not installed). Opens cuFile's driver where KvikIO would use it."""
    loaded = nvidia_fs_loaded(proc)
    reasons = [f"nvidia_fs is {'loaded' if loaded else 'not loaded'} (/proc/modules, /proc/driver/nvidia-fs)"]
    if kvikio is None:
        return CufileState("absent", (*reasons, "KvikIO is not installed"))
    try:
        prefers_compat = bool(kvikio.defaults.is_compat_mode_preferred())
    except _FAULTS as fault:
        return CufileState("compat", (*reasons, f"KvikIO does not report its mode: {fault}"))
    reasons.append(f"KvikIO's compat mode: {prefers_compat}")
    if prefers_compat:
        reasons.append("KvikIO does not use cuFile: libcufile or /run/udev is missing, or KVIKIO_COMPAT_MODE is on")
        return CufileState("compat", tuple(reasons))
    try:
        available = bool(kvikio.cufile_driver.get("is_gds_available"))
        version = ".".join(str(part) for part in kvikio.cufile_driver.libcufile_version())
    except _FAULTS as fault:
        return CufileState("compat", (*reasons, f"cuFile's driver does not open: {fault}"))
    reasons.append(f"cuFile {version}: is_gds_available {available}")
    if loaded and available:
        return CufileState("gds", tuple(reasons))
    reasons.append(
        "cuFile runs in its compatibility mode, although KvikIO's is off (on local NVMe, cuFile may use PCI "
        "peer-to-peer without nvidia_fs: check with gdscheck -p)"
    )
    return CufileState("compat", tuple(reasons))
