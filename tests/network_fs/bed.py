"""Test beds of network file systems: servers and two clients on this machine, in network namespaces of their own."""

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from tests.waiting import wait_until

START_TIMEOUT_S = 60.0  # for a daemon or a mount, seconds
STOP_TIMEOUT_S = 10.0  # between SIGTERM and SIGKILL, seconds
SERVER_IP = "10.77.0.1"  # address of all servers, in each bed's own namespaces
LOOP_DEVICES = "/dev/loop-control"  # disks of limited size are loop devices


class Bed:
    """Two mounts, m1 and m2, of one file system. Subclasses start its servers and clients.

    disks: folders that hold the bytes of the servers; empty where they can only be counted through a mount.
    """

    kind = ""
    programs: tuple[str, ...] = ()
    packages = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.m1, self.m2 = folder / "m1", folder / "m2"
        self.disks: list[Path] = []
        self._stack = ExitStack()
        self._namespaces: dict[str, str] = {}

    @classmethod
    def missing(cls) -> str:
        """Return the reason why this bed cannot run on this machine; empty: it can."""
        if os.geteuid() != 0:
            return "mounts and network namespaces need root"
        if absent := [path for path in ("/dev/fuse", LOOP_DEVICES) if not Path(path).exists()]:
            return f"no {' and no '.join(absent)}"
        path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
        if absent := [name for name in ("ip", "mkfs.ext4", *cls.programs) if shutil.which(name, path=path) is None]:
            return f"not installed: {', '.join(absent)} (apt-get install {cls.packages})"
        probe = f"kvprobe{os.getpid()}"
        made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
        if made.returncode:
            return f"network namespaces: {made.stderr.strip()}"
        subprocess.run(["ip", "netns", "del", probe], check=True)
        return ""

    def __enter__(self) -> Self:
        try:
            for path in (self.m1, self.m2, self.folder / "log"):
                path.mkdir(parents=True, exist_ok=True)
            self._connect()
            self.start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # --- for subclasses to define ---

    def start(self) -> None:
        raise NotImplementedError

    def versions(self) -> str:
        raise NotImplementedError

    def kill_server(self) -> None:
        """Kill one server of bytes: a brick, an OSD, a chunk server."""
        raise NotImplementedError

    def restart_server(self) -> None:
        raise NotImplementedError

    def limit_room(self, n_bytes: int) -> None:
        """Leave so many bytes to the file system by filling the servers' disks with something else."""
        for disk in self.disks:
            room = os.statvfs(disk)
            taken = room.f_bavail * room.f_frsize - n_bytes // len(self.disks)
            with (disk / "ballast").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, taken)

    def available(self) -> int:
        found = os.statvfs(self.m1)
        return found.f_bavail * found.f_frsize

    # --- faults and parts that all have in common ---

    def cut_link(self, node: int) -> None:
        run("ip", "-n", self._namespaces[f"node{node}"], "link", "set", f"veth{node}", "down")

    def mend_link(self, node: int) -> None:
        name = self._namespaces[f"node{node}"]
        run("ip", "-n", name, "link", "set", f"veth{node}", "up")
        run("ip", "-n", name, "route", "replace", "default", "via", f"10.77.{node}.1")

    def within(self, place: str, *words: str) -> list[str]:
        """Return the command that runs in the network of "servers", "node1" or "node2"; it keeps the mounts."""
        return ["nsenter", f"--net=/run/netns/{self._namespaces[place]}", *words]

    def daemon(
        self, place: str, name: str, *words: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Start a process that stays in the foreground; it is ended with the bed."""
        with (self.folder / "log" / f"{name}.out").open("ab") as log:
            process = subprocess.Popen(
                self.within(place, *words),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )
        self._stack.callback(end, process)
        return process

    def command(self, *words: str, place: str = "servers", timeout_s: float = 60.0) -> str:
        return run(*self.within(place, *words), timeout_s=timeout_s)

    def disk(self, name: str, megabytes: int) -> Path:
        """Make and mount an ext4 of this size; its folder."""
        image, path = self.folder / f"{name}.img", self.folder / name
        path.mkdir(exist_ok=True)
        with image.open("wb") as file:
            file.truncate(megabytes << 20)
        run("mkfs.ext4", "-q", "-m", "0", str(image))
        run("mount", "-o", "loop", str(image), str(path))
        self._stack.callback(unmount, path)
        return path

    def mount(self, node: int, *words: str, ready: Callable[[], object] | None = None) -> None:
        """Start the client of a node, which stays in the foreground, and wait for its mount."""
        path = (self.m1, self.m2)[node - 1]
        # Callbacks run in reverse: the client ends first, for umount may wait in the kernel for a client that hangs.
        self._stack.callback(unmount, path)
        process = self.daemon(f"node{node}", f"client{node}", *words)

        def is_up() -> bool:
            assert process.poll() is None, (self.folder / "log" / f"client{node}.out").read_text()[-2000:]
            return path.is_mount() and (ready is None or bool(ready()))

        wait_until(is_up, f"the mount of node {node}", START_TIMEOUT_S)

    def _connect(self) -> None:
        """Make three namespaces, the servers' and one a client, and a veth pair from each client to the servers."""
        for place in ("servers", "node1", "node2"):
            name = f"kv{os.getpid()}{place}"
            run("ip", "netns", "add", name)
            self._stack.callback(subprocess.run, ["ip", "netns", "del", name])
            self._namespaces[place] = name
            run("ip", "-n", name, "link", "set", "lo", "up")
        servers = self._namespaces["servers"]
        run("ip", "-n", servers, "addr", "add", f"{SERVER_IP}/32", "dev", "lo")
        for node in (1, 2):
            client = self._namespaces[f"node{node}"]
            pair = ["type", "veth", "peer", "name", f"veth{node}", "netns", client]
            run("ip", "-n", servers, "link", "add", f"s{node}", *pair)
            run("ip", "-n", servers, "addr", "add", f"10.77.{node}.1/24", "dev", f"s{node}")
            run("ip", "-n", servers, "link", "set", f"s{node}", "up")
            run("ip", "-n", client, "addr", "add", f"10.77.{node}.2/24", "dev", f"veth{node}")
            self.mend_link(node)


def run(*words: str, timeout_s: float = 60.0) -> str:
    """Run a command to its end; its standard output. Raises AssertionError with both outputs if it fails."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
    return done.stdout


def unmount(path: Path) -> None:
    """Unmount a folder. Returns within 2 * STOP_TIMEOUT_S; a process that hangs in the kernel is left behind."""
    for words in (["umount"], ["umount", "-l"]):
        # Not subprocess.run: it waits without limit for a killed process, and none dies in state D.
        process = subprocess.Popen([*words, str(path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            if process.wait(STOP_TIMEOUT_S) == 0:
                return
        except subprocess.TimeoutExpired:
            process.kill()


def end(process: subprocess.Popen[bytes]) -> None:
    """Stop a daemon and the children that share its session."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sent)
            process.wait(STOP_TIMEOUT_S)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
