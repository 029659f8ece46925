"""Whose rows of vLLM's CPU tier may be loaded by whom, as far as vLLM tells a tier.

A row is one chunk of one KV-cache group: the bytes that all workers have of it, in vLLM's own order, and padding.
Before one engine may load another's, these have to be equal: vLLM's release and platform, which decide what lies where
in a block; dtype and layout of the KV, canonical or not; layers and block sizes of all groups; blocks of a chunk, and
tokens of a block hash; bytes of a row; the weights; and sizes of the parallel groups, unless rows are canonical and
vLLM says that these do not depend on them. (Rows of the direct layout are not taken across parallel sizes, even where
vLLM's own file tier would.)

Weights are fingerprinted in the model's folder. A model that vLLM was given by its name on a hub has none here, for a
tier hears neither the revision nor where the files lie: it needs a `model_tag`. So does one whose rotary embedding
looks at the engine's --max-model-len (longrope): that is not heard, either.

What can't be told apart, since vLLM gives a tier its OffloadingConfig and no more: how the same folder is read
(`load_format`, quantization while loading, `hf_overrides`, rope settings, a dtype of activations besides the KV's),
weights of a draft model, processor arguments of images, attention backends that would lay out a block differently
under one layout's name, and LoRA weights that change under one name and path (these two are in vLLM's hashes). Engines
that differ in these need a `model_tag` each, or a root each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import vllm
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform

from kvtier.config.settings import Settings
from kvtier.connectors.objects.store import ObjectHost
from kvtier.connectors.vllm.compatibility import check_sources
from kvtier.connectors.vllm.namespace import FINGERPRINTS, LENGTH_DEPENDENT_ROPES
from kvtier.errors import ConfigError
from kvtier.format.namespace import canonical_text
from kvtier.model.weights_fingerprint import weights_fingerprint

FAMILY = "vllm-offloading"


def host_of(config: Any, settings: Settings, row_bytes: int) -> ObjectHost:
    """config: vLLM's OffloadingConfig. Raises ConfigError where the weights can't be told from others."""
    facts = layout_of(config) | {"row_bytes": row_bytes}
    if settings.model_tag is None:
        facts["weights"] = _weights(config.model.name)
    return ObjectHost(FAMILY, canonical_text(facts), vllm.__version__, config.model.name)


def layout_of(config: Any) -> dict[str, Any]:
    """What decides which bytes of a row mean what. config: vLLM's OffloadingConfig."""
    parallel = config.parallel
    is_portable = config.canonical_layout and parallel.is_parallelism_agnostic
    sizes = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
    return {
        "vllm": vllm.__version__.split("+")[0],
        "platform": current_platform.device_name,
        "kv_dtype": config.model.dtype,
        "kv_layout": config.kv_cache_layout,
        "canonical": _canonical_format(config) if config.canonical_layout else None,
        "replicated": config.replicated_layout,
        "groups": [[group.group_id, group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "parallel": None if is_portable else {name: getattr(parallel, name) for name in sizes},
        "worker_block_bytes": None if is_portable else config.worker_kv_bytes_per_block,
    }


def _canonical_format(config: Any) -> str:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id

    return str(canonical_format_id(config.kv_cache_layout))


def _weights(name: str) -> str:
    if not os.path.isdir(name):
        fix = f"vLLM tells its tiers a model's name and no revision, and {name!r} is no folder whose weights could be"
        raise ConfigError("model_tag", None, f"{fix} fingerprinted; set it to a name that changes when the weights do")
    fingerprint = weights_fingerprint(Path(name), FINGERPRINTS)
    config = json.loads((Path(name) / "config.json").read_text(encoding="utf-8"))
    for kind in LENGTH_DEPENDENT_ROPES.intersection(_ropes(config)):
        fix = f"positions of this model ({kind}) depend on --max-model-len, which vLLM does not tell its tiers"
        raise ConfigError("model_tag", None, f"{fix}; set it to a name that changes with that and with the weights")
    for architecture in config.get("architectures") or ():
        check_sources(architecture, ModelRegistry)
    return fingerprint


def _ropes(config: Any, is_rope: bool = False) -> Iterator[str]:
    """Kinds of rotary embeddings that a model's config.json names, for all of the model or for a part of it."""
    for name, value in config.items() if isinstance(config, dict) else ():
        if is_rope and name in ("rope_type", "type"):
            yield str(value)
        yield from _ropes(value, is_rope or name in ("rope_scaling", "rope_parameters"))
