"""A double of the admin service for the page: its files under a strict policy, and answers that a test chooses."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pydantic import BaseModel, RootModel

UI = Path(__file__).resolve().parents[2] / "server" / "ui"
POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'"
TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


class Raw(RootModel[dict[str, Any]]):
    """An answer that the service's own models would not let pass."""


class Service:
    """answers: by the name below api/v1/, a model, or (status, title) of a problem. token: None asks for none."""

    def __init__(self, overview: BaseModel, history: BaseModel, token: str | None = None) -> None:
        self.answers: dict[str, BaseModel | tuple[int, str]] = {"overview": overview, "history": history}
        self.token = token
        self.asked: list[str] = []
        self.url = ""

    def answer(self, path: str, authorization: str | None) -> tuple[int, str, bytes]:
        """Status, content type, body."""
        self.asked.append(path)
        if path.startswith("/ui/"):
            file = UI / (path.removeprefix("/ui/") or "index.html")
            return (200, TYPES[file.suffix], file.read_bytes()) if file.is_file() else (404, "text/plain", b"")
        if self.token is not None and authorization != f"Bearer {self.token}":
            return problem(401, "a token is needed")
        found = self.answers.get(path.removeprefix("/api/v1/"), (404, "there is no such thing"))
        if isinstance(found, tuple):
            return problem(*found)
        return 200, "application/json", found.model_dump_json().encode()


def problem(status: int, title: str) -> tuple[int, str, bytes]:
    body = {"type": "about:blank", "title": title, "status": status, "detail": ""}
    return status, "application/problem+json", json.dumps(body).encode()


@contextmanager
def served(service: Service) -> Iterator[Service]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, kind, body = service.answer(self.path, self.headers.get("Authorization"))
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Content-Security-Policy", POLICY)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    service.url = f"http://127.0.0.1:{server.server_port}/ui/"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
