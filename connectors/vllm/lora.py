"""Fingerprints of vLLM's LoRA adapters, so that KV is never loaded for other weights.

vLLM identifies an adapter by its number, and in its own prefix cache by its name (before 0.32) or its name and path;
none of these changes if the files are exchanged. It reads the files at its own times: when asked to load an adapter,
hours before the first request, and again at the next request of an adapter evicted by `max_cpu_loras`. So the files are
checked when vLLM is asked to load them, when a request is first seen, and until its computed KV is saved. Once the
files behind a name change, requests with that name or number are neither loaded nor saved until the engine restarts:
the engine's blocks and memory may hold either version.
"""

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

# (name, bytes, times of content and inode in ns, inode) of each existing one of FILES
Signature = tuple[tuple[str, int, int, int, int], ...]


class Adapters:
    """Fingerprints by path; the content is read once as long as the files stay unchanged."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[Signature, str]] = {}  # by path
        self._first: dict[str, str] = {}  # by name
        self._by_number: dict[int, str] = {}
        self._load_signatures: dict[int, Signature] = {}  # by number
        self._rejected: set[str | int] = set()  # names and numbers
        self._warned: set[str] = set()

    def watch_loads(self) -> None:
        """Observe which adapters vLLM's core in this process is asked to load; it does not inform its connectors."""
        from vllm.v1.engine.core import EngineCore

        if EngineCore.add_lora.__globals__ is not globals():
            EngineCore.add_lora = _observed(EngineCore.add_lora)
        _watching.add(self)

    def will_load(self, lora: Any) -> None:
        """Note that vLLM reads the files of this LoRARequest now, unless it has them already."""
        if getattr(lora, "load_inplace", False):
            self._reject(lora, "its weights are replaced in place")
        self._load_signatures.setdefault(lora.lora_int_id, _signature(Path(lora.lora_path)))

    def fingerprint(self, lora: Any) -> str | None:
        """Return the fingerprint of a LoRARequest's weights; None: its requests may neither load nor save."""
        name = lora.lora_name
        if self._is_rejected(lora):
            return None
        if getattr(lora, "load_inplace", False):
            self._reject(lora, "its weights are replaced in place")
            return None
        if getattr(lora, "tensorizer_config_dict", None):  # of releases before 0.32
            self._reject(lora, "its weights are read by tensorizer, from elsewhere than its folder")
            return None
        try:
            fingerprint = self._fingerprint_of(lora.lora_path)
        except ConfigError as error:
            if name not in self._first:  # a later fingerprint could not be compared
                self._rejected.add(name)
            self._warn(name, str(error))
            return None
        if getattr(lora, "is_3d_lora_weight", False):  # vLLM reads the same files in another way
            fingerprint += ":3d"
        read = self._read[lora.lora_path][0]
        if self._load_signatures.get(lora.lora_int_id, read) != read:
            self._reject(lora, "its files changed after vLLM began to load them; load changed weights under a new name")
            return None
        if self._first.setdefault(name, fingerprint) != fingerprint:
            why = "the weights behind it changed, and vLLM may still hold the old ones, or their KV"
            self._reject(lora, f"{why}; load changed weights under a new name")
            return None
        if self._by_number.setdefault(lora.lora_int_id, fingerprint) != fingerprint:
            self._reject(lora, "its number is another adapter's too, and vLLM keeps the weights that it read first")
            return None
        return fingerprint

    def read_at(self, lora: Any) -> Signature | None:
        """Return the state of the files that the fingerprint was made from; None without a fingerprint."""
        known = self._read.get(lora.lora_path)
        return None if known is None or self._is_rejected(lora) else known[0]

    def are_still(self, lora: Any, since: Signature | None) -> bool:
        """Return True if vLLM can only have read these files for this LoRARequest; else reject the adapter from now on.
        Files that were rewritten count as others even if their content is equal: vLLM may have read them in between."""
        if since is None or self._is_rejected(lora):
            return False
        if _signature(Path(lora.lora_path)) == since:
            return True
        self._reject(lora, "its files changed while it was in use; load changed weights under a new name")
        return False

    def _fingerprint_of(self, path: str) -> str:
        signature = _signature(Path(path))
        known = self._read.get(path)
        if known is not None and known[0] == signature:
            return known[1]
        fingerprint = adapter_fingerprint(Path(path))
        self._read[path] = (signature, fingerprint)
        return fingerprint

    def _is_rejected(self, lora: Any) -> bool:
        return lora.lora_name in self._rejected or lora.lora_int_id in self._rejected

    def _reject(self, lora: Any, why: str) -> None:
        self._rejected |= {lora.lora_name, lora.lora_int_id}
        self._warn(lora.lora_name, why)

    def _warn(self, name: str, why: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            log.warning("requests with LoRA adapter %s are neither loaded nor saved: %s", name, why)


_watching: WeakSet[Adapters] = WeakSet()


def _observed(add_lora: Callable[..., bool]) -> Callable[..., bool]:
    @wraps(add_lora)  # vLLM decodes arguments from other processes by the signature
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
        except (OSError, ValueError):  # an unreadable file counts as a change too
            continue
        found.append((name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino))
    return tuple(found)
