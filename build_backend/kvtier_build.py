"""setuptools' build backend, plus one thing: where no C++ compiler is found, the `ziglang` package is asked for."""

import os
import shutil

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403


def _compiler_requirement() -> list[str]:
    if os.environ.get("CXX") or any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        return []
    return ["ziglang>=0.13"]


def get_requires_for_build_wheel(config_settings=None):
    return build_meta.get_requires_for_build_wheel(config_settings) + _compiler_requirement()


def get_requires_for_build_editable(config_settings=None):
    return build_meta.get_requires_for_build_editable(config_settings) + _compiler_requirement()
