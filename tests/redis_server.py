"""Redis servers for tests: real ones, each on a free port, in a folder of its own, ended with the test."""

import hashlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvtier.config.index import IndexSettings
from tests.waiting import wait_until

if TYPE_CHECKING:
    from kvtier.index.redis.index import RedisIndex

Connect = Callable[..., "RedisIndex"]

GENEROUS_MS = 10_000.0  # of tests that are not about times: the machine may be busy
has_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="no openssl is installed here")
has_redis = pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server is installed here")


def free_port() -> int:
    """Below 55535: a cluster's bus takes the port 10000 above."""
    while True:
        with socket.socket() as one, socket.socket() as bus:
            one.bind(("127.0.0.1", 0))
            port: int = one.getsockname()[1]
            if port < 55_000 and bus.connect_ex(("127.0.0.1", port + 10_000)) != 0:
                return port


class Server:
    """One process. `options`: those of redis.conf, as arguments."""

    def __init__(self, folder: Path, options: Sequence[str] = (), port: int | None = None, mode: str = "") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.port = free_port() if port is None else port
        self._mode = mode
        self._options = list(options)
        for _ in range(5):
            try:
                self.start()
                return
            except AssertionError as fault:
                if port is not None or "Address already in use" not in str(fault):
                    raise
                self.port = free_port()  # another test was quicker
        raise AssertionError("no port is free")

    def start(self) -> None:
        arguments = ["redis-server", *self._options, "--dir", str(self.folder), "--bind", "127.0.0.1"]
        if self._mode == "sentinel":
            arguments = ["redis-server", str(self.folder / "sentinel.conf"), "--sentinel"]
        elif "--tls-port" not in self._options:
            arguments += ["--port", str(self.port)]
        if self._mode != "sentinel":
            arguments += ["--save", "", "--appendonly", "no"]
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(arguments, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        wait_until(self._is_up, f"redis-server in {self.folder}")

    def _is_up(self) -> bool:
        assert self.process.poll() is None, (self.folder / "log").read_text()
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", self.port)) == 0

    def cli(self, *words: str, text: bool = True) -> str:
        command = ["redis-cli", "-p", str(self.port), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()

    def pause(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"


@contextmanager
def standalone(folder: Path, options: Sequence[str] = ()) -> Iterator[Server]:
    server = Server(folder, options)
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def cluster(folder: Path, replicas: int = 0) -> Iterator[list[Server]]:
    """Three masters, and then the replicas, so many of each."""
    servers: list[Server] = []
    try:
        for number in range(3 + 3 * replicas):
            options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000"]
            options += ["--cluster-config-file", "nodes.conf"]
            servers.append(Server(folder / str(number), options))
        addresses = [f"127.0.0.1:{server.port}" for server in servers]
        create = ["redis-cli", "--cluster", "create", *addresses, "--cluster-replicas", str(replicas), "--cluster-yes"]
        made = subprocess.run(create, capture_output=True, text=True, timeout=60)
        assert made.returncode == 0, made.stdout + made.stderr
        wait_until(lambda: all("cluster_state:ok" in s.cli("cluster", "info") for s in servers), "the cluster")
        for server in servers[3:]:
            wait_until(lambda s=server: "master_link_status:up" in s.cli("info", "replication"), "the replicas")
        yield servers
    finally:
        for server in servers:
            server.kill()


def cluster_url(servers: Sequence[Server]) -> str:
    return "redis+cluster://" + ",".join(f"127.0.0.1:{server.port}" for server in servers)


def index_settings(url: str, prefix: str = "kvtier", reply_timeout_ms: float = GENEROUS_MS) -> IndexSettings:
    return IndexSettings(
        kind="redis", url=url, prefix=prefix, reply_timeout_ms=reply_timeout_ms, connect_timeout_ms=GENEROUS_MS
    )


ACL = ["+@read", "+@write", "+@connection", "+eval", "+evalsha", "+time", "+cluster|slots"]
USER, PASSWORD = "engine", "a secret: p@ss/word"


@contextmanager
def tls_and_acl(folder: Path) -> Iterator[tuple[Server, IndexSettings]]:
    """One server, and the settings that get in: it takes TLS with a client certificate only, and one user who may do
    what the index needs under kvtier*, and no more."""
    make_certificates(folder)
    files = {"tls_ca_file": folder / "ca.crt", "tls_cert_file": folder / "own.crt", "tls_key_file": folder / "own.key"}
    port = free_port()
    options = f"--port 0 --tls-port {port} --tls-auth-clients yes".split()
    for name, option in (("ca", "ca-cert"), ("cert", "cert"), ("key", "key")):
        options += [f"--tls-{option}-file", str(files[f"tls_{name}_file"])]
    acl = folder / "users.acl"
    digest = hashlib.sha256(PASSWORD.encode()).hexdigest()
    acl.write_text(f"user default off\nuser {USER} on #{digest} ~kvtier* {' '.join(ACL)}\n")
    password_file = folder / "password"
    password_file.write_text(f"{PASSWORD}\n")
    server = Server(folder, [*options, "--aclfile", str(acl)], port)
    settings = index_settings(f"rediss://127.0.0.1:{port}/0").model_copy(
        update={**files, "username": USER, "password_file": password_file}
    )
    settings.check()
    try:
        yield server, settings
    finally:
        server.kill()


def make_certificates(folder: Path) -> None:
    """ca.crt, and own.crt with own.key for 127.0.0.1, signed by it."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=60)

    new = ["req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    may_sign = ["-addext", "keyUsage=critical,keyCertSign"]  # Python 3.13 checks it, and the authorityKeyIdentifier
    openssl(*new, "-x509", *may_sign, "-days", "2", "-subj", "/CN=test CA", "-keyout", "ca.key", "-out", "ca.crt")
    openssl(*new, "-subj", "/CN=127.0.0.1", "-keyout", "own.key", "-out", "own.csr")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
    signed = "x509 -req -in own.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 2 -extfile names -out own.crt"
    openssl(*signed.split())


@contextmanager
def sentinel(folder: Path) -> Iterator[tuple[list[Server], Server]]:
    """([master, replica], the Sentinel that looks after them under the name kv)."""
    servers: list[Server] = []
    try:
        master = Server(folder / "master")
        servers.append(master)
        servers.append(Server(folder / "replica", ["--replicaof", f"127.0.0.1 {master.port}"]))
        port = free_port()
        (folder / "sentinel").mkdir()
        (folder / "sentinel" / "sentinel.conf").write_text(
            f"port {port}\nbind 127.0.0.1\ndir {folder / 'sentinel'}\nsentinel monitor kv 127.0.0.1 {master.port} 1\n"
            "sentinel down-after-milliseconds kv 500\nsentinel failover-timeout kv 3000\n"
        )
        watcher = Server(folder / "sentinel", port=port, mode="sentinel")
        servers.append(watcher)
        wait_until(lambda: "master_link_status:up" in servers[1].cli("info", "replication"), "the replica")
        wait_until(lambda: "slaves=1" in watcher.cli("info", "sentinel"), "the Sentinel's view of the replica")
        yield servers[:2], watcher
    finally:
        for server in servers:
            server.kill()
