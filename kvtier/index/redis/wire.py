"""Batches of commands to Redis over redis-py: one server, the master that Sentinels name, or a cluster.

redis-py makes the connections, logs in, asks Sentinels, keeps a cluster's map of slots and follows redirections. Added
here: a deadline over a whole batch (redis-py has one for each read of a socket), and the check that a connection still
leads to a primary.
"""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol

from redis import Redis, RedisCluster
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.connection import Connection, ConnectionPool, SSLConnection
from redis.crc import key_slot
from redis.credentials import CredentialProvider
from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterError,
    ConnectionError,
    MasterDownError,
    MovedError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)
from redis.retry import Retry
from redis.sentinel import Sentinel

from kvtier.config.index import IndexSettings
from kvtier.errors import ConfigError, IndexRefused, IndexUnavailable

SCAN_KEYS = 1000  # keys that a server looks at in one step of a scan
RECONNECT_PAUSE_S = 1.0  # between two reconnects because of answers about a connection, seconds
ROLE_INTERVAL_S = 1.0  # after which a connection's server is asked for its role, with the next batch, seconds

Argument = bytes | str | int | float
Command = tuple[Argument, ...]
Secret = Literal["password", "sentinel_password"]


class Request(NamedTuple):
    """A command, and the key that says which shard it goes to."""

    key: bytes
    command: Command


class Wire(Protocol):
    """Safe to use from several threads. Raises IndexUnavailable when an answer does not come in time."""

    def run(self, requests: Sequence[Request]) -> list[Any]:
        """Return the answers, in order; an error of one command is a ResponseError in its place."""

    def shard_of(self, key: bytes) -> str:
        """Return the name of the server that has the key."""

    def scan(self, pattern: bytes, kind: str) -> Iterator[bytes]:
        """Yield the names of all keys of a kind (string, hash) that match; some may come twice."""

    def close(self) -> None: ...


class Login(CredentialProvider):
    """The user name and password that the settings name. secret: the setting with the password. A password
    file is read at each connect, so that the password can be rotated."""

    def __init__(self, settings: IndexSettings, secret: Secret = "password") -> None:
        self._settings = settings
        self._secret = secret

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Read the credentials. Raises redis-py's AuthenticationError where the file has no password."""
        user: str | None = getattr(self._settings, self._secret.replace("password", "username"))
        try:
            password = self._settings.secret(self._secret) or ""
        except ConfigError as fault:
            raise AuthenticationError(str(fault)) from fault
        return (user, password) if user else (password,)


def login(settings: IndexSettings, secret: Secret = "password") -> Login | None:
    """Return the login, None where the settings have no password. Raises ConfigError for a file without a password."""
    return None if settings.secret(secret) is None else Login(settings, secret)


def password_file(settings: IndexSettings, said: str, error: Exception) -> str:
    """Return the setting and the file of the password that a server refused, as text; "" if the server refused
    something else, or the password is not from a file.

    said: text of the error, in which redis-py quotes errors of a Sentinel's login.
    """
    at_sentinel = settings.place.kind == "sentinel" and "AuthenticationError" in said
    if not at_sentinel and not isinstance(error, AuthenticationError):
        return ""
    name = "sentinel_password_file" if at_sentinel else "password_file"
    path = getattr(settings, name)
    return "" if path is None or str(path) in said else f"index.{name} = {path}"


def unavailable(error: RedisError, settings: IndexSettings | None = None) -> IndexUnavailable:
    """Return the error to raise. settings: to name the file of a password that was refused."""
    said = " ".join(str(error).split()).rstrip(".")
    file = "" if settings is None else password_file(settings, said, error)
    read = f" ({file}, read at each connect: write the password that is valid now into it)" if file else ""
    return (IndexRefused if is_refusal(error) else IndexUnavailable)(f"Redis: {said}{read}", _fix(error))


def _fix(error: RedisError) -> str:
    """Return what to do about a server that does not answer or is full; "" for any other error."""
    if isinstance(error, BusyLoadingError):
        return "wait until it has loaded its data"
    if isinstance(error, OutOfMemoryError):
        return "raise its maxmemory"
    if isinstance(error, TimeoutError) and "connecting" not in str(error):
        return "look at its load, or raise index.reply_timeout_ms"
    is_away = isinstance(error, ConnectionError | TimeoutError) and not isinstance(error, AuthenticationError)
    return "start it, or correct index.url" if is_away else ""


def is_refusal(error: RedisError) -> bool:
    """Return whether the server is well, and refuses this command: it is full or read-only, or this user may not."""
    is_away = isinstance(error, AskError | ClusterError | TryAgainError) or str(error).startswith("BUSY")
    return isinstance(error, ResponseError) and not is_away


def is_of_connection(answer: Any) -> bool:
    """Return whether an error answer says something of the server at this connection's end, not of the command: it is a
    replica, or a primary that lost its replicas. Behind an address that stands for the primary (a VIP, a Kubernetes
    service, a cloud's endpoint) a new connection may reach another server. (LOADING is a ConnectionError.)"""
    if isinstance(answer, ReadOnlyError | MasterDownError):
        return True
    return isinstance(answer, ResponseError) and str(answer).startswith("NOREPLICAS")


class Reconnects:
    """Limit of reconnects: a server that is read-only for good is connected to now and then, not for each command."""

    def __init__(self) -> None:
        self._last_s = -RECONNECT_PAUSE_S

    def take(self) -> bool:
        """Return whether to connect again, which the caller then does."""
        now_s = time.monotonic()
        is_due = now_s - self._last_s >= RECONNECT_PAUSE_S
        self._last_s = now_s if is_due else self._last_s
        return is_due


def _timely(kind: type[Any], reply_s: float, reconnects: Reconnects) -> type[Any]:
    """Return a class of redis-py's connections that ends a batch at a deadline and notices a demoted primary: once in
    ROLE_INTERVAL_S a batch begins with HELLO, because such a server answers reads as if nothing had happened."""

    class Timely(kind):  # type: ignore[misc]
        deadline_s = role_asked_s = 0.0
        owes_role = False

        def on_connect_check_health(self, check_health: bool = True) -> None:
            self.role_asked_s, self.owes_role = float("inf"), False  # not before it has logged in
            super().on_connect_check_health(check_health=check_health)
            self.role_asked_s = -ROLE_INTERVAL_S

        def send_packed_command(self, command: Iterable[bytes], check_health: bool = True) -> None:
            if not self._sock:
                self.connect()
            now_s = time.monotonic()
            if now_s - self.role_asked_s >= ROLE_INTERVAL_S:
                command = [*self.pack_command("HELLO"), *command]
                self.role_asked_s, self.owes_role = now_s, True
            self.deadline_s = now_s + reply_s
            super().send_packed_command([b"".join(command)], check_health)  # one call of the system

        def read_response(
            self,
            disable_decoding: bool = False,
            *,
            timeout: object = None,
            disconnect_on_error: bool = True,
            push_request: bool = False,
        ) -> Any:
            """Read the next answer within the batch's deadline, whatever `timeout` is."""
            if self.owes_role:
                self.owes_role = False
                hello = self._read(False, disconnect_on_error, push_request)
                if dict(zip(hello[::2], hello[1::2], strict=False)).get(b"role") == b"replica" and reconnects.take():
                    self.disconnect()
                    raise ConnectionError("the server has become a replica")
            return self._read(disable_decoding, disconnect_on_error, push_request)

        def _read(self, is_raw: bool, disconnect_on_error: bool, push_request: bool) -> Any:
            left_s = self.deadline_s - time.monotonic()
            if left_s <= 0:
                self.disconnect()
                raise TimeoutError("the answers took too long")
            return super().read_response(
                is_raw, timeout=left_s, disconnect_on_error=disconnect_on_error, push_request=push_request
            )

    return Timely


def _answers(client: Any, commands: Iterable[Command]) -> list[Any]:
    pipeline: Any = client.pipeline(transaction=False)
    for command in commands:
        pipeline.execute_command(*command)
    answers: list[Any] = pipeline.execute(raise_on_error=False)
    return answers


class SingleWire:
    """One server: named, or the master that Sentinels name."""

    def __init__(self, client: Redis, settings: IndexSettings, reconnects: Reconnects) -> None:
        self._client = client
        self._settings = settings
        self._reply_s = settings.reply_timeout_ms / 1000
        self._reconnects = reconnects

    def run(self, requests: Sequence[Request]) -> list[Any]:
        commands, began_s = [request.command for request in requests], time.monotonic()
        with _unavailable_at_fault(self._settings):
            try:
                answers = _answers(self._client, commands)
            except ConnectionError as error:  # it was restarted, or another is the master now
                is_late = time.monotonic() - began_s > self._reply_s / 2
                if is_late or isinstance(error, AuthenticationError):
                    raise
                self._client.connection_pool.disconnect(inuse_connections=False)
                return _answers(self._client, commands)
            if any(map(is_of_connection, answers)) and self._reconnects.take():
                self._client.connection_pool.disconnect(inuse_connections=False)
                answers = _answers(self._client, commands)
            return answers

    def shard_of(self, key: bytes) -> str:
        return ""

    def scan(self, pattern: bytes, kind: str) -> Iterator[bytes]:
        with _unavailable_at_fault(self._settings):
            yield from self._client.scan_iter(match=pattern, count=SCAN_KEYS, _type=kind)

    def close(self) -> None:
        self._client.close()


class ClusterWire:
    """Redis Cluster. A batch is one pipeline to each shard: redis-py's own pipeline over all shards repeats commands
    of a silent shard one by one, each with its own timeout."""

    def __init__(self, options: Mapping[str, Any], settings: IndexSettings) -> None:
        self._options = options
        self._settings = settings
        self._reply_s = settings.reply_timeout_ms / 1000
        self._lock = threading.Lock()
        self._cluster: RedisCluster | None = None
        self._is_stale = False  # a shard did not answer: a replica may have its slots by now

    def run(self, requests: Sequence[Request]) -> list[Any]:
        with _unavailable_at_fault(self._settings):
            cluster = self._reached()
            try:
                return self._round(cluster, requests)
            except TimeoutError:
                self._is_stale = True
                raise
            except ConnectionError:
                cluster.nodes_manager.initialize()
                return self._round(cluster, requests)

    def _round(self, cluster: Any, requests: Sequence[Request]) -> list[Any]:
        places: dict[str, list[int]] = {}
        nodes: dict[str, Any] = {}
        for place, request in enumerate(requests):
            node = cluster.nodes_manager.get_node_from_slot(key_slot(request.key))
            nodes[node.name] = node
            places.setdefault(node.name, []).append(place)
        answers: list[Any] = [None] * len(requests)
        deadline_s = time.monotonic() + self._reply_s
        for name, own in places.items():
            if time.monotonic() > deadline_s:
                raise TimeoutError("the answers took too long")
            found = _answers(cluster.get_redis_connection(nodes[name]), [requests[place].command for place in own])
            for place, answer in zip(own, found, strict=True):
                answers[place] = answer
        for place, answer in enumerate(answers):
            if isinstance(answer, AskError | ClusterError | MovedError | TryAgainError | ReadOnlyError):
                try:  # redis-py follows the slot, and reads the map again
                    answers[place] = cluster.execute_command(*requests[place].command)
                except ResponseError as error:
                    answers[place] = error
        return answers

    def _reached(self) -> RedisCluster:
        with self._lock:
            if self._cluster is None:  # the constructor connects
                (host, port), *others = self._settings.place.hosts
                url = f"redis://[{host}]:{port}" if ":" in host else f"redis://{host}:{port}"
                nodes = [ClusterNode(*other) for other in others]  # type: ignore[no-untyped-call]
                self._cluster = RedisCluster(url=url, startup_nodes=nodes, reinitialize_steps=1, **self._options)
            elif self._is_stale:
                self._is_stale = False
                self._cluster.nodes_manager.initialize()
            return self._cluster

    def shard_of(self, key: bytes) -> str:
        with _unavailable_at_fault(self._settings):
            name: str = self._reached().nodes_manager.get_node_from_slot(key_slot(key)).name
            return name

    def scan(self, pattern: bytes, kind: str) -> Iterator[bytes]:
        with _unavailable_at_fault(self._settings):
            yield from self._reached().scan_iter(match=pattern, count=SCAN_KEYS, _type=kind)

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()


@contextmanager
def _unavailable_at_fault(settings: IndexSettings) -> Iterator[None]:
    try:
        yield
    except (RedisError, RedisClusterException) as error:
        cause = _cause(error)
        raise unavailable(cause, settings) from cause


def _cause(error: Exception) -> RedisError:
    """Return the error of Redis behind one of redis-py's cluster client."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, RedisError):
        cause = cause.__cause__
    return cause if isinstance(cause, RedisError) else ConnectionError(str(error))


def open_wire(settings: IndexSettings) -> Wire:
    """Make a client that connects when it is first used. Raise ConfigError for a password that cannot be read."""
    place, reply_s, reconnects = settings.place, settings.reply_timeout_ms / 1000, Reconnects()
    options = _options(settings) | {"credential_provider": login(settings)}
    if place.kind == "cluster":
        kind = _timely(SSLConnection if place.has_tls else Connection, reply_s, reconnects)
        return ClusterWire(options | {"connection_class": kind}, settings)
    if place.kind == "sentinel":
        own = _options(settings) | {"credential_provider": login(settings, "sentinel_password"), "ssl": place.has_tls}
        sentinel = Sentinel(list(place.hosts), sentinel_kwargs=own)  # type: ignore[no-untyped-call]
        client: Redis = sentinel.master_for(place.service, ssl=place.has_tls, db=place.db, **options)  # type: ignore[no-untyped-call]
    else:
        assert settings.url is not None, "it is checked with the settings"
        client = Redis(connection_pool=ConnectionPool.from_url(settings.url, **options))
    pool: Any = client.connection_pool
    pool.connection_class = _timely(pool.connection_class, reply_s, reconnects)
    return SingleWire(client, settings, reconnects)


def _options(settings: IndexSettings) -> dict[str, Any]:
    options: dict[str, Any] = {
        "socket_connect_timeout": settings.connect_timeout_ms / 1000,
        "socket_timeout": settings.reply_timeout_ms / 1000,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
        "client_name": "kvtier",
    }
    if settings.place.has_tls:
        files = {"ca_certs": settings.tls_ca_file, "certfile": settings.tls_cert_file, "keyfile": settings.tls_key_file}
        options |= {f"ssl_{name}": str(path) for name, path in files.items() if path is not None}
        options["ssl_check_hostname"] = settings.tls_check_hostname
    return options
