"""The wheel: built from a commit, installed into an empty environment, used without a compiler."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import kvtier
from tests.engines.conftest import lab as lab  # a fixture

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ["pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE", "README.md", "kvtier", "connectors", "server"]


def run(*command: str | Path, cwd: Path, environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


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


def bare_engines(
    python: Path, model: Path, folder: Path, transfers: Sequence[str]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Run real engines of that environment, one after another, on a PATH with nothing but lscpu. Return what each
    found, and logged."""
    (folder / "programs").mkdir()
    (folder / "programs" / "lscpu").symlink_to(shutil.which("lscpu") or "missing")  # which vLLM runs on a CPU
    environment = {
        "PATH": str(folder / "programs"),
        "HOME": str(folder),
        "KVTIER_ROOT": str(folder / "kv"),
        "KVTIER_CHUNK_TOKENS": "64",
        "KVTIER_SEGMENT_BYTES": "4MiB",
        "KVTIER_MIN_LOAD_TOKENS": "0",
        "VLLM_CACHE_ROOT": str(Path.home() / ".cache" / "vllm"),
        "PYTHONPYCACHEPREFIX": sys.pycache_prefix or "",
    }
    output = folder / "results.json"
    script = ROOT / "tests" / "engines" / "root_engine.py"
    log = run(python, script, model, output, *transfers, cwd=folder, environment=environment)
    results = json.loads(output.read_text())
    for result in results:
        assert Path(result["kvtier"]).is_relative_to(python.parents[1]) and result["compiler"] is None
    return results, log.split("-- the engine ended --")


def test_an_engine_hits_with_the_root_alone_and_an_explicit_configuration_wins(
    commands: Path, lab: Any, tmp_path: Path
) -> None:
    root, other = tmp_path / "kv", tmp_path / "other"
    explicit = {
        "kv_connector": "KVTierConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"root": str(other), "capacity_bytes": "1GiB"},
    }
    transfers = ("", "", json.dumps(explicit))
    (cold, warm, told), logs = bare_engines(commands / "python", lab.model("llama"), tmp_path, transfers)
    assert cold["cached"] == 0 and cold["connector"] == "KVTierConnector"
    (line,) = (line for line in logs[0].splitlines() if f"KVTIER_ROOT={root}" in line)
    assert "kv_both, recompute" in line and "80% of the free space" in line and "--kv-transfer-config" in line
    assert 0 < cold["extra"]["capacity_bytes"] <= 0.8 * shutil.disk_usage(tmp_path).total
    assert warm["cached"] == 256 and warm["tokens"] == cold["tokens"]
    assert told["cached"] == 0 and told["extra"]["root"] == str(other) and other.is_dir()
    assert "KVTIER_ROOT=" not in logs[2]
