"""One call of every route that is right, for tests that hold for all of them. A route that is missing here fails
tests/server/test_all_routes.py."""

from collections.abc import Callable
from typing import Any, NamedTuple

from tests.server.serving import JOB, OWNER, PROMPT, Serving


class Call(NamedTuple):
    """path: the route's own. made: path and body of a call; None: no body. status: of a right call."""

    method: str
    path: str
    status: int
    is_change: bool
    made: Callable[[Serving], tuple[str, Any]]
    is_open: bool = False

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def plain(path: str, status: int = 200) -> Call:
    return Call("GET", path, status, False, lambda served: (path, None))


def _pin(served: Serving) -> tuple[str, Any]:
    return "/api/v1/pins", {"namespace": served.filled.namespace, "tokens": PROMPT, "label": "system prompt"}


def _made_pin(served: Serving) -> tuple[str, Any]:
    path, body = _pin(served)
    return f"{path}/{served.call('POST', path, json=body).json()['id']}", None


def _made_quota(kind: str, name: Callable[[Serving], str]) -> Callable[[Serving], tuple[str, Any]]:
    def make(served: Serving) -> tuple[str, Any]:
        path = f"/api/v1/quotas/{kind}/{name(served)}"
        assert served.call("PUT", path, json={"quota_bytes": 8 << 20}).status_code == 200
        return path, None

    return make


def _made_job(served: Serving) -> tuple[str, Any]:
    return f"/api/v1/verify/{served.call('POST', '/api/v1/verify').json()['id']}", None


CALLS = (
    plain("/healthz")._replace(is_open=True),
    plain("/readyz")._replace(is_open=True),
    plain("/", 307)._replace(is_open=True),
    plain("/ui", 307)._replace(is_open=True),
    plain("/api/v1/openapi.json")._replace(is_open=True),
    plain("/metrics"),
    plain("/api/v1/overview"),
    plain("/api/v1/stats"),
    plain("/api/v1/history"),
    plain("/api/v1/workers"),
    Call("GET", "/api/v1/workers/{owner}", 200, False, lambda served: (f"/api/v1/workers/{OWNER}", None)),
    Call("POST", "/api/v1/lookup", 200, False, lambda served: ("/api/v1/lookup", {"tokens": PROMPT})),
    plain("/api/v1/segments"),
    Call("GET", "/api/v1/segments/{set_id}", 200, False, lambda s: (f"/api/v1/segments/{s.set_id()}", None)),
    plain("/api/v1/pins"),
    Call("POST", "/api/v1/pins", 201, True, _pin),
    Call("DELETE", "/api/v1/pins/{pin_id}", 204, True, _made_pin),
    plain("/api/v1/quotas"),
    Call(
        "PUT",
        "/api/v1/quotas/tenants/{label}",
        200,
        True,
        lambda served: ("/api/v1/quotas/tenants/acme", {"quota_bytes": 1 << 30}),
    ),
    Call("DELETE", "/api/v1/quotas/tenants/{label}", 204, True, _made_quota("tenants", lambda served: "acme")),
    Call(
        "PUT",
        "/api/v1/quotas/namespaces/{namespace}",
        200,
        True,
        lambda served: (f"/api/v1/quotas/namespaces/{served.filled.namespace}", {"quota_bytes": None}),
    ),
    Call(
        "DELETE",
        "/api/v1/quotas/namespaces/{namespace}",
        204,
        True,
        _made_quota("namespaces", lambda served: served.filled.namespace),
    ),
    Call("POST", "/api/v1/evict", 200, True, lambda served: ("/api/v1/evict", {"n_bytes": 1})),
    Call("POST", "/api/v1/clear", 200, True, lambda served: ("/api/v1/clear", {})),
    plain("/api/v1/verify"),
    Call("POST", "/api/v1/verify", 202, True, lambda served: ("/api/v1/verify", None)),
    Call("GET", "/api/v1/verify/{job_id}", 200, False, _made_job),
    Call("POST", "/api/v1/verify/{job_id}/cancel", 200, True, lambda served: (f"{_made_job(served)[0]}/cancel", None)),
)

NOWHERE = (
    ("GET", "/api/v1/workers/nobody"),
    ("GET", "/api/v1/segments/" + "f" * 16),
    ("DELETE", f"/api/v1/pins/{JOB}"),
    ("DELETE", "/api/v1/quotas/tenants/nobody"),
    ("DELETE", f"/api/v1/quotas/namespaces/{JOB}"),
    ("GET", f"/api/v1/verify/{JOB}"),
    ("POST", f"/api/v1/verify/{JOB}/cancel"),
    ("GET", "/api/v2/stats"),
    ("GET", "/x"),
    ("GET", "/" + "a" * 10_000),  # the answer repeats no more of it than names it
    ("GET", "/ui/nothing.js"),
    ("GET", "/ui/../../../etc/passwd"),
)
"""What is not there, of every kind of thing."""
