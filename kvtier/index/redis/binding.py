"""Check that a Redis index belongs to this root, and start-up errors of its server in terms of the settings (I8)."""

from collections.abc import Mapping, Sequence
from typing import Any

from redis.exceptions import AuthenticationError, MovedError, NoPermissionError, RedisError, ResponseError

from kvtier.config.index import IndexSettings
from kvtier.errors import ConfigError, IndexUnavailable
from kvtier.index.redis.entries import Caller
from kvtier.index.redis.keys import FORMAT
from kvtier.index.redis.wire import Request, Wire, is_refusal, unavailable

COMMANDS = "+@read +@write +@connection +eval +evalsha +time +cluster|slots"  # rights that an ACL has to grant
VERSION_MIN = 7  # of Redis and Valkey; older servers have no scripts that run while the server is full


class Binding:
    """Blocks all commands until Redis has confirmed that it has this root's index, or none yet: another root's records
    would be removed as lost."""

    def __init__(self, caller: Caller, wire: Wire, meta: bytes, settings: IndexSettings) -> None:
        self._caller = caller
        self._wire = wire
        self._meta = meta
        self._settings = settings
        self._root_id = b""

    def begin(self, root_id: str) -> None:
        """Record the root. Raises ConfigError, or IndexUnavailable when Redis does not answer; the first command tries
        again."""
        self._root_id = root_id.encode()
        self._caller.gate = self._pass
        self._ask()
        self._caller.gate = None

    def look(self, root_id: str | None) -> tuple[str, str]:
        """Return the state of the index, and the fault of the server. Writes nothing. Raises ConfigError where an
        engine of that root would not start. root_id: "" for a root to be created, None for any root."""
        (version, root), _ = self._checked([])
        if version is not None and root_id is not None:
            self._check_root(version, root, root_id.encode())
        state = "to be created" if version is None else f"there, of root {(root or b'?').decode()}"
        (answer,) = self._wire.run([Request(self._meta, ("INFO", "memory"))])
        if not isinstance(answer, dict):  # a right that engines do not need
            return f"{state}; maxmemory-policy was not looked at, because this user may not run INFO", ""
        return state, self._memory_fault(answer)

    @staticmethod
    def _memory_fault(memory: Mapping[str, Any]) -> str:
        """Return what is wrong, and the fix, of a server that is full or that evicts keys; "" for any other."""
        policy, room = memory.get("maxmemory_policy", "noeviction"), memory.get("maxmemory", 0)
        if not room:
            return ""
        if policy == "noeviction":
            is_full = memory.get("used_memory", 0) > room
            return f"Redis is full (maxmemory {room}), and takes nothing new: raise maxmemory" if is_full else ""
        return (
            f"Redis evicts keys when it is full (maxmemory {room}, maxmemory-policy {policy}), and the index loses "
            "chunks then: set maxmemory-policy to noeviction"
        )

    def check(self, root_id: bytes | None) -> None:
        """Check the root again: Redis may have been emptied or replaced. Raises IndexUnavailable, and blocks all
        commands, while it is another root's."""
        if root_id != self._root_id:
            self.renew()

    def renew(self) -> None:
        """Record the root again, after Redis lost its memory."""
        if self._root_id:
            self._caller.gate = self._pass
            self._pass()

    def _pass(self) -> None:
        try:
            self._ask()
        except ConfigError as fault:
            raise IndexUnavailable(str(fault)) from fault
        self._caller.gate = None

    def _ask(self) -> None:
        meta = self._meta
        (version, root), _ = self._checked(
            [Request(meta, ("HSETNX", meta, "format", FORMAT)), Request(meta, ("HSETNX", meta, "root", self._root_id))]
        )
        self._check_root(version, root, self._root_id)

    def _check_root(self, version: bytes, root: bytes | None, own_id: bytes) -> None:
        """Raises ConfigError for an index of another format or root."""
        prefix = self._settings.prefix
        if version != FORMAT:
            fix = f"it has an index of format {version.decode()}, this is {FORMAT.decode()}: choose another prefix"
            raise ConfigError("index.prefix", prefix, fix)
        if root != own_id:
            own = f"this is {own_id.decode()} (in its owner.json)" if own_id else "this one is new"
            fix = (
                f"it has the index of root {(root or b'?').decode()}, and {own}: give each root a prefix of its "
                f"own. If that root is gone, remove the keys {prefix}:*"
            )
            raise ConfigError("index.prefix", prefix, fix)

    def _checked(self, before: Sequence[Request]) -> Sequence[Any]:
        """Return ((format, root), answer of HELLO), read after the commands `before`."""
        meta = self._meta
        asking = [Request(meta, ("HMGET", meta, "format", "root")), Request(meta, ("HELLO",))]
        try:
            answers = self._wire.run([*before, *asking])
        except IndexUnavailable as fault:
            if isinstance(fault.__cause__, RedisError):
                self._refuse(fault.__cause__)
            raise
        for place, answer in reversed(list(enumerate(answers))):
            if isinstance(answer, ResponseError):
                self._refuse(answer)
                # A full server whose root was recorded before can be used, though nothing is written.
                if place >= len(before) or not is_refusal(answer) or None in answers[-2]:
                    raise unavailable(answer)
        hello = dict(zip(answers[-1][::2], answers[-1][1::2], strict=False))
        version = hello.get(b"version", b"").decode()
        if version.partition(".")[0].isdecimal() and int(version.partition(".")[0]) < VERSION_MIN:
            fix = f"that is Redis {version}: the index needs Redis {VERSION_MIN} or newer, or Valkey"
            raise ConfigError("index.url", self._settings.url, fix)
        if b"cluster" in answers[-1] and self._settings.place.kind != "cluster":  # its mode
            raise self._no_single()
        return answers[-2:]

    def _refuse(self, error: RedisError) -> None:
        """Raises ConfigError when the settings are at fault; never with a password in it."""
        said = " ".join(str(error).split()).rstrip(".")
        url = self._settings.url
        if isinstance(error, NoPermissionError):
            fix = (
                f"this user lacks rights that the index needs ({said}): grant {COMMANDS} on ~{self._settings.prefix}:*"
            )
            raise ConfigError("index.username", self._settings.username, fix)
        if isinstance(error, AuthenticationError) or said.startswith(("NOAUTH", "WRONGPASS")):
            raise self._wrong_login(error, said)
        if "CERTIFICATE_VERIFY_FAILED" in said and "mismatch" in said:
            fix = f"the server's certificate is another host's ({said}): write the host as the certificate names it"
            raise ConfigError("index.url", url, fix)
        if "CERTIFICATE_VERIFY_FAILED" in said:
            fix = f"the server's certificate is not trusted ({said}): name the authority that signed it"
            raise ConfigError("index.tls_ca_file", str(self._settings.tls_ca_file or "") or None, fix)
        if "WRONG_VERSION_NUMBER" in said:
            raise ConfigError("index.url", url, "that port speaks without TLS: begin the URL with redis, not rediss")
        if "DB index is out of range" in said:
            fix = "the server has no database of this number: set a lower one, or raise `databases` in redis.conf"
            raise ConfigError("index.url", url, fix)
        if isinstance(error, MovedError):
            raise self._no_single()
        if "cluster support disabled" in said or "Cluster mode is not enabled" in said:
            raise ConfigError("index.url", url, "that is no cluster: begin the URL with redis://")

    def _wrong_login(self, error: RedisError, said: str) -> ConfigError:
        path = self._settings.password_file
        if isinstance(error.__cause__, ConfigError):  # the file cannot be read
            return error.__cause__
        if path is None and self._settings.password is None:
            fix = f"Redis asks for a login: {said}; set password_file, and username where it is not the default one"
            return ConfigError("index.password", None, fix)
        fix = f"Redis refuses the login with this password: {said}; correct it, or index.username"
        key, value = ("index.password", "") if path is None else ("index.password_file", str(path))
        return ConfigError(key, value, fix)

    def _no_single(self) -> ConfigError:
        fix = "that is a node of a cluster: begin the URL with redis+cluster://"
        return ConfigError("index.url", self._settings.url, fix)
