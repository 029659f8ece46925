"""The application: routes, errors, the page, and the middleware before them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.responses import RedirectResponse
from fastapi.staticfiles import StaticFiles
from starlette.middleware.authentication import AuthenticationMiddleware
from starlette.types import ASGIApp

from kvtier.server import routes_change, routes_look
from kvtier.server.middleware import Authentication, HeadAsGet, SecurityHeaders, TimeLimit, WholeBody, not_authenticated
from kvtier.server.problems import add_handlers
from kvtier.server.schemas import VERSION, FieldError, Problem
from kvtier.server.service import Service

PAGE = Path(__file__).parent / "ui"
OPENAPI = "/api/v1/openapi.json"
ABOUT = """Administration of a shared KV cache tier. Engines run on when this service is down.

Errors are `application/problem+json` (RFC 9457). Times are seconds since the epoch, sizes are bytes. Where tokens are
set, send one as `Authorization: Bearer ...`: the read token permits reading, the admin token everything.
"""
TAGS = [
    {"name": "stats", "description": "Fill, rates and latencies of the tier."},
    {"name": "workers", "description": "Engines and their last reports."},
    {"name": "lookup", "description": "Stored part of a prompt."},
    {"name": "segments", "description": "Segment sets in the root."},
    {"name": "pins", "description": "Protection from eviction."},
    {"name": "quotas", "description": "Limits of tenants and namespaces."},
    {"name": "eviction", "description": "Eviction by request."},
    {"name": "verify", "description": "Background jobs that read every record and check every checksum."},
    {"name": "health", "description": "Liveness, readiness and metrics of the service."},
]


def make_app(service: Service) -> ASGIApp:
    settings = service.settings.server
    limited = TimeLimit(make_routes(service), settings.timeout_s)
    whole = WholeBody(limited, settings.body_bytes_max, settings.timeout_s)
    known = AuthenticationMiddleware(whole, Authentication(service.tokens), not_authenticated)
    return SecurityHeaders(HeadAsGet(known), is_tls=settings.tls_cert is not None)


def make_routes(service: Service) -> FastAPI:
    """Return the application without middleware."""

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(service.watch())
        yield
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        service.close()

    app = FastAPI(
        title="kvtier",
        version=VERSION,
        description=ABOUT,
        openapi_url=OPENAPI,
        docs_url=None,
        redoc_url=None,
        openapi_tags=TAGS,
        lifespan=life,
        redirect_slashes=False,
        generate_unique_id_function=lambda route: route.name,
    )
    app.state.service = service
    add_handlers(app)
    for router in (routes_look.router, routes_look.paged, routes_look.health, routes_change.router):
        app.include_router(router)

    @app.get("/", include_in_schema=False)
    @app.get("/ui", include_in_schema=False)
    def to_the_page() -> RedirectResponse:
        return RedirectResponse("ui/")  # relative: a proxy may serve this below a prefix that it strips

    app.mount("/ui", StaticFiles(directory=PAGE, html=True, check_dir=False))

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, service.tokens().are_used)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
    return app


def _document(app: FastAPI, has_tokens: bool) -> dict[str, Any]:
    """Return the OpenAPI document, with this service's errors instead of FastAPI's, and tokens only if they are
    used."""
    document: dict[str, Any] = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes, tags=app.openapi_tags
    )
    schemas = document["components"]["schemas"]
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    for model in (Problem, FieldError):
        made = model.model_json_schema(ref_template="#/components/schemas/{model}")
        made.pop("$defs", None)
        schemas[model.__name__] = made
    if not has_tokens:
        del document["components"]["securitySchemes"]
        for path in document["paths"].values():
            for operation in path.values():
                operation.pop("security", None)
    return document
