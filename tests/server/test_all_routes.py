"""What holds for every route: it has a test, tokens and roles count, errors are problems, a dead index is a 503."""

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urljoin

import pytest
from fastapi.routing import APIRoute
from pytest import Subtests
from starlette.routing import Mount, Route

from kvtier.server.app import make_routes
from kvtier.server.problems import MEDIA_TYPE
from tests.server.calls import CALLS, NOWHERE
from tests.server.serving import ADMIN, READER, Serving

GUARDED = [call for call in CALLS if not call.is_open]
CHANGES = [call for call in CALLS if call.is_change]


def assert_problem(answer: Any, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == MEDIA_TYPE
    said: dict[str, Any] = answer.json()
    assert said["status"] == status and said["title"] and said["type"].startswith("urn:kvtier:problem:")
    return said


def routes_of(app: Any) -> set[str]:
    """All of an application's."""
    found: set[str] = set()
    for route in app.routes:
        if isinstance(route, Mount):
            assert route.path == "/ui", "the page's files are not JSON: they have tests of their own"
        elif hasattr(route, "original_router"):  # as FastAPI includes one from 0.137 on
            found |= routes_of(route.original_router)
        else:
            assert isinstance(route, APIRoute | Route), f"{route.path} may have routes that nobody looks at"
            found |= {f"{method} {route.path}" for method in (route.methods or set()) - {"HEAD"}}
    return found


def test_every_route_has_a_call(served: Serving) -> None:
    app = make_routes(served.service)
    documented = {f"{method.upper()} {path}" for path, of in app.openapi()["paths"].items() for method in of}
    assert documented <= set(map(str, CALLS)), "these have no test"
    assert routes_of(app) | documented == set(map(str, CALLS))


def test_the_document_says_of_each_operation_what_it_is_and_how_it_is_asked(
    served: Serving, subtests: Subtests
) -> None:
    document = make_routes(served.service).openapi()
    groups = {tag["name"] for tag in document["tags"] if tag["description"]}
    schemas = document["components"]["schemas"]
    seen = set()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            with subtests.test(call=f"{method} {path}"):
                made_up = operation["operationId"].replace("_", " ").title()  # FastAPI's, of the function's name
                assert operation["summary"] != made_up and operation["description"]
                assert len(operation["tags"]) == 1 and set(operation["tags"]) <= groups
                seen.add(operation["summary"])
                if "requestBody" in operation:
                    schema = operation["requestBody"]["content"]["application/json"]["schema"]
                    for one in schema.get("oneOf", [schema]):
                        for example in schemas[one["$ref"].rpartition("/")[2]]["examples"]:
                            url = path.format(label="search", namespace=served.filled.namespace)
                            answer = served.call(method.upper(), url, json=example)
                            assert answer.status_code in (200, 201, 404, 409), answer.text  # none is malformed
    assert len(seen) == sum(map(len, document["paths"].values())), "each has a summary of its own"


def test_head_is_answered_as_get_is_without_the_body(served: Serving, subtests: Subtests) -> None:
    looks = [call for call in CALLS if call.method == "GET"]
    files = [("/ui/", 200), ("/ui/app.js", 200), ("/nothing", 404), ("/api/v1/evict", 405)]
    for path, status in [(call.made(served)[0], call.status) for call in looks] + files:
        with subtests.test(path=path):
            get, head = served.call("GET", path), served.call("HEAD", path)
            assert get.status_code == head.status_code == status and head.content == b""
            for name in ("location", "content-type", "content-security-policy", "allow"):
                assert get.headers.get(name) == head.headers.get(name)
    assert served.call("HEAD", "/metrics", None).status_code == 401


def test_redirects_stay_below_the_prefix_of_a_proxy(served: Serving) -> None:
    """The proxy strips the prefix, so the service does not know it."""
    for path, leads_to in (("/kv/", "/kv/ui/"), ("/kv/ui", "/kv/ui/"), ("/", "/ui/")):
        answer = served.call("GET", path.removeprefix("/kv"))
        assert urljoin(f"https://proxy{path}", answer.headers["location"]) == f"https://proxy{leads_to}"


def test_a_right_call(served: Serving, subtests: Subtests) -> None:
    for call in CALLS:
        with subtests.test(call=str(call)):
            path, body = call.made(served)
            answer = served.call(call.method, path, json=body)
            assert answer.status_code == call.status, answer.text
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_without_a_token_or_with_a_wrong_one(served: Serving, subtests: Subtests) -> None:
    wrong = ["Bearer wrong", f"Bearer {ADMIN[:-1]}", f"Bearer {ADMIN}x", "Bearer", "Bearer \u00e9", "", ADMIN]
    wrong += [f"Basic {ADMIN}", f"Token {ADMIN}", f"Bearer {ADMIN} {ADMIN}"]
    for call in GUARDED:
        with subtests.test(call=str(call)):
            path, body = call.made(served)
            for text in (None, *wrong):
                headers = {} if text is None else {"Authorization": text.encode()}
                answer = served.client.request(call.method, path, json=body, headers=headers)
                assert_problem(answer, 401)
                assert answer.headers["www-authenticate"].startswith("Bearer")


def test_readers_may_only_look(served: Serving, subtests: Subtests) -> None:
    for call in CALLS:
        with subtests.test(call=str(call)):
            path, body = call.made(served)
            answer = served.call(call.method, path, READER, json=body)
            if call.is_change:
                assert_problem(answer, 403)
            else:
                assert answer.status_code == call.status


def test_a_dead_index_is_a_problem_and_its_return_is_seen(served: Serving, subtests: Subtests) -> None:
    for call in GUARDED:
        with subtests.test(call=str(call)):
            path, body = call.made(served)
            served.index.is_down = True
            served.service.changed()  # after it: the service looks by itself too
            try:
                answer = served.call(call.method, path, json=body)
                ready = served.call("GET", "/readyz")
            finally:
                served.index.is_down = False
            if call.path == "/metrics":
                assert answer.status_code == 200 and "kvtier_index_up 0.0" in answer.text
            elif call.path.startswith(("/api/v1/verify", "/api/v1/history")):
                assert answer.status_code == call.status  # these ask no index
            else:
                assert "does not answer" in assert_problem(answer, 503)["detail"]
                assert int(answer.headers["retry-after"]) > 0
            assert ready.status_code == 503 and ready.json()["index"] == "not available"
            assert served.call("GET", "/readyz").status_code == 200
            if call.method == "GET":
                assert served.call(call.method, path).status_code == call.status


def test_an_oversized_body(served: Serving, subtests: Subtests) -> None:
    limit = served.service.settings.server.body_bytes_max

    def pieces() -> Iterator[bytes]:  # without a Content-Length
        yield from (b"x" * (limit // 4) for _ in range(5))

    for call in CALLS:
        with subtests.test(call=str(call)):
            path, _ = call.made(served)
            assert_problem(served.call(call.method, path, content=b"x" * (limit + 1)), 413)
            assert_problem(served.call(call.method, path, content=pieces()), 413)


def test_a_malformed_body(served: Serving, subtests: Subtests) -> None:
    bad = (b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"surely": "unknown"}', b"[" * 100_000)
    for call in CALLS:
        path, body = call.made(served)
        if body is None:
            continue
        for content in bad:
            with subtests.test(call=str(call), content=content[:20]):
                answer = served.call(call.method, path, content=content, headers={"Content-Type": "application/json"})
                assert_problem(answer, 400 if content.startswith(b"[[") else 422)
        for kind in ("text/plain", "application/x-www-form-urlencoded", "nonsense", None):
            with subtests.test(call=str(call), kind=kind):
                headers = {} if kind is None else {"Content-Type": kind}
                answer = served.call(call.method, path, content=json.dumps(body), headers=headers)
                assert "Content-Type: application/json" in assert_problem(answer, 415)["detail"]
                assert answer.headers["accept"] == "application/json"


def test_an_unknown_name_is_answered_with_those_there_are(served: Serving, subtests: Subtests) -> None:
    schemas = make_routes(served.service).openapi()["components"]["schemas"]
    for call, name in (
        ("evict", "Eviction"),
        ("clear", "Clearing"),
        ("pins", "PinRequest"),
        ("quotas/tenants/acme", "Quota"),
        ("lookup", "TokensToLookUp"),
        ("lookup", "TextToLookUp"),
    ):
        with subtests.test(call=call, name=name):
            (*_, body) = schemas[name]["examples"]
            method = "PUT" if name == "Quota" else "POST"
            answer = served.call(method, f"/api/v1/{call}", json={**body, "tokenz": "a secret", "x" * 500: 1})
            said = assert_problem(answer, 422)
            assert said["detail"].startswith("body") and said["detail"] == f"{said['errors'][0]['where']}: " + (
                f"unknown: tokenz, {'x' * 50}; valid names: {', '.join(schemas[name]['properties'])}"
            )
            assert "secret" not in answer.text
    wrong = served.call("POST", "/api/v1/evict", json={"prefix": {"namespace": "0" * 32, "token": [1]}})
    assert (
        assert_problem(wrong, 422)["detail"]
        == "body.prefix: unknown: token; valid names: namespace, tokens, cache_salt"
    )


def test_a_body_that_is_no_object_is_answered_with_the_names(served: Serving) -> None:
    names = "valid names: n_bytes, unused_s, namespace, tenant, prefix, dry_run"
    for body in ([], "all", 7):
        assert names in assert_problem(served.call("POST", "/api/v1/evict", json=body), 422)["detail"]
    assert "send an object" in assert_problem(served.call("POST", "/api/v1/evict"), 422)["detail"]


def test_what_takes_no_values_refuses_them(served: Serving) -> None:
    """A verify job of one namespace was answered with one of everything."""
    said = assert_problem(served.call("POST", "/api/v1/verify", json={"namespace": "0" * 32}), 422)
    assert said["detail"] == "body: /api/v1/verify takes no values; valid names: none"
    job = served.call("POST", "/api/v1/verify", json={})
    assert job.status_code == 202
    path = f"/api/v1/verify/{job.json()['id']}/cancel"
    assert "valid names: none" in assert_problem(served.call("POST", path, json={"now": True}), 422)["detail"]
    assert served.call("POST", path).status_code == 200


def test_a_parameter_that_does_nothing_is_refused(served: Serving, subtests: Subtests) -> None:
    for call in CALLS:
        path, body = call.made(served)
        if not call.path.startswith("/api/v1/") or call.path.endswith("openapi.json"):
            continue
        with subtests.test(call=str(call)):
            said = assert_problem(served.call(call.method, path, json=body, params={"tenent": "search"}), 422)
            assert "tenent" in said["detail"] and (
                "valid names: namespace, tenant, is_open, after, limit" in said["detail"]
                if path == "/api/v1/segments"
                else "takes no parameters" in said["detail"]
            )


def test_changes_are_written_to_the_log(served: Serving, subtests: Subtests, caplog: pytest.LogCaptureFixture) -> None:
    for call in CHANGES:
        with subtests.test(call=str(call)), caplog.at_level("INFO", "kvtier"):
            path, body = call.made(served)
            if call.path.endswith(("evict", "clear")):
                body |= {"dry_run": False}
            caplog.clear()
            assert served.call(call.method, path, json=body).status_code == call.status
            assert caplog.text and ADMIN not in caplog.text


def test_what_is_not_there(served: Serving, subtests: Subtests) -> None:
    for method, path in NOWHERE:
        with subtests.test(path=path):
            assert len(assert_problem(served.call(method, path), 404)["detail"]) < 200


def test_other_methods(served: Serving, subtests: Subtests) -> None:
    for call in CALLS:
        path, _ = call.made(served)
        for method in sorted(
            {"GET", "POST", "PUT", "DELETE", "PATCH"} - {c.method for c in CALLS if c.path == call.path}
        ):
            with subtests.test(call=str(call), method=method):
                answer = served.call(method, path)
                assert_problem(answer, 405)
                assert call.method in answer.headers["allow"]
