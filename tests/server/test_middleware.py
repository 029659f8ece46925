"""Middleware as far as it does not depend on the route: names, origins, slow bodies, errors, the files of the page."""

import asyncio
import time
from typing import Any

import pytest
from pytest import Subtests

from kvtier.admin.lookup import TOKENS_MAX
from kvtier.config.server import ServerSettings
from kvtier.errors import ConfigError
from kvtier.server import routes_look
from kvtier.server.auth import Role, Tokens
from kvtier.server.middleware import TimeLimit, WholeBody
from tests.server.serving import ADMIN, READER, Serving
from tests.server.test_all_routes import assert_problem

HOSTS_OF_OTHERS = (
    "evil.example",
    "evil.example:8474",
    "localhost.evil.example",
    "127.0.0.1.nip.io",
    "",
    "[::2]",
    "a b",
)
HOSTS_HERE = ("localhost", "localhost:8474", "127.0.0.1:8474", "[::1]:8474", "LOCALHOST")


def test_without_tokens_only_loopback_names_are_answered(served_here: Serving, subtests: Subtests) -> None:
    for host in HOSTS_OF_OTHERS:
        with subtests.test(host=host):
            for path in ("/api/v1/stats", "/healthz", "/ui/", "/nothing"):
                assert_problem(served_here.call("GET", path, None, headers={"Host": host}), 421)
    for host in HOSTS_HERE:
        with subtests.test(host=host):
            headers = {"Host": host}
            assert served_here.call("GET", "/api/v1/stats", None, headers=headers).status_code == 200
            assert served_here.call("POST", "/api/v1/clear", None, json={}, headers=headers).status_code == 200


def test_without_tokens_other_sites_pages_are_refused(served_here: Serving) -> None:
    own = {"Origin": "http://localhost", "Sec-Fetch-Site": "same-origin"}
    assert served_here.call("POST", "/api/v1/clear", None, json={}, headers=own).status_code == 200
    for headers in (
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://localhost:1234"},
        {"Sec-Fetch-Site": "same-site"},
        {"Origin": "http://[::1"},
    ):
        assert_problem(served_here.call("POST", "/api/v1/clear", None, json={}, headers=headers), 403)
        assert_problem(served_here.call("GET", "/api/v1/overview", None, headers=headers), 403)


def test_with_tokens_the_name_does_not_matter(served: Serving) -> None:
    assert served.call("GET", "/api/v1/stats", READER, headers={"Host": "kv.example"}).status_code == 200


def test_roles_are_told(served: Serving) -> None:
    roles = {
        token: served.call("GET", "/api/v1/overview", token).json()["deployment"]["role"] for token in (ADMIN, READER)
    }
    assert roles == {ADMIN: "admin", READER: "read-only"}


def test_tokens() -> None:
    tokens = Tokens("a" * 16, None)
    assert (tokens.role_of("a" * 16), tokens.role_of("a" * 15), tokens.role_of("")) == (Role.ADMIN, None, None)
    assert "aaaa" not in repr(tokens)


def test_no_answer_shows_what_was_sent(served: Serving) -> None:
    answer = served.call("POST", "/api/v1/lookup", json={"prompt": 5, "secret words": "of a patient"})
    assert "patient" not in answer.text


def test_a_request_that_is_wrong_in_a_million_places_is_answered_briefly_and_soon(served: Serving) -> None:
    tokens = {"tokens": [-1] * TOKENS_MAX}
    began = time.process_time()
    for path, body in (
        ("lookup", tokens),
        ("pins", {"namespace": "0" * 32, **tokens}),
        ("evict", {"prefix": {"namespace": "0" * 32, **tokens}}),
        ("lookup", {"tokens": [], "x" * 1_000_000: 1}),
    ):
        answer = served.call("POST", f"/api/v1/{path}", json=body)
        assert_problem(answer, 422)
        assert len(answer.content) < 4000 and len(answer.json()["errors"]) < 10
    assert time.process_time() - began < 20  # it was 8 s each, and 2 GB


def test_a_bug_is_a_problem_and_says_nothing_of_itself(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(opened: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(routes_look, "list_pins", broken)
    said = assert_problem(served.call("GET", "/api/v1/pins"), 500)
    assert "secret" not in str(said)


def test_the_pages_files(served: Serving) -> None:
    page = served.call("GET", "/ui/", None)
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    policy = page.headers["content-security-policy"]
    assert "script-src 'self'" in policy and "unsafe" not in policy and "http" not in policy
    assert page.headers["x-frame-options"] == "DENY"
    for path in ("/ui/", "/ui/app.js"):
        answer = served.call("POST", path, None)
        assert_problem(answer, 405)
        assert answer.headers["allow"] == "GET, HEAD"
    for path in ("/ui/../app.py", "/ui/%2e%2e/app.py", "/ui/..%2fapp.py", "/ui//etc/passwd"):
        assert served.call("GET", path, None).status_code in (401, 404)


# --- what stands before the routes, by itself ---


async def answer_of(app: Any, chunks: list[bytes], pause_s: float = 0.0, headers: Any = ()) -> tuple[int, bytes]:
    """Status and body of a request whose body comes in these pieces."""
    waiting, sent = list(chunks), []

    async def receive() -> Any:
        if not waiting:
            await asyncio.sleep(3600)
        await asyncio.sleep(pause_s)
        body = waiting.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(waiting)}

    async def send(message: Any) -> None:
        sent.append(message)

    await app({"type": "http", "method": "POST", "path": "/", "headers": list(headers)}, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


async def echo(scope: Any, receive: Any, send: Any) -> None:
    message = await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": message["body"]})


def test_a_body_comes_whole_to_the_routes() -> None:
    assert asyncio.run(answer_of(WholeBody(echo, 10, 5.0), [b"ab", b"cd", b""])) == (200, b"abcd")


@pytest.mark.parametrize("length", [b"abc", b"-1", b"9" * 30, b"1.5", "\u0663".encode()])
def test_a_length_that_is_none(length: bytes) -> None:
    assert asyncio.run(answer_of(WholeBody(echo, 10, 5.0), [b"a"], headers=[(b"content-length", length)]))[0] == 400


def test_a_slow_body_is_given_up() -> None:
    status, body = asyncio.run(answer_of(WholeBody(echo, 10, 0.05), [b"a"] * 10, pause_s=0.03))
    assert status == 408 and b"did not come within" in body


def test_an_answer_that_takes_too_long_is_given_up() -> None:
    ended = []

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.2)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        ended.append(True)

    async def run() -> tuple[int, bytes]:
        found = await answer_of(TimeLimit(slow, 0.02), [b""])
        await asyncio.sleep(0.4)
        return found

    assert asyncio.run(run())[0] == 504
    assert ended, "its work ends by itself"


def test_what_fails_after_it_was_given_up_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(0.1)
        raise ZeroDivisionError("of a late request")

    async def run() -> tuple[int, bytes]:
        found = await answer_of(TimeLimit(broken, 0.02), [b""])
        await asyncio.sleep(0.3)
        return found

    assert asyncio.run(run())[0] == 504
    assert "failed after its time limit" in caplog.text and "of a late request" in caplog.text


def test_an_answer_that_has_begun_is_not_given_up() -> None:
    async def long(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await asyncio.sleep(0.1)
        await send({"type": "http.response.body", "body": b"x"})

    assert asyncio.run(answer_of(TimeLimit(long, 0.02), [b""])) == (200, b"x")


# --- settings ---


def settings(**values: Any) -> ServerSettings:
    return ServerSettings(**values)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1", "localhost"])
def test_loopback_needs_no_token(host: str) -> None:
    settings(host=host).check()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "kv.example", "localhost.example", "127.1.example"])
def test_any_other_address_needs_one(host: str) -> None:
    with pytest.raises(ConfigError, match="no token is set"):
        settings(host=host).check()
    settings(host=host, admin_token=ADMIN).check()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"read_token": READER}, "every change is refused"),
        ({"admin_token": ADMIN, "admin_token_file": "/x"}, "leave one of them out"),
        ({"tls_cert": "/x"}, "TLS needs both"),
        ({"tls_key": "/x"}, "TLS needs both"),
    ],
)
def test_settings_that_do_not_go_together(values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**values).check()


@pytest.mark.parametrize("token", ["short", "with a blank in it", "\u00e9" * 20, ""])
def test_a_token_that_is_none_is_refused_and_not_shown(token: str, tmp_path: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        settings(admin_token=token).tokens()
    assert not token or token not in str(refused.value)
    path = tmp_path / "token"
    path.write_text(token)
    with pytest.raises(ConfigError) as refused:
        settings(admin_token_file=path).tokens()
    assert not token or token not in str(refused.value)


def test_tokens_from_files(tmp_path: Any) -> None:
    path = tmp_path / "token"
    path.write_text(ADMIN + "\n")
    assert settings(admin_token_file=path, read_token=READER).tokens() == (ADMIN, READER)
    with pytest.raises(ConfigError, match="make another one"):
        settings(admin_token_file=path, read_token=ADMIN).tokens()
    with pytest.raises(ConfigError, match="No such file"):
        settings(admin_token_file=tmp_path / "nothing").tokens()
