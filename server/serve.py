"""Process of `kvtier serve`: settings, tokens, TLS, listener, uvicorn."""

import ipaddress
import logging
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from pathlib import Path

import uvicorn

from kvtier.admin.opened import open_for_admin
from kvtier.config.settings import Settings
from kvtier.errors import ConfigError, IndexUnavailable
from kvtier.runtime.exit_status import NOT_DONE, OK
from kvtier.server.app import make_app
from kvtier.server.auth import Tokens
from kvtier.server.connections import IDLE_S, bounded
from kvtier.server.rotated import Rotated
from kvtier.server.service import Service

SHUTDOWN_S = 5
HEAD_BYTES_MAX = 16 << 10
BACKLOG = 2048

log = logging.getLogger("kvtier")


def run_serve(settings: Settings) -> int:
    """Serve until a signal. Return the exit status. Raises ConfigError for settings that it cannot start with."""
    own = settings.server
    own.check()
    check_tls(own.tls_cert, own.tls_key)
    tokens = Rotated("tokens", (own.admin_token_file, own.read_token_file), lambda: Tokens(*own.tokens()))
    listener = listen(settings)  # before the root, so that a refused start creates none
    service = open_service(settings, tokens.now)
    config = uvicorn_config(service)
    server = uvicorn.Server(config)
    if own.tls_cert is not None and own.tls_key is not None:
        config.load()
        service.periodic.append(rotated_tls(config, own.tls_cert, own.tls_key).now)
    print(f"kvtier serves {settings.root} at {address(settings, listener)}", file=sys.stderr, flush=True)

    def stop(number: int, frame: object) -> None:
        """Before uvicorn listens to signals itself; it hands them on once it has ended well."""
        server.should_exit = True

    signal.signal(signal.SIGTERM, stop)
    server.run(sockets=[listener])
    return OK if server.started else NOT_DONE


def open_service(settings: Settings, tokens: Callable[[], Tokens]) -> Service:
    """Open the root. Raises ConfigError if that is impossible. An index that is down is waited for."""
    service = Service(settings, tokens, lambda: open_for_admin(settings))
    try:
        assert service.opened is not None
    except IndexUnavailable as fault:
        log.warning("the index does not answer yet: %s", fault)
    return service


def rotated_tls(config: uvicorn.Config, cert: Path, key: Path) -> Rotated[None]:
    """Return a value that reloads the certificate and its key, for later connections."""

    def load() -> None:
        check_tls(cert, key)  # in a context of its own: where the two do not match, the one in use stays as it is
        assert config.ssl is not None
        config.ssl.load_cert_chain(cert, key)

    return Rotated("certificate and its key", (cert, key), load)


def uvicorn_config(service: Service) -> uvicorn.Config:
    settings = service.settings.server
    return uvicorn.Config(
        make_app(service),
        backlog=BACKLOG,
        ssl_certfile=settings.tls_cert,
        ssl_keyfile=settings.tls_key,
        http=bounded(settings.connections_max, settings.timeout_s),
        loop="kvtier.server.connections:Loop",
        timeout_keep_alive=IDLE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
        h11_max_incomplete_event_size=HEAD_BYTES_MAX,
        limit_concurrency=settings.connections_max + 1,  # uvicorn refuses from this number on
        ws="none",
        proxy_headers=False,
        server_header=False,
        access_log=False,
        log_level="warning",
        lifespan="on",
    )


def check_tls(cert: Path | None, key: Path | None) -> None:
    """Check that certificate and key match. Raises ConfigError."""
    if cert is None or key is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key, password=_no_password)
    except (OSError, ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or str(error)
        raise ConfigError("server.tls_cert", str(cert), f"cannot be used with key {key}: {reason}") from None


def _no_password() -> str:
    raise ValueError("the key is encrypted: give one without a password, readable by this user alone")


def listen(settings: Settings) -> socket.socket:
    """Listen on the configured address. Raises ConfigError. Listening comes first: a port in use stops the start, and a
    client that connects once the address is printed waits instead of being refused."""
    host, port = settings.server.host, settings.server.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, place = found[0]
        if not settings.server.has_token and not ipaddress.ip_address(place[0]).is_loopback:
            raise settings.server.too_open(f"{host} ({place[0]})")
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(BACKLOG)
    except (OSError, ValueError) as error:  # ValueError: no host can have such a name
        why = getattr(error, "strerror", None) or error
        fix = f"cannot listen on {host} port {port}: {why}; choose another server.host or server.port"
        raise ConfigError("server.port", port, fix) from None
    listener.set_inheritable(True)
    return listener


def address(settings: Settings, listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http{'s' if settings.server.tls_cert else ''}://{f'[{host}]' if ':' in host else host}:{port}"
