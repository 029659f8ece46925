"""ASGI middleware before the routes: authentication, limits of size and time, and headers on every answer.

    SecurityHeaders( HeadAsGet( AuthenticationMiddleware( WholeBody( TimeLimit( routes )))))

A request without a valid token costs nothing but reading its head: its body is never read.
"""

import asyncio
import logging
from collections.abc import Callable

from starlette.authentication import AuthenticationBackend, AuthenticationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvtier.server.auth import Tokens, role_of
from kvtier.server.problems import RETRY, Refused, problem, send_problem

log = logging.getLogger("kvtier")

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
ANSWER_POLICY = "default-src 'none'; frame-ancestors 'none'"
SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
HSTS = "max-age=31536000"
# Multiple of its limit up to which a body is read before it is refused: a client that is still sending sees no answer.
READ_FACTOR = 16


class SecurityHeaders:
    def __init__(self, app: ASGIApp, is_tls: bool) -> None:
        self._app = app
        self._is_tls = is_tls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_page = scope["path"] == "/ui" or scope["path"].startswith("/ui/")

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers[name] = value
                headers["Content-Security-Policy"] = PAGE_POLICY if is_page else ANSWER_POLICY
                headers["Cache-Control"] = "no-cache" if is_page else "no-store"
                if self._is_tls:
                    headers["Strict-Transport-Security"] = HSTS
            await send(message)

        await self._app(scope, receive, with_headers)


class HeadAsGet:
    """Answers HEAD like GET without the body: load balancers and monitors use it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def without_body(message: Message) -> None:
            if message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        await self._app({**scope, "method": "GET"}, receive, without_body)


class Authentication(AuthenticationBackend):
    """Check of a request's token, for Starlette's AuthenticationMiddleware. Notes the role in the request's state."""

    def __init__(self, tokens: Callable[[], Tokens]) -> None:
        self._tokens = tokens

    async def authenticate(self, conn: HTTPConnection) -> None:
        try:
            conn.state.role = role_of(conn.headers, conn.scope["path"], self._tokens())
        except Refused as refused:
            raise AuthenticationError from refused


def not_authenticated(conn: HTTPConnection, error: AuthenticationError) -> Response:
    refused = error.__cause__
    assert isinstance(refused, Refused)
    return problem(refused.status, refused.detail, refused.headers)


# Not Starlette's RequestBodyLimitMiddleware: it has no deadline, answers in plain text, and lets a route that reads no
# body do its work before it refuses the request.
class WholeBody:
    """Reader of request bodies, before the routes: at most `bytes_max`, within `timeout_s`."""

    def __init__(self, app: ASGIApp, bytes_max: int, timeout_s: float) -> None:
        self._app = app
        self._bytes_max = bytes_max
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                body = await self._read(Headers(scope=scope), receive)
        except Refused as refused:
            await send_problem(scope, receive, send, refused)
            return
        except TimeoutError:
            slow = Refused(408, f"the request did not come within {self._timeout_s:g} s", {"Connection": "close"})
            await send_problem(scope, receive, send, slow)
            return
        if body is None:
            return
        is_replayed = False

        async def replay() -> Message:
            nonlocal is_replayed
            if is_replayed:
                return await receive()
            is_replayed = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """Return the body; None if the client disconnected. Raises Refused."""
        too_large = Refused(413, f"a request may have {self._bytes_max} bytes", {"Connection": "close"})
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 18:
            raise Refused(400, "its Content-Length is no number", {"Connection": "close"})
        most = READ_FACTOR * self._bytes_max
        if int(length) > (self._bytes_max if "expect" in headers else most):
            raise too_large
        body, n_read = bytearray(), 0
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            n_read += len(message.get("body", b""))
            if n_read <= self._bytes_max:
                body += message.get("body", b"")
            has_more = message.get("more_body", False)
            if n_read > (most if has_more else self._bytes_max):
                raise too_large
            if not has_more:
                return bytes(body)


# Neither Starlette nor uvicorn has a deadline of answers.
class TimeLimit:
    """Deadline of answers: one that has not begun after `timeout_s` is given up. Its work ends by itself: index and
    storage have deadlines of their own, and a thread cannot be stopped."""

    def __init__(self, app: ASGIApp, timeout_s: float) -> None:
        self._app = app
        self._timeout_s = timeout_s
        self._late: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = asyncio.Event()
        is_given_up = False

        async def send_in_time(message: Message) -> None:
            has_begun.set()
            if not is_given_up:
                await send(message)

        work = asyncio.ensure_future(self._app(scope, receive, send_in_time))
        begun = asyncio.ensure_future(has_begun.wait())
        try:
            await asyncio.wait({work, begun}, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not has_begun.is_set():
                is_given_up = True
                self._late.add(work)
                work.add_done_callback(self._forget)
                late = Refused(504, f"no answer within {self._timeout_s:g} s", RETRY)
                await send_problem(scope, receive, send, late)
                return
            await work
        finally:
            begun.cancel()

    def _forget(self, work: asyncio.Task[None]) -> None:
        self._late.discard(work)
        fault = None if work.cancelled() else work.exception()
        if fault is not None:  # its client is gone, so the server does not log it
            log.error("a request failed after its time limit", exc_info=fault)
