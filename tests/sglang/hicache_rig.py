"""What SGLang's HiCache does with a storage backend, and a host pool of its kind, on the CPU and without SGLang."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvtier.connectors.sglang import KVTierHiCache
from tests.objects.rig import SMALL, content

PAGE_TOKENS = 16
POOL_PAGES = 16
ROOM: dict[str, object] = {**SMALL, "model_tag": "weights-1"}


@dataclass
class Config:
    """As HiCacheStorageConfig of SGLang 0.5.23 (srt/mem_cache/hicache_storage.py); the names are SGLang's."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    is_mla_model: bool = False
    enable_storage_metrics: bool = False
    is_page_first_layout: bool = False
    model_name: str | None = "org/model"
    tp_lcm_size: int | None = None
    should_split_heads: bool = False
    dp_rank: int = 0
    extra_config: dict[str, Any] | None = None
    dcp_size: int = 1
    dcp_rank: int = 0
    logical_page_size: int | None = None


class MHATokenToKVPoolHost:
    """KV of POOL_PAGES pages; the names of the class and of what it has are SGLang's.

    kv_buffer: layer_first (2, layers, tokens, heads, dim), page_first (2, tokens, layers, heads, dim).
    """

    page_size = PAGE_TOKENS
    layer_num = target_layer_num = 3
    head_num, head_dim, v_head_dim = 2, 8, 8
    start_layer, end_layer = 0, 3
    head_group_num = 1
    storage_format_tag = None

    def __init__(self, layout: str = "layer_first", dtype: torch.dtype = torch.bfloat16) -> None:
        self.layout, self.dtype = layout, dtype
        tokens = POOL_PAGES * PAGE_TOKENS
        middle = (self.layer_num, tokens) if layout == "layer_first" else (tokens, self.layer_num)
        self.kv_buffer = torch.zeros(2, *middle, self.head_num, self.head_dim, dtype=dtype)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros_like(self._page(0)).flatten()

    def get_data_page(self, index: Any, flat: bool = True) -> torch.Tensor:
        return self._page(index).flatten() if flat else self._page(index)

    def set_from_flat_data_page(self, index: Any, data_page: torch.Tensor) -> None:
        page = self._page(index)
        page[:] = data_page.reshape(page.shape)

    def _page(self, index: Any) -> torch.Tensor:
        return self.kv_buffer.narrow(2 if self.layout == "layer_first" else 1, int(index), PAGE_TOKENS)


class MLATokenToKVPoolHost(MHATokenToKVPoolHost):
    """Known by its name, too."""


class Hybrid(MHATokenToKVPoolHost):
    """A kind that nobody has looked at."""


def key(number: int) -> str:
    return f"{number:064x}"


def keys(numbers: Sequence[int] | range) -> list[str]:
    return [key(number) for number in numbers]


def extra(root: Path, **changes: object) -> dict[str, Any]:
    names = {"backend_name": "kvtier", "module_path": KVTierHiCache.__module__, "class_name": KVTierHiCache.__name__}
    return names | {"interface_v1": 1, "settings": ROOM | {"root": str(root)} | changes}


class Engine:
    """One rank: as SGLang's cache controller uses host pool and backend."""

    def __init__(self, backend: Any, pool: Any, with_v1: bool = True) -> None:
        self.backend, self.pool, self.with_v1 = backend, pool, with_v1
        backend.register_mem_pool_host(pool)
        backend.register_mem_host_pool_v2(pool, "kv")
        self.page_bytes: int = pool.get_dummy_flat_data_page().nbytes

    def content(self, name: str) -> bytes:
        return content((name, str(self.pool.dtype)), self.page_bytes)

    def expected(self, names: Sequence[str]) -> list[bytes]:
        return [self.content(name) for name in names]

    def store(self, names: Sequence[str]) -> bool:
        """Fills the pool's first pages with what is put under these keys, and stores them."""
        for number, name in enumerate(names):
            page = torch.frombuffer(bytearray(self.content(name)), dtype=self.pool.dtype)
            self.pool.set_from_flat_data_page(number * PAGE_TOKENS, page)
        if self.with_v1:
            return all(self.backend.batch_set_v1(names, self._places(len(names))))
        pages = [self.pool.get_data_page(number * PAGE_TOKENS) for number in range(len(names))]
        return bool(self.backend.batch_set(names, pages))

    def load(self, names: Sequence[str]) -> list[bytes | None]:
        """None: a miss, of which the pool's page has to be as it was."""
        self.pool.kv_buffer.view(torch.uint8)[:] = 0xA5
        if self.with_v1:
            got = self.backend.batch_get_v1(names, self._places(len(names)))
        else:
            targets = [self.pool.get_dummy_flat_data_page() for _ in names]
            pages = self.backend.batch_get(names, targets)
            got = [page is not None for page in pages]
            for number, page in enumerate(pages):
                if page is not None:
                    self.pool.set_from_flat_data_page(number * PAGE_TOKENS, page)
        here = [self._bytes(number) for number in range(len(names))]
        untouched = b"\xa5" * self.page_bytes
        assert all(is_here or page == untouched for is_here, page in zip(got, here, strict=True))
        return [page if is_here else None for is_here, page in zip(got, here, strict=True)]

    def _places(self, n_pages: int) -> torch.Tensor:
        return torch.arange(n_pages * PAGE_TOKENS)

    def _bytes(self, number: int) -> bytes:
        return bytes(self.pool.get_data_page(number * PAGE_TOKENS).view(torch.uint8).numpy())


@contextmanager
def engine_at(
    root: Path, pool: Any = None, with_v1: bool = True, config: Config | None = None, **changes: object
) -> Iterator[Engine]:
    config = config or Config()
    config.extra_config = extra(root, **changes)
    backend = KVTierHiCache(config, {})
    try:
        yield Engine(backend, pool or MHATokenToKVPoolHost(), with_v1)
    finally:
        backend.close()
