"""What the command line says to a new user who slips."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.cli import main
from kvtier.commands import doctor


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    return captured.err


@pytest.mark.parametrize("name", ["kvtier.yaml", "kvtier.yml", "kvtier.toml", "kvtier.JSON"])
@pytest.mark.parametrize("command", ["doctor", "stats", "verify"])
def test_a_settings_file_that_is_not_there_is_no_root(
    command: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *_, **__: [])
    path = tmp_path / name
    said = refused(capsys, command, str(path))
    assert f"config = '{path}'" in said and "there is no such file" in said
    path.mkdir()
    assert main([command, str(path)]) == (0 if command == "doctor" else 2)
    assert "there is no such file" not in capsys.readouterr().err
