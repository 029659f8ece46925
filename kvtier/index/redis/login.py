"""Logins at Redis and at Sentinels. A password in a file is read at each connect, so that it can be rotated."""

from __future__ import annotations

from typing import Literal

from redis.credentials import CredentialProvider
from redis.exceptions import AuthenticationError

from kvtier.config.index import IndexSettings
from kvtier.errors import ConfigError


class Login(CredentialProvider):
    """The user name and password that the settings name. secret: the setting with the password."""

    def __init__(self, settings: IndexSettings, secret: Literal["password", "sentinel_password"] = "password") -> None:
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


def login(settings: IndexSettings, secret: Literal["password", "sentinel_password"] = "password") -> Login | None:
    """Return the login, None where the settings have no password. Raises ConfigError for a file that has none."""
    return None if settings.secret(secret) is None else Login(settings, secret)


def password_file(settings: IndexSettings, said: str, error: Exception) -> str:
    """Name the setting and the file of the password that a server refused; "" for other errors and other passwords.

    said: the error's text; an error of a Sentinel's login is a part of it.
    """
    at_sentinel = settings.place.kind == "sentinel" and "AuthenticationError" in said
    if not at_sentinel and not isinstance(error, AuthenticationError):
        return ""
    name = "sentinel_password_file" if at_sentinel else "password_file"
    path = getattr(settings, name)
    return "" if path is None or str(path) in said else f"index.{name} = {path}"
