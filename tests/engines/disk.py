"""A disk of the tests' own for a root: a small tmpfs, seen through faulty_fs.c. What this machine does not permit is
left out, and faults that need it are not tried."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.engines.fuse import mounted

FLAGS = (
    "reads hang", "all hangs", "read-only", "reads fail", "silly renames", "quota of MiB", "quota says ENOSPC",
    "files at most", "free after tenths of a second", "close fails with",
)  # fmt: skip  # in the order of faulty_fs.c
_BALLAST = "ballast"


@dataclass
class Disk:
    """root: where the engines' root lies. below: the same folder, past all faults. flags: None where there is no FUSE;
    n_bytes: None where it is no file system of its own, and so cannot be filled. users: closed before the disk is
    unmounted, also when a test fails."""

    root: Path
    below: Path
    flags: Path | None
    n_bytes: int | None
    users: ExitStack = field(default_factory=ExitStack)

    def set(self, fault: str, value: int) -> None:
        """Set a flag: 1 or True for a fault without a number, 0 or False to end it."""
        assert self.flags is not None
        with self.flags.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), bytes([value]), FLAGS.index(fault))

    def fill(self) -> None:
        """Takes all the room that is left, also what was freed since."""
        assert self.n_bytes is not None
        path = self.below.parent / _BALLAST
        with path.open("ab") as file:
            if os.fstat(file.fileno()).st_dev == path.parent.parent.stat().st_dev:
                return  # it is unmounted already: this would fill the disk of all tests
            for step in (1 << 20, 4096):
                while (left := shutil.disk_usage(file.fileno()).free) >= step:
                    try:
                        os.posix_fallocate(file.fileno(), file.tell(), left // step * step)
                        file.seek(0, os.SEEK_END)
                    except OSError:
                        break  # another one was quicker

    def free(self) -> None:
        (self.below.parent / _BALLAST).unlink(missing_ok=True)


@contextmanager
def disk(folder: Path, n_bytes: int, silly_renames: bool = False) -> Iterator[Disk]:
    """With as much of it as can be had here, mounted in `folder`."""
    with ExitStack() as stack:
        below = folder / "below"
        below.mkdir(parents=True)
        has_tmpfs = _mount(stack, ["mount", "-t", "tmpfs", "-o", f"size={n_bytes},mode=700", "kvtier-test", str(below)])
        (below / "root").mkdir(mode=0o700)
        flags = folder / "flags"
        flags.write_bytes(bytes(silly_renames and name == "silly renames" for name in FLAGS))
        through = stack.enter_context(mounted("faulty_fs", below / "root", flags))
        made = Disk(through or below / "root", below / "root", through and flags, n_bytes if has_tmpfs else None)
        with made.users:
            yield made


def _mount(stack: ExitStack, command: list[str]) -> bool:
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode == 0:
        stack.callback(_unmount, Path(command[-1]))
    return done.returncode == 0


def _unmount(path: Path) -> None:
    subprocess.run(["umount", "--lazy", str(path)], capture_output=True, check=False)
