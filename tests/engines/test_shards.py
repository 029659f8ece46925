"""Shards of all ranks, made in one process: read by kvtier's loader and by vLLM's, refused where they do not fit."""

import errno
import json
import logging
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from safetensors import safe_open
from vllm.config import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader
from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

from kvtier.cli import main
from kvtier.connectors.vllm import weights_shard
from kvtier.connectors.vllm.weights_loader import KvtierModelLoader, release
from kvtier.connectors.vllm.weights_ranks import as_rank, engine_config
from kvtier.errors import ConfigError, TierUnavailable, WeightsDamaged
from kvtier.model.shard_manifest import NAME, read_shard_manifest
from kvtier.model.weights_fingerprint import weights_fingerprint
from kvtier.weights import shards as shards_module
from kvtier.weights.manifest import MANIFEST
from tests.damage import flip

from . import weights_models
from .test_weights import alone, assert_equal, fresh_model, load_as_vllm, loader

__all__ = ["alone"]
RANKS = 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied embeddings and two experts' worth of everything else would be several models: this one has both."""
    return weights_models.make("qwen3_moe", tmp_path_factory.mktemp("checkpoint") / "model")


@pytest.fixture(scope="module")
def made(checkpoint: Path) -> Path:
    out = checkpoint.with_name("shards")
    assert main(["weights", "shard", str(checkpoint), "--tp", str(RANKS), "--out", str(out)]) == 0
    return out


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "shards"))


def load(folder: Path, size: int, rank: int, expected: torch.nn.Module | None = None) -> None:
    config = engine_config(str(folder), size)
    with as_rank(config, rank):
        model = fresh_model(config)
        loader().load_weights(model, config.model_config)
        if expected is not None:
            assert_equal(model, expected)


@pytest.mark.parametrize("rank", range(RANKS))
def test_both_loaders_read_them(checkpoint: Path, made: Path, rank: int, caplog: pytest.LogCaptureFixture) -> None:
    config = engine_config(str(checkpoint), RANKS)
    with as_rank(config, rank):
        expected = load_as_vllm(config)
    with caplog.at_level(logging.INFO, "kvtier"):
        load(made, RANKS, rank, expected)
    assert "verified, plan of shards" in caplog.text
    config = engine_config(str(made), RANKS, load_format="sharded_state")
    with as_rank(config, rank):
        model = fresh_model(config)
        ShardedStateLoader(LoadConfig(load_format="sharded_state")).load_weights(model, config.model_config)
        assert_equal(model, expected)


@pytest.mark.parametrize("has_head", [False, True])
def test_tied_embeddings(has_head: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both loaders build the model that the checkpoint gives: one tensor, or, against config.json, a head too."""
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    folder, out = weights_models.make("tied", tmp_path / "model"), tmp_path / "shards"
    if has_head:
        weights_models.add_head(folder)
    assert main(["weights", "shard", str(folder), "--out", str(out)]) == 0
    loaders = {
        "auto": DefaultModelLoader(LoadConfig(use_tqdm_on_load=False)),
        "kvtier": loader(),
        "sharded_state": ShardedStateLoader(LoadConfig(load_format="sharded_state")),
    }
    models = {}
    models = {}
    for load_format, one in loaders.items():
        config = engine_config(str(folder if load_format == "auto" else out), 1, load_format=load_format)
        with as_rank(config, 0):
            models[load_format] = one.load_model(vllm_config=config, model_config=config.model_config)
    assert models["auto"].config.tie_word_embeddings is not has_head
    assert_equal(models["kvtier"], models["auto"])
    assert_equal(models["sharded_state"], models["auto"])


def test_a_checkpoint_in_fp8(tmp_path: Path, capsys: Any) -> None:
    folder, out = weights_models.make("fp8", tmp_path / "model"), tmp_path / "the shards"
    assert main(["weights", "shard", str(folder), "--tp", str(RANKS), "--out", str(out)]) == 0
    assert f"for 2 ranks of vLLM {release()}: vllm serve '{out}' -tp 2" in capsys.readouterr().out
    config = engine_config(str(folder), RANKS)
    with as_rank(config, 1):
        expected = load_as_vllm(config)
        for name, tensor in expected.named_parameters():
            if ".attn." in name:  # scales of the KV, which the checkpoint does not have: as vLLM makes them
                tensor.data.fill_(-1.0)
    load(out, RANKS, 1, expected)


@pytest.mark.parametrize("kind", ["gptq", "awq_part"])
def test_layers_that_vllm_finds_by_their_tensors(kind: str, tmp_path: Path) -> None:
    """vLLM learns from names in the checkpoint which layers are quantized, and shards name the layers otherwise."""
    folder, out = weights_models.make(kind, tmp_path / "model"), tmp_path / "shards"
    assert main(["weights", "shard", str(folder), "--tp", str(RANKS), "--out", str(out)]) == 0
    config = engine_config(str(folder), RANKS)
    with as_rank(config, 1):
        expected = load_as_vllm(config)
    load(out, RANKS, 1, expected)
    assert weights_fingerprint(out, None) == weights_fingerprint(folder, None)


def test_their_files(checkpoint: Path, made: Path) -> None:
    """Data begins at 4 KiB, configuration is copied, and the KV of both folders is shared."""
    manifest = read_shard_manifest(made)
    assert manifest is not None
    assert sorted(manifest.files) == [f"model-rank-{rank}-part-0.safetensors" for rank in range(RANKS)]
    for name in manifest.files:
        assert (int.from_bytes((made / name).read_bytes()[:8], "little") + 8) % 4096 == 0
        with safe_open(made / name, "pt") as file:
            assert len(list(file.keys())) > 10
    assert (made / "config.json").read_bytes() == (checkpoint / "config.json").read_bytes()
    assert sorted(path.name for path in made.glob("*.index.json")) == []
    assert weights_fingerprint(made, None) == weights_fingerprint(checkpoint, None) == manifest.source_fingerprint


def test_a_changed_folder_has_a_fingerprint_of_its_own(checkpoint: Path, copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps(config | {"rope_theta": 1.0}))
    assert weights_fingerprint(copied, None) != weights_fingerprint(checkpoint, None)


def test_another_size_is_refused(made: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size = 4.*shards for tensor_parallel_size 2"):
        load(made, 4, 0)


def test_another_dtype_is_refused(made: Path) -> None:
    config = engine_config(str(made), RANKS, dtype="float32")
    with as_rank(config, 0), pytest.raises(ConfigError, match=r"BF16.*this engine wants float32.*dtype"):
        loader().load_weights(fresh_model(config), config.model_config)


def test_another_release_is_refused(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    with pytest.raises(ConfigError, match=r"vllm = '0\.99\.0'.*shards for vllm 0"):
        load(made, RANKS, 0)


def test_a_missing_shard_is_refused(copied: Path) -> None:
    (copied / "model-rank-1-part-0.safetensors").unlink()
    load(copied, RANKS, 0)
    with pytest.raises(ConfigError, match=r"model-rank-1-part-0\.safetensors.*missing"):
        load(copied, RANKS, 1)


def test_shards_by_a_name_of_the_hub_are_refused(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM downloads no manifest, and its loaders took the shards for a checkpoint with strange names."""
    monkeypatch.setattr(KvtierModelLoader, "_collect", lambda *_: sorted(made.glob("model-rank-*.safetensors")))
    config = engine_config(str(made), RANKS)
    with as_rank(config, 0):
        model = fresh_model(config)
        config.model_config.model = "org/shards"
        with pytest.raises(ConfigError, match="model = 'org/shards': it has shards.*name that folder"):
            loader().load_weights(model, config.model_config)


def test_swapped_shards_are_refused(copied: Path) -> None:
    one, other = (copied / f"model-rank-{rank}-part-0.safetensors" for rank in range(RANKS))
    one.rename(copied / "x")
    other.rename(one)
    (copied / "x").rename(other)
    with pytest.raises(WeightsDamaged, match="model-rank-0"):
        load(copied, RANKS, 0)


def test_a_flipped_byte_is_refused(copied: Path) -> None:
    path = copied / "model-rank-0-part-0.safetensors"
    flip(path, path.stat().st_size - 1000)
    with pytest.raises(WeightsDamaged, match="model-rank-0-part-0"):
        load(copied, RANKS, 0)


@pytest.mark.parametrize(
    ("content", "said"),
    [("{}", "no manifest of shards"), ("", "without kvtier-weights.json.*run `kvtier weights shard` again")],
    ids=["damaged", "missing"],
)
def test_shards_without_a_manifest_are_refused(copied: Path, content: str, said: str) -> None:
    (copied / NAME).write_text(content) if content else (copied / NAME).unlink()
    with pytest.raises(ConfigError, match=said):
        load(copied, RANKS, 0)


def test_shards_are_not_loaded_again_into_an_engine(made: Path) -> None:
    config = engine_config(str(made), RANKS)
    with as_rank(config, 0), pytest.raises(ConfigError, match="own folder"):
        loader().get_all_weights(config.model_config, fresh_model(config))


def test_a_damaged_checkpoint_is_not_sharded(checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    """Shards of it would have checksums that declare the damage good."""
    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    assert main(["weights", "verify", str(folder), "--write"]) == 0
    path = sorted(folder.glob("*.safetensors"))[-1]
    flip(path, path.stat().st_size - 5)
    assert main(["weights", "shard", str(folder), "--out", str(tmp_path / "out")]) == 2
    assert f"weights verify {folder} --write" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("model-*"))


def test_what_loaders_leave_in_a_model_is_in_no_shard(
    checkpoint: Path, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the bias of Phi-2's head, which vLLM makes when the checkpoint has one."""
    load = Qwen3MoeForCausalLM.load_weights

    def adds(self: Any, weights: Any) -> Any:
        self.lm_head.register_parameter("bias", torch.nn.Parameter(torch.zeros(8), requires_grad=False))
        return load(self, weights)

    monkeypatch.setattr(Qwen3MoeForCausalLM, "load_weights", adds)
    assert main(["weights", "shard", str(checkpoint), "--out", str(tmp_path / "out")]) == 2
    assert "lm_head._parameters" in (said := capsys.readouterr().err) and "--load-format kvtier" in said
    assert not list((tmp_path / "out").glob("model-*"))


def test_the_message_has_the_reason_of_vllm(checkpoint: Path, tmp_path: Path, capsys: Any) -> None:
    for command in ("plan", "shard"):
        out = [] if command == "plan" else ["--out", str(tmp_path / "out")]
        assert main(["weights", command, str(checkpoint), "--tp", "3", *out]) == 2
        assert "heads (8) must be divisible by tensor parallel size (3)" in capsys.readouterr().err


def test_another_architecture_is_refused(made: Path) -> None:
    """Shards do not have the layers of a draft model that is in the checkpoint."""
    config = engine_config(str(made), RANKS)
    with as_rank(config, 0):
        model, draft = fresh_model(config), SimpleNamespace(model=str(made), architecture="Qwen3MTP")
        with pytest.raises(ConfigError, match="shards of Qwen3MoeForCausalLM only; .*own folder to load Qwen3MTP"):
            loader().load_weights(model, draft)


def test_expert_parallelism_is_refused(made: Path) -> None:
    config = engine_config(str(made), RANKS)
    config.parallel_config.enable_expert_parallel = True
    with as_rank(config, 0), pytest.raises(ConfigError, match="for expert parallelism, load the checkpoint's own"):
        loader().load_weights(fresh_model(config), config.model_config)


def test_other_files_of_the_model(checkpoint: Path, tmp_path: Path) -> None:
    """Pooling of an embedding model is in a subfolder; weights of other frameworks are of no use to vLLM."""
    folder, out = Path(shutil.copytree(checkpoint, tmp_path / "model")), tmp_path / "out"
    kind = "sentence_transformers.models.Pooling"
    modules = [{"path": path, "type": kind} for path in ("1_Pooling", "../secret", "..", "/")]
    (folder / "modules.json").write_text(json.dumps(modules))
    for name in ("1_Pooling/config.json", "onnx/model.onnx", "tf_model.h5", "flax_model.msgpack", "../secret/x"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    weights_shard.shard(folder, 1, out, lambda done, total: None)
    beside = {path.name for path in out.iterdir() if not path.name.startswith(("kvtier-", "model-"))}
    assert beside == {"config.json", "generation_config.json", "modules.json", "1_Pooling"}
    assert (out / "1_Pooling/config.json").read_text() == "{}"


def test_a_file_system_without_modes_and_sizes(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some FUSE file systems: chmod is not implemented, and statvfs answers zeros."""

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    folder = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    (folder / "modules.json").write_text('[{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]')
    (folder / "1_Pooling/deep").mkdir(parents=True)
    (folder / "1_Pooling/deep/x").write_text("x")
    sizes = os.statvfs_result([4096, 4096, *[0] * 8])
    monkeypatch.setattr(os, "chmod", refused)
    monkeypatch.setattr(shards_module.os, "statvfs", lambda path: sizes)
    weights_shard.shard(folder, 1, tmp_path / "out", lambda done, total: None)
    assert (tmp_path / "out/1_Pooling/deep/x").read_text() == "x"
    load(tmp_path / "out", 1, 0)


def test_without_room_nothing_is_begun(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards_module, "ROOM_TO_SPARE", 1 << 60)
    with pytest.raises(TierUnavailable, match="do not fit"):
        weights_shard.shard(checkpoint, RANKS, tmp_path / "out", lambda done, total: None)
    assert not list((tmp_path / "out").glob("model-*"))


def test_a_disk_that_fills_up_is_gone_on_with(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(shards_module.RankState, "n_bytes", property(lambda state: patch.setattr(os, "fsync", full) or 1))
        with pytest.raises(TierUnavailable, match="no room for .*run the command again"):
            weights_shard.shard(checkpoint, 1, out, lambda done, total: None)
    assert not list(out.glob("model-*"))
    weights_shard.shard(checkpoint, 1, out, lambda done, total: None)
    load(out, 1, 0)


def test_a_disk_that_is_full_at_the_end(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards were written, and the model's other files do not fit."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(shards_module.shutil, "copyfile", full)
        with pytest.raises(TierUnavailable, match=f"no room for {out}.*run the command again"):
            weights_shard.shard(checkpoint, 1, out, lambda done, total: None)
    weights_shard.shard(checkpoint, 1, out, lambda done, total: None)
    load(out, 1, 0)


def test_a_refused_model_is_not_in_the_way(checkpoint: Path, tmp_path: Path) -> None:
    """The folder it was to go to looks empty, and takes the shards of another checkpoint."""
    without = Path(shutil.copytree(checkpoint, tmp_path / "model", ignore=lambda *_: {"model.safetensors.index.json"}))
    for path in without.glob("*.safetensors"):
        path.unlink()
    (without / "model.gguf").write_bytes(b"GGUF")
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="Cannot find any model weights"):
        weights_shard.shard(without, 1, out, lambda done, total: None)
    weights_shard.shard(checkpoint, 1, out, lambda done, total: None)
    load(out, 1, 0)


def test_what_is_in_the_way_is_refused(checkpoint: Path, made: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, reason in (
        (tmp_path, "not empty"),
        (made, "finished shards"),
        (tmp_path / "file", "is a file"),
        (tmp_path / "file/x", "is a file"),
    ):
        with pytest.raises(ConfigError, match=reason):
            weights_shard.shard(checkpoint, RANKS, folder, lambda done, total: None)
    with pytest.raises(ConfigError, match="shards already"):
        weights_shard.shard(made, RANKS, tmp_path / "out", lambda done, total: None)


def test_two_processes_do_not_write_into_one_folder(checkpoint: Path, tmp_path: Path) -> None:
    """One process would truncate a file that the other has written and then sums."""
    with (
        shards_module.locked_folder(tmp_path / "out"),
        pytest.raises(ConfigError, match="another process writes shards"),
    ):
        weights_shard.shard(checkpoint, 1, tmp_path / "out", lambda done, total: None)
    weights_shard.shard(checkpoint, 1, tmp_path / "out", lambda done, total: None)


class Killed(BaseException):
    """Ends a run at once: no handler of the library takes it, and none cleans up after it."""


class Kill:
    """Audit hook that raises Killed at the `left`-th call that opens, renames or removes something in `folder`."""

    def __init__(self) -> None:
        self.folder, self.left = "", 0
        sys.addaudithook(self._count)  # it stays for as long as the process lives

    def _count(self, event: str, arguments: Any) -> None:
        if self.left and event in ("open", "os.rename", "os.remove", "os.mkdir") and self.folder in str(arguments[0]):
            self.left -= 1
            if self.left == 0:
                raise Killed


@pytest.fixture(scope="module")
def kill() -> Kill:
    return Kill()


def killed_at(step: int, kill: Kill, checkpoint: Path, out: Path) -> bool:
    """Makes shards until the `step`-th change of the folder. Returns whether it came that far."""
    kill.folder, kill.left = str(out), step
    try:
        weights_shard.shard(checkpoint, 1, out, lambda done, total: None)
        return False
    except Killed:
        return True
    finally:
        kill.left = 0


def test_a_kill_at_any_point_is_repaired(
    kill: Kill, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder without the manifest has no shards; one with it has all of them whole."""
    monkeypatch.setattr(shards_module, "PART_BYTES", 200_000)
    out, step = tmp_path / "out", 1
    while killed_at(step, kill, checkpoint, out):
        manifest = read_shard_manifest(out)
        if manifest is not None:
            assert {name: (out / name).stat().st_size for name in manifest.files} == manifest.files
        step += 7
    manifest = read_shard_manifest(out)
    assert manifest is not None and len(manifest.files) > 2 and step > 21
    assert not list(out.glob(".*"))
    load(out, 1, 0)


@pytest.mark.parametrize("fault", ["flipped", "cut", "not recorded"])
def test_a_file_that_was_damaged_since_a_kill_is_written_again(
    fault: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checksums would declare the damage good. Files that are sound are not written again."""
    out, write = tmp_path / "out", shards_module._write

    def write_three(path: Path, contents: Any) -> None:
        if "part-3" in path.name:
            raise Killed
        write(path, contents)

    monkeypatch.setattr(shards_module, "PART_BYTES", 200_000)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(shards_module, "_write", write_three)
        weights_shard.shard(checkpoint, 1, out, lambda done, total: None)
    sound, damaged, _ = sorted(out.glob("model-*"))
    before = sound.stat().st_mtime_ns
    if fault == "flipped":
        flip(damaged, damaged.stat().st_size - 1000)
    elif fault == "cut":
        os.truncate(damaged, damaged.stat().st_size - 1)
    else:  # as after a loss of power, or begun by an earlier kvtier
        (out / MANIFEST).unlink()
    weights_shard.shard(checkpoint, 1, out, lambda done, total: None)
    assert (sound.stat().st_mtime_ns == before) is (fault != "not recorded")
    config = engine_config(str(checkpoint), 1)
    with as_rank(config, 0):
        expected = load_as_vllm(config)
    load(out, 1, 0, expected)


def test_plan_of_each_rank(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", "plan", str(checkpoint), "--tp", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [rank["rank"] for rank in found] == [0, 1]
    for rank in found:
        assert rank["landed_bytes"] < rank["read_bytes"] and rank["converted"] == rank["materialized_bytes"] == 0
    assert main(["weights", "plan", str(checkpoint), "--tp", "2", "--dtype", "float32", "--json"]) == 0
    for rank, wide in zip(found, json.loads(capsys.readouterr().out), strict=True):
        assert wide["converted"] and wide["landed_bytes"] == 2 * rank["landed_bytes"]
        assert wide["read_bytes"] >= rank["landed_bytes"]  # what is converted is read as well: it said 0 bytes
    assert main(["weights", "plan", str(checkpoint)]) == 0
    assert "into parameters" in capsys.readouterr().out
    assert main(["weights", "plan", str(checkpoint.parent)]) == 2
    assert "config.json" in capsys.readouterr().err
