"""One command that root runs does not take a root or its index away from the engines' user."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtier import cli
from kvtier.config.settings import Settings
from kvtier.errors import ConfigError
from kvtier.index.lmdb.index import LmdbIndex
from kvtier.storage import root_owner
from kvtier.storage.filesystem import FileSystem
from kvtier.storage.root import open_root
from kvtier.storage.root_owner import default_index_path
from tests.objects.rig import names, put, tier_at
from tests.storage.users import USER, as_user

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root")

SMALL = {"segment_bytes": "64KiB", "capacity_bytes": "1MiB"}


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of that user's; not below tmp_path, which others cannot look into."""
    with tempfile.TemporaryDirectory() as made:
        os.chmod(made, 0o755)
        path = Path(made) / "kv"
        path.mkdir(mode=0o700)
        os.chown(path, USER, USER)
        yield path


def start(path: Path) -> None:
    """As an engine does."""
    root = open_root(Settings.load({"root": str(path), **SMALL}))
    assert root.index_path is not None
    index = LmdbIndex(str(root.index_path), 1 << 20)
    index.bind(root.folder)
    index.put_note("a note", b"it can write", None)
    index.close()


def files_of_root(path: Path) -> list[str]:
    return subprocess.run(["find", str(path), "-uid", "0"], capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize("before", ["restart", "no index", "no v2"])
@pytest.mark.parametrize(
    "command", ["stats ROOT", "verify ROOT", "index rebuild ROOT", "pin CONFIG", "evict CONFIG --all --dry-run"]
)
def test_the_engines_user_can_start_after_it(folder: Path, command: str, before: str) -> None:
    assert as_user(lambda: start(folder)) == ""
    config = folder.parent / "kv.yaml"
    config.write_text(f"root: {folder}\n" + "".join(f"{name}: {value}\n" for name, value in SMALL.items()))
    if before == "restart":
        (folder / "v2/index/boot-id").write_text("2 another-boot\n")
    else:
        shutil.rmtree(folder / ("v2/index" if before == "no index" else "v2"))
    cli.main([word.replace("ROOT", str(folder)).replace("CONFIG", str(config)) for word in command.split()])
    assert files_of_root(folder) == []
    assert as_user(lambda: start(folder)) == ""


@pytest.mark.parametrize("command", ["stats", "verify"])
def test_who_only_looks_leaves_an_index_of_another_boot_as_it_is(folder: Path, command: str) -> None:
    start(folder)
    stamp = folder / "v2/index/boot-id"
    stamp.write_text("2 another-boot\n")
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert cli.main([command, str(folder)]) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_the_index_of_a_root_on_a_network_is_looked_for_where_its_owner_has_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(root_owner, "file_system_of", lambda path: FileSystem("nfs4", True, "/"))
    monkeypatch.setattr(root_owner, "LOCAL_STATE", folder.parent)
    found = default_index_path(folder, folder)
    assert found.parent == folder.parent / f"kvtier-{USER}" / "index"
    assert found.parent.parent.stat().st_uid == USER


def test_an_index_of_another_user_is_named_with_what_to_do(folder: Path) -> None:
    assert as_user(lambda: start(folder)) == ""
    os.chown(folder / "v2/index/data.mdb", 0, 0)
    said = as_user(lambda: start(folder))
    assert said.startswith(ConfigError.__name__) and "data.mdb, this is user 65534: chown it" in said


def test_the_engines_user_loads_what_an_engine_of_root_saved(folder: Path) -> None:
    """Segments belonged to root. Each load of them failed, and nothing was saved in their place, because the index had
    their records."""
    assert as_user(lambda: start(folder)) == ""
    with tier_at(folder, capacity_bytes="1MiB", segment_bytes="64KiB") as tier:
        assert all(put(tier, names(4)))
    assert files_of_root(folder) == []
