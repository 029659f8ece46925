"""Authentication: bearer tokens and two roles. Without tokens, every client on this machine has all rights.

Without a token only the address protects the service, and a browser on this machine reaches loopback for any web page.
So the Host header must then name loopback (a page whose own name resolves to 127.0.0.1 sends that name), and a request
that names another origin is refused. With tokens neither is checked: a browser never adds them by itself.
"""

import hmac
from dataclasses import dataclass
from enum import IntEnum
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers

from kvtier.server.problems import Refused

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
CHALLENGE = {"WWW-Authenticate": 'Bearer realm="kvtier"'}
# Paths that need no token; none of them shows data of the tier.
OPEN_PATHS = ("/", "/healthz", "/readyz", "/api/v1/openapi.json", "/ui")


class Role(IntEnum):
    READ_ONLY = 1
    ADMIN = 2


@dataclass(frozen=True, slots=True, repr=False)
class Tokens:
    """The two tokens. admin None: no tokens at all."""

    admin: str | None = None
    read: str | None = None

    @property
    def are_used(self) -> bool:
        return self.admin is not None

    def role_of(self, given: str) -> Role | None:
        """Return the role of a token, compared in constant time."""
        is_admin = self.admin is not None and _equal(given, self.admin)
        is_reader = self.read is not None and _equal(given, self.read)
        return Role.ADMIN if is_admin else Role.READ_ONLY if is_reader else None


def role_of(headers: Headers, path: str, tokens: Tokens) -> Role | None:
    """Return the role of a request; None if tokens are not used. Raises Refused."""
    if not tokens.are_used:
        _check_host(headers)
        _check_origin(headers)
        return Role.ADMIN
    if path in OPEN_PATHS or path.startswith("/ui/"):
        return None
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not given:
        raise Refused(401, "send the header Authorization: Bearer <token>", CHALLENGE)
    role = tokens.role_of(given.strip())
    if role is None:
        challenge = {"WWW-Authenticate": CHALLENGE["WWW-Authenticate"] + ', error="invalid_token"'}
        raise Refused(401, "this token is not the service's", challenge)
    return role


def _equal(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), expected.encode())


def _check_host(headers: Headers) -> None:
    hosts = headers.getlist("host")
    if len(hosts) != 1 or _split(f"//{hosts[0]}").hostname not in LOOPBACK_NAMES:
        names = ", ".join(LOOPBACK_NAMES)
        raise Refused(421, f"without a token this service answers to the names {names} only; set server.admin_token")


def _check_origin(headers: Headers) -> None:
    """Refuse a browser's request that comes from a page of another origin."""
    origin, site = headers.get("origin"), headers.get("sec-fetch-site", "none")
    is_own = origin is None or _split(origin).netloc == headers.get("host")
    if not is_own or site not in ("none", "same-origin"):
        raise Refused(403, "this request comes from another site's page")


def _split(url: str) -> SplitResult:
    """Split a URL. Return empty parts if it is malformed."""
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")
