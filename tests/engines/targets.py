"""A root on a file system with targets of which one can be away: target_fs.c, mounted by FUSE."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engines.conftest import HERE
from tests.waiting import wait_until

FAULTS = ("hangs", "fails", "short reads")  # in the order of target_fs.c
NAME_AT, FILE_BYTES = 64, 256  # as in target_fs.c, bytes


class Targets:
    """root: where engines have theirs. One target holds the files whose names contain what `take_away` names."""

    def __init__(self, root: Path, below: Path, file: Path) -> None:
        self.root = root
        self.below = below
        self._file = file

    def take_away(self, name: str, fault: str) -> None:
        content = bytearray(FILE_BYTES)
        content[FAULTS.index(fault)] = 1
        content[NAME_AT : NAME_AT + len(name)] = name.encode()
        self._write(bytes(content))

    def mend(self) -> None:
        self._write(bytes(FILE_BYTES))

    def _write(self, content: bytes) -> None:
        with self._file.open("r+b", buffering=0) as file:  # it is mapped, so it must not become shorter
            file.write(content)


@contextmanager
def targets(folder: Path) -> Iterator[Targets]:
    """Mounted in `folder`; the test is skipped where that is not permitted, or there is no compiler or libfuse3."""
    below, mounted, flags, file = (folder / name for name in ("below", "mounted", "flags", "target"))
    below.mkdir()
    mounted.mkdir()
    flags.write_bytes(bytes(64))
    file.write_bytes(bytes(FILE_BYTES))
    if not all(shutil.which(name) for name in ("gcc", "pkg-config", "umount")):
        pytest.skip("needs gcc, pkg-config and umount")
    found = subprocess.run(["pkg-config", "--cflags", "--libs", "fuse3"], capture_output=True, text=True, check=False)
    if found.returncode:
        pytest.skip("needs libfuse3's headers")
    binary = folder / "target_fs"
    subprocess.run(["gcc", "-O2", "-Wall", "-o", binary, HERE / "target_fs.c", *found.stdout.split()], check=True)
    command = [binary, below, flags, mounted, "-f", "-o", "max_threads=64,max_idle_threads=64"]
    server = subprocess.Popen(command, env=os.environ | {"TARGET_FILE": str(file)}, stderr=subprocess.DEVNULL)
    made = Targets(mounted, below, file)
    try:
        wait_until(lambda: os.path.ismount(mounted) or server.poll() is not None, "the mount")
        if server.poll() is not None:
            pytest.skip("FUSE is not permitted here")
        yield made
    finally:
        made.mend()
        subprocess.run(["umount", "--lazy", str(mounted)], capture_output=True, check=False)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
