"""A root on a file system with targets of which one can be away: target_fs.c, mounted by FUSE."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.engines.fuse import mounted

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
    """Mounted in `folder`; the test is skipped where that cannot be had."""
    below, flags, file = (folder / name for name in ("below", "flags", "target"))
    below.mkdir()
    flags.write_bytes(bytes(64))
    file.write_bytes(bytes(FILE_BYTES))
    with mounted("target_fs", below, flags, TARGET_FILE=str(file)) as place:
        if place is None:
            pytest.skip("needs FUSE, gcc, pkg-config and libfuse3's headers")
        made = Targets(place, below, file)
        try:
            yield made
        finally:
            made.mend()
