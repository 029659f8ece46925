"""Dependencies of routes: the service, and the check of the caller's role."""

from typing import Annotated, Any

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer

from kvtier.server.auth import CHALLENGE, Role
from kvtier.server.problems import FIELD_ERRORS_MAX, PROBLEMS, WHERE_CHARS_MAX, Refused
from kvtier.server.schemas import Problem
from kvtier.server.service import Service

BEARER = HTTPBearer(auto_error=False, description="One of the service's two tokens; checked before the routes.")


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Document these errors of a route, and those that any route may return."""
    every = (400, 401, 403, 405, 408, 413, 421, 422, 500, 503, 504)
    schema = {"$ref": f"#/components/schemas/{Problem.__name__}"}
    return {
        status: {"description": PROBLEMS[status][1], "content": {"application/problem+json": {"schema": schema}}}
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


def the_role(request: Request, _: Annotated[object, Security(BEARER)]) -> Role:
    role: Role | None = request.state.role
    if role is None:
        raise Refused(401, "send the header Authorization: Bearer <token>", CHALLENGE)
    return role


def an_admin(role: Annotated[Role, Depends(the_role)]) -> None:
    if role < Role.ADMIN:
        raise Refused(403, "this token may only read; send the admin's to change something")


TheService = Annotated[Service, Depends(the_service)]
TheRole = Annotated[Role, Depends(the_role)]
