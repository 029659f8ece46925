"""Whole files as tensors: as safetensors loads them, with its dtypes and shapes; bad files are refused."""

import json
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file as stock_load_file
from safetensors.torch import save_file, save_model

from kvtier.errors import Corrupt, TierUnavailable, WeightsDamaged, WeightsUnreadable
from kvtier.weights import load, load_file, load_files, manifest
from kvtier.weights.dtypes import TORCH_DTYPES
from kvtier.weights.reader import WeightReader
from tests.damage import flip

RAW = torch.randint(0, 255, (4, 6, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def tensors() -> dict[str, torch.Tensor]:
    """One of each dtype, empty and 0-d ones, of sizes that leave the next one at any byte."""
    dtypes = {**TORCH_DTYPES, "F4": torch.float4_e2m1fn_x2}
    found = {name: RAW.view(dtype).clone() for name, dtype in sorted(dtypes.items()) if name != "BOOL"}
    found |= {"bool": RAW > 128, "odd": RAW[0, 0, :7].clone(), "scalar": torch.tensor(1.5), "empty": torch.empty(0, 3)}
    found["empty of the end"] = torch.empty(4, 0, dtype=torch.int64)
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        value.dtype == other[name].dtype
        and value.shape == other[name].shape
        and value.is_contiguous()
        and bytes(value.view(torch.uint8).numpy() if value.dim() else value.numpy().tobytes())
        == bytes(other[name].view(torch.uint8).numpy() if value.dim() else other[name].numpy().tobytes())
        for name, value in one.items()
    )


def test_all_dtypes_are_loaded_as_the_library_does(tmp_path: Path) -> None:
    save_file(tensors(), tmp_path / "x.safetensors")
    ours = load_file(tmp_path / "x.safetensors")
    assert same(ours, stock_load_file(tmp_path / "x.safetensors"))
    assert len(ours) >= 20 and all(value.data_ptr() % 64 == 0 for value in ours.values() if value.numel())


def test_several_files_in_several_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "BUFFER_BYTES", 10_000)
    whole = {f"t{n}": torch.arange(n * 700, dtype=torch.int32) for n in range(10)}
    for n in range(2):
        save_file({name: value for name, value in whole.items() if int(name[1:]) % 2 == n}, tmp_path / f"{n}")
    found = load_files([str(tmp_path / "0"), tmp_path / "1"], "cpu")
    assert same(found, {name: found[name] for name in found}) and same(found, {n: whole[n] for n in found})
    assert len({value.untyped_storage().data_ptr() for value in found.values()}) > 3


def test_tensors_have_storages_of_their_own(tmp_path: Path) -> None:
    """A tensor is pickled without the others of its buffer, and safetensors can save a model of these tensors."""
    save_file({"large": torch.zeros(1000, 1000), "bias": torch.arange(2.0)}, tmp_path / "x")
    found = load_file(tmp_path / "x")
    assert len(pickle.dumps(found["bias"])) < 1000
    model = torch.nn.Linear(1000, 2)
    model.load_state_dict({"weight": found["large"][:2].clone(), "bias": found["bias"]}, assign=True)
    save_model(model, str(tmp_path / "saved"))
    bias = found.pop("bias")
    del found, model
    assert torch.equal(bias.add_(1), stock_load_file(tmp_path / "saved")["bias"] + 1)


def test_no_files_and_no_tensors(tmp_path: Path) -> None:
    save_file({}, tmp_path / "x")
    assert load_files([]) == load_file(tmp_path / "x") == {}


def test_torch_is_imported_by_the_first_call() -> None:
    program = "import kvtier.weights, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_progress(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1_000_000)}, tmp_path / "x")
    seen: list[int] = []
    load_files([tmp_path / "x"], progress=seen.append)
    assert seen == sorted(seen) and seen[-1] == 4_000_000


# --- bad files ---


def write(path: Path, header: dict[str, Any], n_bytes: int) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(n_bytes))


def test_a_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save_file({"x": torch.zeros(100)}, path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Corrupt, match="x is not a whole safetensors file: the tensors end at byte"):
        load_file(path)


def test_a_missing_shard(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(100)}, tmp_path / "x")
    with pytest.raises(WeightsUnreadable, match="y: it cannot be opened: No such file"):
        load_files([tmp_path / "x", tmp_path / "y"])


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    for name in ("x", "y"):
        save_file({"same": torch.zeros(1)}, tmp_path / name)
    with pytest.raises(Corrupt, match="tensor same is in .*y and in another"):
        load_files([tmp_path / "x", tmp_path / "y"])


def test_a_dtype_that_torch_has_not(tmp_path: Path) -> None:
    write(tmp_path / "x", {"x": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}, 3)
    with pytest.raises(Corrupt, match="has no dtype for tensor x, F6_E2M3"):
        load_file(tmp_path / "x")
    write(tmp_path / "x", {"x": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}, 3)
    with pytest.raises(Corrupt, match=r"has no dtype for tensor x, F4 \[2, 3\]"):
        load_file(tmp_path / "x")


def test_paths_that_are_not_files(tmp_path: Path) -> None:
    """A read of a pipe would wait without end."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(WeightsUnreadable, match="it is no regular file"):
            load_file(path)
    with pytest.raises(TypeError, match="load_file loads one"):
        load_files(str(tmp_path / "x"))


def test_devices_that_are_not_there(tmp_path: Path) -> None:
    save_file({}, tmp_path / "x")
    for device in ("cuda:77", 77, torch.device("cuda", 77)):
        with pytest.raises(TierUnavailable, match="device cuda:77 cannot be used: torch .* sees"):
            load_file(tmp_path / "x", device)
    with pytest.raises(ValueError, match="device mps: .*load to the CPU"):
        load_file(tmp_path / "x", "mps")


def test_a_file_that_is_replaced_after_its_header_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    save_file({"x": torch.zeros(100)}, path)
    read = WeightReader.read

    def replaced(self: WeightReader, *rest: Any) -> object:
        save_file({"x": torch.ones(100)}, tmp_path / "new")
        (tmp_path / "new").replace(path)
        return read(self, *rest)

    monkeypatch.setattr(WeightReader, "read", replaced)
    with pytest.raises(WeightsUnreadable, match="x: the file was changed while it was read"):
        load_file(path)


def test_a_flipped_byte_is_refused_where_there_is_a_manifest(tmp_path: Path) -> None:
    path = tmp_path / "x"
    save_file({"weight": torch.zeros(100)}, path)
    with WeightReader() as reader:
        manifest.write(tmp_path, [path], reader)
    assert load_file(path)["weight"].count_nonzero() == 0
    flip(path, path.stat().st_size - 1, 0x80)
    with pytest.raises(WeightsDamaged, match="x at byte 0: bytes in tensor weight differ"):
        load_file(path)


# --- transformers ---


def test_transformers_answers_as_with_its_own_loader(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path, max_shard_size="100KB")
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    stock = LlamaForCausalLM.from_pretrained(tmp_path)
    ours = LlamaForCausalLM.from_pretrained(None, config=stock.config, state_dict=load_files(files))
    ids = torch.arange(20)[None] * 5
    assert torch.equal(ours(ids).logits, stock(ids).logits)
