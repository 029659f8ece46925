"""Plans and shards of all ranks of an engine, made in one process on the CPU."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from vllm.config import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from kvtier.connectors.vllm.weights_loader import (
    KvtierModelLoader,
    PlannedLoad,
    everything,
    notes_in,
    reason_for_tensors,
    release,
    state_of,
)
from kvtier.connectors.vllm.weights_ranks import as_rank, build_model, engine_config
from kvtier.errors import ConfigError
from kvtier.model.shard_manifest import ShardManifest, read_shard_manifest
from kvtier.model.weights_fingerprint import weights_fingerprint
from kvtier.weights.copies import OFFSET, ROW_BYTES, ROWS, SOURCE_PITCH, pack
from kvtier.weights.plan import WeightPlan
from kvtier.weights.reader import WeightReader
from kvtier.weights.shards import GPTQ_LAYERS, RankState, ShardFolder, locked_folder

AUTO = "auto"  # dtype of an engine that is given none


@dataclass(frozen=True, slots=True)
class RankPlan:
    """Figures of one rank's plan. landed_bytes: into parameters, in their dtypes. read_bytes: of files, for those, with
    the gaps between short rows."""

    rank: int
    copies: int
    landed_bytes: int
    read_bytes: int
    converted: int
    materialized_bytes: int


def plans(folder: Path, tensor_size: int, dtype: str) -> Iterator[RankPlan]:
    """Yield the figures of each rank's plan. dtype: as vLLM's --dtype.

    Raises ConfigError for a model that is not loaded by plans.
    """
    with refusals_of_vllm(folder):
        config = _config(folder, tensor_size, dtype)
        for rank in range(tensor_size):
            with as_rank(config, rank), WeightReader() as reader:
                model, loader = build_model(config), _loader()
                planned = loader.record(model, config.model_config, reader)
            if planned is None:
                raise ConfigError("model", str(folder), f"kvtier cannot plan its load: {loader.why}")
            plan = planned.plan
            table = plan.copies.T
            lengths = (table[ROWS] - 1) * table[SOURCE_PITCH] + table[ROW_BYTES]
            spans = list(zip(table[0].tolist(), table[OFFSET].tolist(), lengths.tolist(), strict=True))
            sources = [conversion.source for conversion in plan.conversions]
            spans += [(source.number, source.offset, source.n_bytes) for source in sources]
            converted_bytes = sum(conversion.target.content_bytes for conversion in plan.conversions)
            yield RankPlan(
                rank=rank,
                copies=len(plan.copies),
                landed_bytes=plan.copied_bytes + converted_bytes + plan.materialized_bytes,
                read_bytes=_covered(spans),
                converted=len(plan.conversions),
                materialized_bytes=plan.materialized_bytes,
            )


def shard(
    folder: Path, tensor_size: int, out: Path, progress: Callable[[int, int], object], dtype: str = AUTO
) -> ShardManifest:
    """Write the shards of all ranks. Go on where an earlier call ended. Return the manifest.

    progress: is called with (bytes written so far, bytes of all shards). dtype: as vLLM's --dtype.
    Raises ConfigError, TierUnavailable without room, WeightsUnreadable, WeightsDamaged, OSError.
    """
    with refusals_of_vllm(folder):
        config = _config(folder, tensor_size, dtype)
        model_config = config.model_config
        # vLLM finds them by names in the checkpoint, which shards do not have. Building a model changes the names.
        gptq_layers = sorted(getattr(config.quant_config, GPTQ_LAYERS, None) or ())
        wanted = ShardManifest(
            source_fingerprint=weights_fingerprint(folder, None),
            release=release(),
            architecture=str(model_config.architecture),
            tensor_parallel_size=tensor_size,
            dtype=str(model_config.dtype).removeprefix("torch."),
            quantization=None if model_config.quantization is None else str(model_config.quantization),
        )
        with locked_folder(out), WeightReader() as reader:
            place = ShardFolder(out, wanted, progress)
            for rank in range(tensor_size):
                with as_rank(config, rank):
                    state = _rank_state(rank, config, reader)
                    if rank == 0:
                        place.check_room(state.n_bytes * tensor_size)
                    place.write_rank(state, reader)
            is_untied = getattr(model_config, "word_embeddings_untied_by_checkpoint", False)
            return place.finish(folder, is_untied=is_untied, gptq_layers=gptq_layers)


@contextmanager
def refusals_of_vllm(folder: Path) -> Iterator[None]:
    """Raise ConfigError with what vLLM says where it refuses the model or the tensor-parallel size."""
    try:
        yield
    except ValidationError as error:
        raise ConfigError("model", str(folder), f"vLLM does not take it: {error.errors()[0]['msg']}") from error
    except (ValueError, AssertionError, RuntimeError, LookupError, AttributeError) as error:
        said = f"{type(error).__name__}: {error}"
        raise ConfigError("model", str(folder), f"vLLM does not load it: {said}") from error


def _rank_state(rank: int, config: Any, reader: WeightReader) -> RankState:
    model, loader = build_model(config), _loader()
    before = notes_in(model)
    planned = loader.record(model, config.model_config, reader)
    if planned is None:
        if reason_for_tensors(model, list(everything(model)), config.model_config):
            raise ConfigError("model", config.model_config.model, f"it cannot be sharded: {loader.why}")
        DefaultModelLoader(LoadConfig(use_tqdm_on_load=False)).load_weights(model, config.model_config)
        planned = PlannedLoad(WeightPlan((), (), pack([])), [], {}, "vLLM's own loader")
    if changed := dict(before.items() ^ notes_in(model).items()):
        fix = f"it cannot be sharded: vLLM's loaders change more of it than bytes ({min(changed)}); start the engine"
        raise ConfigError("model", config.model_config.model, f"{fix} with this folder and --load-format kvtier")
    return RankState(rank, state_of(model), planned.plan, planned.targets, planned.expected)


def _config(folder: Path, tensor_size: int, dtype: str) -> Any:
    if read_shard_manifest(folder) is not None:
        raise ConfigError("model", str(folder), "these are shards already; name the folder of the checkpoint")
    logging.disable(logging.WARNING)  # a level would not last: vLLM 0.32 configures its log anew here
    try:
        with redirect_stdout(sys.stderr):  # stdout has the command's answer
            config = engine_config(str(folder), tensor_size, dtype=dtype)
    finally:
        logging.disable(logging.NOTSET)
    logging.getLogger("vllm").setLevel(logging.ERROR)
    return config


def _loader() -> KvtierModelLoader:
    return KvtierModelLoader(LoadConfig(load_format="kvtier", model_loader_extra_config={"plan_cache": False}))


def _covered(spans: list[tuple[int, int, int]]) -> int:
    """Return the bytes of files in any of the (file, offset, length)."""
    total, end = 0, (-1, 0)
    for file, offset, length in sorted(spans):
        begin = max(offset, end[1]) if file == end[0] else offset
        total += max(0, offset + length - begin)
        end = (file, max(offset + length, end[1] if file == end[0] else 0))
    return total
