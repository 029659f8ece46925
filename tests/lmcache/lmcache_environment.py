"""LMCache in an environment of its own, build/lmcache-<version>: its pins are not those of vLLM. What it shares with
the engine (torch, transformers, ...) and kvtier itself come from the environment that this runs in."""

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSIONS = ("0.5.3", "0.5.6")
REQUIREMENTS = ROOT / "requirements" / "lmcache.txt"
INSTALL_TIMEOUT_S = 600.0
OUTSIDE = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}  # for its processes: no telemetry, no banner


def environment(version: str) -> Path:
    """Its folder of programs, `lmcache` and `python` among them. Made at the first call; raises CalledProcessError."""
    folder = ROOT / "build" / f"lmcache-{version}"
    programs = folder / "bin"
    stamp = folder / ".stamp"
    if stamp.exists() and stamp.stat().st_mtime >= REQUIREMENTS.stat().st_mtime:
        return programs
    shutil.rmtree(folder, ignore_errors=True)
    venv.create(folder, with_pip=True)
    own = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    shared = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    # Behind its own packages; addsitedir follows the .pth files there too, by which kvtier's checkout is found.
    (own / "shared.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n" for path in sorted(shared)))
    quiet = ["--quiet", "--quiet", "--disable-pip-version-check"]
    install = [programs / "python", "-m", "pip", *quiet, "install", "--no-deps", f"lmcache=={version}"]
    subprocess.run([*map(str, install), "-r", str(REQUIREMENTS)], check=True, timeout=INSTALL_TIMEOUT_S)
    stamp.touch()
    return programs
