"""Tokens from files: a file that replaces another one takes effect. test_process.py tests it with a running service."""

import logging
from pathlib import Path

import pytest

from kvtier.config.server import ServerSettings
from kvtier.errors import ConfigError
from kvtier.server.auth import Role, Tokens
from kvtier.server.rotated import CHECK_INTERVAL_S, Rotated
from tests.server.serving import ADMIN, NEW, READER, put
from tests.support.clock import Clock


def test_a_token_is_read_again_when_its_file_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, clock = tmp_path / "admin-token", Clock()
    file.write_text(ADMIN)
    own = ServerSettings(admin_token_file=file, read_token=READER)
    tokens = Rotated("tokens", (own.admin_token_file, None), lambda: Tokens(*own.tokens()), clock)

    def roles(*given: str) -> list[Role | None]:
        clock.now_s += CHECK_INTERVAL_S
        return [tokens.now().role_of(token) for token in given]

    assert roles(ADMIN, READER, NEW) == [Role.ADMIN, Role.READ_ONLY, None]
    put(file, NEW)
    assert tokens.now().role_of(ADMIN) is Role.ADMIN, "looked at once an interval"
    assert roles(ADMIN, READER, NEW) == [None, Role.READ_ONLY, Role.ADMIN]
    with caplog.at_level(logging.WARNING):
        for spoil in (lambda: put(file, "short"), file.unlink, lambda: put(file, READER)):
            spoil()
            assert roles(NEW, "", "short") == [Role.ADMIN, None, None], "what was read before stays in use"
    assert len(caplog.records) == 3 and str(file) in caplog.text and NEW not in caplog.text
    put(file, ADMIN)
    assert roles(ADMIN, NEW) == [Role.ADMIN, None]


def test_a_file_is_read_again_when_its_rights_change(tmp_path: Path) -> None:
    file, clock = tmp_path / "admin-token", Clock()

    def read() -> str:
        if not file.stat().st_mode & 0o400:
            raise ConfigError("server.admin_token_file", str(file), "no token can be read there")
        return file.read_text()

    put(file, "old")
    tokens = Rotated("tokens", (file,), read, clock)
    put(file, "new")
    for mode, token in ((0, "old"), (0o600, "new")):
        file.chmod(mode)
        clock.now_s += CHECK_INTERVAL_S
        assert tokens.now() == token
