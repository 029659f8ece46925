"""Roots for commands."""

import shutil
from pathlib import Path

import pytest

from kvtier.cli import evict
from kvtier.config.settings import CONFIG_VARIABLE
from kvtier.storage.root_owner import Owner, this_node
from tests.cli.asking import TOKENS, Cli
from tests.support.rig import Engine


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with the chunks of TOKENS, whose engine has ended."""
    root = tmp_path_factory.mktemp("made") / "kv"
    engine = Engine(root)
    assert engine.save(TOKENS, list(range(len(TOKENS) // 16)))
    engine.close()
    return root


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture
def root(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> Path:
    """Copy the root for a test that changes it, with an index of its own. Commands do not wait for freed space, which
    other writers of this disk could take."""
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    monkeypatch.setattr(evict, "SHOW_TIMEOUT_S", 0.0)
    copy = Path(shutil.copytree(made, tmp_path / "kv"))
    (copy / "v2" / "owner.json").write_bytes(Owner(this_node(), copy / "v2" / "index").to_json(copy / "v2"))
    shutil.rmtree(copy / "v2" / "index")
    cli.run("index", "rebuild", str(copy))
    return copy
