"""Identity of a row of vLLM's CPU tier: the facts that must be equal before one engine loads another's rows.

A row is one chunk of one KV-cache group: the bytes of all workers, in vLLM's own order, and padding. Compared are
vLLM's release and platform, which define the layout within a block; dtype and layout of the KV, canonical or not;
layers and block sizes of all groups; blocks of a chunk, and tokens of a block hash; bytes of a row; the weights; and
sizes of the parallel groups, unless rows are canonical and vLLM says that they do not depend on these. (Rows of the
direct layout are not shared across parallel sizes, even where vLLM's own file tier would do so.)

Weights are fingerprinted in the model's folder. A model named by its hub id needs a `model_tag`, because vLLM passes
neither its revision nor its folder to a tier; so does one whose rotary embedding depends on the engine's
--max-model-len (longrope), or its attention (Llama 4), which vLLM does not pass either.

vLLM passes only its OffloadingConfig, so some differences cannot be detected: how the folder is read (`load_format`,
quantization while loading, `hf_overrides`, rope settings, a dtype of activations besides the KV's), weights of a draft
model, processor arguments of images, attention backends with another block layout under the same layout name, and LoRA
weights that change under one name and path. Engines that differ in these need a `model_tag` each, or a root each.
"""

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
from kvtier.connectors.vllm.namespace import FINGERPRINTS, LENGTH_DEPENDENT_ROPES, LENGTH_TUNED
from kvtier.errors import ConfigError
from kvtier.format.namespace import canonical_text
from kvtier.model.weights_fingerprint import configs_in, weights_fingerprint

FAMILY = "vllm-offloading"


def host_of(config: Any, settings: Settings, row_bytes: int) -> ObjectHost:
    """Return the identity of an engine. config: vLLM's OffloadingConfig. Raises ConfigError if the weights cannot be
    identified."""
    facts = layout_of(config) | {"row_bytes": row_bytes}
    if settings.model_tag is None:
        facts["weights"] = _weights(config.model.name)
    return ObjectHost(FAMILY, canonical_text(facts), vllm.__version__, config.model.name)


def layout_of(config: Any) -> dict[str, Any]:
    """Return the facts that define the meaning of a row's bytes. config: vLLM's OffloadingConfig."""
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
        fix = f"vLLM passes its tiers a model's name and no revision, and {name!r} is no folder whose weights could be"
        raise ConfigError("model_tag", None, f"{fix} fingerprinted; set it to a name that changes when the weights do")
    folder = Path(name)
    fingerprint = weights_fingerprint(folder, FINGERPRINTS)
    config = json.loads((folder / configs_in(folder)[0]).read_text(encoding="utf-8"))
    types = {str(part.get("model_type")) for part in (config, config.get("text_config")) if isinstance(part, dict)}
    for kind in [*LENGTH_DEPENDENT_ROPES.intersection(_ropes(config)), *types & LENGTH_TUNED.keys()]:
        fix = f"positions of this model ({kind}) depend on --max-model-len, which vLLM does not pass to its tiers"
        raise ConfigError("model_tag", None, f"{fix}; set it to a name that changes with that and with the weights")
    for architecture in config.get("architectures") or ():
        check_sources(architecture, ModelRegistry)
    return fingerprint


def _ropes(config: Any, is_rope: bool = False) -> Iterator[str]:
    """Yield the kinds of rotary embeddings in a config.json, of the whole model or of a part of it."""
    for name, value in config.items() if isinstance(config, dict) else ():
        if is_rope and name in ("rope_type", "type"):
            yield str(value)
        yield from _ropes(value, is_rope or name in ("rope_scaling", "rope_parameters"))
