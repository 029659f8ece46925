"""Settings of the index: embedded, in memory, or in Redis; and where a Redis index is, read from its URL.

redis://host:port/db                          one server; rediss:// with TLS
unix:///run/redis.sock?db=0                   one server of this node
redis+sentinel://host:26379,host2/service     the master that Sentinels name; rediss+sentinel:// with TLS
redis+cluster://host:6379,host2:6379          Redis Cluster, from any of its nodes on; rediss+cluster:// with TLS
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import unquote

from pydantic import BaseModel, BeforeValidator, Field, SecretStr, field_validator, model_validator

from kvtier.config.types import FROZEN, AbsolutePath, Bytes, Count, SecretPath, Timeout, no_bool
from kvtier.errors import ConfigError

_URL = re.compile(
    r"(?P<scheme>rediss?|rediss?\+sentinel|rediss?\+cluster|unix)://(?:(?P<user>[^/?#]*)@)?(?P<hosts>[^/?#]*)"
    r"(?P<path>/[^?#]*)?(?:\?(?P<query>[^#]*))?"
)
_FORMS = "redis://host:6379/0, rediss://..., unix:///path, redis+sentinel://host:26379,.../service, redis+cluster://..."
# Of the index's map: tables need the least; it may grow eightfold, within a process's 128 TiB of addresses.
MAP_BYTES_MIN, MAP_BYTES_MAX = 1 << 20, 8 << 40
_PORTS = {"sentinel": 26379}
# Kinds of index that use a setting. Redis uses all that are not named here.
USERS = {"path": ("embedded",), "map_bytes": ("embedded",), "timeout_s": ("embedded", "memory")}

Milliseconds = Annotated[float, BeforeValidator(no_bool), Field(gt=0, le=60_000, allow_inf_nan=False)]
Reply = Annotated[Milliseconds, Field(ge=1)]  # below, no Redis answers in time
QUEUE_BYTES_MIN = 64 << 10  # of a queue that holds the records of a save, bytes


class RedisPlace(NamedTuple):
    """Parsed URL of a Redis. kind: one, sentinel or cluster. path: of a socket. service: its name for Sentinels."""

    kind: str
    hosts: tuple[tuple[str, int], ...]
    path: str
    service: str
    db: int
    has_tls: bool


class BreakerSettings(BaseModel):
    """Circuit breaker of an index that does not answer. After `failures` in a row (calls in flight together count once)
    no call is made for a pause, which doubles up to `pause_max_ms`. During a pause every lookup is a miss at once."""

    model_config = FROZEN
    failures: Count = 3
    pause_first_ms: Milliseconds = 500.0
    pause_max_ms: Milliseconds = 15_000.0


class IndexSettings(BaseModel):
    """Index of the stored chunks.

    path, map_bytes, timeout_s: of an embedded index; path None: chosen by the root's file system.
    url and below: of one in Redis. prefix: begins the names of all its keys, so that several can share a Redis.
    connect_timeout_ms, reply_timeout_ms: of a connection, and of the answers of one round trip.
    publish_queue_records, publish_queue_bytes: what may wait for a Redis that does not answer.
    """

    model_config = FROZEN
    kind: Literal["embedded", "memory", "redis"] = "embedded"
    path: AbsolutePath | None = None
    map_bytes: Annotated[Bytes, Field(ge=MAP_BYTES_MIN, le=MAP_BYTES_MAX)] = 16 << 30
    timeout_s: Timeout = 2.0
    url: str | None = None
    prefix: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,64}$")] = "kvtier"
    username: str | None = None
    password: SecretStr | None = None
    password_file: SecretPath | None = None
    sentinel_username: str | None = None
    sentinel_password: SecretStr | None = None
    sentinel_password_file: SecretPath | None = None
    tls_ca_file: AbsolutePath | None = None
    tls_cert_file: AbsolutePath | None = None
    tls_key_file: SecretPath | None = None
    tls_check_hostname: bool = True
    connect_timeout_ms: Reply = 500.0
    reply_timeout_ms: Reply = 250.0
    breaker: BreakerSettings = BreakerSettings()
    publish_queue_records: Count = 65_536
    publish_queue_bytes: Annotated[Bytes, Field(ge=QUEUE_BYTES_MIN)] = 64 << 20

    @model_validator(mode="before")
    @classmethod
    def _take_credentials(cls, values: Any) -> Any:
        """Move user and password out of the URL, which is printed."""
        if not isinstance(values, Mapping) or not isinstance(values.get("url"), str):
            return values
        match = _URL.fullmatch(values["url"])
        if match is None or match["user"] is None:
            return values
        user, colon, password = match["user"].partition(":")
        given = {"username": unquote(user)} if user else {}
        if colon:
            given["password"] = unquote(password)
        rest = values["url"].replace(f"{match['user']}@", "", 1)
        return {**given, **{name: value for name, value in values.items() if value is not None}, "url": rest}

    @field_validator("url")
    @classmethod
    def _known_url(cls, value: str | None) -> str | None:
        if value is not None:
            parse_url(value)
        return value

    @property
    def place(self) -> RedisPlace:
        assert self.url is not None, "check() was called"
        return parse_url(self.url)

    @property
    def lookup_timeout_s(self) -> float:
        """Longest time that a request waits for its lookup, seconds."""
        if self.kind == "redis":
            return (self.connect_timeout_ms + self.reply_timeout_ms) / 1000
        return self.timeout_s

    def check(self) -> None:
        """Raises ConfigError for settings that do not go together."""
        defaults = IndexSettings().model_dump(mode="json")
        for name, value in self.model_dump(mode="json", exclude={"kind"}).items():
            users = USERS.get(name, ("redis",))
            if self.kind not in users and value not in (defaults[name], ""):  # "": of a template without a value
                fix = f"only index.kind {users[0]} uses it, and that is {self.kind}"
                fix = f"{fix}: set it to {users[0]}, or leave this out"
                raise ConfigError(f"index.{name}", value, fix)
        if self.kind != "redis":
            return
        if self.url is None:
            raise ConfigError("index.url", None, f"index.kind redis needs the address of the server: {_FORMS}")
        self._check_secrets()
        self._check_tls()

    def _check_secrets(self) -> None:
        for name in ("sentinel_username", "sentinel_password", "sentinel_password_file"):
            if self.place.kind != "sentinel" and (value := getattr(self, name)):
                fix = "index.url names no Sentinels: begin it with redis+sentinel, or leave this out"
                raise ConfigError(f"index.{name}", str(value), fix)
        for name in ("password", "sentinel_password"):
            path = getattr(self, f"{name}_file")
            if getattr(self, name) is not None and path is not None:
                fix = f"index.{name}, or a password in index.url, is set too: leave one of them out"
                raise ConfigError(f"index.{name}_file", str(path), fix)
        if self.username is not None and self.password is None and self.password_file is None:
            raise ConfigError("index.username", self.username, "it has no password: set index.password_file too")

    def _check_tls(self) -> None:
        given = [name for name in ("tls_ca_file", "tls_cert_file", "tls_key_file") if getattr(self, name) is not None]
        if given and not self.place.has_tls:
            fix = "index.url speaks without TLS: begin it with rediss, or leave this out"
            raise ConfigError(f"index.{given[0]}", str(getattr(self, given[0])), fix)
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            have, lack = ("key", "cert") if self.tls_cert_file is None else ("cert", "key")
            path = str(getattr(self, f"tls_{have}_file"))
            raise ConfigError(f"index.tls_{have}_file", path, f"index.tls_{lack}_file is not set: both, or neither")
        for name in given:
            path = getattr(self, name)
            try:
                path.read_bytes()
            except OSError as error:
                raise ConfigError(f"index.{name}", str(path), f"it cannot be read: {error.strerror}") from None

    def secret(self, name: str = "password") -> str | None:
        """Return the password, or `sentinel_password`, as given or from its file. Raises ConfigError."""
        given: SecretStr | None = getattr(self, name)
        path: Path | None = getattr(self, f"{name}_file")
        if path is None:
            return None if given is None else given.get_secret_value()
        try:
            text = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not a text"
            raise ConfigError(f"index.{name}_file", str(path), f"no password can be read there: {reason}") from None
        if not text:
            raise ConfigError(f"index.{name}_file", str(path), "the file is empty: write the password into it")
        return text


def parse_url(url: str) -> RedisPlace:
    """Raises ValueError, never with the URL in it: it may hold a password."""
    match = _URL.fullmatch(url)
    if match is None:
        raise ValueError(f"must be the address of a Redis: {_FORMS}")
    scheme, path, query = match["scheme"], unquote(match["path"] or ""), match["query"] or ""
    kind = scheme.partition("+")[2] or "one"
    name, _, db = query.partition("=")
    if query and (name != "db" or not db.isdecimal()):
        raise ValueError("only ?db=NUMBER may stand behind the ?; timeouts, TLS and the like are settings of their own")
    has_tls = scheme.startswith("rediss")
    if scheme == "unix":
        if not path.strip("/") or match["hosts"]:
            raise ValueError("unix:// needs the absolute path of a socket: unix:///run/redis.sock")
        return RedisPlace(kind, (), path, "", int(db or 0), False)
    hosts = tuple(_host(text, _PORTS.get(kind, 6379)) for text in match["hosts"].split(","))
    word = path.strip("/")
    if kind == "sentinel":
        if not word:
            raise ValueError("name the service behind the hosts, as in redis+sentinel://host:26379/mymaster")
        return RedisPlace(kind, hosts, "", word, int(db or 0), has_tls)
    if kind == "cluster" and (word or query):
        raise ValueError("Redis Cluster has one database and no service name: leave out what follows the hosts")
    if word and (not word.isdecimal() or query):
        raise ValueError("behind the host stands the number of the database, as in redis://host:6379/0")
    if kind == "one" and len(hosts) > 1:
        raise ValueError("several hosts need redis+sentinel:// or redis+cluster://")
    return RedisPlace(kind, hosts, "", "", int(word or db or 0), has_tls)


def _host(text: str, port: int) -> tuple[str, int]:
    match = re.fullmatch(r"(\[[0-9a-fA-F:.]+(?:%[\w.-]+)?\]|[^:\[\]\s]+)(?::(\d{1,5}))?", text)
    if match is None:
        raise ValueError("a host is a name or an address, with :PORT behind it; several are divided by commas")
    port = int(match[2] or port)
    if not 0 < port < 1 << 16:
        raise ValueError("a port is a number from 1 to 65535")
    try:
        match[1].encode("idna")  # getaddrinfo does this too, and no client of Redis expects its exception
    except UnicodeError:
        raise ValueError("no such host can be looked up: each part between dots has 1 to 63 characters") from None
    return match[1].strip("[]"), port
