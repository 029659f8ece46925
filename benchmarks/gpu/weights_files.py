"""Random bf16 checkpoints with the tensors of real models, and the parameters that an engine copies them into."""

from __future__ import annotations

import argparse
import json
import math
import os
import struct
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

ELEMENT_BYTES = 2
RANDOM_BYTES = 64 << 20  # random bytes, of which each tensor takes others
WRITERS = 32  # files written at once: writes to one file exclude each other
SUM_WORDS = 1 << 22  # 8-byte words that are weighted at once
PIECE_SHIFT = 104_729 * 16  # bytes by which the next piece of a tensor begins further on, so that halves differ


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """A tensor of the checkpoint, and its place: `at` elements into a parameter, which is contiguous."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    at: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class WeightShapes:
    """Sizes of a model. experts: of each layer, 0 for a dense one, whose `inner` is the MLP's."""

    files: int
    vocabulary: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    norms_heads: bool
    tied: bool
    experts: int = 0


MODELS = {
    "8b": WeightShapes(4, 128_256, 4096, 14_336, 32, 32, 8, 128, False, False),
    "70b": WeightShapes(30, 128_256, 8192, 28_672, 80, 64, 8, 128, False, False),
    "0.6b": WeightShapes(1, 151_936, 1024, 3072, 28, 16, 8, 128, True, True),
    "moe": WeightShapes(5, 151_936, 2048, 768, 16, 32, 4, 128, True, False, 128),
    "tiny": WeightShapes(2, 512, 64, 96, 2, 4, 2, 16, True, False, 4),
}


def parser(module: str, about: str | None) -> argparse.ArgumentParser:
    """Return the options that all scripts about weights share."""
    made = argparse.ArgumentParser(
        prog=f"python -m benchmarks.gpu.{module}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    made.add_argument("--folder", type=Path, default=Path("/dev/shm/weights"), help="of the checkpoints")
    made.add_argument("--repetitions", type=int, default=3)
    made.add_argument("--tiny", action="store_true", help="a tiny model on the CPU, to try this script")
    made.add_argument("--wheels", type=Path, help="folder of wheels to import loaders from")
    made.add_argument("--logs", type=Path, default=Path("/tmp/bench/logs"))
    return made


def unpacked(wheels: Path | None) -> list[str]:
    """Return the folder to import the wheels of a folder from, as a list; [] without one."""
    if wheels is None:
        return []
    target = Path(tempfile.gettempdir(), "kvtier-bench-wheels")
    for wheel in sorted(wheels.glob("*.whl")):
        if not (target / wheel.name).exists():
            zipfile.ZipFile(wheel).extractall(target)
            (target / wheel.name).touch()
    return [str(target)]


def config_of(model: WeightShapes) -> dict[str, Any]:
    """Return the config.json of a Llama, Qwen3 or Qwen3-MoE with these sizes."""
    kind = "qwen3_moe" if model.experts else "qwen3" if model.norms_heads else "llama"
    name = {"qwen3_moe": "Qwen3MoeForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[kind]
    found: dict[str, Any] = {
        "model_type": kind,
        "architectures": [name],
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    found |= {"vocab_size": model.vocabulary, "hidden_size": model.hidden, "intermediate_size": model.inner}
    found |= {"num_hidden_layers": model.layers, "num_attention_heads": model.heads, "head_dim": model.head_size}
    found |= {"num_key_value_heads": model.kv_heads, "tie_word_embeddings": model.tied, "hidden_act": "silu"}
    found |= {"max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "bos_token_id": 0, "eos_token_id": 1}
    if model.experts:
        found |= {"num_experts": model.experts, "num_experts_per_tok": 2, "moe_intermediate_size": model.inner}
        found |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return found


def tensors_of(model: WeightShapes) -> list[PlacedTensor]:
    """Return the tensors in the order of the files, with the fused parameters of vLLM (qkv, gate_up, w13, w2)."""
    hidden = model.hidden
    found = [PlacedTensor("model.embed_tokens.weight", (model.vocabulary, hidden), "embed", 0)]
    for layer in range(model.layers):
        found += _layer(model, f"model.layers.{layer}.")
    found.append(PlacedTensor("model.norm.weight", (hidden,), "norm", 0))
    if not model.tied:
        found.append(PlacedTensor("lm_head.weight", (model.vocabulary, hidden), "lm_head", 0))
    return found


def _layer(model: WeightShapes, prefix: str) -> Iterator[PlacedTensor]:
    hidden, inner, attention = model.hidden, model.inner, prefix + "self_attn."
    yield PlacedTensor(prefix + "input_layernorm.weight", (hidden,), prefix + "norm1", 0)
    yield PlacedTensor(prefix + "post_attention_layernorm.weight", (hidden,), prefix + "norm2", 0)
    at = 0
    for name, heads in (("q_proj", model.heads), ("k_proj", model.kv_heads), ("v_proj", model.kv_heads)):
        yield PlacedTensor(f"{attention}{name}.weight", (heads * model.head_size, hidden), prefix + "qkv", at)
        at += heads * model.head_size * hidden
    yield PlacedTensor(attention + "o_proj.weight", (hidden, model.heads * model.head_size), prefix + "o", 0)
    if model.norms_heads:
        for name in ("q_norm", "k_norm"):
            yield PlacedTensor(f"{attention}{name}.weight", (model.head_size,), prefix + name, 0)
    if model.experts:
        yield PlacedTensor(prefix + "mlp.gate.weight", (model.experts, hidden), prefix + "router", 0)
    for expert in range(max(1, model.experts)):
        mlp = prefix + (f"mlp.experts.{expert}." if model.experts else "mlp.")
        size = inner * hidden
        yield PlacedTensor(mlp + "gate_proj.weight", (inner, hidden), prefix + "w13", 2 * expert * size)
        yield PlacedTensor(mlp + "up_proj.weight", (inner, hidden), prefix + "w13", (2 * expert + 1) * size)
        yield PlacedTensor(mlp + "down_proj.weight", (hidden, inner), prefix + "w2", expert * size)


def parameters_of(tensors: list[PlacedTensor]) -> dict[str, int]:
    """Return the elements of each parameter."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        sizes[tensor.parameter] = max(sizes.get(tensor.parameter, 0), tensor.at + tensor.elements)
    return sizes


def make(folder: Path, model: WeightShapes) -> list[Path]:
    """Write the checkpoint unless it is there. Return its files."""
    shards = _shards(model)
    paths = [folder / f"model-{n + 1:05}-of-{len(shards):05}.safetensors" for n in range(len(shards))]
    if (folder / "made").exists():
        return paths
    folder.mkdir(parents=True, exist_ok=True)
    values = np.random.default_rng(0).standard_normal(RANDOM_BYTES // 2, np.float32)
    content = np.tile((values.view(np.uint32) >> 16).astype(np.uint16), 2).tobytes()  # bf16

    def write(path: Path, shard: list[tuple[int, PlacedTensor]]) -> None:
        with path.open("wb", buffering=0) as file:
            for start, end, offset in _pieces(file, shard):
                os.pwrite(file.fileno(), memoryview(content)[start:end], offset)

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(write, paths, shards))
    (folder / "made").touch()
    return paths


def _shards(model: WeightShapes) -> list[list[tuple[int, PlacedTensor]]]:
    """Return the numbered tensors of each file. No file is empty: InstantTensor refuses it."""
    tensors = tensors_of(model)
    share = sum(tensor.elements for tensor in tensors) / model.files
    shards: list[list[tuple[int, PlacedTensor]]] = [[] for _ in range(model.files)]
    done = 0
    for number, tensor in enumerate(tensors):
        shards[min(model.files - 1, int(done / share))].append((number, tensor))
        done += tensor.elements
    return [shard for shard in shards if shard]


def _pieces(file: FileIO, shard: list[tuple[int, PlacedTensor]]) -> Iterator[tuple[int, int, int]]:
    """Write the header of a file. Yield the parts of the random bytes, and their offsets in the file."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for _, tensor in shard:
        end = at + tensor.elements * ELEMENT_BYTES
        header[tensor.name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    offset = 8 + len(text)
    for number, tensor in shard:
        skip = number * 7_919 * 16 % RANDOM_BYTES
        left = tensor.elements * ELEMENT_BYTES
        while left:
            size = min(left, RANDOM_BYTES)
            yield skip, skip + size, offset
            offset, left, skip = offset + size, left - size, (skip + PIECE_SHIFT) % RANDOM_BYTES


def position_sum(tensor: Any) -> int:
    """Return the sum of a tensor's 8-byte words, each times an odd number made of its position, modulo 2**64."""
    import torch

    words = tensor.detach().contiguous().view(-1).view(torch.int64)
    weights = torch.arange(1, 2 * min(SUM_WORDS, len(words)), 2, device=words.device)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for number, piece in enumerate(words.split(SUM_WORDS)):
        total += (piece * weights[: len(piece)]).sum() * (2 * number + 1)
    return int(total)
