"""Which weights a LoRA adapter of vLLM's has, so that the KV of others is never taken for its own.

vLLM looks an adapter up by its number and its own prefix cache by its name (before 0.32) or its name and path; neither
tells that the files behind them were exchanged. It reads them when it likes, too: an adapter that fell out of
`max_cpu_loras` is read again at its next request. So the files are looked at with every request, and a name whose files
are not those of before is passed by until the engine is started again: whatever lies in the engine's blocks, or in its
memory, may be of either.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError
from kvtier.fingerprint import adapter_fingerprint

log = logging.getLogger("kvtier")

FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")

Signature = tuple[tuple[str, int, int, int, int], ...]
"""(name, bytes, times of content and inode in ns, inode) of each of FILES that is there."""


class Adapters:
    """Fingerprints of LoRA adapters; their contents are read once as long as the files stay as they are."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[Signature, str]] = {}  # by path
        self._first: dict[str, str] = {}  # by name
        self._passed_by: set[str] = set()
        self._warned: set[str] = set()

    def fingerprint(self, lora: Any) -> str | None:
        """Of the weights of a LoRARequest; None: its requests may neither load nor save."""
        name = lora.lora_name
        if name in self._passed_by:
            return None
        if getattr(lora, "load_inplace", False):
            self._pass_by(name, "its weights are replaced in place")
            return None
        if getattr(lora, "tensorizer_config_dict", None):  # of releases before 0.32
            self._pass_by(name, "its weights are read by tensorizer, from elsewhere than its folder")
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
        if self._first.setdefault(name, fingerprint) != fingerprint:
            why = "the weights behind it changed, and vLLM may still hold the old ones, or their KV"
            self._pass_by(name, f"{why}; load changed weights under a new name")
            return None
        return fingerprint

    def _fingerprint_of(self, path: str) -> str:
        signature = _signature(Path(path))
        known = self._read.get(path)
        if known is not None and known[0] == signature:
            return known[1]
        fingerprint = adapter_fingerprint(Path(path))
        self._read[path] = (signature, fingerprint)
        return fingerprint

    def _pass_by(self, name: str, why: str) -> None:
        self._passed_by.add(name)
        self._warn(name, why)

    def _warn(self, name: str, why: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            log.warning("requests with LoRA adapter %s are neither loaded nor saved: %s", name, why)


def _signature(folder: Path) -> Signature:
    found = []
    for name in FILES:
        try:
            stat = (folder / name).stat()
        except OSError:  # that it cannot be looked at is a change as well
            continue
        found.append((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino))
    return tuple(found)
