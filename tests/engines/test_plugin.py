"""vLLM's general plugin: the connector by its name, and engines with KVTIER_ROOT alone (see also test_wheel.py)."""

import importlib
import json
import shutil
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import model_executor
from vllm.config import KVTransferConfig, LoadConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs

from kvtier.connectors.vllm import KVTierConnector, plugin
from kvtier.connectors.vllm.weights_loader import KvtierModelLoader
from kvtier.errors import ConfigError
from kvtier.storage.root import CAPACITY_UNIT, default_capacity
from tests.engines import forked
from tests.engines.conftest import ENGINE_TIMEOUT_S

HERE = Path(__file__).parent
SMALL = {"KVTIER_CHUNK_TOKENS": "64", "KVTIER_SEGMENT_BYTES": "4MiB", "KVTIER_MIN_LOAD_TOKENS": "0"}


def test_the_plugin_is_installed() -> None:
    (found,) = (each for each in entry_points(group="vllm.general_plugins") if each.name == "kvtier")
    assert found.load() is plugin.register


def test_the_load_format_is_known_once_vllm_imports_its_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no sooner: front ends never import them."""
    package = importlib.import_module(plugin.LOADERS)
    monkeypatch.setattr(model_executor, "model_loader", package)  # put back afterwards, as the module is
    monkeypatch.delitem(sys.modules, plugin.LOADERS)
    plugin.register_load_format()
    plugin.register_load_format()
    assert plugin.LOADERS not in sys.modules
    imported = importlib.import_module(plugin.LOADERS)
    assert imported is not package
    assert isinstance(imported.get_model_loader(LoadConfig(load_format="kvtier")), KvtierModelLoader)


@pytest.mark.parametrize(("connector", "is_set"), [("KVTierConnector", False), ("NixlConnector", True)])
def test_clients_send_embeddings_only_where_that_was_set(connector: str, is_set: bool) -> None:
    """vLLM switches it on wherever a connector loads."""
    plugin.register()
    items = SimpleNamespace(enable_mm_embeds=False, allow_missing_mm_embeddings=False)
    config = SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=items),
        kv_transfer_config=KVTransferConfig(kv_connector=connector, kv_role="kv_both"),
        ec_transfer_config=None,
    )
    VllmConfig._resolve_mm_embedding_inputs(config)  # type: ignore[arg-type]
    assert (items.enable_mm_embeds, items.allow_missing_mm_embeddings) == (is_set, is_set)
    items.enable_mm_embeds = True
    VllmConfig._resolve_mm_embedding_inputs(config)  # type: ignore[arg-type]
    assert items.enable_mm_embeds


def test_0_27_takes_the_connector_by_the_root_alone(lab: Any, older_python: Path, tmp_path: Path) -> None:
    """Its hits are those of test_older_release."""
    output, log, root = tmp_path / "found.json", tmp_path / "log", str(tmp_path / "kv")
    argv = [str(HERE / "root_engine.py"), str(lab.model("llama")), str(output), ""]
    engine = forked.start(argv, log, log, python=older_python, environment=SMALL | {"KVTIER_ROOT": root})
    assert engine.wait(ENGINE_TIMEOUT_S) == 0, log.read_text()[-6000:]
    (found,) = json.loads(output.read_text())
    assert (found["connector"], found["cached"], found["extra"]["root"]) == ("KVTierConnector", 0, root)


@pytest.fixture
def create(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each engine configuration is what its KVTransferConfig is; restored at the end."""
    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda self: self.kv_transfer_config)


def arguments(**values: Any) -> EngineArgs:
    made = object.__new__(EngineArgs)
    made.kv_transfer_config, made.kv_offloading_size = None, None
    for name, value in values.items():
        setattr(made, name, value)
    return made


@pytest.mark.usefixtures("create")
def test_without_a_root_only_a_name_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVTIER_ROOT", raising=False)
    before = EngineArgs.create_engine_config
    plugin.register()
    assert EngineArgs.create_engine_config is before and arguments().create_engine_config() is None
    assert KVConnectorFactory.get_connector_class_by_name("KVTierConnector") is KVTierConnector


@pytest.mark.usefixtures("create")
def test_what_is_given_explicitly_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVTIER_ROOT", str(tmp_path / "kv"))
    monkeypatch.setenv("KVTIER_CAPACITY_BYTES", "3GiB")
    plugin.register()
    plugin.register()
    own = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    assert arguments(kv_transfer_config=own).create_engine_config() is own
    assert arguments(kv_offloading_size=1.0).create_engine_config() is None
    supplied = arguments().create_engine_config()
    assert supplied.kv_connector_extra_config == {"root": str(tmp_path / "kv"), "capacity_bytes": 3 << 30}
    assert (supplied.kv_role, supplied.kv_load_failure_policy) == ("kv_both", "recompute")


@pytest.mark.usefixtures("create")
@pytest.mark.parametrize("root", ["not/absolute", ""])  # `KVTIER_ROOT=$KV vllm serve` without KV started without a tier
def test_a_bad_root_is_refused_by_the_name_of_its_variable(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_ROOT", root)
    plugin.register()
    with pytest.raises(ConfigError, match="KVTIER_ROOT"):
        arguments().create_engine_config()


def test_stored_segments_count_as_free(tmp_path: Path) -> None:
    folder = tmp_path / "kv" / "v2" / "namespace"
    folder.mkdir(parents=True)
    empty = default_capacity(tmp_path / "kv")
    (folder / "set-0.kvseg").write_bytes(bytes(4096))
    usage = shutil.disk_usage(tmp_path)
    assert abs(default_capacity(tmp_path / "kv") - empty) <= 2 * CAPACITY_UNIT
    assert default_capacity(tmp_path / "not" / "made" / "yet") <= 0.8 * usage.total
