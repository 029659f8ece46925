"""ObjectTier: opaque objects of another host, stored as an engine's KV: segments, checksums, quotas, eviction,
signatures.

    namespaces   one for each size in pages; distinct from those of engines by codec and family
    key          blake3-128(family id || the host's key); the family id is that of a namespace for no pages at all
    found by     the key alone: its entry in the index has the size of the slab, and so identifies the namespace
    length       under the slab's checksum (codec); an object of another length than requested is a miss, and is
                 removed for the one that the host will put

The first object under a key stays until it is deleted, evicted or found to be of another length: hosts hash contents
into their keys. A deleted object is a miss at once; its space is freed with its segment set, and an index that is
rebuilt from the segments has it again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from blake3 import blake3

from kvtier.config.settings import Settings
from kvtier.connectors.objects.codec import CODEC_ID, object_geometry, octets, slab_bytes_of
from kvtier.connectors.objects.size_class import FoundObject, SizeClass, Wanted
from kvtier.errors import ConfigError, IndexResting, IndexUnavailable, TierUnavailable
from kvtier.format.namespace import ID_BYTES, Namespace
from kvtier.index import entry as entries
from kvtier.index.open import open_index
from kvtier.model.tenants import Tenants
from kvtier.runtime.metrics import INDEX_ERRORS, LOAD_FAILURES, Metrics, summed
from kvtier.runtime.repeated_log import RepeatedLog
from kvtier.scheduler.engine_report import About
from kvtier.storage.root import namespace_folders, open_root, read_namespace
from kvtier.storage.start_wait import in_time

log = logging.getLogger("kvtier")

SIZE_CLASSES_MAX = 8  # of one process: each has threads and memory of its own


class Object(NamedTuple):
    """key: the host's own. memory: contiguous, to read from or write to. salt: mapped to the tenant's label."""

    key: bytes
    memory: memoryview
    salt: str = ""


@dataclass(frozen=True, slots=True)
class ObjectHost:
    """Identity of a host.

    family: name shared by hosts that may read each other's objects, such as "lmcache". identity: further facts that
    must be equal, and that keys do not contain (kvtier.format.namespace.canonical_text); "" for none. version, model:
    for reports.
    """

    family: str
    identity: str = ""
    version: str = ""
    model: str = ""


def settings_of(config: str | None, settings: Mapping[str, Any] | None) -> Settings:
    """Load settings as hosts pass them. config: a YAML file. settings: these override that file and the environment.
    Raises ConfigError."""
    return Settings.load(dict(settings or {}) | ({} if config is None else {"config": config}))


class ObjectTier:
    """Store of objects. Thread-safe. Calls wait for the storage, for `io.timeout_s` and a little more, and touch no
    memory later. A `get` whose loads fail one after the other waits up to twice that; sizes are served in turn.

    A fault of storage or index is a miss. `put` and `get` raise ConfigError if objects of that size cannot be stored at
    all, which `prepare` finds at start; and ValueError for memory that is not contiguous.
    """

    def __init__(self, settings: Settings, host: ObjectHost) -> None:
        """Open root and index. Raises ConfigError."""
        if settings.codec != "raw":
            raise ConfigError("codec", settings.codec, f"objects of {host.family} are kept as they are: set it to raw")
        settings.check_device(has_gpu=False)
        self._settings = settings
        self._host = host
        signer = settings.signing.signer()
        self._signing = "" if signer is None else signer.fingerprint
        self._tenants = Tenants(settings.capacity.tenants)
        self._family_id = self._namespace(0).id
        opening = "opening the root and reading its owner.json"
        self._root = in_time(settings.root, opening, partial(open_root, settings))
        self._metrics = Metrics()
        self._index = open_index(settings, self._root, self._metrics, is_engines=True)
        self._lock = threading.Lock()
        self._size_classes: dict[int, SizeClass] = {}
        self._refused: dict[int, ConfigError] = {}
        self._is_own: dict[bytes, bool] = {}
        self._is_closed = False
        self._log = RepeatedLog()
        self._open_a_known_size()

    @classmethod
    def opened(cls, settings: Settings, host: ObjectHost, sizes: Sequence[int]) -> ObjectTier:
        """Return a tier prepared for objects of these sizes, in bytes. Raises ConfigError, and then nothing is open."""
        tier = cls(settings, host)
        try:
            for object_bytes in sizes:
                tier.prepare(object_bytes)
        except ConfigError:
            tier.close()
            raise
        return tier

    def prepare(self, object_bytes: int) -> None:
        """Open the size class of this object size, instead of with its first object. Raises ConfigError."""
        self._size_class(slab_bytes_of(object_bytes))

    def put(self, objects: Sequence[Object]) -> list[bool]:
        """Return for each object True if it is stored, now or before, or being stored by another caller."""
        wanted = [self._wanted(item) for item in objects]
        answer = self._find([item.key for item in wanted])
        found = answer or [None] * len(wanted)
        is_stored = [False] * len(wanted)
        by_size: dict[int, list[int]] = {}
        for number, (item, entry) in enumerate(zip(wanted, found, strict=True)):
            slab_bytes = slab_bytes_of(item.memory.size)
            is_stored[number] = entry is not None and _slab_bytes(entry) == slab_bytes
            if is_stored[number]:
                continue
            if entry is not None:
                self._drop([item.key], [entry])
            by_size.setdefault(slab_bytes, []).append(number)
        for slab_bytes, numbers in by_size.items():
            these = [wanted[number] for number in numbers]
            kept = self._size_class(slab_bytes).put(these, [item.key for item in these] if answer is not None else [])
            for number, is_kept in zip(numbers, kept, strict=True):
                is_stored[number] = is_kept
        return is_stored

    def get(self, objects: Sequence[Object]) -> list[bool]:
        """Return for each object True if its memory now has the content stored under its key; else its memory is
        undefined."""
        wanted = [self._wanted(item) for item in objects]
        by_size: dict[int, list[FoundObject]] = {}
        others: list[FoundObject] = []
        for item, entry in zip(wanted, self._find([item.key for item in wanted]) or [], strict=False):
            if entry is not None:
                slab_bytes = slab_bytes_of(item.memory.size)
                mine = by_size.setdefault(slab_bytes, []) if _slab_bytes(entry) == slab_bytes else others
                mine.append(FoundObject(item, entry))
        got: set[int] = set()
        for slab_bytes, these in by_size.items():
            these.sort(key=_place)  # neighbours are read together, and no two loads wait for each other in a circle
            here, others_too = self._size_class(slab_bytes).get(these)
            got.update(id(item) for item in here)
            others += others_too
        if others:
            self._metrics.add(LOAD_FAILURES, len(others))
            self._drop([found.wanted.key for found in others], [found.entry for found in others])
        return [id(item) in got for item in wanted]

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key True if an object of any length is indexed. A hint: it may be gone or corrupt when
        loaded."""
        found = self._find([self._key(key) for key in keys]) or [None] * len(keys)
        return [entry is not None for entry in found]

    def delete(self, keys: Sequence[bytes]) -> list[bool]:
        """Delete objects. Return for each key True if it was there."""
        own = [self._key(key) for key in keys]
        return self._drop(own, self._find(own) or [None] * len(own))

    def usage_bytes(self) -> dict[str, int]:
        """Return the bytes of this family's segment sets by the tenant's label ("": none), of all hosts on the root.
        Raises IndexUnavailable."""
        used: dict[str, int] = {}
        for info in self._index.sets():
            if self._is_of_family(info.namespace):
                used[info.tenant] = used.get(info.tenant, 0) + info.n_bytes
        return used

    def counters(self) -> dict[str, float]:
        """Return sums since the start (kvtier.runtime.metrics); a token there is an object."""
        return summed([self._metrics.total(), *(size_class.counters() for size_class in self._opened_size_classes())])

    def close(self) -> None:
        """Close everything; every wait is bounded. No call should be under way; one that is ends as a miss or with
        TierUnavailable."""
        with self._lock:
            self._is_closed = True
            size_classes, self._size_classes = self._size_classes, {}
        for size_class in size_classes.values():
            size_class.close()
        self._index.close()

    def _namespace(self, slab_bytes: int) -> Namespace:
        settings = self._settings
        return Namespace(
            engine=self._host.family,
            weights=settings.model_tag or "",
            geometry=object_geometry(slab_bytes),
            model_dtype="",
            quantization="",
            positions="",
            hf_overrides="",
            codec=CODEC_ID,
            draft="",
            epoch=str(settings.epoch),
            settings=self._host.identity,
            signing=self._signing,
        )

    def _size_class(self, slab_bytes: int) -> SizeClass:
        """Return the opened class. Raises ConfigError, again without a new attempt; TierUnavailable after `close`."""
        with self._lock:
            if self._is_closed:
                raise TierUnavailable("the tier of objects is closed")
            refusal = self._refused.get(slab_bytes)
            if refusal is not None:
                raise refusal
            size_class = self._size_classes.get(slab_bytes)
            if size_class is None:
                try:
                    size_class = self._size_classes[slab_bytes] = self._open_size_class(slab_bytes)
                except ConfigError as fault:
                    self._refused[slab_bytes] = fault
                    raise
            return size_class

    def _open_a_known_size(self) -> None:
        # The background thread of a size class rebuilds a lost index, for all sizes, and has to do so before lookups.
        # One class suffices: other sizes may be in use by other hosts only.
        for folder in namespace_folders(self._root.folder):
            with suppress(ConfigError):  # an unreadable namespace belongs to no family
                found = read_namespace(folder)
                slab_bytes = found.geometry.k_head_size
                if found != self._namespace(slab_bytes):
                    continue
                try:
                    self._size_class(slab_bytes)
                    return
                except ConfigError as fault:  # objects to be stored may have other sizes
                    log.warning("objects stored by earlier processes are not used: %s", fault)

    def _open_size_class(self, slab_bytes: int) -> SizeClass:
        if len(self._size_classes) == SIZE_CLASSES_MAX:
            sizes = ", ".join(map(str, sorted(self._size_classes)))
            fix = (
                f"a process keeps objects of {SIZE_CLASSES_MAX} sizes in pages ({sizes}); give this one another process"
            )
            raise ConfigError("object_bytes", slab_bytes, fix)
        about = About(1, self._host.family, self._host.version, self._host.model)
        return SizeClass(self._settings, self._namespace(slab_bytes), about)

    def _opened_size_classes(self) -> list[SizeClass]:
        with self._lock:
            return list(self._size_classes.values())

    def _key(self, key: bytes) -> bytes:
        return blake3(self._family_id + key).digest(length=ID_BYTES)

    def _wanted(self, item: Object) -> Wanted:
        return Wanted(self._key(item.key), octets(item.memory), self._tenants.label(item.salt))

    def _find(self, keys: Sequence[bytes]) -> list[bytes | None] | None:
        """Return the entry of each key; None if the index does not answer."""
        try:
            return self._index.find(keys)
        except IndexUnavailable as fault:
            self._metrics.add(INDEX_ERRORS)
            if not isinstance(fault, IndexResting):
                self._log.warning(
                    "lookup", "the index does not answer; objects count as missing until it does: %s", fault
                )
            return None

    def _drop(self, keys: Sequence[bytes], found: Sequence[bytes | None]) -> list[bool]:
        """Remove entries from the index. Return for each key True if there was one."""
        was_there = []
        for key, entry in zip(keys, found, strict=True):
            places = [] if entry is None else entries.locations_of(entry) or [entries.NOWHERE]
            try:
                gone = [self._index.retract(key, location) for location in places]
            except IndexUnavailable:
                self._metrics.add(INDEX_ERRORS)
                gone = []
            was_there.append(any(gone))
        for size_class in self._opened_size_classes():
            size_class.forget(keys)
        return was_there

    def _is_of_family(self, namespace_id: bytes) -> bool:
        if namespace_id not in self._is_own:
            try:
                found = read_namespace(self._root.folder / namespace_id.hex())
            except ConfigError:
                return False  # an unreadable namespace belongs to no family
            self._is_own[namespace_id] = (found.engine, found.codec) == (self._host.family, CODEC_ID)
        return self._is_own[namespace_id]


def _slab_bytes(entry: bytes) -> int:
    """Return the size of the object's slab; 0 if the entry is damaged."""
    located = entries.locations_of(entry)
    return located[0].slab_bytes if located else 0


def _place(found: FoundObject) -> entries.Place:
    located = entries.locations_of(found.entry)
    return entries.place(located[0]) if located else (0, 0, 0)
