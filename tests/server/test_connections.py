"""Connections that take their time: none may keep others out, nor last."""

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import uvicorn

from kvtier.config.settings import Settings
from kvtier.server import connections
from kvtier.server.auth import Tokens
from kvtier.server.serve import listen, open_service, uvicorn_config
from tests.server.test_process import own_certificate
from tests.waiting import wait_until

IDLE_S = 1.0
MAX = 16
CLOSED_TIMEOUT_S = 60.0  # longest wait for the end of an idle connection, on a busy machine, seconds


@contextmanager
def served(root: Path, monkeypatch: pytest.MonkeyPatch, idle_s: float = IDLE_S, **server: object) -> Iterator[int]:
    """The port of a service in this process, whose deadlines are short."""
    monkeypatch.setattr(connections, "IDLE_S", idle_s)
    monkeypatch.setattr(connections, "HANDSHAKE_S", idle_s)
    given = {"port": 0, "connections_max": MAX, "timeout_s": IDLE_S, "history_s": 60.0, **server}
    settings = Settings.load({"root": str(root), "capacity_bytes": "64MiB", "segment_bytes": "4MiB", "server": given})
    listener = listen(settings)
    server_ = uvicorn.Server(uvicorn_config(open_service(settings, Tokens)))
    thread = threading.Thread(target=server_.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        while not server_.started and thread.is_alive():
            time.sleep(0.01)
        yield listener.getsockname()[1]
    finally:
        server_.should_exit = True
        thread.join(30)


@pytest.fixture
def port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    with served(tmp_path / "kv", monkeypatch) as found:
        yield found


def connect(port: int, sent: bytes = b"") -> socket.socket:
    made = socket.create_connection(("127.0.0.1", port), timeout=CLOSED_TIMEOUT_S)
    made.sendall(sent)
    return made


def answer(connection: socket.socket, sent: bytes = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n") -> bytes:
    """The status line of an answer in JSON, if there is one."""
    found = b""
    try:
        connection.sendall(sent)
        while not found.endswith(b"}") and (more := connection.recv(65536)):
            found += more
    except OSError:
        return b""
    return found.split(b"\r\n")[0]


def is_closed(connection: socket.socket) -> bool:
    """Whether the service has closed it; reads what it has sent."""
    connection.settimeout(0.01)
    try:
        while connection.recv(1 << 20):
            pass
        return True
    except TimeoutError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(CLOSED_TIMEOUT_S)


def wait_until_closed(connection: socket.socket) -> None:
    wait_until(lambda: is_closed(connection), "its end", CLOSED_TIMEOUT_S)


def test_idle_connections_keep_nobody_out(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "IDLE_S", CLOSED_TIMEOUT_S)
    heads = [b"", b"GET / HTTP/1.1\r\nHost: x\r\n"]
    idle = [connect(port, heads[number % 2]) for number in range(2 * MAX)]
    with closing(connect(port)) as other:
        assert answer(other) == b"HTTP/1.1 200 OK"
    assert sum(map(is_closed, idle)) >= 2 * MAX - MAX // 2, "an address has half of the connections"
    for connection in idle:
        connection.close()


STEPS = {
    "silent": (b"", b""),
    "head": (b"GET / HTTP/1.1\r\n", b"X-A: b\r\n"),
    "second head": (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HT", b""),
    "body after the answer": (b"POST /nothing HTTP/1.1\r\nHost: evil\r\nContent-Length: 100000\r\n\r\n", b"x"),
    "body": (b"POST /api/v1/clear HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n", b"x"),
    "done": (b"GET /ui/ HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", b""),
}
"""Bytes that are sent at once, and bytes that are then sent again and again."""


def test_no_step_lasts(port: int) -> None:
    slow = {name: connect(port, sent) for name, (sent, _) in STEPS.items()}
    deadline = time.monotonic() + CLOSED_TIMEOUT_S
    while slow:
        assert time.monotonic() < deadline, f"open still: {', '.join(slow)}"
        time.sleep(0.02)
        for name, connection in list(slow.items()):
            if is_closed(connection) or not drip(connection, STEPS[name][1]):
                slow.pop(name).close()


def drip(connection: socket.socket, dripped: bytes) -> bool:
    """Send more bytes. Return whether the connection is still open."""
    try:
        connection.sendall(dripped)
    except OSError:
        return False
    return True


def test_who_does_not_read_is_dropped(port: int) -> None:
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    slow.connect(("127.0.0.1", port))
    with closing(slow):
        request = b"GET /api/v1/openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
        slow.setblocking(False)
        began = time.monotonic()
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            while time.monotonic() - began < CLOSED_TIMEOUT_S:
                try:
                    slow.send(request)
                except BlockingIOError:
                    time.sleep(0.1)


def test_a_client_that_asks_now_and_then_keeps_its_connection(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for idle_s in (IDLE_S, 6 * IDLE_S, 36 * IDLE_S):  # longer ones where this test itself asks too late
        monkeypatch.setattr(connections, "IDLE_S", idle_s)
        answers = []
        with closing(connect(port)) as client:
            for _ in range(4):
                answers.append(answer(client))
                time.sleep(idle_s / 2)
        if answers == [b"HTTP/1.1 200 OK"] * 4:
            return
    pytest.fail(f"closed: {answers}")


def test_what_is_at_work_is_not_closed_for_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of an address that has its share at work wait for none of them: they are refused."""
    head = b"POST /api/v1/clear HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n"
    with served(tmp_path / "kv", monkeypatch, timeout_s=CLOSED_TIMEOUT_S) as port:
        busy = [connect(port, head) for _ in range(MAX // 2)]
        for connection in busy:  # each is waited for until its body is
            assert connection.recv(65536).startswith(b"HTTP/1.1 100 ")
        assert answer(connect(port)) == b""
        assert [answer(connection, b"{}") for connection in busy] == [b"HTTP/1.1 200 OK"] * len(busy)
        for connection in busy:
            connection.close()


def test_handshakes_have_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(tmp_path / "kv", monkeypatch, **own_certificate(tmp_path)) as port:
        for connection in [connect(port) for _ in range(MAX // 2)]:
            wait_until_closed(connection)
            connection.close()


def test_handshakes_of_an_address_are_capped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were not counted at all: 1,000 silent connections took 1,000 descriptors of the service for 10 s."""
    paths = own_certificate(tmp_path)
    trusting = ssl.create_default_context(cafile=paths["tls_cert"])
    with served(tmp_path / "kv", monkeypatch, CLOSED_TIMEOUT_S, **paths) as port:
        idle = [connect(port, b"\x16\x03\x01" if number % 2 else b"") for number in range(4 * MAX)]
        with trusting.wrap_socket(connect(port), server_hostname="localhost") as client:
            assert answer(client) == b"HTTP/1.1 200 OK"
            assert sum(map(is_closed, idle)) >= 4 * MAX - MAX // 2, "an address has half of the connections"
            assert answer(client) == b"HTTP/1.1 200 OK", "also while others wait"
        for _ in range(2 * MAX):  # handshakes that fail leave nothing
            with closing(connect(port, b"GET / HTTP/1.1\r\n\r\n")) as plain:
                wait_until_closed(plain)
        with trusting.wrap_socket(connect(port), server_hostname="localhost") as client:
            assert answer(client) == b"HTTP/1.1 200 OK"
        for connection in idle:
            connection.close()


@pytest.mark.parametrize("expects", [b"", b"Expect: 100-continue\r\n"])
def test_a_client_that_sends_too_much_gets_an_answer(
    expects: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a connection that is reset while it sends, which hides the answer."""
    n_bytes = 12 << 20  # more than the sockets' buffers hold
    head = b"POST /api/v1/lookup HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with served(tmp_path / "kv", monkeypatch, timeout_s=60.0) as port, closing(connect(port)) as one:
        one.sendall(head + expects + b"Content-Length: %d\r\n\r\n" % n_bytes)
        if not expects:
            one.sendall(b"x" * n_bytes)
        assert one.recv(100).startswith(b"HTTP/1.1 413 ")
