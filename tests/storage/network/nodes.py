"""Two mounts of stale_fs.c over one folder, and engines on them: nodes that share a network file system and a Redis."""

import os
import struct
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.engines.fuse import program, unmount
from tests.redis_server import GENEROUS_MS
from tests.support.rig import Engine
from tests.waiting import wait_until

SOURCE = Path(__file__).with_name("stale_fs.c")
SWITCHES = ("write-behind", "no fallocate", "away", "fsync fails", "write fails")  # in the order of stale_fs.c
COUNTERS = ("fsync", "write", "fallocate")


class Nodes:
    """mounts: of each node. below: the folder that both are over."""

    def __init__(self, below: Path, control: Path, mounts: tuple[Path, Path]) -> None:
        self.below = below
        self.mounts = mounts
        self._control = control

    def set(self, switch: str, value: int = 1) -> None:
        with self._control.open("r+b", buffering=0) as file:
            os.pwrite(file.fileno(), bytes([value]), SWITCHES.index(switch))

    def counts(self) -> dict[str, int]:
        return dict(zip(COUNTERS, struct.unpack_from("=3Q", self._control.read_bytes(), 64), strict=True))

    def segments(self) -> list[Path]:
        return sorted(self.below.glob("kv/v2/*/*.kvseg"))


@contextmanager
def two_nodes(folder: Path) -> Iterator[Nodes]:
    """Skips the test where FUSE file systems cannot be built or mounted."""
    built = program(SOURCE)
    if built is None or not os.access("/dev/fuse", os.W_OK):
        pytest.skip("needs gcc, pkg-config, the headers of libfuse 3 and /dev/fuse")
    folder.mkdir(parents=True, exist_ok=True)
    below, control = folder / "below", folder / "control"
    below.mkdir(mode=0o700)
    control.write_bytes(bytes(128))
    with ExitStack() as stack:
        mounts = (folder / "node-1", folder / "node-2")
        for mount in mounts:
            mount.mkdir()
            server = subprocess.Popen([built, below, control, mount, "-f"], stderr=subprocess.DEVNULL)
            stack.callback(unmount, server, mount)
            wait_until(lambda mount=mount, server=server: mount.is_mount() or server.poll() is not None, "the mount")
            if server.poll() is not None:
                pytest.skip("this user may not mount")
        yield Nodes(below, control, mounts)


def engine_on(mount: Path, url: str, **changes: object) -> Engine:
    """An engine that reads from files each time."""
    index = {"kind": "redis", "url": url, "reply_timeout_ms": GENEROUS_MS, "connect_timeout_ms": GENEROUS_MS}
    host = {"arena_bytes": 8 << 20, "admit": "never"}
    return Engine(mount / "kv", changes={"index": index, "host": host, "writer_lease_s": 30.0, **changes})
