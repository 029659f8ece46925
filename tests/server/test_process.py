"""`kvtier serve` as a process: where it listens, TLS, its end, and that engines do not need it."""

import json
import signal
import socket
import ssl
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from tests.cli.asking import Cli
from tests.redis_server import Server, free_port, has_redis
from tests.server.process import START_TIMEOUT_S, environment, running, write_config
from tests.server.serving import ADMIN, CHUNKS, NEW, PROMPT, READER, put
from tests.support.rig import Engine
from tests.waiting import wait_until


def own_certificate(folder: Path) -> dict[str, str]:
    """A self-signed one for localhost: settings that name its files."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ip_address("127.0.0.1"))])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(True, None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = {"tls_cert": folder / "cert.pem", "tls_key": folder / "key.pem"}
    paths["tls_cert"].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    paths["tls_key"].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return {name: str(path) for name, path in paths.items()}


def test_it_does_not_start_with_what_cannot_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "kv"
    said = Cli(capsys).refused("serve", str(write_config(tmp_path, root, host="0.0.0.0")))
    assert "server.host" in said and "no token is set" in said, "others could reach it without a token"
    said = Cli(capsys).refused("serve", str(write_config(tmp_path, root, host="a..b", admin_token="t" * 16)))
    assert "server.port" in said and "cannot listen on a..b" in said and "label empty" in said
    with socket.create_server(("127.0.0.1", 0)) as taken:
        said = Cli(capsys).refused("serve", str(write_config(tmp_path, root, port=taken.getsockname()[1])))
    assert "server.port" in said and "in use" in said
    (tmp_path / "cert.pem").write_text("nothing")
    paths = {name: str(tmp_path / "cert.pem") for name in ("tls_cert", "tls_key")}
    assert "server.tls_cert" in Cli(capsys).refused("serve", str(write_config(tmp_path, root, **paths)))
    assert f"name a settings file with `root: {tmp_path}`" in Cli(capsys).refused("serve", str(tmp_path))
    monkeypatch.setenv("KVTIER_INDEX__KIND", "memory")
    assert "index.kind" in Cli(capsys).refused("serve", str(write_config(tmp_path, root)))
    assert not root.exists()


def test_tls_and_tokens_from_the_environment_and_from_files_that_change(tmp_path: Path) -> None:
    paths, token = own_certificate(tmp_path), tmp_path / "admin-token"
    token.write_text(ADMIN)
    config = write_config(
        tmp_path, tmp_path / "kv", host="0.0.0.0", admin_token_file=str(token), history_s=0.5, **paths
    )
    first = ssl.create_default_context(cafile=paths["tls_cert"])
    with running(config, KVTIER_SERVER__READ_TOKEN=READER) as served:
        assert served.address.startswith("https://0.0.0.0:")
        assert served.get("/healthz", tls=first) == (200, b'{"status":"ok"}')
        for given, status in ((None, 401), ("wrong" * 5, 401), (READER, 200), (ADMIN, 200)):
            assert served.get("/api/v1/stats", given, first)[0] == status
        connection = served.connect(first)
        connection.request("GET", "/healthz")
        assert connection.getresponse().getheader("strict-transport-security")
        with pytest.raises(ssl.SSLCertVerificationError):
            served.get("/healthz", tls=ssl.create_default_context())
        with pytest.raises(OSError):
            served.get("/healthz")  # plain http
        put(token, NEW)
        wait_until(lambda: served.get("/api/v1/stats", NEW, first)[0] == 200)
        assert served.get("/api/v1/stats", ADMIN, first)[0] == 401
        own_certificate(tmp_path)
        second = ssl.create_default_context(cafile=paths["tls_cert"])

        def is_served() -> bool:
            try:
                return served.get("/api/v1/stats", NEW, second)[0] == 200
            except ssl.SSLCertVerificationError:
                return False

        wait_until(is_served)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(START_TIMEOUT_S) == 0


EARLY = """
import os, signal, sys, uvicorn
from kvtier.cli import main
run = uvicorn.Server.run
def early(server, sockets):
    os.kill(os.getpid(), signal.SIGTERM)
    run(server, sockets)
uvicorn.Server.run = early
sys.exit(main(["serve", sys.argv[1]]))
"""


def test_a_stop_that_comes_before_it_serves_is_heeded(tmp_path: Path) -> None:
    config = write_config(tmp_path, tmp_path / "kv")
    words = [sys.executable, "-c", EARLY, str(config)]
    done = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=START_TIMEOUT_S)
    assert done.returncode == 0, done.stderr


def test_engines_do_not_need_it(tmp_path: Path) -> None:
    """An engine saves and loads beside the service, and when that is killed."""
    root = tmp_path / "kv"
    engine = Engine(root)
    try:
        with running(write_config(tmp_path, root)) as served:
            engine.save(PROMPT, list(range(4 * CHUNKS)))

            def overview() -> Any:
                return json.loads(served.get("/api/v1/overview")[1])

            wait_until(lambda: overview()["workers"] and overview()["index"]["chunks"])
            seen = overview()
            report = seen["workers"][0]["report"]
            assert seen["index"]["chunks"] == CHUNKS and report["namespace"] == engine.store.namespace_id.hex()
            asked = json.dumps({"tokens": PROMPT})
            connection = served.connect()
            connection.request("POST", "/api/v1/lookup", asked, {"Content-Type": "application/json"})
            found: Any = json.loads(connection.getresponse().read())
            assert found["hits"][0]["hit_chunks"] == CHUNKS
            served.process.kill()
            served.process.wait()
            planned, done = engine.load(PROMPT, list(range(100, 100 + 4 * CHUNKS)))
            assert planned == CHUNKS and all(not answer.failed_blocks for answer in done)
            other = [token + 1000 for token in PROMPT]
            assert len(engine.save(other, list(range(40, 40 + 4 * CHUNKS)))) == CHUNKS
        with running(write_config(tmp_path, root)) as served:
            assert json.loads(served.get("/api/v1/overview")[1])["index"]["chunks"] == 2 * CHUNKS
    finally:
        engine.close()


@has_redis
def test_a_redis_that_comes_late_stops_and_dies(tmp_path: Path) -> None:
    """The service starts without it, says so, and serves again whenever it is back; nothing it does is waited for."""
    port = free_port()
    environment = {"KVTIER_INDEX__KIND": "redis", "KVTIER_INDEX__URL": f"redis://127.0.0.1:{port}/0"}
    with running(write_config(tmp_path, tmp_path / "kv"), **environment) as served:

        def status(path: str = "/api/v1/overview") -> int:
            return served.get(path)[0]

        def wait_for(wanted: int, path: str = "/api/v1/overview") -> None:
            wait_until(lambda: status(path) == wanted, f"status {wanted}", 120)

        assert (status(), status("/readyz"), status("/healthz"), status("/metrics")) == (503, 503, 200, 200)
        redis = Server(tmp_path / "redis", port=port)
        try:
            wait_for(200)
            assert status("/readyz") == 200
            redis.pause()
            wait_for(503)  # what was seen a moment ago is shown for a second
            assert status() == 503  # before the client's own deadline
            wait_for(503, "/api/v1/pins")
            assert json.loads(served.get("/api/v1/pins")[1])["title"] == "Not available"
            redis.go_on()
            wait_for(200)
            redis.kill()
            wait_for(503)
            redis.start()
            wait_for(200)
        finally:
            redis.kill()
