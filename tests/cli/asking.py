"""Run commands in this process and read their answers."""

import json
from typing import Any

import pytest

from kvtier.cli import main

CHUNKS = 5
TOKENS = list(range(64 * CHUNKS))


class Cli:
    """The command line. status: exit status that a command must have; None: any."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def run(self, *arguments: str, status: int | None = 0) -> tuple[str, str]:
        """Return output and errors."""
        self._capsys.readouterr()
        assert main(list(arguments)) == status or status is None
        return self._capsys.readouterr()

    def printed(self, *arguments: str, status: int | None = 0) -> str:
        return self.run(*arguments, status=status)[0]

    def errors(self, *arguments: str, status: int = 1) -> str:
        return self.run(*arguments, status=status)[1]

    def json(self, *arguments: str, status: int = 0) -> Any:
        return json.loads(self.printed(*arguments, "--json", status=status))

    def refused(self, *arguments: str, status: int = 2) -> str:
        """Run a command that must fail with one line of an error. Return that line."""
        out, err = self.run(*arguments, status=status)
        assert out == "" and len(err.splitlines()) == 1
        return err
