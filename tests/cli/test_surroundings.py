"""Surroundings of the command: output that cannot take a letter, a root whose name is not UTF-8, a closed output."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier.config.settings import Settings
from kvtier.errors import ConfigError
from tests.cli.asking import Cli
from tests.support.rig import saved_by_another


@pytest.fixture(scope="module", name="root")
def _root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made") / "r\u00e4ume"
    saved_by_another(root, list(range(128)), list(range(8)))
    return root


def run(*words: str | Path, environment: dict[str, str] | None = None, shell: str = "") -> tuple[int, str, str]:
    """Status, output and errors of `kvtier WORDS`."""
    command = [sys.executable, "-m", "kvtier.cli", *words]
    if shell:
        command = ["sh", "-c", f'exec "$@" {shell}', "sh", *command]
    done = subprocess.run(command, capture_output=True, env=os.environ | (environment or {}), check=False, timeout=600)
    return done.returncode, done.stdout.decode("utf-8", "replace"), done.stderr.decode("utf-8", "replace")


def test_letters_that_the_output_cannot_take_are_escaped(root: Path) -> None:
    status, out, err = run("stats", root, environment={"PYTHONIOENCODING": "ascii"})
    assert status == 0 and "r\\xe4ume" in out and "Traceback" not in err


@pytest.mark.parametrize("command", [["stats"], ["verify"], ["index", "check"], ["doctor"]])
def test_a_root_whose_name_is_not_utf_8_is_refused(command: list[str], tmp_path: Path, cli: Cli) -> None:
    folder = os.fsdecode(os.fsencode(tmp_path / "caf") + b"\xe9")
    os.mkdir(folder)
    assert "its name is not UTF-8" in "".join(cli.run(*command, folder, status=None))
    with pytest.raises(ConfigError, match="its name is not UTF-8"):
        Settings.load({"root": folder})


def test_a_closed_output_is_said(root: Path) -> None:
    status, _, err = run("stats", root, shell=">&-")
    assert status == 2 and err.splitlines() == ["kvtier: standard output is closed: send it to a file, or to /dev/null"]


def test_other_closed_streams_are_empty(root: Path) -> None:
    status, out, err = run("evict", root, "--all", shell="<&-")
    assert status == 2 and "add --config" in err
    status, out, err = run("lookup", root, "--tokens", "-", shell="<&-")
    assert status == 2 and err.startswith("kvtier: -: no token ids")
    assert run("verify", root, shell="2>&-")[0] == 0
    assert run("stats", root / "absent", shell="2>&-")[:2] == (2, ""), "the fault was printed as the answer"


INTERRUPTED_IMPORT = """
import os, runpy, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # which shells ignore in what they run in the background
sys.meta_path.insert(0, Finder())
runpy.run_module("kvtier.cli", run_name="__main__")
"""


@pytest.mark.parametrize("module", ["typer", "numpy", "kvtier.admin.opened", "kvtier.cli.weights"])
def test_an_interruption_while_modules_are_imported_is_status_130(module: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED_IMPORT, module]
    done = subprocess.run(command, capture_output=True, check=False, timeout=600)
    assert (done.returncode, done.stderr) == (130, b"")


@pytest.mark.parametrize("words", [["stats", "ROOT"], ["--version"], ["plan", "--help"]])
def test_a_full_output_is_said_once(words: list[str], root: Path) -> None:
    """Words that end the program before a command begins are answered without a traceback, too."""
    status, _, err = run(*(root if word == "ROOT" else word for word in words), shell=">/dev/full")
    assert status == 2 and len(err.splitlines()) == 1 and "No space left" in err
