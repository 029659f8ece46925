"""Memory limits of this process, its cgroups and the machine (proc_meminfo(5), cgroups(7), getrlimit(2))."""

import re
import resource
from pathlib import Path
from typing import NamedTuple

from kvtier.errors import ConfigError
from kvtier.runtime.units import size

PROC, SYS = Path("/proc"), Path("/sys")


class MachineMemory(NamedTuple):
    """Memory of this process. limit_bytes: largest possible size, limited by `limit`; available_bytes: free part now.
    None: /proc/meminfo cannot be read."""

    limit_bytes: int | None
    limit: str
    available_bytes: int | None


def memory_here(proc: Path = PROC, sys: Path = SYS) -> MachineMemory:
    """Return the limits. proc, sys: folders to read instead of the kernel's."""
    text = _text(proc / "meminfo")
    limits = [(n_bytes, "this machine's memory") for n_bytes in _meminfo(text, "MemTotal")]
    available = _meminfo(text, "MemAvailable")
    for limit_bytes, used_bytes in _cgroups(proc, sys / "fs/cgroup"):
        limits.append((limit_bytes, "the memory of this cgroup (container)"))
        if available and used_bytes is not None:
            available.append(max(0, limit_bytes - used_bytes))
    address_bytes, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_bytes != resource.RLIM_INFINITY:
        limits.append((address_bytes, "this process's limit (ulimit -v)"))
    least = min(available, default=None)
    return MachineMemory(*min(limits), least) if limits else MachineMemory(None, "", least)


def check_host_arena(n_bytes: int, found: MachineMemory) -> None:
    """Raise ConfigError for an arena larger than the limit."""
    if found.limit_bytes is not None and n_bytes > found.limit_bytes:
        raise arena_refused(n_bytes, f"{size(n_bytes)}, more than {found.limit} ({size(found.limit_bytes)})", found)


def arena_refused(n_bytes: int, why: str, found: MachineMemory) -> ConfigError:
    """Return the error with its fix, which proposes half of the available memory: each worker has its own arena."""
    fix = "set it to less: each worker on this machine takes so much"
    if found.available_bytes is not None and found.available_bytes >> 31:
        fix += f" ({size(found.available_bytes)} are available now, so {found.available_bytes >> 31}GiB is a start)"
    return ConfigError("host.arena_bytes", n_bytes, f"{why}; {fix}")


def beyond_available(n_bytes: int, found: MachineMemory) -> str:
    """Return a warning about an arena larger than the available memory; "" where it fits."""
    if found.available_bytes is None or n_bytes <= found.available_bytes:
        return ""
    return (
        f"host.arena_bytes ({size(n_bytes)} for each worker) is more than is available now "
        f"({size(found.available_bytes)}): the kernel may kill an engine that fills it; set it to less"
    )


def _cgroups(proc: Path, mount: Path) -> list[tuple[int, int | None]]:
    """Return (limit, used) in bytes of this process's cgroup and its parents, where they have a limit."""
    lines = [line.split(":", 2) for line in _text(proc / "self/cgroup").splitlines()]
    named = {controllers: path.lstrip("/") for _, controllers, path in (line for line in lines if len(line) == 3)}
    found = []
    for top, own, limit_name, used_name in (
        (mount, named.get("", ""), "memory.max", "memory.current"),
        (mount / "memory", named.get("memory", ""), "memory.limit_in_bytes", "memory.usage_in_bytes"),  # version 1
    ):
        # In a container the path may be the host's, of which only the top is visible.
        folders = [top, *(top / path for path in (Path(own), *Path(own).parents) if own and ".." not in path.parts)]
        for folder in dict.fromkeys(folders):
            limit, used = _text(folder / limit_name), _text(folder / used_name)
            if limit.isdigit():  # else "max"
                found.append((int(limit), int(used) if used.isdigit() else None))
    return found


def _meminfo(text: str, name: str) -> list[int]:
    """Return the value in bytes; none where the kernel has no such line."""
    match = re.search(rf"^{name}:\s*(\d+) kB$", text, re.MULTILINE)
    return [int(match[1]) << 10] if match else []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
