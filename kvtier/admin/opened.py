"""A root and its index, opened to be looked after."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier.config.settings import Settings
from kvtier.errors import ConfigError, KVTierError
from kvtier.eviction.evictor import Evictor
from kvtier.eviction.limits import Rules
from kvtier.format.namespace import Namespace
from kvtier.index.base import Index, SetInfo, new_owner
from kvtier.index.open import open_index
from kvtier.storage.root import Root, model_name, namespace_folders, open_root, read_namespace


class AdminRefusal(KVTierError):
    """Refusal of an operation; the text says why."""


class NotThere(AdminRefusal):
    """There is no such namespace or tenant."""


class Busy(AdminRefusal):
    """Another operation of the same kind is running."""


class NamespaceBook:
    """Descriptions of a root's namespaces. Each is read once, for it never changes."""

    def __init__(self, root: Root) -> None:
        self._root = root
        self._known: dict[bytes, Namespace] = {}
        self._models: dict[bytes, str] = {}

    def ids(self) -> list[bytes]:
        """Return the ids of all namespaces that have a folder."""
        return [bytes.fromhex(folder.name) for folder in namespace_folders(self._root.folder)]

    def find(self, namespace: bytes) -> Namespace | None:
        """Return a namespace; None when it does not exist or its description cannot be read."""
        if namespace not in self._known:
            try:
                self._known[namespace] = read_namespace(self._root.folder / namespace.hex())
            except ConfigError:
                return None
        return self._known[namespace]

    def model(self, namespace: bytes) -> str:
        """Return the name under which an engine first served the namespace's model; "" when it is not known."""
        if not self._models.get(namespace):
            self._models[namespace] = model_name(self._root.folder / namespace.hex())
        return self._models[namespace]

    def get(self, namespace: bytes) -> Namespace:
        """Return a namespace. Raises NotThere."""
        found = self.find(namespace)
        if found is None:
            raise NotThere(f"there is no namespace {namespace.hex()} in {self._root.path}")
        return found


@dataclass(frozen=True)
class Opened:
    """Thread-safe as far as the index is. clock: seconds since the epoch."""

    settings: Settings
    root: Root
    index: Index
    evictor: Evictor
    book: NamespaceBook
    clock: Callable[[], float] = time.time

    def protected(self, sets: Sequence[SetInfo]) -> frozenset[int]:
        """Return the ids of the sets that pins keep from being evicted. Raises IndexUnavailable."""
        return self.evictor.protected(sets, self.settings.capacity_bytes)

    def close(self) -> None:
        self.index.close()


def open_for_admin(settings: Settings) -> Opened:
    """Raises ConfigError; IndexUnavailable where the index is down."""
    if settings.index.kind == "memory":
        fix = "an index in memory is one engine's own, and no other process sees it; use embedded or redis"
        raise ConfigError("index.kind", "memory", fix)
    root = open_root(settings, needs_room=False)
    return opened(settings, root, open_index(settings, root))


def opened(settings: Settings, root: Root, index: Index) -> Opened:
    """Return an Opened over an index that the caller has opened."""
    evictor = Evictor(index, root.folder, new_owner("admin-"), Rules.of(settings.capacity))
    return Opened(settings, root, index, evictor, NamespaceBook(root))
