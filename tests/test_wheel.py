"""The wheel: built from a commit, installed into an empty environment, used without a compiler."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import kvtier

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ["pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE", "README.md", "kvtier", "connectors", "server"]


def run(*command: str | Path, cwd: Path, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module", name="source")
def _source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of one commit with what a build needs."""
    source = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, source / name)
    git = ["git", "-c", "user.name=test", "-c", "user.email=test@localhost"]
    shutil.copy(ROOT / ".gitignore", source / ".gitignore")
    run("git", "init", "--quiet", cwd=source)
    run("git", "add", ".", cwd=source)
    run(*git, "commit", "--quiet", "--message", "all", cwd=source)
    return source


@pytest.fixture(scope="module", name="wheel")
def _wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", folder, "."]
    run(*pip, cwd=source)
    (wheel,) = folder.iterdir()
    return wheel


@pytest.fixture(scope="module", name="commands")
def _commands(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of an environment that holds the wheel alone, and sees this one's packages behind it."""
    environment = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=environment)
    python = environment / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel, cwd=environment)
    (packages,) = environment.glob("lib/python*/site-packages")
    # Plain lines: path files in these folders, such as that of an editable kvtier, are not read.
    shared = [entry for entry in sys.path if entry.endswith("site-packages")]
    (packages / "shared.pth").write_text("\n".join(shared) + "\n")
    return environment / "bin"


def test_the_wheel_holds_the_library_without_its_sources(wheel: Path) -> None:
    assert re.fullmatch(r"kvtier-[\d.]+-py3-none-(many)?linux_\w+\.whl", wheel.name)
    names = zipfile.ZipFile(wheel).namelist()
    assert "kvtier/io/_native.abi3.so" in names and not any(name.endswith((".cpp", ".h")) for name in names)
    assert {"kvtier/cli/__init__.py", "kvtier/connectors/__init__.py", "kvtier/server/__init__.py"} <= set(names)


def test_version_names_the_commit(commands: Path, source: Path, tmp_path: Path) -> None:
    said = run(commands / "kvtier", "--version", cwd=tmp_path, environment={})
    head = run("git", "rev-parse", "--short", "HEAD", cwd=source).strip()
    assert said == f"kvtier {version_of(source)} ({head})\n"


def version_of(source: Path) -> str:
    found = re.search(r'^version = "(.*)"$', (source / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]


def test_check_runs_without_a_compiler(commands: Path, tmp_path: Path) -> None:
    (tmp_path / "kvtier.yaml").write_text(f"root: {tmp_path / 'kv'}\ncapacity_bytes: 2GiB\n")
    said = run(commands / "kvtier", "check", "kvtier.yaml", cwd=tmp_path, environment={})
    assert str(tmp_path / "kv") in said
    code = "import kvtier.io.native as n; print(n.__file__, n.instruction_set())"
    path, _ = run(commands / "python", "-c", code, cwd=tmp_path, environment={}).split()
    assert Path(path).is_relative_to(commands.parent) and not Path(path).is_relative_to(Path(kvtier.__file__).parent)
