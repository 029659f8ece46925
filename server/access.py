"""Dependencies of routes: the service, and the check of the caller's role."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer

from kvtier.admin.opened import Opened
from kvtier.server.auth import CHALLENGE, Role
from kvtier.server.problems import FIELD_ERRORS_MAX, WHERE_CHARS_MAX, Refused
from kvtier.server.schemas import Problem
from kvtier.server.service import Service

BEARER = HTTPBearer(auto_error=False, description="One of the service's two tokens; checked before the routes.")

DESCRIPTIONS = {
    400: "The request is malformed.",
    401: "No token, or an unknown one.",
    403: "The token is read-only, or the request comes from another site's page.",
    404: "There is no such thing.",
    405: "There is no such method here.",
    408: "The request did not come in time.",
    409: "It cannot be done as things are.",
    413: "The request is too large.",
    415: "The Content-Type of the body is not application/json.",
    421: "Without a token, the service answers to the names of loopback only.",
    422: "The request does not fit the schema.",
    429: "Another operation is running; try again.",
    500: "A bug.",
    503: "The index or the storage does not answer; try again.",
    504: "The answer took too long.",
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Document these errors of a route, and those that any route may return."""
    every = (400, 401, 403, 405, 408, 413, 421, 422, 500, 503, 504)
    schema = {"$ref": f"#/components/schemas/{Problem.__name__}"}
    return {
        status: {"description": DESCRIPTIONS[status], "content": {"application/problem+json": {"schema": schema}}}
        for status in sorted({*every, *statuses})
    }


def no_parameters(request: Request) -> None:
    """Refuse a query, because the route has none: a client that sends one expects an effect."""
    names = ", ".join(name[:WHERE_CHARS_MAX] for name in list(request.query_params)[:FIELD_ERRORS_MAX])
    if names:
        raise Refused(422, f"{request.url.path} takes no parameters in its query; unknown: {names}")


async def no_values(request: Request) -> None:
    """Refuse a body with values, because the route takes none: a client that sends some expects an effect."""
    if (await request.body()).strip() not in (b"", b"{}", b"null"):
        raise Refused(422, f"body: {request.url.path} takes no values; valid names: none")


def the_service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def the_root(service: Annotated[Service, Depends(the_service)]) -> Opened:
    return service.opened


def the_role(request: Request, _: Annotated[object, Security(BEARER)]) -> Role:
    role: Role | None = request.state.role
    if role is None:
        raise Refused(401, "send the header Authorization: Bearer <token>", CHALLENGE)
    return role


def an_admin(role: Annotated[Role, Depends(the_role)]) -> Role:
    if role < Role.ADMIN:
        raise Refused(403, "this token may only look; it takes the admin's to change something")
    return role


TheService = Annotated[Service, Depends(the_service)]
TheRoot = Annotated[Opened, Depends(the_root)]
TheRole = Annotated[Role, Depends(the_role)]
AnAdmin = Annotated[Role, Depends(an_admin)]
