"""Small Llama: RoPE on halves, grouped-query attention, SwiGLU, RMSNorm, and a bias on Q, K and V as Qwen has it.

Plain torch, because evaluation passes keys and values of a prefix (`KVCache`) as an engine reads them from its pages: K
after RoPE.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROPE_BASE = 500_000.0  # Llama 3's
NORM_EPSILON = 1e-5
WEIGHT_SPREAD = 0.02


@dataclass(frozen=True)
class ModelShape:
    layers: int
    width: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int
    head_size: int = 128


@dataclass(frozen=True)
class KVCache:
    """Keys (after RoPE) and values of all layers, each (layers, rows, KV heads, tokens, head size)."""

    k: Tensor
    v: Tensor

    @property
    def n_tokens(self) -> int:
        return self.k.shape[3]

    def rows(self, which: slice) -> KVCache:
        return KVCache(self.k[:, which], self.v[:, which])


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), NORM_EPSILON)


class RopeRotation:
    """RoPE's cosines and sines of positions [first, first + n)."""

    def __init__(self, first: int, n: int, head_size: int, device: torch.device) -> None:
        power = torch.arange(0, head_size, 2, device=device, dtype=torch.float32) / head_size
        angles = torch.outer(torch.arange(first, first + n, device=device, dtype=torch.float32), ROPE_BASE**-power)
        self.cos, self.sin = angles.cos(), angles.sin()

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate x (rows, heads, tokens, head size) in float32; return x's dtype."""
        low, high = x.float().chunk(2, dim=-1)
        return torch.cat((low * self.cos - high * self.sin, high * self.cos + low * self.sin), dim=-1).to(x.dtype)


class LlamaLayer(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        q_width, kv_width = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
        self.before_attention, self.before_mlp = RmsNorm(shape.width), RmsNorm(shape.width)
        self.qkv = nn.Linear(shape.width, q_width + 2 * kv_width)
        self.out = nn.Linear(q_width, shape.width, bias=False)
        self.gate_up = nn.Linear(shape.width, 2 * shape.mlp, bias=False)
        self.down = nn.Linear(shape.mlp, shape.width, bias=False)

    def qkv_of(self, x: Tensor, rotation: RopeRotation) -> tuple[Tensor, Tensor, Tensor]:
        """Return Q, K (both rotated) and V, each (rows, heads, tokens, head size)."""
        rows, n, _ = x.shape
        shape = self.shape
        heads = self.qkv(self.before_attention(x)).view(rows, n, -1, shape.head_size).transpose(1, 2)
        q, k, v = heads.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        return rotation(q), rotation(k), v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)

    def forward(self, x: Tensor, rotation: RopeRotation) -> Tensor:
        return self.finish(x, self.attend(*self.qkv_of(x, rotation)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend from the newest tokens to all: q (rows, heads, n, d), k and v (rows, KV heads, old + n, d)."""
        n, total = q.shape[2], k.shape[2]
        k, v = (x.repeat_interleave(self.shape.heads // self.shape.kv_heads, dim=1) for x in (k, v))
        if n == total:  # without a mask: flash attention
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mask = torch.ones(n, total, dtype=torch.bool, device=q.device).tril(total - n) if n > 1 else None
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class SmallLlama(nn.Module):
    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(LlamaLayer(shape) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 2:
                is_residual = ".out." in name or ".down." in name
                nn.init.normal_(parameter, std=WEIGHT_SPREAD / (math.sqrt(2 * shape.layers) if is_residual else 1))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits (rows, n, vocabulary) of tokens (rows, n): for training."""
        rotation = RopeRotation(0, tokens.shape[1], self.shape.head_size, tokens.device)
        x = self.embedding(tokens)
        if torch.is_autocast_enabled(tokens.device.type):
            x = x.to(torch.get_autocast_dtype(tokens.device.type))
        for layer in self.layers:
            x = layer(x, rotation)
        return self.head(self.norm(x))

    def for_evaluation(self) -> SmallLlama:
        """Convert to bf16, as in an engine, except the last product: logits of 8 bits would hide small differences."""
        self.to(torch.bfloat16)
        self.head.float()
        return self.eval().requires_grad_(False)

    def extend(self, tokens: Tensor, past: KVCache | None, key_offset: Tensor | None = None) -> tuple[Tensor, KVCache]:
        """Return hidden states (rows, n, width) of tokens (rows, n) that follow the cache, and the cache with theirs.

        key_offset (layers, KV heads, head size) is added to the keys of these tokens after RoPE; `past` must have it
        already. An offset that all keys have in common does not change softmax.
        """
        first = past.n_tokens if past else 0
        rotation = RopeRotation(first, tokens.shape[1], self.shape.head_size, tokens.device)
        x = self.embedding(tokens)
        ks, vs = [], []
        for number, layer in enumerate(self.layers):
            q, k, v = layer.qkv_of(x, rotation)
            if key_offset is not None:
                k = with_offset(k, key_offset[number])
            if past is not None:
                k, v = torch.cat((past.k[number], k), dim=2), torch.cat((past.v[number], v), dim=2)
            x = layer.finish(x, layer.attend(q, k, v))
            ks.append(k)
            vs.append(v)
        return x, KVCache(torch.stack(ks), torch.stack(vs))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden).to(self.head.weight.dtype))


def with_offset(k: Tensor, offset: Tensor) -> Tensor:
    """Add (KV heads, head size) to keys (..., KV heads, tokens, head size), rounded once to the keys' dtype."""
    return (k.float() + offset[..., :, None, :]).to(k.dtype)
