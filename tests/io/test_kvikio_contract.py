"""CONTRACT: that the published wheel of KvikIO has the calls that kvtier makes of it, where pip finds the wheel."""

import ast
import subprocess
import sys
import zipfile

import pytest

from kvtier.format.geometry import PAGE_BYTES
from kvtier.io.kvikio import KvikioReader

from fake_kvikio import FakeKvikio


@pytest.fixture(scope="module", name="wheel")
def _wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "download", "kvikio-cu13==26.10.0", "--no-deps", "-q", "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, check=False, timeout=120)
    found = list(folder.glob("*.whl"))
    if done.returncode or not found:
        pytest.skip("pip finds no kvikio-cu13 26.10.0")
    return zipfile.ZipFile(found[0])


def functions(wheel: zipfile.ZipFile, path: str, inside: str | None = None) -> dict[str, list[str]]:
    """Name -> parameters of the functions of a module, or of a class in it."""
    tree: ast.AST = ast.parse(wheel.read(path))
    if inside is not None:
        tree = next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == inside)
    body = tree.body  # type: ignore[attr-defined]
    return {node.name: [x.arg for x in node.args.args] for node in body if isinstance(node, ast.FunctionDef)}


def test_contract_files_and_futures(wheel: zipfile.ZipFile) -> None:
    file = functions(wheel, "kvikio/cufile.py", "CuFile")
    assert file["__init__"] == ["self", "file", "flags"]
    assert file["pread"] == ["self", "buf", "size", "file_offset", "task_size"]
    assert file["close"] == file["fileno"] == ["self"]
    future = functions(wheel, "kvikio/cufile.py", "IOFuture")
    assert future["get"] == future["done"] == ["self"]


def test_contract_settings_and_registration(wheel: zipfile.ZipFile) -> None:
    kvikio = FakeKvikio()
    KvikioReader((0, PAGE_BYTES), load=lambda: kvikio).close()
    settings = wheel.read("kvikio/defaults.py").decode()
    assert kvikio.settings and all(f'"{name}"' in settings for name in kvikio.settings)
    assert functions(wheel, "kvikio/defaults.py")["is_compat_mode_preferred"] == []
    buffer = functions(wheel, "kvikio/buffer.py")
    assert buffer["memory_register"] == buffer["memory_deregister"] == ["buf"]
    assert buffer["bounce_buffer_free"] == []
    driver = functions(wheel, "kvikio/cufile_driver.py")
    assert driver["libcufile_version"] == [] and driver["get"] == ["config_name"]
    assert '"is_gds_available"' in wheel.read("kvikio/cufile_driver.py").decode()
    for name in ("CuFile", "memory_register", "memory_deregister", "bounce_buffer_free"):
        assert f'"{name}"' in wheel.read("kvikio/__init__.py").decode()
