"""Run commands and read their answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvtier.cli import main

CHUNKS = 5
TOKENS = list(range(64 * CHUNKS))


def printed(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    """Run a command that ends with this status. Return its output."""
    capsys.readouterr()
    assert main(list(arguments)) == status
    return capsys.readouterr().out


def printed_json(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> Any:
    return json.loads(printed(capsys, *arguments, "--json", status=status))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 2) -> str:
    """Run a command that ends with one line of an error. Return that."""
    capsys.readouterr()
    assert main(list(arguments)) == status
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    return captured.err
