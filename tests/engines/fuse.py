"""FUSE file systems in C, such as faulty_fs.c and target_fs.c: built once in a process, mounted for a test."""

import atexit
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tests.waiting import wait_until

HERE = Path(__file__).parent
THREADS = 256  # more than all engines have: a read that hangs keeps none from being asked for


@cache
def program(source: Path) -> Path | None:
    """The program of a source; None: no compiler, or no headers of libfuse3, on this machine."""
    if not all(shutil.which(tool) for tool in ("gcc", "pkg-config", "umount")):
        return None
    flags = subprocess.run(["pkg-config", "--cflags", "--libs", "fuse3"], capture_output=True, text=True, check=False)
    if flags.returncode:
        return None
    folder = Path(tempfile.mkdtemp(prefix="kvtier-fuse-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    command = ["gcc", "-O2", "-Wall", "-Werror", "-o", folder / source.stem, source, *flags.stdout.split()]
    subprocess.run(command, check=True)
    return folder / source.stem


def unmount(server: subprocess.Popen[bytes], place: Path) -> None:
    """End the program that serves a mount."""
    subprocess.run(["umount", "--lazy", place], capture_output=True, check=False)
    try:
        server.wait(10)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


@contextmanager
def mounted(name: str, below: Path, flags: Path, **environment: str) -> Iterator[Path | None]:
    """A folder through which `below` is seen; None: it cannot be had here. At the end all flags are cleared."""
    built, place = program(HERE / f"{name}.c"), flags.with_name("mounted")
    if built is None:
        yield None
        return
    place.mkdir()
    command = [built, below, flags, place, "-f", "-o", f"max_threads={THREADS},max_idle_threads={THREADS}"]
    server = subprocess.Popen(command, env=os.environ | environment, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: os.path.ismount(place) or server.poll() is not None, "the mount")
        yield place if server.poll() is None else None
    finally:
        with flags.open("r+b") as file:  # it is mapped, so it must not become shorter
            file.write(bytes(flags.stat().st_size))  # what hangs goes on
        unmount(server, place)
