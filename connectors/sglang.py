"""KVTierHiCache: kvtier as the storage below SGLang's HiCache, its backend `dynamic` (configs/sglang/).

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"backend_name": "kvtier",
        "module_path": "kvtier.connectors.sglang", "class_name": "KVTierHiCache", "interface_v1": 1,
        "config": "/etc/kvtier/kvtier.yaml"}'

Tested with SGLang 0.5.23's factory, abstract class and host pools on a CPU, without an engine. SGLang's factory accepts
only subclasses of its abstract class, so this class inherits from it if it can be imported; nothing else needs SGLang.

An object is one flat page of one rank's host pool, K and V together; a load that fails writes to no page of the pool.
SGLang's key is a chained hash of the tokens, of `extra_key` (adapters) and of the cache salt. Before a page may be
read, these must be equal too: SGLang's release; `model_tag` and `epoch`; the model and ranks of HiCacheStorageConfig,
except the number of the replica; kind, layout, dtype and dimensions of the host pool. With MLA all TP ranks have the
same pages: SGLang has one of them write, and all read its pages.

SGLang does not pass to a backend: the model's folder and revision, quantization, load format, rope settings, the
weights of a draft model in the same pages, the fp8 variant of a pool of bytes, and the weights of adapters. So
`model_tag` is required, and must differ if any of these does. SGLang derives the number of an adapter of `--lora-paths`
from its name and path, not from its files; one that is loaded later gets a random number, and shares no page after a
restart. SGLang does not pass the user either, so no page belongs to a tenant.

Updates of a running engine's weights are observed (kvtier.connectors.sglang_weights). From an update until SGLang has
flushed its caches no page is found or stored, because the caches may hold KV of the old weights; from then on this
process finds only pages stored since, and shares none. After a restart the updated weights need another `epoch`.

Refused at start: models with host pools besides that of their KV (hybrid ones, indexers, separate draft models), which
need `batch_*_v2`; pools other than SGLang's plain MHA and MLA ones, or with different head sizes of K and V;
`tp_lcm_size`; context parallel decoding. SGLang's storage metrics stay empty.
"""

import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kvtier.connectors.faults import Faults, catch_faults
from kvtier.connectors.objects.store import Object, ObjectHost, ObjectTier, settings_of
from kvtier.connectors.sglang_weights import watch_weights
from kvtier.errors import ConfigError
from kvtier.format.namespace import canonical_text
from kvtier.runtime.versions import installed

try:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage  # type: ignore[import-not-found,unused-ignore]
except ImportError:
    HiCacheStorage = object

log = logging.getLogger("kvtier")

TESTED = "0.5.23"
FAMILY = "sglang-hicache"
# keys of the extra config that SGLang itself reads, besides those of its prefetching, which it removes
OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1")
OWN = ("config", "settings")
# Fields of HiCacheStorageConfig outside of the identity. All others count, those of later releases too.
NOT_OF_IDENTITY = ("extra_config", "enable_storage_metrics", "dp_rank", "dp_size")
OF_REPLICAS = ("tp_rank", "tp_size")  # fields outside of the identity if all TP ranks have the same pages
POOL_FACTS = (
    "layout",
    "page_size",
    "dtype",
    "layer_num",
    "target_layer_num",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "dsa_kv_cache_store_fp8",
    "start_layer",
    "end_layer",
    "head_group_num",
    "storage_format_tag",
)
KV_POOL = "kv"
POOLS = ("MHATokenToKVPoolHost", "MLATokenToKVPoolHost")  # kinds of pools whose pages POOL_FACTS describe completely


class _Page(NamedTuple):
    """A flat page of a host pool. elements: count, each of `dtype`; n_bytes: of all of them."""

    elements: int
    dtype: torch.dtype
    n_bytes: int


def _all_missing(_: Any, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
    return [None] * len(keys)


def _all_failed(_: Any, keys: Sequence[str], host_indices: Any = None, extra_info: Any = None) -> list[bool]:
    return [False] * len(keys)


class KVTierHiCache(HiCacheStorage):  # type: ignore[misc,unused-ignore]
    """Storage backend of HiCache. Thread-safe: SGLang loads and stores on several threads. Calls wait for the storage,
    as those of ObjectTier do.

    No hook raises once SGLang runs, because SGLang does not restart a thread that an exception ended. A fault is a
    miss.
    """

    def __init__(self, storage_config: Any, kwargs: Mapping[str, Any] | None = None) -> None:
        """Read the settings. Raises ConfigError; register_mem_pool_host checks the rest.

        storage_config: SGLang's HiCacheStorageConfig. Its extra config may have config: a YAML file of kvtier's
        settings; settings: these override that file and the environment. kwargs: unused; its factory may pass more.
        """
        extra = _checked(storage_config)
        self._settings = settings_of(extra.get("config"), extra.get("settings"))
        if self._settings.model_tag is None:
            fix = "SGLang passes its storage only the model's served name; set model_tag to a name that"
            raise ConfigError("model_tag", None, f"{fix} changes with the weights, their format and that of the KV")
        self._storage_config = storage_config
        self._faults = Faults()
        self._epoch: bytes | None = b""  # None: weights changed, and SGLang's caches are not flushed since
        self._tier: ObjectTier | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Open the tier for this pool's pages. Raises ConfigError, which ends SGLang's start."""
        page = _page_of(mem_pool_host)
        release = _sglang_version()
        identity = canonical_text(_config_facts(self._storage_config, release) | _pool_facts(mem_pool_host, page))
        model = str(self._storage_config.model_name or "")
        self.close()
        host = ObjectHost(FAMILY, identity, release, model)
        tier = ObjectTier.opened(self._settings, host, [page.n_bytes])
        self.mem_pool_host, self._page, self._tier = mem_pool_host, page, tier
        if not watch_weights(self) and HiCacheStorage is not object:
            log.warning(
                "kvtier cannot observe updates of weights in this SGLang; after an update restart it with another epoch"
            )

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Refuse a pool besides the KV's: KV pages are no use without its pages. Raises ConfigError."""
        name = str(getattr(host_pool_name, "value", host_pool_name))
        if name != KV_POOL:
            fix = "kvtier keeps the KV pool's pages only, not those of hybrid, sparse or draft models; start without it"
            raise ConfigError("host_pool", name, fix)

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Return the page, in `target_location` if given: contiguous host memory of a page's size. None is a miss; the
        content of `target_location` is then undefined."""
        return self.batch_get([key], [target_location])[0]

    @catch_faults("loading SGLang's pages", default=_all_missing)
    def batch_get(
        self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Return the result of `get` for each key."""
        targets = [None] * len(keys) if target_locations is None else target_locations
        pages = [self._new_page() if target is None else target for target in targets]
        return [page if is_here else None for page, is_here in zip(pages, self._load(keys, pages), strict=True)]

    @catch_faults("loading SGLang's pages", default=_all_failed)
    def batch_get_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Load into the pool's pages that begin at every page_size-th of host_indices, (n_keys * page_size,). Return
        for each page True if it was loaded; the others are unchanged."""
        places = self._places(keys, host_indices)
        pages = [self._new_page() for _ in keys]
        got = self._load(keys, pages)
        for place, page, is_here in zip(places, pages, got, strict=True):
            if is_here:
                self.mem_pool_host.set_from_flat_data_page(place, page)
        return got

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Return True if the page is stored, now or before. value: its tensor, in host memory."""
        return self.batch_set([key], [value])

    @catch_faults("storing SGLang's pages", default=False)
    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Return True if all pages are stored."""
        return all(self._store(keys, values))

    @catch_faults("storing SGLang's pages", default=_all_failed)
    def batch_set_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Store the pool's pages, named as for batch_get_v1. Return for each page True if it is stored, now or
        before."""
        places = self._places(keys, host_indices)
        return self._store(keys, [self.mem_pool_host.get_data_page(place, flat=True) for place in places])

    def exists(self, key: str) -> bool:
        """Return True if the page is indexed. A hint: it may be gone or corrupt when it is loaded."""
        return self.batch_exists([key]) == 1

    @catch_faults("a lookup of SGLang's pages", default=0)
    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Return the number of leading keys that are indexed."""
        tier, own = self._tier, self._own(keys)
        if tier is None or own is None:
            return 0
        found = tier.exists(own)
        return next((number for number, is_there in enumerate(found) if not is_there), len(keys))

    def clear(self) -> None:
        """Begin an epoch: this process finds nothing stored before, and shares nothing stored later. Nothing is
        deleted: other engines use it, and an engine started later finds it again (raise `epoch` to prevent that). With
        MLA on several ranks there are no hits until a restart, because each rank begins an epoch of its own. After a
        change of weights the epoch begins with the next flush of SGLang's caches."""
        if self._epoch is not None:
            self._epoch = uuid.uuid4().bytes

    def weights_changed(self) -> None:
        """Find and store nothing until SGLang has emptied its caches."""
        if self._epoch is not None:
            log.warning(
                "weights changed in place: nothing is loaded or stored until SGLang's caches are flushed "
                "(POST /flush_cache); from then until a restart, which needs another epoch, it loads no KV stored "
                "before and shares none with other engines"
            )
        self._epoch = None

    def caches_emptied(self) -> None:
        """Begin an epoch if the weights have changed."""
        if self._epoch is None:
            self._epoch = uuid.uuid4().bytes

    def counters(self) -> dict[str, float]:
        """Return the counters of kvtier.runtime.metrics."""
        return {} if self._tier is None else self._tier.counters()

    def close(self) -> None:
        """Close the tier; every wait is bounded. Later calls are misses."""
        tier, self._tier = self._tier, None
        if tier is not None:
            with self._faults.contained("closing the tier"):
                tier.close()

    def _load(self, keys: Sequence[str], pages: Sequence[Any]) -> list[bool]:
        tier, own = self._tier, self._own(keys)
        if tier is None or own is None:
            return [False] * len(keys)
        views = [self._memory(page) for page in pages]
        return tier.get([Object(*both) for both in zip(own, views, strict=True)])

    def _store(self, keys: Sequence[str], pages: Sequence[Any]) -> list[bool]:
        tier, own = self._tier, self._own(keys)
        if tier is None or own is None:
            return [False] * len(keys)
        views = [self._memory(page.contiguous()) for page in pages]
        return tier.put([Object(*both) for both in zip(own, views, strict=True)])

    def _own(self, keys: Sequence[str]) -> list[bytes] | None:
        """Return the keys in this epoch; None while nothing may be found or stored."""
        epoch = self._epoch
        if epoch is None:
            return None
        before = bytes([len(epoch)]) + epoch
        return [before + key.encode() for key in keys]

    def _new_page(self) -> torch.Tensor:
        return torch.empty(self._page.elements, dtype=self._page.dtype)

    def _memory(self, page: Any) -> memoryview:
        """Return the bytes of a page, not copied. Raises ValueError for a tensor that is no page of the pool: a request
        of another length would replace the stored object."""
        if not isinstance(page, torch.Tensor) or page.nbytes != self._page.n_bytes:
            raise ValueError(f"no tensor of the {self._page.n_bytes} bytes of a page")
        if page.device.type != "cpu" or not page.is_contiguous():
            raise ValueError("a page that is not contiguous in host memory")
        return page.detach().reshape(-1).view(torch.uint8).numpy().data

    def _places(self, keys: Sequence[str], host_indices: torch.Tensor) -> list[int]:
        """Return the first token of each page in the pool. Raises ValueError."""
        page_tokens = self.mem_pool_host.page_size
        if len(host_indices) != len(keys) * page_tokens:
            raise ValueError(f"{len(host_indices)} places for {len(keys)} pages of {page_tokens} tokens")
        return [int(place) for place in host_indices[::page_tokens]]


def _checked(storage_config: Any) -> Mapping[str, Any]:
    """Return the extra config. Raises ConfigError for values that it or the other settings cannot have."""
    extra: Mapping[str, Any] = storage_config.extra_config or {}
    unknown = sorted(extra.keys() - {*OF_SGLANG, *OWN})
    if unknown:
        fix = "unknown keys of --hicache-storage-backend-extra-config; kvtier's settings go under settings"
        raise ConfigError("extra_config", unknown, f"{fix}, or into the file that config names")
    if not isinstance(extra.get("settings", {}), Mapping):
        raise ConfigError("settings", extra["settings"], 'must be an object, such as {"root": "/mnt/kv/kvtier"}')
    if getattr(storage_config, "tp_lcm_size", None):
        fix = "kvtier does not cut SGLang's pages, so ranks of other TP sizes can't read them; leave it out"
        raise ConfigError("tp_lcm_size", storage_config.tp_lcm_size, fix)
    if getattr(storage_config, "dcp_size", 1) > 1:
        raise ConfigError("dcp_size", storage_config.dcp_size, "context parallel decoding is not supported here")
    return extra


def _page_of(pool: Any) -> _Page:
    """Return the flat page of a pool. Raises ConfigError for an unknown kind of pool."""
    kind = type(pool).__name__
    if kind not in POOLS:
        raise ConfigError("host_pool", kind, f"kvtier knows the pages of {' and '.join(POOLS)} only; start without it")
    if getattr(pool, "_layer_shard_enabled", False):
        raise ConfigError("host_pool", kind, "its layers are divided among ranks, which kvtier cannot identify here")
    try:
        page = pool.get_dummy_flat_data_page()
    except NotImplementedError as lacking:
        raise ConfigError("host_pool", kind, f"it makes no flat pages ({lacking})") from None
    return _Page(page.numel(), page.dtype, page.nbytes)


def _config_facts(storage_config: Any, release: str) -> dict[str, Any]:
    left_out = {*NOT_OF_IDENTITY, *(OF_REPLICAS if storage_config.is_mla_model else ())}
    facts = {name: _plain(value) for name, value in vars(storage_config).items() if name not in left_out}
    return facts | {"sglang": release}


def _pool_facts(pool: Any, page: _Page) -> dict[str, Any]:
    facts = {name: _plain(getattr(pool, name, None)) for name in POOL_FACTS}
    return {"pool": type(pool).__name__, "pool_facts": facts, "page": [page.elements, str(page.dtype)]}


def _plain(value: Any) -> Any:
    """Return a value as JSON, or its repr; the repr of an unknown kind of object equals no other."""
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)


def _sglang_version() -> str:
    """Return the installed release, "" without one; warn of one that was not tested."""
    found = installed("sglang")
    if found not in ("", TESTED):
        log.warning("SGLang is %s; kvtier was tested with %s", found, TESTED)
    return found
