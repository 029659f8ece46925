"""Kernel NFS in an emulated guest: one server and two clients, whatever the kernel of this machine has."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.network_fs.bed import end
from tests.network_fs.run import ROOT

PROGRAMS = ("qemu-system-x86_64", "mmdebstrap", "mke2fs")
FULL_DISK_BYTES = 300 << 20  # room of the full-disk measurement: 37 segment sets of one file, bytes
TIMEOUT_S = 3000.0  # for all measurements in one guest, seconds


def missing() -> str:
    """Return the reason why no guest can be booted here; empty: one can."""
    if os.geteuid() != 0:
        return "building the guest's image needs root"
    if absent := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"not installed: {', '.join(absent)} (apt-get install qemu-system-x86 mmdebstrap e2fsprogs)"
    if sys.base_prefix == "/usr":
        return "the guest has its own /usr: Python must be installed elsewhere"
    return ""


def measure(folder: Path, options: str, measurements: Sequence[str]) -> dict[str, Any]:
    """Run measurements of tests.network_fs.probe in a guest whose mounts have these options; what they found.

    `folder` keeps the guest's image.
    """
    folder.mkdir(parents=True, exist_ok=True)
    probe = f"{sys.executable} -m tests.network_fs.probe /mnt/m1 /mnt/m2 --disks /export"
    lines = ["set -e", f"cd {ROOT}", "export PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1"]
    usual = [one for one in measurements if not one.startswith("full")]
    if usual:
        lines.append(f"{probe} --out /out/usual.json {' '.join(usual)}")
    if full := [one for one in measurements if one.startswith("full")]:
        lines.append(f"fallocate -l $(($(stat -f -c '%a * %S' /export) - {FULL_DISK_BYTES})) /export/ballast")
        lines.append(f"{probe} --out /out/full.json {' '.join(full)}")
    job = folder / "job"
    job.write_text("\n".join([*lines, "grep /mnt/m1 /proc/mounts; uname -r > /out/version", ""]))
    script = Path(__file__).with_name("nfs_guest.sh")
    environment = {**os.environ, "TIMEOUT_S": str(int(TIMEOUT_S))}
    process = subprocess.Popen(
        [str(script), str(folder), options, str(job), *map(str, _folders())],
        env=environment,
        start_new_session=True,
    )
    try:
        process.wait(TIMEOUT_S + 300)
    finally:
        end(process)
    assert process.returncode == 0, f"NFS {options}: the guest's job failed with {process.returncode}; see its output"
    results = {"file_system": f"NFS {options}, Linux {(folder / 'out/version').read_text().strip()}"}
    for path in (folder / "out").glob("*.json"):
        results |= json.loads(path.read_text())
    return results


def _folders() -> list[Path]:
    """Return folders that the guest needs: the checkout, the interpreter, and packages outside both."""
    needed = [ROOT, Path(sys.base_prefix), Path(sys.prefix), Path(sysconfig.get_path("purelib"))]
    needed += [Path(path) for path in sys.path if path.endswith("site-packages")]
    found: list[Path] = []
    for path in needed:
        if not any(path.resolve().is_relative_to(one) for one in found):
            found.append(path.resolve())
    return found
