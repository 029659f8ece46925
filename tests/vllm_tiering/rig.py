"""vLLM's tiering without a GPU: its own spec, managers and shared region, and what its scheduler does with them.

What a worker would copy from its GPU is written into the rows of the region here, and read from them.
"""

import itertools
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from kvtier.connectors.vllm_tiering import KVTierSecondaryTier
from tests.objects.rig import SMALL, content
from tests.waiting import wait_until

UNTAGGED: dict[str, Any] = {**SMALL, "touch_interval_s": 0.2}
ROOM: dict[str, Any] = {**UNTAGGED, "model_tag": "tiny"}
ROW_BYTES = 24_576  # two workers' 6,000 bytes a block, two blocks a chunk, in whole pages
ROWS = 24
_numbers = itertools.count()


def offloading_config(tier: Mapping[str, Any], **changes: Any) -> OffloadingConfig:
    """changes: of fields of OffloadingConfig; tp_size, blocks_per_chunk, dtype and name as themselves."""
    tp_size = changes.pop("tp_size", 2)
    model = OffloadingModelConfig(changes.pop("name", "org/model"), changes.pop("dtype", "bfloat16"))
    cache = OffloadingCacheConfig(16, changes.pop("blocks_per_chunk", 2))
    parallel = OffloadingParallelConfig(
        rank=0,
        world_size=tp_size,
        tp_size=tp_size,
        pp_size=1,
        pcp_size=1,
        dcp_size=1,
        data_parallel_index=0,
        data_parallel_size=1,
        data_parallel_rank_local=None,
        is_parallelism_agnostic=changes.pop("is_parallelism_agnostic", False),
    )
    values: dict[str, Any] = {
        "groups": (OffloadingGroupConfig(16, ("model.layers.0.self_attn.attn",), 0),),
        "worker_kv_bytes_per_block": 12_000 // tp_size,
        "enable_kv_cache_events": False,
        "extra_config": {"cpu_bytes_to_use": ROWS * ROW_BYTES, "secondary_tiers": [dict(tier)]},
        "engine_id": uuid.uuid4().hex,
        "model": model,
        "cache": cache,
        "parallel": parallel,
        "kv_cache_layout": "LBHNC",
    }
    return OffloadingConfig(**values | changes)


def tier_config(root: Path, room: Mapping[str, Any] = ROOM, **settings: Any) -> dict[str, Any]:
    return {
        "type": "KVTierSecondaryTier",
        "module_path": "kvtier.connectors.vllm_tiering",
        "settings": {"root": str(root)} | dict(room) | settings,
    }


def write_model(folder: Path, weight: float) -> None:
    """A model's folder, as far as vLLM's configuration and fingerprints look at it: three layers, two heads of 32."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_hidden_layers": 3,
        "intermediate_size": 64,
        "vocab_size": 512,
        "max_position_embeddings": 2048,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"weight": torch.full((4,), weight)}, folder / "model.safetensors")


def key(number: int, of: str = "chunk") -> OffloadKey:
    return make_offload_key(sha256(f"{of}{number}".encode()).digest(), 0)


def keys(numbers: Sequence[int] | range, of: str = "chunk") -> list[OffloadKey]:
    return [key(number, of) for number in numbers]


def expected(wanted: Sequence[OffloadKey]) -> list[bytes]:
    return [content(one, ROW_BYTES) for one in wanted]


@dataclass
class Offloader:
    """One engine's scheduler, as far as offloading goes."""

    manager: TieringOffloadingManager

    @property
    def tier(self) -> KVTierSecondaryTier:
        (tier,) = self.manager.secondary_tiers
        assert isinstance(tier, KVTierSecondaryTier)
        return tier

    @property
    def rows(self) -> np.ndarray[Any, Any]:
        return np.asarray(self.manager.primary_tier.get_kv_memoryview())

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext((), ()))

    def settle(self) -> None:
        """Steps until nothing is on its way."""

        def is_idle() -> bool:
            self.step()
            return not self.manager.has_pending_work()

        wait_until(is_idle, "the end of all transfers")

    def begin(self, salt: str | None = None) -> ReqContext:
        parameters = None if salt is None else {"cache_salt": salt}
        context = ReqContext(f"request {next(_numbers)}", parameters)
        self.manager.on_new_request(context)
        return context

    def store(self, wanted: Sequence[OffloadKey], salt: str | None = None, context: ReqContext | None = None) -> None:
        """What a request computed goes to the CPU tier, and from there on; bytes depend on the key."""
        own = context or self.begin(salt)
        prepared = self.manager.prepare_store(wanted, own)
        assert prepared is not None, "the CPU tier of this test is too small"
        for one, number in zip(prepared.keys_to_store, prepared.store_spec.block_ids, strict=True):
            self.rows[number] = np.frombuffer(content(one, ROW_BYTES), dtype=self.rows.dtype)
        if prepared.keys_to_store:
            self.manager.complete_store(prepared.keys_to_store, own)
        if context is None:
            self.manager.on_request_finished(own)
        self.settle()

    def look_up(self, wanted: Sequence[OffloadKey], context: ReqContext) -> list[LookupResult]:
        """Step by step, until all of them are in the CPU tier or nowhere."""
        found: list[LookupResult] = []

        def is_known() -> bool:
            found[:] = [self.manager.lookup(one, context) for one in wanted]
            self.step()
            return not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(found)

        wait_until(is_known, "an answer to every lookup")
        return found

    def load(self, wanted: Sequence[OffloadKey], context: ReqContext | None = None) -> list[bytes | None]:
        """What a request would copy to its GPU; None: it computes that itself."""
        own = context or self.begin()
        found = self.look_up(wanted, own)
        hits = [one for one, how in zip(wanted, found, strict=True) if how is LookupResult.HIT]
        numbers = self.manager.prepare_load(hits, own).block_ids if hits else []
        got = {one: self.rows[number].tobytes() for one, number in zip(hits, numbers, strict=True)}
        if hits:
            self.manager.complete_load(hits, own)
        if context is None:
            self.manager.on_request_finished(own)
        return [got.get(one) for one in wanted]

    def empty_cpu_tier(self) -> None:
        """As if other requests had pushed all out; what lay there is overwritten, too."""
        self.settle()
        self.manager.primary_tier.reset_cache()
        self.rows[:] = 0x5A

    def reset(self) -> None:
        """As before new weights. From 0.33 on, vLLM promotes nothing until its workers say that they hold nothing."""
        self.manager.reset_cache()
        if hasattr(self.manager, "on_reset_flushed"):
            self.manager.on_reset_flushed()

    def exported(self) -> dict[str, float]:
        """What vLLM would add to its metrics since the last call, without labels."""
        stats = self.manager.get_stats()
        return {} if stats is None else dict(stats.reduce())


@contextmanager
def offloader(tier: Mapping[str, Any], **changes: Any) -> Iterator[Offloader]:
    manager = TieringOffloadingSpec(offloading_config(tier, **changes)).get_manager()
    assert isinstance(manager, TieringOffloadingManager)
    try:
        yield Offloader(manager)
    finally:
        manager.shutdown()


@contextmanager
def offloader_at(root: Path, **settings: Any) -> Iterator[Offloader]:
    with offloader(tier_config(root, **settings)) as made:
        yield made
