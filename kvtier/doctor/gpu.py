"""The GPU's side: driver, GPUDirect Storage, PCIe, and memory that may be pinned."""

import re
import resource
from collections.abc import Iterator
from pathlib import Path

from kvtier.config.settings import Settings
from kvtier.doctor.host import Diagnosis, Host, ProbeFailed, ProbeNotRun
from kvtier.errors import ConfigError
from kvtier.io.cufile import nvidia_fs_loaded
from kvtier.runtime.memory_limits import memory_here
from kvtier.runtime.units import size

PCIE_TIMEOUT_S = 60.0
PCIE_SHARE_MIN = 0.7  # least share of the link's raw rate; a healthy H200 on Gen5 x16 copies 55.6 of 63 GB/s
MEMLOCK_BYTES_MIN = 1 << 30  # least memlock limit beside RDMA devices, bytes

# Raw rate of one lane, bytes a second, by the link's GT/s as sysfs writes it.
_LANE_BYTES_S = {"2.5": 0.25e9, "5.0": 0.5e9, "8.0": 0.985e9, "16.0": 1.969e9, "32.0": 3.938e9, "64.0": 7.563e9}


def gpu_names(host: Host) -> list[str]:
    """Return the names of the GPUs that the NVIDIA kernel driver has bound."""
    found = []
    for path in sorted((host.proc / "driver/nvidia/gpus").glob("*/information")):
        match = re.search(r"^Model:\s*(.+)$", host.text(path), re.MULTILINE)
        found.append(match[1].strip() if match else "unknown GPU")
    return found


def examine_gpu(host: Host, settings: Settings | None = None) -> Iterator[Diagnosis]:
    """settings: whose GPU memory there must be a GPU for."""
    names = gpu_names(host)
    has_driver = False
    try:
        version = host.probe("kvtier.doctor.probe", "driver")
        has_driver = version is not None
        yield _driver(version, names, len(_pci_gpus(host)))
        if settings is not None:
            settings.check_device(has_driver)
    except ConfigError as fault:
        yield Diagnosis("bad", "settings", f"{fault.key} = {fault.value}", fault.fix)
    except ProbeNotRun as fault:
        yield fault.diagnosis("NVIDIA driver")
    except ProbeFailed as fault:
        yield Diagnosis(
            "bad", "NVIDIA driver", f"does not answer: {fault}", "see dmesg; reboot or reinstall the driver"
        )
    yield _nvidia_fs(host, has_driver)
    yield _cufile(host, has_driver)
    yield _pcie(host, has_driver)


def _driver(version: int | None, names: list[str], n_on_bus: int) -> Diagnosis:
    """names: what the kernel's driver drives; n_on_bus: NVIDIA GPUs that PCI has, with a driver or without."""
    gpus = f"{len(names)} x {names[0]}" if names and len(set(names)) == 1 else ", ".join(names)
    if version is None and names:
        fix = "give the container the driver: --gpus all, NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return Diagnosis("bad", "NVIDIA driver", f"the kernel has it ({gpus}), libcuda.so.1 cannot be used", fix)
    if version is None:
        if not n_on_bus:
            fix = "for engines on the CPU nothing is to be done; for a GPU run this where nvidia-smi lists it"
            return Diagnosis("warn", "NVIDIA driver", "none, and there is no NVIDIA GPU on the PCI bus", fix)
        value = (
            "libcuda.so.1 is not here, or too old for kvtier, and the kernel drives none of the "
            f"{n_on_bus} NVIDIA GPUs on the PCI bus"
        )
        fix = "install NVIDIA's driver, until nvidia-smi lists them; engines on the CPU need none"
        return Diagnosis("warn", "NVIDIA driver", value, fix)
    cuda = f"CUDA {version // 1000}.{version % 1000 // 10}"
    return Diagnosis("ok", "NVIDIA driver", f"{cuda}, {gpus or 'GPUs are not listed in /proc'}")


def _nvidia_fs(host: Host, has_driver: bool) -> Diagnosis:
    if nvidia_fs_loaded(host.proc):
        return Diagnosis("ok", "nvidia_fs", "loaded")
    if not has_driver:
        return Diagnosis("ok", "nvidia_fs", "not loaded; of no use without a GPU")
    fix = "only GPUDirect Storage needs it: install nvidia-gds and `modprobe nvidia-fs`; the ring does without"
    return Diagnosis("warn", "nvidia_fs", "not loaded", fix)


def _cufile(host: Host, has_driver: bool) -> Diagnosis:
    if not has_driver:
        return Diagnosis("ok", "cuFile", "not asked: no driver")
    try:
        state = host.probe("kvtier.doctor.probe", "cufile")
    except ProbeFailed as fault:
        fix = "set io.engine to ring, or reinstall kvikio and libcufile"
        return Diagnosis("warn", "cuFile", f"KvikIO does not answer: {fault}", fix)
    why = "; ".join(state["reasons"])
    if state["mode"] == "gds":
        return Diagnosis("ok", "cuFile", f"GPUDirect Storage: {why}")
    if state["mode"] == "absent":
        return Diagnosis("ok", "cuFile", f"not used: {why}")
    fix = "load nvidia_fs for GPUDirect Storage; the calibration decides between this and the ring"
    return Diagnosis("warn", "cuFile", f"compatibility mode, through host memory: {why}", fix)


def _pcie(host: Host, has_driver: bool) -> Diagnosis:
    if not has_driver:
        return Diagnosis("ok", "PCIe", "not measured: no driver")
    try:
        found = host.probe("kvtier.kernels.pcie", timeout_s=PCIE_TIMEOUT_S)
    except ProbeFailed as fault:
        return Diagnosis("bad", "PCIe", f"cannot be measured: {fault}", "the GPU or torch's CUDA is broken: nvidia-smi")
    if found is None:
        return Diagnosis("warn", "PCIe", "not measured: torch sees no GPU", "install a torch with CUDA")
    slowest = min(found["to_device_bytes_s"], found["from_device_bytes_s"])
    link, link_bytes_s = _link(host)
    rates = f"{found['to_device_bytes_s'] / 1e9:.1f} GB/s to, {found['from_device_bytes_s'] / 1e9:.1f} from"
    value = f"pinned memory {rates} {found['name']}; link {link}"
    if link_bytes_s and slowest < PCIE_SHARE_MIN * link_bytes_s:
        fix = "run on the GPU's NUMA node (numactl), and see whether the link came up at full width (lspci -vv)"
        return Diagnosis("warn", "PCIe", f"{value} ({link_bytes_s / 1e9:.0f} GB/s)", fix)
    return Diagnosis("ok", "PCIe", value)


def _link(host: Host) -> tuple[str, float]:
    """Return the widest link of an NVIDIA GPU and its bytes a second; its speed is the possible one, as idle GPUs
    lower it."""
    best = ("unknown", 0.0)
    for device in _pci_gpus(host):
        speed = host.text(device / "max_link_speed").split(" ")[0]
        width = host.text(device / "current_link_width")
        rate = _LANE_BYTES_S.get(speed, 0.0) * int(width) if width.isdigit() else 0.0
        if rate > best[1]:
            best = (f"{speed} GT/s x{width}", rate)
    return best


def _pci_gpus(host: Host) -> list[Path]:
    """Return the sysfs folders of NVIDIA GPUs."""
    return [
        device
        for device in sorted((host.sys / "bus/pci/devices").glob("*"))
        if host.text(device / "vendor") == "0x10de" and host.text(device / "class").startswith("0x03")
    ]


def examine_memory(host: Host, arena_bytes: int | None) -> Iterator[Diagnosis]:
    """Judge the memlock limit and the available memory. arena_bytes: host arena of each worker, from the settings."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    has_rdma = any((host.sys / "class/infiniband").glob("*"))
    if limit == resource.RLIM_INFINITY:
        yield Diagnosis("ok", "memlock limit", "unlimited")
    elif has_rdma and limit < MEMLOCK_BYTES_MIN:
        fix = "ulimit -l unlimited (docker: --ulimit memlock=-1): EFA and InfiniBand register memory under it"
        yield Diagnosis("warn", "memlock limit", size(limit), fix)
    else:
        yield Diagnosis("ok", "memlock limit", size(limit))
    available = memory_here(host.proc, host.sys).available_bytes
    if available is None:
        yield Diagnosis("warn", "memory to pin", "unknown: /proc/meminfo cannot be read")
    elif arena_bytes is not None and arena_bytes > available:
        fix = f"lower host.arena_bytes ({size(arena_bytes)} for each worker), or give this host or cgroup more memory"
        yield Diagnosis("bad", "memory to pin", f"{size(available)} are available", fix)
    else:
        yield Diagnosis("ok", "memory to pin", f"{size(available)} are available")
