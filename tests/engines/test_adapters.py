"""LoRA adapters whose files or numbers change under one name: no KV of one may be saved or found as another's."""

import inspect
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvtier.connectors.vllm.lora import Adapters

from .adapter_files import lora, write


def test_unchanged_files_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapters, path = Adapters(), write(tmp_path / "a", 1.0)
    found = adapters.fingerprint(lora(path))
    monkeypatch.setattr("kvtier.connectors.vllm.lora.adapter_fingerprint", None)
    assert found is not None and adapters.fingerprint(lora(path, number=2)) == found


def test_a_folder_overwritten_between_unload_and_load_is_passed_by(tmp_path: Path) -> None:
    """vLLM's own prefix cache goes by name and path, so it still finds KV of the old weights for the new adapter."""
    adapters, path = Adapters(), write(tmp_path / "a", 1.0)
    assert adapters.fingerprint(lora(path, number=1)) is not None
    write(path, 2.0)
    assert adapters.fingerprint(lora(path, number=2)) is None


def test_another_folder_under_the_same_name_is_passed_by(tmp_path: Path) -> None:
    """Before 0.32 vLLM's own prefix cache goes by the name alone. Another name is another adapter."""
    adapters, one, two = Adapters(), write(tmp_path / "1", 1.0), write(tmp_path / "2", 2.0)
    first = adapters.fingerprint(lora(one, number=1))
    assert adapters.fingerprint(lora(two, number=2)) is None
    assert adapters.fingerprint(lora(two, number=3, name="b")) not in (None, first)


def test_the_same_weights_in_another_folder_go_on(tmp_path: Path) -> None:
    adapters, one, two = Adapters(), write(tmp_path / "1", 1.0), write(tmp_path / "2", 1.0)
    assert adapters.fingerprint(lora(one)) == adapters.fingerprint(lora(two, number=2)) is not None


def test_files_exchanged_under_a_loaded_adapter_are_noticed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The same number and path: vLLM reads the files again when the adapter had fallen out of max_cpu_loras, and holds
    the old weights otherwise. Nobody tells, so it is passed by for good, also when the old files are back."""
    adapters, path = Adapters(), write(tmp_path / "a", 1.0)
    assert adapters.fingerprint(lora(path)) is not None
    write(path, 2.0)
    assert [adapters.fingerprint(lora(path)) for _ in range(2)] == [None, None]
    write(path, 1.0)
    assert adapters.fingerprint(lora(path)) is None
    assert caplog.text.count("load changed weights under a new name") == 1


def test_files_that_changed_between_load_and_first_request_are_not_what_vllm_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of `--lora-modules a=/ckpt/latest` with a trainer that goes on."""
    adapters, path = Adapters(), write(tmp_path / "a", 1.0)
    adapters.will_load(lora(path, number=1))
    adapters.will_load(lora(path, number=2, name="b"))
    assert adapters.fingerprint(lora(path, number=2, name="b")) is not None
    write(path, 2.0)
    adapters.will_load(lora(path, number=1))  # told again, vLLM keeps what it has
    adapters.will_load(lora(path, number=3, name="c"))
    assert adapters.fingerprint(lora(path, number=1)) is None
    assert adapters.fingerprint(lora(path, number=3, name="c")) is not None
    assert "changed after vLLM began to load them" in caplog.text


def test_one_number_under_two_names_has_the_weights_that_were_read_first(tmp_path: Path) -> None:
    adapters, one, two = Adapters(), write(tmp_path / "1", 1.0), write(tmp_path / "2", 2.0)
    assert adapters.fingerprint(lora(one)) is not None
    assert adapters.fingerprint(lora(two, name="b")) is None


def test_what_vllms_core_is_told_to_load_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.core import EngineCore

    monkeypatch.setattr(EngineCore, "add_lora", EngineCore.add_lora)  # put back afterwards
    core = EngineCore.__new__(EngineCore)
    core.model_executor = SimpleNamespace(add_lora=lambda request: request.lora_name == "a")
    adapters, other = Adapters(), Adapters()
    for each in (adapters, other):
        each.watch_loads()
    path = write(tmp_path / "a", 1.0)
    assert core.add_lora(lora(path)) is True
    (told,) = inspect.signature(core.add_lora).parameters.values()
    assert told.annotation is LoRARequest, "by which vLLM decodes what its server sends"
    write(path, 2.0)
    assert adapters.fingerprint(lora(path)) is other.fingerprint(lora(path)) is None
    assert Adapters().fingerprint(lora(path)) is not None


def test_files_that_were_away_for_a_while_are_compared(tmp_path: Path) -> None:
    adapters, path = Adapters(), write(tmp_path / "a", 1.0)
    first = adapters.fingerprint(lora(path))
    shutil.move(path, tmp_path / "away")
    assert adapters.fingerprint(lora(path)) is None
    shutil.move(tmp_path / "away", path)
    assert adapters.fingerprint(lora(path)) == first


def test_files_that_came_after_the_adapter_was_used_are_not_trusted(tmp_path: Path) -> None:
    adapters = Adapters()
    assert adapters.fingerprint(lora(tmp_path / "a")) is None
    assert adapters.fingerprint(lora(write(tmp_path / "a", 1.0))) is None


def test_a_name_that_was_replaced_in_place_stays_out(tmp_path: Path) -> None:
    adapters, path = Adapters(), write(tmp_path / "a", 1.0)
    assert adapters.fingerprint(lora(path, load_inplace=True)) is None
    assert adapters.fingerprint(lora(path)) is None


def test_how_files_are_read_is_told_apart(tmp_path: Path) -> None:
    adapters, path = Adapters(), write(tmp_path / "a", 1.0)
    flat, stacked = lora(path, number=1), lora(path, number=2, name="b")
    stacked.is_3d_lora_weight = True
    assert adapters.fingerprint(stacked) not in (None, adapters.fingerprint(flat))
    stacked.is_3d_lora_weight = False
    assert adapters.fingerprint(stacked) is None  # now of two kinds under one name


def test_weights_from_elsewhere_than_the_folder_are_passed_by(tmp_path: Path) -> None:
    adapter = lora(write(tmp_path / "a", 1.0))
    adapter.tensorizer_config_dict = {"tensorizer_uri": "s3://bucket"}
    assert Adapters().fingerprint(adapter) is None


def test_an_engine_saves_nothing_of_an_adapter_that_changed_after_its_load_or_in_use(lab: Any) -> None:
    """vLLM reads an adapter when it schedules a request, and replaces it in place between two steps of one."""
    llm = {
        "enable_lora": True,
        "max_lora_rank": 8,
        "max_loras": 2,
        "max_model_len": 640,
        "num_gpu_blocks_override": 28,
        "max_num_batched_tokens": 128,
    }
    spec = {"root": str(lab.folder / "adapters"), "llm": llm, "scenarios": ["adapters", "adapters_in_use"]}
    run = lab.run("adapters", [spec])[0]
    kept = {"cached": 256, "differs": False}
    assert run["adapters"] == {"as they were": kept, "overwritten": kept | {"cached": 0}}
    assert run["adapters_in_use"] == {"nothing": 4, "replaced in place": 0, "overwritten while it waits": 0}


def test_what_is_replaced_in_place_is_passed_by_under_its_name_and_number(tmp_path: Path) -> None:
    adapters, one, two = Adapters(), write(tmp_path / "1", 1.0), write(tmp_path / "2", 2.0)
    assert adapters.fingerprint(lora(one)) is not None
    since = adapters.read_at(lora(one))
    assert adapters.are_still(lora(one), since)
    adapters.will_load(lora(two, load_inplace=True))
    assert not adapters.are_still(lora(one), since) and adapters.read_at(lora(one)) is None
    assert adapters.fingerprint(lora(one)) is adapters.fingerprint(lora(one, name="b")) is None


def test_files_that_were_others_for_a_while_are_passed_by(tmp_path: Path) -> None:
    """vLLM may have read them in between, and its memory may hold them."""
    adapters, path = Adapters(), write(tmp_path / "a", 1.0)
    assert adapters.fingerprint(lora(path)) is not None
    since = adapters.read_at(lora(path))
    write(path, 2.0)
    write(path, 1.0)
    assert not adapters.are_still(lora(path), since)
    assert adapters.fingerprint(lora(path)) is adapters.fingerprint(lora(path, name="b")) is None
