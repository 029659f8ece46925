"""Tokens and the certificate come from files, and a running service takes what is put in their place."""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path

import pytest

from kvtier.config.server import ServerSettings
from kvtier.server.auth import Role, Tokens
from kvtier.server.rotated import CHECK_INTERVAL_S, Rotated
from tests.server.process import running, write_config
from tests.server.serving import ADMIN, READER
from tests.server.test_process import own_certificate
from tests.waiting import wait_until


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def put(path: Path, text: str) -> None:
    """As Kubernetes does: another file in its place."""
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)


def test_a_token_is_read_again_when_its_file_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, clock = tmp_path / "admin-token", Clock()
    file.write_text(ADMIN)
    own = ServerSettings(admin_token_file=file, read_token=READER)
    tokens = Rotated("tokens", (own.admin_token_file, None), lambda: Tokens(*own.tokens()), clock)

    def roles(*given: str) -> list[Role | None]:
        clock.now_s += CHECK_INTERVAL_S
        return [tokens.now().role_of(token) for token in given]

    new = "another-admins-token-0123456789"
    assert roles(ADMIN, READER, new) == [Role.ADMIN, Role.READ_ONLY, None]
    put(file, new)
    assert tokens.now().role_of(ADMIN) is Role.ADMIN, "looked at once an interval"
    assert roles(ADMIN, READER, new) == [None, Role.READ_ONLY, Role.ADMIN]
    with caplog.at_level(logging.WARNING):
        for spoil in (lambda: put(file, "short"), file.unlink, lambda: put(file, READER)):
            spoil()
            assert roles(new, "", "short") == [Role.ADMIN, None, None], "what was read before stays in use"
    assert len(caplog.records) == 3 and str(file) in caplog.text and new not in caplog.text
    put(file, ADMIN)
    assert roles(ADMIN, new) == [Role.ADMIN, None]


def test_a_running_service_takes_another_token_and_certificate(tmp_path: Path) -> None:
    token = tmp_path / "admin-token"
    token.write_text(ADMIN)
    paths = own_certificate(tmp_path)
    config = write_config(
        tmp_path, tmp_path / "kv", host="0.0.0.0", admin_token_file=str(token), history_s=0.5, **paths
    )
    with running(config) as served:
        first = ssl.create_default_context(cafile=paths["tls_cert"])
        assert served.get("/api/v1/stats", ADMIN, first)[0] == 200
        put(token, READER)
        wait_until(lambda: served.get("/api/v1/stats", READER, first)[0] == 200)
        assert served.get("/api/v1/stats", ADMIN, first)[0] == 401
        own_certificate(tmp_path)
        second = ssl.create_default_context(cafile=paths["tls_cert"])

        def is_served() -> bool:
            try:
                return served.get("/api/v1/stats", READER, second)[0] == 200
            except ssl.SSLCertVerificationError:
                return False

        wait_until(is_served)
