"""Round trips to Redis: a batch of commands goes out to all shards before the first answer is read.

redis-py makes the connections (TLS, logging in, asking Sentinels) and speaks the protocol. Batches are sent from here
and not through its pipelines, because those of a cluster take 30 us of Python a command, and because a whole batch,
whatever the number of shards, is to end within one deadline (I10).

Which command goes where is decided by a key that is named beside it. A cluster's map of slots is read with CLUSTER
SLOTS and read again when a shard says that a slot is elsewhere, or is gone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from redis.backoff import NoBackoff
from redis.connection import Connection, ConnectionPool, SSLConnection, UnixDomainSocketConnection
from redis.crc import key_slot
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterError,
    ConnectionError,
    MasterDownError,
    MovedError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from kvtier.config_index import IndexSettings
from kvtier.errors import IndexRefused, IndexUnavailable
from kvtier.index.redis_connections import Connector
from kvtier.index.redis_login import login, password_file

_SENTINEL: Any = Sentinel  # redis-py has no types for them
_SENTINEL_POOL: Any = SentinelConnectionPool
REDIRECTS_MAX = 5
"""Rounds in which a slot may be said to be elsewhere: resharding moves it once, a failover once more."""
SLOTS = 16384
RECONNECT_PAUSE_S = 1.0  # between two reconnects because of answers about a connection, seconds
ROLE_INTERVAL_S = 1.0  # after which a connection's server is asked for its role, with the next batch, seconds
_ROLE = -1  # place of the answer to HELLO in a batch that asks for the role

Argument = bytes | str | int | float
Command = tuple[Argument, ...]
Shard = tuple[str, int]
"""Host and port of a master."""
_THE_SERVER: Shard = ("", 0)
Clock = Callable[[], float]


class Request(NamedTuple):
    """A command, and the key that says which shard it goes to."""

    key: bytes
    command: Command


class Wire(Protocol):
    """Safe to use from several threads. Raises IndexUnavailable when an answer does not come in time."""

    def run(self, requests: Sequence[Request]) -> list[Any]:
        """The answers, in order; one that is an error is a ResponseError in its place."""
        ...

    def shards(self) -> list[Shard]: ...

    def shard_of(self, key: bytes) -> Shard | None:
        """The one that the key lies on."""
        ...

    def run_on(self, shard: Shard, command: Command) -> Any:
        """The answer of one shard."""
        ...

    def close(self) -> None: ...


class _Part(NamedTuple):
    """What goes to one shard in a batch; `places`: of the answers. asks_role: now and then with HELLO before it."""

    pool: ConnectionPool
    places: list[int]
    commands: list[Command]
    asks_role: bool = False


def exchange(parts: Sequence[_Part], reply_s: float, clock: Clock = time.monotonic) -> dict[int, Any]:
    """Sends every part, then reads every answer, until a deadline. Raises redis-py's ConnectionError, TimeoutError."""
    opened: list[tuple[_Part, Any]] = []
    answers: dict[int, Any] = {}
    is_done = False
    try:
        for part in parts:
            connection: Any = part.pool.get_connection()
            if part.asks_role and clock() - getattr(connection, "role_asked_s", -ROLE_INTERVAL_S) >= ROLE_INTERVAL_S:
                part = part._replace(places=[_ROLE, *part.places], commands=[("HELLO",), *part.commands])
                connection.role_asked_s = clock()
            opened.append((part, connection))
            packed = b"".join(connection.pack_commands(part.commands))  # one call of the system, and one packet or few
            connection.send_packed_command([packed])
        deadline_s = clock() + reply_s
        for part, connection in opened:
            for place in part.places:
                answers[place] = _read(connection, deadline_s - clock())
        is_done = True
    finally:
        for part, connection in opened:
            if not is_done:  # answers are still to come on it
                connection.disconnect()
            part.pool.release(connection)
    return answers


def _read(connection: Any, left_s: float) -> Any:
    if left_s <= 0:
        raise TimeoutError("the answers took too long")
    try:
        return connection.read_response(timeout=left_s)
    except (ConnectionError, TimeoutError):  # of which some are said to be answers, such as LOADING
        raise
    except ResponseError as error:
        return error


def unavailable(error: RedisError, settings: IndexSettings | None = None) -> IndexUnavailable:
    """Return the error to raise. settings: to name the file of a password that was refused."""
    said = " ".join(str(error).split())
    file = "" if settings is None else password_file(settings, said, error)
    read = f" ({file}, read at each connect: write the password that is valid now into it)" if file else ""
    return (IndexRefused if is_refusal(error) else IndexUnavailable)(f"Redis: {said}{read}")


def is_refusal(error: RedisError) -> bool:
    """Whether the server is well, and refuses this command: it is full or read-only, or this user may not."""
    is_away = isinstance(error, AskError | ClusterError | TryAgainError) or str(error).startswith("BUSY")
    return isinstance(error, ResponseError) and not is_away


def is_of_connection(answer: Any) -> bool:
    """Return whether an error answer says something of the server at this connection's end, not of the command: it is a
    replica, or a primary that lost its replicas. Behind an address that stands for the primary (a VIP, a Kubernetes
    service, a cloud's endpoint) a new connection may reach another server. (LOADING is a ConnectionError.)"""
    if isinstance(answer, ReadOnlyError | MasterDownError):
        return True
    return isinstance(answer, ResponseError) and str(answer).startswith("NOREPLICAS")


def is_replica(hello: Any) -> bool:
    """Return whether HELLO was answered by a replica. It answers reads too, and may have another index or none."""
    return isinstance(hello, list) and dict(zip(hello[::2], hello[1::2], strict=False)).get(b"role") == b"replica"


class Reconnects:
    """Decides after which answers to connect again. Where the server is read-only for good, that is done now and then
    only, and not for each command."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._last_s = -RECONNECT_PAUSE_S

    def are_due(self, answers: Mapping[int, Any]) -> bool:
        """Return whether to connect again, which the caller then does."""
        now_s = self._clock()
        is_wrong = is_replica(answers.get(_ROLE)) or any(map(is_of_connection, answers.values()))
        is_due = is_wrong and now_s - self._last_s >= RECONNECT_PAUSE_S
        self._last_s = now_s if is_due else self._last_s
        return is_due


class SingleWire:
    """One server: named, or the master that Sentinels name."""

    def __init__(self, pool: ConnectionPool, settings: IndexSettings, connector: Connector) -> None:
        self._pool = pool
        self._settings = settings
        self._reply_s = settings.reply_timeout_ms / 1000
        self._connector = connector
        self._reconnects = Reconnects()

    def run(self, requests: Sequence[Request]) -> list[Any]:
        part = _Part(self._pool, list(range(len(requests))), [request.command for request in requests], True)
        answers = self._exchange(part) if requests else {}
        return [answers[place] for place in part.places]

    def _exchange(self, part: _Part) -> dict[int, Any]:
        started_s = time.monotonic()
        try:
            try:
                answers = exchange([part], self._reply_s)
            except ConnectionError as error:  # it was restarted, or another is the master now
                is_late = time.monotonic() - started_s > self._reply_s / 2
                if is_late or isinstance(error, TimeoutError | AuthenticationError):
                    raise
                return exchange([part], self._reply_s)
            if self._reconnects.are_due(answers):
                self._pool.disconnect(inuse_connections=False)
                answers = exchange([part], self._reply_s)
            return answers
        except RedisError as error:
            raise unavailable(error, self._settings) from error

    def shards(self) -> list[Shard]:
        return [_THE_SERVER]

    def shard_of(self, key: bytes) -> Shard | None:
        return _THE_SERVER

    def run_on(self, shard: Shard, command: Command) -> Any:
        return self.run([Request(b"", command)])[0]

    def close(self) -> None:
        self._pool.disconnect()
        self._connector.close()


class ClusterWire:
    """Redis Cluster: its map of slots, and a pool of connections to each master."""

    def __init__(
        self, make_pool: Callable[[str, int], ConnectionPool], settings: IndexSettings, connector: Connector
    ) -> None:
        self._seeds = list(settings.place.hosts)
        self._connector = connector
        self._make_pool = make_pool
        self._settings = settings
        self._reply_s = settings.reply_timeout_ms / 1000
        self._reconnects = Reconnects()
        self._lock = threading.Lock()
        self._pools: dict[Shard, ConnectionPool] = {}
        self._slots: list[Shard | None] = []

    def run(self, requests: Sequence[Request]) -> list[Any]:
        answers: list[Any] = [None] * len(requests)
        waiting = list(range(len(requests)))
        try:
            for _ in range(REDIRECTS_MAX):
                if waiting:
                    waiting = self._round(requests, waiting, answers)
        except RedisError as error:
            raise unavailable(error, self._settings) from error
        if waiting:
            raise unavailable(answers[waiting[0]])
        return answers

    def _round(self, requests: Sequence[Request], waiting: Sequence[int], answers: list[Any]) -> list[int]:
        """Fills in answers; the places of those to be asked for again, elsewhere."""
        slots = self._slots or self._learn()
        try:
            found = exchange(self._parts(slots, requests, waiting), self._reply_s)
        except TimeoutError:
            self._slots = []  # who does not answer may be replaced by a replica
            raise
        except ConnectionError:
            found = exchange(self._parts(self._learn(), requests, waiting), self._reply_s)
        if self._reconnects.are_due(found):
            for pool in list(self._pools.values()):
                pool.disconnect(inuse_connections=False)
            found = exchange(self._parts(self._learn(), requests, waiting), self._reply_s)
        again = []
        for place, answer in found.items():
            answers[place] = answer
            if isinstance(answer, AskError):
                answers[place] = self._ask(answer, requests[place].command)
            elif isinstance(answer, MovedError):
                again.append(place)
            elif isinstance(answer, ResponseError) and str(answer).startswith(("CLUSTERDOWN", "TRYAGAIN")):
                raise answer
        if again:
            self._learn()
        return again

    def _parts(self, slots: Sequence[Shard | None], requests: Sequence[Request], places: Sequence[int]) -> list[_Part]:
        parts: dict[Shard, _Part] = {}
        for place in places:
            request = requests[place]
            node = slots[key_slot(request.key)]
            if node is None:
                raise ConnectionError("some slots of the cluster are no shard's")
            part = parts.get(node)
            if part is None:
                part = parts[node] = _Part(self._pool(node), [], [])
            part.places.append(place)
            part.commands.append(request.command)
        return list(parts.values())

    def _ask(self, where: AskError, command: Command) -> Any:
        """A slot that is being moved: the one key is there already."""
        part = _Part(self._pool((where.host, where.port)), [0, 1], [("ASKING",), command])
        return exchange([part], self._reply_s)[1]

    def _pool(self, node: Shard) -> ConnectionPool:
        with self._lock:
            if node not in self._pools:
                self._pools[node] = self._make_pool(*node)
            return self._pools[node]

    def _learn(self) -> list[Shard | None]:
        """Reads the map of slots from the first node that tells; who does not is asked last from then on."""
        fault: RedisError = ConnectionError("no node of the cluster is known")
        for node in dict.fromkeys([*self._seeds, *self._pools]):
            try:
                answer = exchange([_Part(self._pool(node), [0], [("CLUSTER", "SLOTS")])], self._reply_s)[0]
            except ConnectionError as error:
                fault = error
                self._put_last(node)
                continue
            except TimeoutError:  # the next call asks another
                self._put_last(node)
                raise
            if isinstance(answer, ResponseError):
                raise answer
            slots: list[Shard | None] = [None] * SLOTS
            for first, last, master, *_ in answer:
                host = master[0].decode() if master[0] else node[0]
                slots[first : last + 1] = [(host, master[1])] * (last + 1 - first)
            self._slots = slots
            return slots
        raise fault

    def _put_last(self, node: Shard) -> None:
        with self._lock:
            self._seeds = [*(seed for seed in self._seeds if seed != node), node]

    def shards(self) -> list[Shard]:
        return list(dict.fromkeys(node for node in self._known_slots() if node is not None))

    def shard_of(self, key: bytes) -> Shard | None:
        return self._known_slots()[key_slot(key)]

    def run_on(self, shard: Shard, command: Command) -> Any:
        try:
            return exchange([_Part(self._pool(shard), [0], [command])], self._reply_s)[0]
        except RedisError as error:
            raise unavailable(error, self._settings) from error

    def _known_slots(self) -> list[Shard | None]:
        try:
            return self._slots or self._learn()
        except RedisError as error:
            raise unavailable(error, self._settings) from error

    def close(self) -> None:
        with self._lock:
            for pool in self._pools.values():
                pool.disconnect()
        self._connector.close()


def open_wire(settings: IndexSettings) -> Wire:
    """Connects to nothing yet. Raises ConfigError for a password that cannot be read."""
    place = settings.place
    options = _options(settings) | {"credential_provider": login(settings)}
    connector = Connector()
    kind = connector.timely(SSLConnection if place.has_tls else Connection)
    if place.kind == "cluster":
        return ClusterWire(
            lambda host, port: ConnectionPool(kind, host=host, port=port, **options), settings, connector
        )
    options["db"] = place.db
    if place.kind == "sentinel":
        own = _options(settings) | {"credential_provider": login(settings, "sentinel_password"), "ssl": place.has_tls}
        sentinel: Any = _SENTINEL(list(place.hosts), sentinel_kwargs=own)
        pool: ConnectionPool = _SENTINEL_POOL(place.service, sentinel, ssl=place.has_tls, **options)
        for own_pool in (pool, *(one.connection_pool for one in sentinel.sentinels)):
            own_pool.connection_class = connector.timely(own_pool.connection_class)
    elif place.path:
        pool = ConnectionPool(UnixDomainSocketConnection, path=place.path, **options)
    else:
        pool = ConnectionPool(kind, host=place.hosts[0][0], port=place.hosts[0][1], **options)
    return SingleWire(pool, settings, connector)


def _options(settings: IndexSettings) -> dict[str, Any]:
    options: dict[str, Any] = {
        "socket_connect_timeout": settings.connect_timeout_ms / 1000,
        "socket_timeout": settings.reply_timeout_ms / 1000,
        "retry": Retry(NoBackoff(), 0), "protocol": 2, "client_name": "kvtier",
    }  # fmt: skip
    if settings.place.has_tls:
        files = {"ca_certs": settings.tls_ca_file, "certfile": settings.tls_cert_file, "keyfile": settings.tls_key_file}
        options |= {f"ssl_{name}": str(path) for name, path in files.items() if path is not None}
        options["ssl_check_hostname"] = settings.tls_check_hostname
    return options
