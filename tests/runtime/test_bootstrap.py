"""Importing kvtier: in a checkout beside an install, and what its log lines begin with."""

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvtier._bootstrap import PREFIX

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds kvtier as `pip install` lays it out."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "kvtier", folder / "kvtier", ignore=shutil.ignore_patterns("__pycache__"))
    for sibling in ("connectors", "server"):
        shutil.copytree(ROOT / sibling, folder / "kvtier" / sibling, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def where(code: str, installed: Path, in_folder: Path) -> list[str]:
    """What `code` prints where Python looks into `in_folder` first, as `python -m vllm...` does."""
    environment = os.environ | {"PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command, cwd=in_folder, env=environment, check=True, capture_output=True, text=True, timeout=60
    ).stdout.split()


def test_an_installed_kvtier_is_used_in_a_checkout_too(installed: Path) -> None:
    """The checkout's folder kvtier/ holds neither connectors nor compiled parts, and stands first in sys.path."""
    code = (
        "import kvtier, kvtier.errors, kvtier.io.native, kvtier.connectors.bridge\n"
        "for m in (kvtier, kvtier.errors, kvtier.io.native, kvtier.connectors.bridge): print(m.__file__)"
    )
    first, *rest = where(code, installed, ROOT)
    assert first == str(ROOT / "kvtier/__init__.py")  # else this test shows nothing
    assert [Path(place).is_relative_to(installed) for place in rest] == [True] * 3
    assert all(Path(place).is_relative_to(installed) for place in where(code, installed, Path("/")))


def test_every_line_of_the_log_can_be_found(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("kvtier")
    with caplog.at_level(logging.INFO, logger="kvtier"):
        log.info("tier at %s, %d%% full", "/mnt", 3)
        log.warning("kvtier: %s", "once is enough")
        log.info("100 % as it is")
    expected = ["tier at /mnt, 3% full", "once is enough", "100 % as it is"]
    assert caplog.messages == [PREFIX + text for text in expected]


def test_all_modules_log_by_that_one_logger() -> None:
    for path in [*(ROOT / "kvtier").rglob("*.py"), *(ROOT / "connectors").rglob("*.py")]:
        for line in path.read_text().splitlines():
            if line.startswith("log = "):
                assert line == 'log = logging.getLogger("kvtier")', path
