"""Checks that run in vLLM's front end, where it chooses the executor: before any weights are loaded."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvtier.config.kv_transfer import CONNECTOR
from kvtier.errors import ConfigError, IndexUnavailable

pytest.importorskip("vllm")

from vllm.config import KVTransferConfig
from vllm.v1.executor.abstract import Executor

from kvtier.connectors.vllm import KVTierConnector, compatibility
from tests.engines.test_refusals import engine


def asked(extra: dict[str, Any], **changes: Any) -> Any:
    transfer = KVTransferConfig(
        kv_connector=CONNECTOR,
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_module_path="kvtier.connectors.vllm",
        kv_connector_extra_config=extra,
    )
    return engine(kv_transfer_config=transfer, parallel__distributed_executor_backend="uni", **changes)


def settings_at(root: Path, **more: Any) -> dict[str, Any]:
    return {"root": str(root), "capacity_bytes": "1GiB", "segment_bytes": "16MiB", "chunk_tokens": 64, **more}


def test_the_choice_of_an_executor_is_checked() -> None:
    assert KVTierConnector.__name__ == CONNECTOR
    assert hasattr(Executor.get_class, compatibility.MARK)
    choose = Executor.get_class
    compatibility.install()
    assert Executor.get_class is choose, "it was wrapped twice"
    assert Executor.get_class(engine(parallel__distributed_executor_backend="uni", kv_transfer_config=None))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"no_such_key": 1}, "no_such_key"),
        ({"root": "/proc/nope"}, "root"),
        ({"index": {"kind": "redis", "url": "nonsense"}}, "index.url"),
        ({"host": {"arena_bytes": "1000TiB"}}, "host.arena_bytes"),
    ],
)
def test_wrong_settings_and_roots_are_refused(changes: dict[str, Any], key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Executor.get_class(asked(settings_at(tmp_path / "root") | changes))
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("changes", "model", "key"),
    [
        ({"host": {"arena_bytes": "7MiB"}}, {}, "host.arena_bytes"),  # a chunk: 2 layers, 4 heads, 64 tokens, 2 MiB
        ({"segment_bytes": "2MiB"}, {}, "segment_bytes"),
        ({"segment_bytes": "2MiB"}, {"model_type": "of_a_plugin"}, None),
        ({"host": {"arena_bytes": "7MiB"}}, {"quantization": "fp8"}, None),  # KV may be in fp8
        ({"host": {"arena_bytes": "7MiB"}, "codec": "int8"}, {"quantization": "fp8"}, None),
        ({"host": {"arena_bytes": "9MiB"}}, {}, None),
        ({"host": {"arena_bytes": "9MiB"}}, {"dtype": torch.float32}, "host.arena_bytes"),
        ({"codec": "k4v4"}, {"head_size": 1000}, "codec"),
    ],
)
def test_sizes_below_a_few_chunks_are_refused_before_the_model_is_loaded(
    changes: dict[str, Any], model: dict[str, Any], key: str | None, tmp_path: Path
) -> None:
    """A worker refused them after the weights were loaded, and vLLM's last line of log did not name the reason."""
    config = asked(settings_at(tmp_path / "root") | changes)
    values = {"model_type": "llama", "head_size": 1024, "dtype": torch.bfloat16, "quantization": None} | model
    config.model_config.hf_text_config = SimpleNamespace(model_type=values["model_type"])
    config.model_config.dtype, config.model_config.quantization = values["dtype"], values["quantization"]
    config.model_config.get_head_size = lambda: values["head_size"]
    config.model_config.get_total_num_kv_heads = lambda: 4
    config.model_config.get_total_num_hidden_layers = lambda: 2
    config.parallel_config.tensor_parallel_size = config.parallel_config.pipeline_parallel_size = 1
    if key is None:
        Executor.get_class(config)
        return
    with pytest.raises(ConfigError) as caught:
        Executor.get_class(config)
    assert caught.value.key == key and not (tmp_path / "root").exists()


def test_a_right_one_is_opened_and_closed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = asked(settings_at(tmp_path / "root"))
    Executor.get_class(config)
    assert (tmp_path / "root" / "v2" / "owner.json").exists()
    monkeypatch.setattr(compatibility, "check_place", lambda settings: pytest.fail("it was opened a second time"))
    Executor.get_class(config)


def test_an_index_that_does_not_open_is_named_as_kvtiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise IndexUnavailable("index /kv: no room")

    monkeypatch.setattr(compatibility, "check_place", fail)
    with pytest.raises(IndexUnavailable, match="^kvtier: index /kv: no room$"):
        Executor.get_class(asked(settings_at(tmp_path / "root")))


@pytest.mark.parametrize("elsewhere", [{"data_parallel_backend": "ray"}, {"data_parallel_size_local": 0}])
def test_the_root_of_another_machine_is_left_alone(elsewhere: dict[str, Any], tmp_path: Path) -> None:
    changes = {f"parallel__{name}": value for name, value in elsewhere.items()}
    Executor.get_class(asked(settings_at(tmp_path / "root"), **changes))
    assert not (tmp_path / "root").exists()
    with pytest.raises(ConfigError):
        Executor.get_class(asked({"no_such_key": 1}, **changes))


def test_children_of_a_multi_connector_are_checked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    child = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": "kvtier.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": settings_at(tmp_path / "root"),
    }
    other = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}

    def several(one: dict[str, Any]) -> Any:
        extra = {"connectors": [other, one]}
        transfer = KVTransferConfig(kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=extra)
        return engine(kv_transfer_config=transfer, parallel__distributed_executor_backend="uni")

    Executor.get_class(several(child))
    assert (tmp_path / "root" / "v2").is_dir()
    assert "at the MultiConnector too" in caplog.text
    with pytest.raises(ConfigError, match="/proc/nope"):
        Executor.get_class(several(child | {"kv_connector_extra_config": settings_at(Path("/proc/nope"))}))
