"""Evaluation: a prefix's KV goes through a codec in whole chunks, and the continuation is computed on it in bf16.

Everything is compared with the reference: the same model on its own KV in bf16, as an engine without a tier has it.
A condition adds an offset to all keys, as Qwen's K bias does. Softmax does not depend on what all keys have in common,
so in exact arithmetic no output changes; the reference has the offset too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.quality import tasks
from benchmarks.quality.model import KVCache, SmallLlama, with_offset
from benchmarks.quality.tasks import TaskRows, TaskSource
from kvtier.codecs.fp8.codec import Fp8Coder
from kvtier.codecs.turboquant.layout import PRESETS, Bits, LayerLayout
from kvtier.codecs.turboquant.reference import decode_layer, encode_layer, signs_of
from kvtier.format.geometry import Extent

CHUNK_TOKENS = 256
FIRST_SEED = 100
CODEC_SEED = 0
BATCH_ELEMENTS = 1 << 25  # elements of K that are encoded together: the reference takes some 50 bytes for each
PREFILL_ROWS = 64
CONDITIONS = {"as trained": 0.0, "K offset x10": 10.0, "K offset x100": 100.0}  # offset in mean norms of the keys
LARGE_CHANNELS, LARGE_TIMES = 8, 6.0  # so many channels of the offset are so much larger, as in Qwen's K bias
SHIPPED = ("k6v4", "k5v3", "k4v4", "k4v3", "k3v3", "k4v2")
CONTROL = "k2v2"  # must be seen to be worse than k4v4
SEEN_TIMES = 2.0  # seen: the low end of the KL's interval is above so many times the high end of the other one
Z = 1.96

Figure = dict[str, float]


@dataclass(frozen=True)
class EvaluationSize:
    """Amount of rows of each seed. Prefixes are whole chunks."""

    seeds: int = 3
    text_rows: int = 48
    text_prefix_tokens: int = 2048
    text_tokens: int = 256
    pairs: tuple[int, ...] = (64, 256, 512, 768)
    pairs_asked: int = 32
    recall_rows: int = 16


@dataclass(frozen=True)
class PrefixCase:
    """Rows whose first `prefix_tokens` come from the tier; the text, or the recall of pairs."""

    is_text: bool
    rows: TaskRows
    prefix_tokens: int

    @property
    def prefix(self) -> Tensor:
        return self.rows.tokens[:, : self.prefix_tokens]

    @property
    def continuation(self) -> Tensor:
        return self.rows.tokens[:, self.prefix_tokens :]

    def right(self, log_p: Tensor) -> Tensor:
        """Return (rows, answers) bool. log_p: (rows, n - 1, vocabulary) of the continuation but its first token."""
        is_judged = self.rows.is_judged[:, self.prefix_tokens + 1 :]
        return (log_p.argmax(-1) == self.continuation[:, 1:])[is_judged].view(len(self.prefix), -1)


def cases(source: TaskSource, size: EvaluationSize) -> Iterator[PrefixCase]:
    prefix = size.text_prefix_tokens
    yield PrefixCase(True, tasks.text(source, size.text_rows, prefix + size.text_tokens), prefix)
    for n_pairs in size.pairs:
        prefix = -(-(2 + 2 * n_pairs) // CHUNK_TOKENS) * CHUNK_TOKENS
        length = prefix + 1 + 2 * size.pairs_asked
        yield PrefixCase(False, tasks.recall(source, size.recall_rows, length, n_pairs, size.pairs_asked), prefix)


class LoadedChunks(NamedTuple):
    """k, v: each (chunks, layers, KV heads, CHUNK_TOKENS, head size). refused: (chunks,) bool: without meaning."""

    k: Tensor
    v: Tensor
    refused: Tensor


@dataclass(frozen=True)
class CodecMethod:
    """vector_bytes: of one K and one V vector of one head, with all that is stored beside the codes.

    round_trip: takes K and V as in LoadedChunks; None for raw.
    """

    name: str
    vector_bytes: float
    round_trip: Callable[[Tensor, Tensor], LoadedChunks] | None

    def apply(self, cache: KVCache) -> tuple[KVCache, int]:
        """Return the cache as a load brings it back, and the number of refused chunks.

        Those are computed again, as with the tier, so they stay as they were. The cache's tokens are whole chunks.
        """
        if self.round_trip is None:
            return cache, 0
        # (layers, rows, heads, tokens, size) -> (rows x chunks, layers, heads, CHUNK_TOKENS, size)
        whole = (x.unflatten(3, (-1, CHUNK_TOKENS)).permute(1, 3, 0, 2, 4, 5) for x in (cache.k, cache.v))
        k, v = (x.flatten(0, 1) for x in whole)
        step = max(1, BATCH_ELEMENTS // k[0].numel())
        parts = [self.round_trip(k[i : i + step], v[i : i + step]) for i in range(0, len(k), step)]
        back_k, back_v, refused = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        stays = refused[:, None, None, None, None]
        planes = (torch.where(stays, k, back_k), torch.where(stays, v, back_v))
        n_rows = cache.k.shape[1]
        rows = (x.unflatten(0, (n_rows, -1)).permute(2, 0, 3, 1, 4, 5).flatten(3, 4) for x in planes)
        return KVCache(*rows), int(refused.sum())


def turboquant(k: Tensor, v: Tensor, bits: Bits) -> LoadedChunks:
    _, layers, heads, tokens, size = k.shape
    layout = LayerLayout(tokens, size, size, bits)
    signs = signs_of(CODEC_SEED, Extent(0, layers, 0, heads), layout, k.device)
    encoded = encode_layer(k, v, layout, signs)
    return LoadedChunks(*decode_layer(encoded.data, layout, signs, k.dtype), encoded.refused.flatten(1).any(dim=1))


def fp8(k: Tensor, v: Tensor) -> LoadedChunks:
    _, layers, heads, tokens, size = k.shape
    coder, extent = Fp8Coder(tokens, size, size), Extent(0, layers, 0, heads)
    encoded = coder.encode(k, v, extent)
    return LoadedChunks(*coder.decode(encoded.data, extent, k.dtype), encoded.refused.flatten(1).any(dim=1))


def methods(size: int) -> list[CodecMethod]:
    """Return all rows of the table for a head size, the most accurate first."""
    found = [CodecMethod("raw", 4 * size, None), CodecMethod("fp8", 2 * size + 4, fp8)]
    for name in (*SHIPPED, CONTROL):
        vector_bytes = LayerLayout(CHUNK_TOKENS, size, size, PRESETS[name]).n_bytes / CHUNK_TOKENS
        found.append(CodecMethod(name, vector_bytes, partial(turboquant, bits=PRESETS[name])))
    return found


def offset_of(cache: KVCache, times: float) -> Tensor | None:
    """Return (layers, KV heads, head size) float32, in the same direction for every condition; None without one."""
    if not times:
        return None
    layers, _, heads, _, size = cache.k.shape
    random = torch.Generator().manual_seed(0)
    direction = torch.randn(layers, heads, size, generator=random)
    large = torch.rand(layers, heads, size, generator=random).argsort(-1) < LARGE_CHANNELS
    direction = F.normalize(direction * (1 + (LARGE_TIMES - 1) * large), dim=-1).to(cache.k.device)
    return direction * (times * cache.k.float().norm(dim=-1).mean(dim=(1, 3)))[..., None]


def prefill(model: SmallLlama, tokens: Tensor, step_tokens: int, step_rows: int) -> KVCache:
    """Return the KV of tokens (rows, n), computed so many tokens and rows at a time."""
    parts = []
    for rows in tokens.split(step_rows):
        cache = None
        for piece in rows.split(step_tokens, dim=1):
            _, cache = model.extend(piece, cache)
        assert cache is not None
        parts.append(cache)
    return KVCache(torch.cat([part.k for part in parts], dim=1), torch.cat([part.v for part in parts], dim=1))


def shifted(cache: KVCache, offset: Tensor | None) -> KVCache:
    return cache if offset is None else KVCache(with_offset(cache.k, offset[:, None]), cache.v)


def log_probabilities(
    model: SmallLlama, case: PrefixCase, cache: KVCache, offset: Tensor | None, step_rows: int
) -> Tensor:
    """Return (rows, n - 1, vocabulary) float32: of the continuation's tokens but the first."""
    parts = []
    for first in range(0, len(case.continuation), step_rows):
        rows = slice(first, first + step_rows)
        hidden, _ = model.extend(case.continuation[rows, :-1], cache.rows(rows), offset)
        parts.append(F.log_softmax(model.logits(hidden).float(), dim=-1))
    return torch.cat(parts)


def judge(model: SmallLlama, case: PrefixCase, times: float, codecs: list[CodecMethod]) -> dict[str, dict[str, Tensor]]:
    """Return {method: {measure: (rows, values)}} of one case under one condition.

    kl: KL(reference || method) in nats; top1: whether the likeliest token is the same; recall: whether answers are
    right. Raw is computed in other steps, of tokens and of rows: the noise floor.
    """
    plain = prefill(model, case.prefix, case.prefix_tokens, PREFILL_ROWS)
    offset = offset_of(plain, times)
    expected = log_probabilities(model, case, shifted(plain, offset), offset, PREFILL_ROWS)
    found = {"reference": {} if case.is_text else {"recall": case.right(expected)}}
    for method in codecs:
        cache, step_rows = plain, PREFILL_ROWS
        if method.round_trip is None:
            step_rows = max(1, len(case.prefix) // 3)
            cache = prefill(model, case.prefix, CHUNK_TOKENS, step_rows)
        cache, n_refused = method.apply(shifted(cache, offset))
        log_p = log_probabilities(model, case, cache, offset, step_rows)
        values = {"recall": case.right(log_p)}
        if case.is_text:
            kl = (expected.exp() * (expected - log_p)).sum(-1).clamp_min(0)
            values = {"kl": kl, "top1": expected.argmax(-1) == log_p.argmax(-1)}
        found[method.name] = values | {"refused": torch.tensor([[n_refused]])}
    return found


def mean(values: list[Tensor]) -> Figure:
    """Return the mean and 1.96 standard errors over rows, whose tokens are not independent. values: (rows, tokens)."""
    rows = torch.cat(values).double().mean(dim=1)
    half = Z * rows.std().item() / math.sqrt(len(rows)) if len(rows) > 1 else math.nan
    value = rows.mean().item()
    return {"value": value, "low": value - half, "high": value + half}


def share(values: list[Tensor]) -> Figure:
    """Return the share of right answers with Wilson's interval, which is not empty at 100 %."""
    n = sum(value.numel() for value in values)
    p = sum(value.sum().item() for value in values) / n
    middle = (p + Z * Z / (2 * n)) / (1 + Z * Z / n)
    half = Z / (1 + Z * Z / n) * math.sqrt(p * (1 - p) / n + Z * Z / (4 * n * n))
    return {"value": p, "low": min(p, middle - half), "high": max(p, middle + half)}


def evaluate(model: SmallLlama, held_out: Tensor, size: EvaluationSize) -> dict[str, Any]:
    """Return the rows of the table: figures of each method under each condition, over all seeds."""
    codecs = methods(model.shape.head_size)
    found: dict[tuple[str, str, str], list[Tensor]] = {}
    for seed in range(size.seeds):
        source = TaskSource(held_out, torch.Generator(held_out.device).manual_seed(FIRST_SEED + seed))
        for case in cases(source, size):
            for condition, times in CONDITIONS.items():
                for method, values in judge(model, case, times, codecs).items():
                    for measure, value in values.items():
                        found.setdefault((condition, method, measure), []).append(value.float().cpu())
        print(f"  seed {seed} is done", flush=True)
    rows = []
    for condition in CONDITIONS:
        for method in codecs:
            of = partial(lambda measure, key: found[(*key, measure)], key=(condition, method.name))
            rows.append(
                {
                    "condition": condition,
                    "method": method.name,
                    "vector_bytes": method.vector_bytes,
                    "is_control": method.name == CONTROL,
                    "kl_mean": mean(of("kl")),
                    "top1": mean(of("top1")),
                    "recall_all": share(of("recall")),
                    "refused_chunks": int(sum(value.sum().item() for value in of("refused"))),
                }
            )
    reference = {condition: share(found[condition, "reference", "recall"]) for condition in CONDITIONS}
    return {"plan": asdict(size), "reference": reference, "rows": rows, "is_control_seen": is_control_seen(rows)}


def is_control_seen(rows: list[dict[str, Any]]) -> bool:
    """Return whether the control is clearly worse than k4v4; if not, the benchmark shows nothing."""
    kl = {row["method"]: row["kl_mean"] for row in rows if row["condition"] == next(iter(CONDITIONS))}
    return bool(kl[CONTROL]["low"] > SEEN_TIMES * kl["k4v4"]["high"])
