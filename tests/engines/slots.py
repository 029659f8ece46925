"""vLLM's own turboquant kernels, interpreted on the CPU, over blocks that kvtier moved. Run by test_slots.py in a
process of its own: python slots.py OUT.json

vLLM turns Triton off where there is no GPU; here it is put back before the kernels are defined.
"""

# ruff: noqa: E402
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl
import vllm
import vllm.triton_utils as dispatch

dispatch.triton, dispatch.tl = triton, tl

from vllm.model_executor.layers.quantization.turboquant.centroids import get_centroids
from vllm.model_executor.layers.quantization.turboquant.config import TurboQuantConfig
from vllm.v1.attention.ops.triton_turboquant_decode import _tq_full_dequant_kv
from vllm.v1.attention.ops.triton_turboquant_store import triton_turboquant_store

from kvtier.connectors.vllm.kv_dtypes import SLOTS
from kvtier.connectors.vllm.kv_layout import CacheShape, engine_pages
from kvtier.kernels.device import DevicePages
from kvtier.kernels.paged import Move, Patch

BLOCKS, BLOCK_TOKENS, HEADS, SIZE = 6, 4, 2, 64
WRITTEN, ELSEWHERE = (4, 1), (0, 5)


def hadamard(size: int) -> torch.Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


class Slots:
    """The KV cache of one layer as vLLM has it, (blocks, tokens, heads, slot), and its kernels."""

    def __init__(self, preset: str) -> None:
        self.config = TurboQuantConfig.from_cache_dtype(preset, SIZE)
        self.codebook = get_centroids(SIZE, self.config.centroid_bits).float().sort().values
        self.cache = torch.full((BLOCKS, BLOCK_TOKENS, HEADS, self.config.slot_size_aligned), 77, dtype=torch.uint8)

    def store(self, k: torch.Tensor, v: torch.Tensor, blocks: tuple[int, ...]) -> None:
        """k, v: (tokens, heads, size)."""
        slots = torch.cat([torch.arange(block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS) for block in blocks])
        config, middles = self.config, (self.codebook[:-1] + self.codebook[1:]) / 2
        triton_turboquant_store(
            k,
            v,
            self.cache,
            slots.int(),
            hadamard(SIZE),
            middles,
            mse_bits=config.key_mse_bits,
            key_packed_size=config.key_packed_size,
            value_quant_bits=config.effective_value_quant_bits,
            key_fp8=config.key_fp8,
        )

    def read(self, blocks: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """K (rotated back) and V of these blocks, (tokens, heads, size), as a continued prefill reads them."""
        config, tokens = self.config, len(blocks) * BLOCK_TOKENS
        k, v = (torch.zeros(1, HEADS, tokens, SIZE, dtype=torch.float16) for _ in range(2))
        table = torch.tensor([blocks], dtype=torch.int32)
        _tq_full_dequant_kv[(tokens, HEADS)](
            self.cache,
            table,
            self.codebook,
            k,
            v,
            *k.stride()[:3],
            *v.stride()[:3],
            *self.cache.stride()[:3],
            table.stride(0),
            HEAD_DIM=SIZE,
            BLOCK_SIZE=BLOCK_TOKENS,
            NUM_KV_HEADS=HEADS,
            MSE_BYTES=-(-SIZE * config.key_mse_bits // 8),
            KPS=config.key_packed_size,
            VQB=config.effective_value_quant_bits,
            VAL_DATA_BYTES=-(-SIZE * config.effective_value_quant_bits // 8),
            MSE_BITS=config.key_mse_bits,
            KEY_FP8=int(config.key_fp8),
            BLOCK_D=SIZE,
            NORM_CORRECTION=int(config.norm_correction),
            FP8_E4B15=0,
        )
        rotated = k[0] if config.key_fp8 else (k[0].float() @ hadamard(SIZE)).half()
        return rotated.transpose(0, 1), v[0].transpose(0, 1)


def moved(source: Slots, target: Slots) -> None:
    """What WRITTEN holds of `source` into ELSEWHERE of `target`, by kvtier's gather and scatter: slabs between them."""
    shape = CacheShape(BLOCKS, BLOCK_TOKENS, HEADS, source.cache.shape[-1], 0, is_slots=True, element_bytes=1)
    name = "layers.0"
    slabs = torch.zeros(HEADS, 8192, dtype=torch.uint8)
    patch = Patch(0, 0, 1, 0, HEADS)
    heads_first = {name: source.cache.transpose(1, 2)}, {name: target.cache.transpose(1, 2)}
    out, back = (DevicePages(engine_pages(each, [name], shape).pages) for each in heads_first)
    out.gather([Move(patch, WRITTEN, slabs)])
    back.scatter([Move(patch, ELSEWHERE, slabs)])


def changed_slots(
    source: Slots, other: Slots, k: torch.Tensor, v: torch.Tensor, token: int, head: int
) -> list[list[int]]:
    """Slots, as [token, head], whose bytes are others when one token's K and V of one head are."""
    k, v = k.clone(), v.clone()
    k[token, head] += torch.randn(SIZE)
    v[token, head] *= -2
    other.store(k, v, WRITTEN)
    differs = (source.cache != other.cache).any(-1)[list(WRITTEN)].flatten(0, 1)
    outside = source.cache[[b for b in range(BLOCKS) if b not in WRITTEN]]
    assert (outside == 77).all(), "vLLM wrote into other blocks"
    return differs.nonzero().tolist()


def facts(preset: str) -> dict[str, Any]:
    torch.manual_seed(1)
    k, v = torch.randn(2, len(WRITTEN) * BLOCK_TOKENS, HEADS, SIZE).unbind(0)
    source, target, other = (Slots(preset) for _ in range(3))
    source.store(k, v, WRITTEN)
    before = source.cache.clone()
    moved(source, target)
    theirs, ours = source.read(WRITTEN), target.read(ELSEWHERE)
    untouched = target.cache[[block for block in range(BLOCKS) if block not in ELSEWHERE]]
    return {
        "bytes_equal": torch.equal(target.cache[list(ELSEWHERE)], before[list(WRITTEN)]),
        "untouched": bool((untouched == 77).all()),
        "read_equal": all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True)),
        "nmse": [float((a.float() - b).square().mean() / b.square().mean()) for a, b in zip(ours, (k, v), strict=True)],
        "changed": changed_slots(source, other, k, v, 5, 1),
    }


if __name__ == "__main__":
    found = {"release": vllm.__version__} | {preset: facts(preset) for preset in SLOTS}
    Path(sys.argv[1]).write_text(json.dumps(found))
