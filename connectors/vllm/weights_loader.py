"""`--load-format kvtier`: weights of safetensors files, or of prepared shards, straight into the parameters.

vLLM's own weight loaders are recorded once on tensors without data (`weights_trace`); the plan that results is carried
out by the ring. Where that is not possible, vLLM's own loader does it, and a line of the log says why.
"""

import dataclasses
import inspect
import logging
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import vllm
from tqdm.auto import tqdm
from vllm.config import get_current_vllm_config
from vllm.distributed import parallel_state
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader
from vllm.model_executor.model_loader.weight_utils import enable_tqdm

from kvtier.connectors.faults import Faults, catch_faults
from kvtier.connectors.vllm.platform import join_log, ranks_here
from kvtier.connectors.vllm.weights_key import Named, key_of
from kvtier.connectors.vllm.weights_trace import LoadTrace, TraceRefused, distinct
from kvtier.errors import ConfigError, Corrupt, WeightsDamaged
from kvtier.model.safetensors import read_header
from kvtier.model.shard_manifest import NAME, ShardManifest, read_shard_manifest
from kvtier.runtime.garbage import paused_collection
from kvtier.runtime.units import size
from kvtier.weights.manifest import of_files
from kvtier.weights.plan import PlanMismatch, WeightPlan
from kvtier.weights.plan_cache import PLANS, PlanCache
from kvtier.weights.reader import Sums, WeightReader, unchanged
from kvtier.weights.shards import shard_plan

log = logging.getLogger("kvtier")

EXTRA = "model_loader_extra_config"
OF_VLLM = ("enable_weights_track",)  # keys of vLLM's default loader that mean something here
TRACED = "traced"  # origin of a plan
PLAIN = bool | int | float | str | None  # values that a loader may leave in a model as a note
LOADED_AS_THEMSELVES = ("bitsandbytes", "gguf")  # quantizations with a load format of this name, of vLLM or a plugin
READ_AS_TENSORS = (*LOADED_AS_THEMSELVES, "torchao")  # quantizations whose loaders need values


class PlannedLoad(NamedTuple):
    """A plan, the tensors of its targets, the checksums of its files that have some, and where the plan came from."""

    plan: WeightPlan
    targets: list[torch.Tensor]
    expected: Mapping[Path, Sums]
    origin: str


class KvtierModelLoader(DefaultModelLoader):
    """vLLM's default loader, whose bytes go from the files into the parameters by a plan.

    Keys of model_loader_extra_config: plan_cache (folder of stored plans, or false), enable_weights_track.
    """

    def __init__(self, load_config: Any) -> None:
        join_log()
        if not isinstance(extra := load_config.model_loader_extra_config or {}, dict):
            raise ConfigError(EXTRA, extra, "pass a JSON object, such as {} for the defaults")
        extra = dict(extra)
        self._cache = _plan_cache(extra.pop("plan_cache", True))
        unknown = sorted(set(extra) - set(OF_VLLM))
        if unknown:
            fix = f"load format kvtier takes plan_cache and {OF_VLLM[0]} only; leave out {', '.join(unknown)}"
            raise ConfigError(EXTRA, load_config.model_loader_extra_config, fix)
        # The configuration is shared with other loaders. With "auto" the same files are chosen as without kvtier.
        super().__init__(dataclasses.replace(load_config, load_format="auto", model_loader_extra_config=extra))
        self._faults = Faults(without="it")
        self._files: list[Path] | None = None  # while they are collected
        self._trace: LoadTrace | None = None  # while loaders are recorded
        self.why, self._key = "", ""  # why the last load had no plan; name of the plan
        self._damage: WeightsDamaged | None = None  # met while loaders were recorded
        self._bar: Any = None  # while bytes of the plan land

    def load_model(self, vllm_config: Any, model_config: Any, **rest: Any) -> torch.nn.Module:
        """Build the model, load it, and let vLLM process its weights. Raises as `load_weights`."""
        loader = self._other_loader(model_config.quantization)
        if loader is not None:
            loaded: torch.nn.Module = loader.load_model(vllm_config, model_config, **rest)
            return loaded
        if (Path(model_config.model) / NAME).exists():
            keep_tied(model_config)
        model: torch.nn.Module = super().load_model(vllm_config=vllm_config, model_config=model_config, **rest)
        return model

    def _other_loader(self, quantization: str | None) -> Any:
        """Return the loader of a quantization with a load format of its own; None without one, or if neither this vLLM
        nor a plugin has it."""
        if quantization not in LOADED_AS_THEMSELVES:
            return None
        config = dataclasses.replace(self.load_config, load_format=quantization, model_loader_extra_config={})
        with suppress(ValueError):  # vLLM 0.32 has no load format bitsandbytes
            loader = get_model_loader(config)
            log.info("weights are loaded by load format %s, not by kvtier", quantization)
            return loader
        return None

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Fill the parameters. Return when all bytes have landed.

        Raises WeightsUnreadable, WeightsDamaged, Corrupt for files that cannot be read, ConfigError for shards of other
        settings.
        """
        start_s = time.perf_counter()
        folder = Path(model_config.model)
        shards = read_shard_manifest(folder) if folder.is_dir() else None
        if shards is None and next(folder.glob("model-rank-*.safetensors"), None) is not None:
            fix = f"it has shards without {NAME}, which is written last; run `kvtier weights shard` again to go on"
            raise ConfigError("model", str(folder), fix)
        with ExitStack() as stack:
            readers = ranks_here(get_current_vllm_config().parallel_config)
            reader = stack.enter_context(WeightReader(progress=self._show, readers=readers))
            if (first := next(model.parameters(), None)) is not None:
                reader.prepare(first.device)  # buffers are pinned while the load is planned
            if shards is None:
                planned = self._planned(model, model_config, reader, stack)
            else:
                planned = shards_of_rank(folder, shards, model, str(model_config.architecture))
            if planned is None:
                log.info("weights are loaded by vLLM's own loader: %s", self.why)
                super().load_weights(model, model_config)
                return
            planned_s = time.perf_counter()
            self._fill(planned, reader)
        end_s = time.perf_counter()
        plan = planned.plan
        if self._cache and self._key and planned.origin == TRACED and plan.is_replayable:
            self._cache.put(self._key, plan)
        n_bytes = plan.n_bytes + plan.materialized_bytes
        log.info(
            "loading weights took %.3f seconds: %s at %.2f GB/s, %s, plan %s in %.3f seconds, %s materialized",
            end_s - start_s,
            size(n_bytes),
            n_bytes / (end_s - start_s) / 1e9,
            _verified(len(planned.expected), len(plan.files)),
            planned.origin,
            planned_s - start_s,
            size(plan.materialized_bytes),
        )

    def _fill(self, planned: PlannedLoad, reader: WeightReader) -> None:
        """Carry the plan out, with vLLM's kind of progress bar on the first rank."""
        plan = planned.plan
        is_hidden = not enable_tqdm(self.load_config.use_tqdm_on_load)
        with tqdm(
            total=plan.n_bytes, desc="Loading weights", unit="B", unit_scale=True, disable=is_hidden
        ) as self._bar:
            plan.load(reader, planned.targets, planned.expected)
            self._bar.update(plan.n_bytes - self._bar.n)
        self._bar = None

    def _show(self, landed_bytes: int) -> None:
        if self._bar is not None:
            self._bar.update(landed_bytes - self._bar.n)

    def get_all_weights(self, model_config: Any, model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the checkpoint's tensors, for a reload of weights. Raises ConfigError for shards, which have none."""
        if (Path(model_config.model) / NAME).exists():
            fix = "shards cannot be loaded again into a running engine; give reload_weights the checkpoint's own folder"
            raise ConfigError("model", model_config.model, fix)
        return super().get_all_weights(model_config, model)  # type: ignore[no-any-return]

    def record(self, model: torch.nn.Module, model_config: Any, reader: WeightReader) -> PlannedLoad | None:
        """Return a new plan of the load; None where its loaders cannot be followed, which `why` explains."""
        with ExitStack() as stack:
            return self._planned(model, model_config, reader, stack, use_cache=False)

    def _planned(
        self, model: torch.nn.Module, model_config: Any, reader: WeightReader, stack: ExitStack, use_cache: bool = True
    ) -> PlannedLoad | None:
        """Return a plan, new or stored. None: there is none, and the reason is set.

        stack: checks at its end that the files are those that the plan was made of.
        """
        tensors = list(everything(model))  # takes milliseconds each time
        self.why, self._key, self._damage = reason_for_tensors(model, tensors, model_config), "", None
        files = [] if self.why else self._collect(model, model_config)
        if self.why:
            return None
        if not Path(model_config.model).is_dir() and any(file.name.startswith("model-rank-") for file in files):
            fix = "it has shards, which are read by their folder's name only: `hf download` them, and name that folder"
            raise ConfigError("model", model_config.model, fix)
        stack.enter_context(unchanged(files))
        expected = of_files(files)
        if use_cache and self._cache is not None and self._find_key(model, tensors, model_config, files):
            stored = self._cache.get(self._key, files)
            targets = None if stored is None else _targets_of(stored, tensors)
            if stored is not None and targets is not None:
                return PlannedLoad(stored, targets, expected, "from the cache")
        trace = LoadTrace({file: read_header(file) for file in files}, tensors, reader, expected)
        plan = self._record(model, model_config, trace)
        if self._damage is not None:
            raise self._damage
        if plan is None:
            self.why = self.why or "the model's loaders cannot be recorded"
            return None
        # Not found by name: a loader may have replaced or removed parameters.
        return PlannedLoad(plan, trace.tensors, expected, TRACED)

    @catch_faults("naming the plan of the load", default=False)
    def _find_key(self, model: torch.nn.Module, tensors: Named, model_config: Any, files: list[Path]) -> bool:
        """Set the name under which the plan is stored. Without one it is not."""
        with suppress(Corrupt):  # the header is read again by the load, whose error names the file
            self._key = key_of(model, tensors, model_config, files, self.enable_weights_track)
        return bool(self._key)

    def _collect(self, model: torch.nn.Module, model_config: Any) -> list[Path]:
        """Return the checkpoint's files in the order in which vLLM reads them."""
        self._files = []
        try:
            for _ in self.get_all_weights(model_config, model):
                raise AssertionError("tensors while files are collected")
            return list(dict.fromkeys(self._files))  # a model may name a file of its folder as a further source
        finally:
            self._files = None

    @catch_faults("recording the weight loaders")
    def _record(self, model: torch.nn.Module, model_config: Any, trace: LoadTrace) -> WeightPlan | None:
        """Run vLLM's weight loaders on tensors without data. Return the plan; None where they cannot be followed."""
        before, self._trace = _state(model), trace
        try:
            with trace, paused_collection():
                loaded = model.load_weights(self.get_all_weights(model_config, model))  # type: ignore[operator]
            self._track(model, model_config, loaded)
            if any(tensor.is_meta for _, tensor in everything(model)):
                raise TraceRefused("a loader put a tensor of the checkpoint itself into the model")
            plan = trace.plan()
        except TraceRefused as fault:
            self.why = str(fault)
            return None
        except WeightsDamaged as fault:  # vLLM's own loader would serve them
            self._damage = fault
            return None
        except (ValueError, TypeError, AssertionError, LookupError, AttributeError, RuntimeError) as fault:
            # Logged once, by the line about vLLM's own loader, which raises it again if it is a fault of the files.
            self.why = f"the model's loaders cannot be recorded ({type(fault).__name__}: {fault})"
            log.debug("recording the weight loaders failed", exc_info=True)
            return None
        finally:
            self._trace = None
        # Repeated from the cache, the plan would leave out what loaders did to the model itself.
        return plan if _state(model) == before else dataclasses.replace(plan, is_replayable=False)

    def _track(self, model: torch.nn.Module, model_config: Any, loaded: set[str] | None) -> None:
        """Check that no parameter was left out, where vLLM does. Raises ValueError."""
        is_quantized = model_config.quantization is not None
        is_wanted = self.enable_weights_track
        if is_wanted or (is_wanted is None and not is_quantized and loaded is not None):
            takes = inspect.signature(self.track_weights_loading).parameters
            self.track_weights_loading(model, loaded, **({"quantized": is_quantized} if "quantized" in takes else {}))

    def _get_weights_iterator(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        if self._files is None and self._trace is None:
            return super()._get_weights_iterator(source)  # type: ignore[no-any-return]
        return self._lazily(source)

    def _lazily(self, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        _, names, is_safetensors = self._prepare_weights(
            source.model_or_path,
            source.subfolder,
            source.revision,
            source.fall_back_to_pt,
            source.allow_patterns_overrides,
        )[:3]
        files = sorted((Path(os.path.abspath(name)) for name in names), key=_natural_order)
        if self._files is not None:
            self.why = self.why or ("" if is_safetensors else "the checkpoint's files are not safetensors")
            self._files += files
            return
        assert self._trace is not None
        for file in files:
            for name, tensor in self._trace.checkpoint(file):
                yield source.prefix + name, tensor


def _natural_order(file: Path) -> list[int | str]:
    """Return the key by which vLLM orders files: of two tensors of one name, the later one counts."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", file.name)]


def everything(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all parameters and buffers by all their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _plan_cache(value: object) -> PlanCache | None:
    if value is False:
        return None
    if value is True:
        return PlanCache(PLANS)
    if isinstance(value, str) and os.path.isabs(value):
        return PlanCache(Path(value))
    raise ConfigError(EXTRA, {"plan_cache": value}, "plan_cache is an absolute path, or false for none")


def reason_for_tensors(model: torch.nn.Module, tensors: Named, model_config: Any) -> str:
    """Return why this model needs the checkpoint's real tensors; "" if it does not."""
    quantization = str(model_config.quantization)
    if quantization in READ_AS_TENSORS:
        return f"{quantization} computes with them"
    if any(getattr(getattr(module, "quant_method", None), "uses_meta_device", False) for module in model.modules()):
        return "it is quantized while it is loaded"
    if any(tensor.is_meta for _, tensor in tensors):
        return "some of its parameters have no memory yet"
    if any(getattr(tensor, "_vllm_is_uva_offloaded", False) for _, tensor in tensors):
        return "some of its parameters are in host memory"
    return ""


def _verified(n_listed: int, n_files: int) -> str:
    """Return how much was compared with checksums."""
    if n_listed == n_files:
        return "verified"
    return f"{n_listed} of {n_files} files verified" if n_listed else "no checksums to verify"


def _targets_of(plan: WeightPlan, tensors: Named) -> list[torch.Tensor] | None:
    """Return the targets of a stored plan, if it has all of the model's tensors, laid out as they are."""
    try:
        targets = plan.bind(tensors)
        if missing := {name for name, _ in distinct(tensors)} - {target.name for target in plan.targets}:
            raise PlanMismatch(f"it does not load {min(missing)}")
    except PlanMismatch as fault:
        log.warning("the stored plan of this load is not used, and is recorded anew: %s", fault)
        return None
    return targets


def keep_tied(model_config: Any) -> None:
    """Tie the embeddings of a model from shards, if its config.json does.

    Shards hold a tied tensor once, as lm_head. From 0.32 on, vLLM takes that name for a head beside the embeddings.
    """
    if getattr(model_config, "word_embeddings_untied_by_checkpoint", False):
        for config in (model_config.hf_config, model_config.hf_config.get_text_config()):
            config.tie_word_embeddings = True
        model_config.word_embeddings_untied_by_checkpoint = False


def shards_of_rank(folder: Path, manifest: ShardManifest, model: torch.nn.Module, architecture: str) -> PlannedLoad:
    """Return the load of this rank's shards. Raises ConfigError where they are of other settings, Corrupt."""
    if architecture != manifest.architecture:
        fix = f"it has shards of {manifest.architecture} only; name the checkpoint's own folder to load {architecture}"
        raise ConfigError("model", str(folder), fix)
    group, stages = parallel_state.get_tp_group(), parallel_state.get_pp_group().world_size
    for key, made, here in (
        ("tensor_parallel_size", manifest.tensor_parallel_size, group.world_size),
        ("pipeline_parallel_size", 1, stages),
        ("vllm", manifest.release, release()),
    ):
        if made != here:
            fix = (
                f"{folder} has shards for {key} {made}; make others with `kvtier weights shard`, or load the checkpoint"
            )
            raise ConfigError(key, here, fix)
    plan = shard_plan(folder, manifest, group.rank_in_group, state_of(model))
    return PlannedLoad(plan, plan.bind(everything(model)), of_files(plan.files), "of shards")


def release() -> str:
    """Return vLLM's release, without the name of its build."""
    return str(vllm.__version__).split("+")[0]


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that vLLM's `sharded_state` keeps: one name for those that share their memory."""
    found: dict[str, torch.Tensor] = ShardedStateLoader._filter_subtensors(model.state_dict())
    return found


def notes_in(model: torch.nn.Module) -> dict[str, object]:
    """Return what a loader may leave in a model beside bytes: attributes of its modules and parameters."""
    owners = [*model.named_modules(), *everything(model)]
    return {
        f"{name}.{key}": noted
        for name, owner in owners
        for key, value in vars(owner).items()
        if (noted := _noted(value)) != ()  # DeepSeek's loader adds a container that it empties again
    }


def _state(model: torch.nn.Module) -> list[object]:
    """Return the notes in a model, and which memory each parameter has."""
    return [notes_in(model), [(name, t.untyped_storage()._cdata, t.shape) for name, t in everything(model)]]


def _noted(value: object) -> object:
    """Return a copy of a plain value, or of the plain values in a container; of anything else the type alone."""
    if isinstance(value, dict):
        return _noted([*value, *value.values()])
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(map(_noted, value))
    return value if isinstance(value, PLAIN) else type(value)
