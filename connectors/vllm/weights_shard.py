"""Shards of all ranks of an engine, made in one process on the CPU."""

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from vllm.config import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from kvtier.connectors.vllm.weights_loader import KvtierModelLoader, everything, reason_for_tensors, release, state_of
from kvtier.connectors.vllm.weights_ranks import as_rank, build_model, engine_config
from kvtier.errors import ConfigError
from kvtier.model.shard_manifest import ShardManifest, read_shard_manifest
from kvtier.model.weights_fingerprint import weights_fingerprint
from kvtier.weights.plan import WeightPlan
from kvtier.weights.reader import WeightReader
from kvtier.weights.shards import RankState, ShardFolder, locked_folder

LOGGED = logging.ERROR  # least level of vLLM's own lines here


def shard(
    folder: Path, tensor_size: int, out: Path, begin: Callable[[int], Callable[[int], object]], dtype: str = "auto"
) -> ShardManifest:
    """Write the shards of all ranks. Go on where an earlier call ended. Return the manifest.

    begin: is called with the bytes of all shards, and returns what is called with bytes that are written.
    dtype: as vLLM's --dtype.
    Raises ConfigError, TierUnavailable without room, WeightsUnreadable, WeightsDamaged, OSError.
    """
    report: list[Callable[[int], object]] = []
    with refusals_of_vllm(folder):
        config = _config(folder, tensor_size, dtype)
        model_config = config.model_config
        wanted = ShardManifest(
            source_fingerprint=weights_fingerprint(folder, None),
            release=release(),
            architecture=str(model_config.architecture),
            tensor_parallel_size=tensor_size,
            dtype=str(model_config.dtype).removeprefix("torch."),
            quantization=None if model_config.quantization is None else str(model_config.quantization),
        )
        with locked_folder(out), WeightReader() as reader:
            place = ShardFolder(out, wanted, lambda n_bytes: report[0](n_bytes))
            for rank in range(tensor_size):
                with as_rank(config, rank):
                    state = _rank_state(rank, config, reader)
                    if rank == 0:
                        place.check_room(state.n_bytes * tensor_size)
                        report.append(begin(state.n_bytes * tensor_size))
                    place.write_rank(state, reader)
            is_untied = getattr(model_config, "word_embeddings_untied_by_checkpoint", False)
            return place.finish(folder, reader, is_untied=is_untied)


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
    planned = loader.record(model, config.model_config, reader)
    if planned is not None:
        return RankState(rank, state_of(model), planned.plan, planned.targets, planned.expected)
    if reason_for_tensors(model, list(everything(model)), config.model_config):
        raise ConfigError("model", config.model_config.model, f"it cannot be sharded: {loader.why}")
    DefaultModelLoader(LoadConfig(use_tqdm_on_load=False)).load_weights(model, config.model_config)
    return RankState(rank, state_of(model), WeightPlan.empty(), [], {})


def _config(folder: Path, tensor_size: int, dtype: str) -> Any:
    if read_shard_manifest(folder) is not None:
        raise ConfigError("model", str(folder), "these are shards already; name the folder of the checkpoint")
    log = logging.getLogger("vllm")
    log.setLevel(LOGGED)
    with redirect_stdout(sys.stderr):  # vLLM 0.32 configures its log anew here; stdout has the command's answer
        config = engine_config(str(folder), tensor_size, dtype=dtype)
    log.setLevel(LOGGED)
    return config


def _loader() -> KvtierModelLoader:
    return KvtierModelLoader(LoadConfig(load_format="kvtier", model_loader_extra_config={"plan_cache": False}))
