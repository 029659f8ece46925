"""Settings of the admin service (`kvtier serve`)."""

import ipaddress
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field, SecretStr

from kvtier.config.types import FROZEN, AbsolutePath, Bytes, Count, Seconds, SecretPath, Timeout, no_bool
from kvtier.errors import ConfigError

TOKEN_CHARS_MIN = 16
HISTORY_S_MIN = 0.1  # least interval of points of the dashboard's curves, seconds

Port = Annotated[int, BeforeValidator(no_bool), Field(ge=0, le=65535)]


class ServerSettings(BaseModel):
    """Settings of the admin service. host, port: address to listen on; port 0 takes a free one. Without a token, host
    must be a loopback address.

    admin_token, read_token: tokens for all requests, and for those that only read. admin_token_file, read_token_file:
    files with one line, the token. tls_cert, tls_key: PEM files; with them the service accepts https only.
    body_bytes_max: limit of a request's body. timeout_s: limit of the time until the body has arrived, and until it is
    answered. connections_max: limit of connections at a time; one address has at most half of them. history_s: interval
    of points of the dashboard's curves.
    """

    model_config = FROZEN
    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    port: Port = 8474
    admin_token: SecretStr | None = None
    admin_token_file: SecretPath | None = None
    read_token: SecretStr | None = None
    read_token_file: SecretPath | None = None
    tls_cert: AbsolutePath | None = None
    tls_key: SecretPath | None = None
    body_bytes_max: Bytes = 4 << 20
    timeout_s: Timeout = 30.0
    connections_max: Count = 256
    history_s: Annotated[Seconds, Field(ge=HISTORY_S_MIN)] = 5.0

    @property
    def is_loopback(self) -> bool:
        """Return whether only processes of this machine can reach the service. A name other than localhost may resolve
        to any address."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def check(self) -> None:
        """Raises ConfigError for settings that do not go together."""
        for name in ("admin_token", "read_token"):
            if getattr(self, name) is not None and getattr(self, f"{name}_file") is not None:
                path = str(getattr(self, f"{name}_file"))
                raise ConfigError(f"server.{name}_file", path, f"server.{name} is set too: leave one of them out")
        if (self.tls_cert is None) != (self.tls_key is None):
            missing, given = ("tls_key", self.tls_cert) if self.tls_key is None else ("tls_cert", self.tls_key)
            fix = f"server.{missing} is not set: TLS needs both, the certificate and its key"
            raise ConfigError(f"server.{'tls_cert' if missing == 'tls_key' else 'tls_key'}", str(given), fix)
        has_read = self.read_token is not None or self.read_token_file is not None
        if has_read and not self.has_token:
            fix = "without server.admin_token every change is refused: set that too, or admin_token_file"
            raise ConfigError("server.read_token", "***", fix)
        if not self.has_token and not self.is_loopback:
            raise self.too_open(self.host)

    @property
    def has_token(self) -> bool:
        """Return True if there is an admin token. Without it there is no other token."""
        return self.admin_token is not None or self.admin_token_file is not None

    def too_open(self, host: str) -> ConfigError:
        fix = (
            "others could reach it there, and no token is set: set server.admin_token_file (or the environment "
            "variable KVTIER_SERVER__ADMIN_TOKEN), or server.host to 127.0.0.1"
        )
        return ConfigError("server.host", host, fix)

    def tokens(self) -> tuple[str | None, str | None]:
        """Return (the admin's token, the read-only token). Raises ConfigError, never with a token in it."""
        admin = _token("server.admin_token", self.admin_token, self.admin_token_file)
        read = _token("server.read_token", self.read_token, self.read_token_file)
        if admin is not None and admin == read:
            raise ConfigError("server.read_token", "***", "it is the admin's token too: make another one")
        return admin, read


def _token(key: str, given: SecretStr | None, path: Path | None) -> str | None:
    if path is not None:
        key += "_file"
        try:
            text = path.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it holds other characters than ASCII"
            raise ConfigError(key, str(path), f"no token can be read there: {reason}") from None
    elif given is not None:
        text = given.get_secret_value()
    else:
        return None
    if len(text) < TOKEN_CHARS_MIN or not all("!" <= char <= "~" for char in text):
        fix = (
            f"a token is one word of at least {TOKEN_CHARS_MIN} printable ASCII characters; make one with "
            "`openssl rand -hex 32`"
        )
        raise ConfigError(key, "***" if path is None else str(path), fix)
    return text
