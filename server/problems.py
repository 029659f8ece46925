"""Errors as answers: one kind of document for all of them (RFC 9457), anywhere in the service."""

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Mount
from starlette.types import Receive, Scope, Send

from kvtier.admin.opened import AdminRefusal, Busy, NotThere
from kvtier.errors import ConfigError, IndexUnavailable, KVTierError
from kvtier.server.schemas import FieldError, Problem

log = logging.getLogger("kvtier")

MEDIA_TYPE = "application/problem+json"
JSON = "application/json"
METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")  # that a route may have
RETRY = {"Retry-After": "2"}  # seconds
FIELD_ERRORS_MAX = 20
WHERE_CHARS_MAX = 100  # characters shown of a field's name, which the client chooses

PROBLEMS = {  # status -> title, description
    400: ("Bad request", "The request is malformed."),
    401: ("No valid token", "No token, or an unknown one."),
    403: ("Not allowed", "The token is read-only, or the request comes from another site's page."),
    404: ("Not found", "The object that the request names does not exist."),
    405: ("Method not allowed", "This path does not have this method."),
    408: ("Request too slow", "The request did not come in time."),
    409: ("Conflict", "The current state of the tier does not allow the operation."),
    413: ("Request too large", "The request is too large."),
    415: ("Unsupported media type", "The Content-Type of the body is not application/json."),
    421: ("Misdirected request", "Without a token, the service answers to the names of loopback only."),
    422: ("Request not understood", "The request does not fit the schema."),
    429: ("Too many requests", "Another operation is running; try again."),
    500: ("Internal error", "A bug."),
    503: ("Not available", "The index or the storage does not answer; try again."),
    504: ("Took too long", "The answer took too long."),
}


class Refused(Exception):
    """A request that cannot be done, with the problem that says so."""

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.headers = dict(headers or {})


def problem(
    status: int, detail: str = "", headers: Mapping[str, str] | None = None, errors: list[FieldError] | None = None
) -> Response:
    title, _ = PROBLEMS.get(status, ("Error", ""))
    kind = title.lower().replace(" ", "-")
    said = Problem(type=f"urn:kvtier:problem:{kind}", title=title, status=status, detail=detail, errors=errors or [])
    return Response(said.model_dump_json(), status, dict(headers or {}), MEDIA_TYPE)


async def send_problem(scope: Scope, receive: Receive, send: Send, refused: Refused) -> None:
    await problem(refused.status, refused.detail, refused.headers)(scope, receive, send)


def add_handlers(app: FastAPI) -> None:
    """Convert every exception that can leave a route to a problem. The server also logs bugs."""
    handlers: dict[Any, Any] = {
        Refused: _refused,
        HTTPException: _http,
        RequestValidationError: _invalid,
        AdminRefusal: _cannot,
        KVTierError: _fault,
        OSError: _fault,
        Exception: _bug,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


async def _refused(request: Request, refused: Refused) -> Response:
    return problem(refused.status, refused.detail, refused.headers)


async def _cannot(request: Request, refusal: AdminRefusal) -> Response:
    if isinstance(refusal, Busy):
        return problem(429, str(refusal), RETRY)
    return problem(404 if isinstance(refusal, NotThere) else 409, str(refusal))


async def _http(request: Request, error: HTTPException) -> Response:
    path = request.url.path[:WHERE_CHARS_MAX]
    if error.status_code == 405:
        allowed = _allowed(request)
        return problem(405, f"{path} takes another method: {allowed}", {"Allow": allowed})
    detail = f"there is nothing at {path}" if error.status_code == 404 else str(error.detail)
    return problem(error.status_code, detail, error.headers)


def _allowed(request: Request) -> str:
    """Return the methods of all routes of this path: the exception has only those of one. Paths without a route are the
    page's files."""
    routes = [route for route in request.app.routes if not isinstance(route, Mount)]
    methods = {
        method
        for method in METHODS
        if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in routes)
    } or {"GET"}
    return ", ".join(sorted(methods | {"HEAD"} if "GET" in methods else methods))


async def _invalid(request: Request, error: RequestValidationError) -> Response:
    """Answer with the place and the fault, but not the value: it may be a user's prompt."""
    if error.body and isinstance(error.body, bytes):  # FastAPI has not parsed it
        return problem(415, "the body must be JSON: send the header Content-Type: application/json", {"Accept": JSON})
    found = [
        FieldError(where=".".join(map(str, one["loc"]))[:WHERE_CHARS_MAX], what=_what(one))
        for one in error.errors()[:FIELD_ERRORS_MAX]
    ]
    more = f" (and {len(error.errors()) - 1} more)" if len(error.errors()) > 1 else ""
    return problem(422, f"{found[0].where}: {found[0].what}{more}", errors=found)


def _what(fault: Mapping[str, Any]) -> str:
    if fault["type"] == "missing" and tuple(fault["loc"]) == ("body",):
        return "it is missing: send an object with names and values, as GET /api/v1/openapi.json describes it"
    return str(fault["msg"])


async def _fault(request: Request, fault: Exception) -> Response:
    """Return 503 if the index or the storage does not answer, or the root belongs to another deployment now."""
    if isinstance(fault, IndexUnavailable):
        return problem(503, f"the index does not answer: {fault}", RETRY)
    if not isinstance(fault, ConfigError):
        log.warning("%s %s: %s", request.method, request.url.path, fault)
    return problem(503, str(fault), RETRY)


async def _bug(request: Request, fault: Exception) -> Response:
    return problem(500, "a bug of kvtier; the service's log says more")
