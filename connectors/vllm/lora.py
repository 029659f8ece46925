"""Which weights a LoRA adapter of vLLM's has, so that the KV of others is never taken for its own.

vLLM looks an adapter up by its number and its own prefix cache by its name (before 0.32) or its name and path; neither
tells that the files behind them were exchanged. It reads them when it likes, too: when it is told to load an adapter,
hours before the first request, and again at the next request of one that fell out of `max_cpu_loras`. So the files are
looked at when it is told to load them, when a request is first seen, and until what it computed is saved. A name whose
files are not those of before is passed by until the engine is started again, and its number is: whatever lies in the
engine's blocks, or in its memory, may be of either.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any
from weakref import WeakSet

from kvtier.errors import ConfigError
from kvtier.model.weights_fingerprint import adapter_fingerprint

log = logging.getLogger("kvtier")

FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")

Signature = tuple[tuple[str, int, int, int, int], ...]
"""(name, bytes, times of content and inode in ns, inode) of each of FILES that is there."""


class Adapters:
    """Fingerprints of LoRA adapters; their contents are read once as long as the files stay as they are."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[Signature, str]] = {}  # by path
        self._first: dict[str, str] = {}  # by name
        self._by_number: dict[int, str] = {}
        self._told_to_load: dict[int, Signature] = {}  # by number
        self._passed_by: set[str | int] = set()  # names and numbers
        self._warned: set[str] = set()

    def watch_loads(self) -> None:
        """Sees from now on what vLLM's core in this process is told to load: it does not tell its connectors."""
        from vllm.v1.engine.core import EngineCore

        if EngineCore.add_lora.__globals__ is not globals():
            EngineCore.add_lora = _telling(EngineCore.add_lora)
        _watching.add(self)

    def will_load(self, lora: Any) -> None:
        """vLLM reads the files of this LoRARequest now, unless it has them already."""
        if getattr(lora, "load_inplace", False):
            self._pass_by(lora, "its weights are replaced in place")
        self._told_to_load.setdefault(lora.lora_int_id, _signature(Path(lora.lora_path)))

    def fingerprint(self, lora: Any) -> str | None:
        """Of the weights of a LoRARequest; None: its requests may neither load nor save."""
        name = lora.lora_name
        if self._is_passed_by(lora):
            return None
        if getattr(lora, "load_inplace", False):
            self._pass_by(lora, "its weights are replaced in place")
            return None
        if getattr(lora, "tensorizer_config_dict", None):  # of releases before 0.32
            self._pass_by(lora, "its weights are read by tensorizer, from elsewhere than its folder")
            return None
        try:
            fingerprint = self._fingerprint_of(lora.lora_path)
        except ConfigError as error:
            if name not in self._first:  # nothing to compare with what may be there later
                self._passed_by.add(name)
            self._warn(name, str(error))
            return None
        if getattr(lora, "is_3d_lora_weight", False):  # how vLLM reads the files, where it is told to ask
            fingerprint += ":3d"
        read = self._read[lora.lora_path][0]
        if self._told_to_load.get(lora.lora_int_id, read) != read:
            self._pass_by(
                lora, "its files changed after vLLM was told to load them; load changed weights under a new name"
            )
            return None
        if self._first.setdefault(name, fingerprint) != fingerprint:
            why = "the weights behind it changed, and vLLM may still hold the old ones, or their KV"
            self._pass_by(lora, f"{why}; load changed weights under a new name")
            return None
        if self._by_number.setdefault(lora.lora_int_id, fingerprint) != fingerprint:
            self._pass_by(lora, "its number is another adapter's too, and vLLM keeps the weights that it read first")
            return None
        return fingerprint

    def read_at(self, lora: Any) -> Signature | None:
        """The files that its fingerprint was made from; None: there is none."""
        known = self._read.get(lora.lora_path)
        return None if known is None or self._is_passed_by(lora) else known[0]

    def are_still(self, lora: Any, since: Signature | None) -> bool:
        """Whether vLLM can have read no other files for this LoRARequest than those; from now on it is passed by if it
        can. Files that are as before but were written again count as others: it may have read them in between."""
        if since is None or self._is_passed_by(lora):
            return False
        if _signature(Path(lora.lora_path)) == since:
            return True
        self._pass_by(lora, "its files changed while it was in use; load changed weights under a new name")
        return False

    def _fingerprint_of(self, path: str) -> str:
        signature = _signature(Path(path))
        known = self._read.get(path)
        if known is not None and known[0] == signature:
            return known[1]
        fingerprint = adapter_fingerprint(Path(path))
        self._read[path] = (signature, fingerprint)
        return fingerprint

    def _is_passed_by(self, lora: Any) -> bool:
        return lora.lora_name in self._passed_by or lora.lora_int_id in self._passed_by

    def _pass_by(self, lora: Any, why: str) -> None:
        self._passed_by |= {lora.lora_name, lora.lora_int_id}
        self._warn(lora.lora_name, why)

    def _warn(self, name: str, why: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            log.warning("requests with LoRA adapter %s are neither loaded nor saved: %s", name, why)


_watching: WeakSet[Adapters] = WeakSet()


def _telling(add_lora: Callable[..., bool]) -> Callable[..., bool]:
    @wraps(add_lora)  # what comes from another process is decoded by its signature
    def add(core: Any, lora_request: Any) -> bool:
        for adapters in tuple(_watching):
            adapters.will_load(lora_request)
        return add_lora(core, lora_request)

    return add


def _signature(folder: Path) -> Signature:
    found = []
    for name in FILES:
        try:
            stat = (folder / name).stat()
        except (OSError, ValueError):  # that it cannot be looked at is a change as well
            continue
        found.append((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino))
    return tuple(found)
