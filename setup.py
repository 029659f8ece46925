"""The native extension: a shared library that kvtier/io/native.py loads with ctypes. The rest is pyproject.toml."""

import os
import shlex
import shutil
import sys
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

NATIVE = Path("kvtier/io/native")
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread"]
# The runtime comes along, so that the library loads on a machine without libstdc++ (a bare container).
LINK = ["-shared", "-pthread", "-ldl"]


def compiler() -> tuple[list[str], list[str]]:
    """Command and its own flags: $CXX, else c++, g++ or clang++ from PATH, else the ziglang package."""
    named = os.environ.get("CXX")
    if named:
        return shlex.split(named), ["-static-libstdc++", "-static-libgcc"]
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name], ["-static-libstdc++", "-static-libgcc"]
    # zig compiles for this very processor and with traps unless told otherwise; its libc++ is always static.
    return [sys.executable, "-m", "ziglang", "c++"], ["-mcpu=baseline", "-fno-sanitize=undefined"]


class BuildNative(build_ext):
    """Compiles without Python's own flags: the library includes no Python header."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        command, own_flags = compiler()
        self.spawn([*command, *FLAGS, *own_flags, *ext.sources, *LINK, "-o", str(target)])


class AnyPython3Wheel(bdist_wheel):
    """No Python ABI is used; the wheel only depends on the machine."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


def packages() -> list[str]:
    """kvtier's own, and the sibling folders that [tool.setuptools.package-dir] maps into it."""
    siblings = ["connectors", "server"]
    below = [name for folder in siblings for name in find_packages(include=[f"{folder}.*"])]
    return find_packages(include=["kvtier", "kvtier.*"]) + [f"kvtier.{name}" for name in siblings + below]


setup(
    packages=packages(),
    ext_modules=[
        Extension(
            "kvtier.io._native",
            sources=sorted(str(path) for path in NATIVE.glob("*.cpp")),
            depends=sorted(str(path) for path in NATIVE.glob("*.h")),
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": AnyPython3Wheel},
)
