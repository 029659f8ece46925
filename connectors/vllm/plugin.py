"""Plugin of vLLM (entry point group `vllm.general_plugins`): the connector by its name, and by KVTIER_ROOT alone; and
the load format for weights.

    KVTIER_ROOT=/nvme/kv vllm serve MODEL

vLLM calls `register` in each of its processes. It has no hook that supplies a KVTransferConfig: its plugins run before
its command line is parsed and return nothing, and an option's default is only its own. So where KVTIER_ROOT is set,
`EngineArgs.create_engine_config` is wrapped, which every front end calls. Engines without KVTIER_ROOT are not touched.
"""

import logging
import os
import sys
from contextlib import suppress
from functools import partial, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from kvtier.config.kv_transfer import CONNECTOR, MODULE, POLICY, ROOT_VARIABLE

log = logging.getLogger("kvtier")

LOAD_FORMAT = "kvtier"
LOADERS = "vllm.model_executor.model_loader"  # module with the register of load formats
MARK = "_is_supplied_by_kvtier"  # attribute of wrapped methods of vLLM


def register() -> None:
    """Register the names of connector and load format. Supply the connector's configuration to engines that have none,
    if KVTIER_ROOT is set."""
    register_connector()
    register_load_format()
    keep_embedding_inputs()
    if ROOT_VARIABLE in os.environ:  # an empty one is refused with the settings
        _supply_configuration()


def register_connector() -> None:
    """Make `kv_connector: KVTierConnector` enough. Do nothing where it is known, or where vLLM has no connectors."""
    with suppress(ImportError, ValueError):
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        KVConnectorFactory.register_connector(CONNECTOR, MODULE, CONNECTOR)


def register_load_format() -> None:
    """Make `--load-format kvtier` known, at once or when vLLM imports its loaders: that takes seconds, and front ends
    never do."""
    module = sys.modules.get(LOADERS)
    if module is not None:
        _add_loader(module)
    elif not any(isinstance(finder, _LoadersImport) for finder in sys.meta_path):
        sys.meta_path.insert(0, _LoadersImport())


class _LoadersImport(MetaPathFinder):
    """Import of vLLM's loaders: adds ours when their module has run."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != LOADERS:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_add(module: ModuleType) -> None:
            run(module)
            _add_loader(module)

        spec.loader.exec_module = run_and_add  # type: ignore[method-assign]
        return spec


def _add_loader(module: Any) -> None:
    if LOAD_FORMAT not in module._LOAD_FORMAT_TO_MODEL_LOADER:  # a second time is logged as a mistake
        from kvtier.connectors.vllm.weights_loader import KvtierModelLoader

        module.register_model_loader(LOAD_FORMAT)(KvtierModelLoader)


def keep_embedding_inputs() -> None:
    """Leave `enable_mm_embeds` as it was set in engines whose only connector is kvtier.

    vLLM (0.32) takes every engine that may load KV for the receiver of another engine's prefill, and lets its clients
    send embeddings in place of images, even without the tensors: such a request can end the engine.
    """
    from vllm.config import VllmConfig

    resolve = getattr(VllmConfig, "_resolve_mm_embedding_inputs", None)  # older releases have none
    if resolve is None or hasattr(resolve, MARK):
        return

    @wraps(resolve)
    def resolved(self: Any) -> None:
        items = getattr(self.model_config, "multimodal_config", None)
        transfer, encoders = self.kv_transfer_config, self.ec_transfer_config
        before = getattr(items, "enable_mm_embeds", None)
        resolve(self)
        is_ours = transfer is not None and transfer.kv_connector == CONNECTOR
        if items is not None and is_ours and not (encoders is not None and encoders.is_ec_consumer):
            items.enable_mm_embeds, items.allow_missing_mm_embeddings = before, False

    setattr(resolved, MARK, True)
    VllmConfig._resolve_mm_embedding_inputs = resolved


def _supply_configuration() -> None:
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config
    if hasattr(create, MARK):
        return

    @wraps(create)
    def supplied(self: Any, *args: Any, **kwargs: Any) -> Any:
        # --kv-offloading-size makes vLLM choose a connector of its own.
        if self.kv_transfer_config is None and getattr(self, "kv_offloading_size", None) is None:
            self.kv_transfer_config = transfer_config()
        return create(self, *args, **kwargs)

    setattr(supplied, MARK, True)
    EngineArgs.create_engine_config = supplied


def transfer_config() -> Any:
    """Return the KVTransferConfig that KVTIER_ROOT stands for, and log it. Raises ConfigError for a bad setting."""
    from vllm.config import KVTransferConfig

    from kvtier.config.settings import Settings
    from kvtier.connectors.vllm.platform import join_log
    from kvtier.runtime.units import size
    from kvtier.storage.root import CAPACITY_SHARE, with_default_capacity
    from kvtier.storage.start_wait import in_time

    join_log()
    settings = Settings.load()
    why = "as set"
    if "capacity_bytes" not in settings.model_fields_set:
        settings = in_time(settings.root, "measuring its free space", partial(with_default_capacity, settings))
        why = f"{CAPACITY_SHARE:.0%} of the free space; KVTIER_CAPACITY_BYTES sets another"
    # The root is part of the configuration: workers on other nodes may not have the variable.
    extra = {"root": str(settings.root), "capacity_bytes": settings.capacity_bytes}
    log.info(
        "%s=%s: KV is saved to and loaded from there by %s (kv_both, %s), up to %s (%s). "
        "To change it, set other KVTIER_* variables or give --kv-transfer-config, which replaces all of this",
        ROOT_VARIABLE,
        settings.root,
        CONNECTOR,
        POLICY,
        size(settings.capacity_bytes),
        why,
    )
    return KVTransferConfig(
        kv_connector=CONNECTOR,
        kv_connector_module_path=MODULE,
        kv_role="kv_both",
        kv_load_failure_policy=POLICY,
        kv_connector_extra_config=extra,
    )
