"""Build of the native library, which kvtier/io/native.py loads with ctypes. All else is in pyproject.toml."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

COMPILER = os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread", "-shared", "-ldl"]
# The C++ runtime is linked in, so that the library loads in a container without libstdc++.
STATIC = ["-static-libstdc++", "-static-libgcc"]
# Without these, zig compiles for this very processor and with traps. Its libc++ is always linked in.
ZIG = [sys.executable, "-m", "ziglang", "c++", "-mcpu=baseline", "-fno-sanitize=undefined"]


class BuildNative(build_ext):
    """Compiles without Python's own flags: the library includes no Python header, and zig refuses some of them."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        self.spawn([*([*shlex.split(COMPILER), *STATIC] if COMPILER else ZIG), *ext.sources, *FLAGS, "-o", str(target)])


class BuildPython(build_py):
    """Writes the git commit beside the modules; an editable install asks git (kvtier/runtime/versions.py)."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode and Path(".git").exists() and shutil.which("git"):
            command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
            Path(self.build_lib, "kvtier", "COMMIT").write_bytes(subprocess.run(command, stdout=subprocess.PIPE).stdout)


class AnyPython3Wheel(bdist_wheel):
    """Uses no Python ABI; the wheel only depends on the machine."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


siblings = ["connectors", "server"]  # [tool.setuptools.package-dir] maps these into kvtier
below = [name for folder in siblings for name in find_packages(include=[f"{folder}.*"])]
setup(
    packages=find_packages(include=["kvtier", "kvtier.*"]) + [f"kvtier.{name}" for name in siblings + below],
    ext_modules=[
        Extension("kvtier.io._native", sorted(map(str, Path("kvtier/io/native").glob("*.cpp"))), py_limited_api=True)
    ],
    cmdclass={"build_ext": BuildNative, "build_py": BuildPython, "bdist_wheel": AnyPython3Wheel},
    setup_requires=[] if COMPILER else ["ziglang>=0.13"],
)
