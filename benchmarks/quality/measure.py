"""Runs the tier's protocol: the prefix's KV goes through a method, the continuation is computed on it in bf16.

Everything is compared with the reference: the same model on its own KV in bf16, as an engine without a tier has it.
Under an offset that KV has the offset too, and what bf16 loses by that is measured by itself.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.quality.cases import TEXT, Case
from benchmarks.quality.methods import CHUNK_TOKENS, Method
from benchmarks.quality.model import Cache, Model, with_offset

REFERENCE, REFUSED = "reference", "refused"
PREFILL_ROWS = 64
LARGE_CHANNELS, LARGE_TIMES = 8, 6.0
"""So many channels of the offset are so much larger, as in Qwen's K bias; they have some 70% of its energy."""


@dataclass(frozen=True)
class Condition:
    """An offset of `times` the mean norm of each layer's and head's keys is added to all keys; 0: none.

    Softmax does not see what all keys have in common, so in exact arithmetic no output changes.
    """

    times: float

    @property
    def name(self) -> str:
        return f"K offset x{self.times:g}" if self.times else "as trained"


@dataclass(frozen=True)
class Key:
    condition: str
    method: str
    measure: str


@dataclass
class Tally:
    """What was measured, by seed: tensors (rows, judged tokens of a row), float32 on the CPU."""

    found: dict[Key, list[Tensor]] = field(default_factory=lambda: defaultdict(list))

    def add(self, condition: str, method: str, values: dict[str, Tensor]) -> None:
        for measure, value in values.items():
            self.found[Key(condition, method, measure)].append(value.float().cpu())


@dataclass(frozen=True)
class Reference:
    """A case and what the model says without a tier: log-probabilities (rows, n - 1, vocabulary) float32 of the
    continuation's tokens but the first, and on text `greedy` (rows, n), the tokens it goes on with."""

    case: Case
    cache: Cache
    log_probabilities: Tensor
    greedy: Tensor | None


def prefill(model: Model, tokens: Tensor, step_tokens: int, step_rows: int) -> Cache:
    """The KV of tokens (rows, n), computed so many tokens and rows at a time."""
    parts = []
    for rows in tokens.split(step_rows):
        first, *others = rows.split(step_tokens, dim=1)
        _, cache = model.extend(first, None)
        for piece in others:
            _, cache = model.extend(piece, cache)
        parts.append(cache)
    return Cache(torch.cat([part.k for part in parts], dim=1), torch.cat([part.v for part in parts], dim=1))


def log_probabilities(model: Model, case: Case, cache: Cache, key_offset: Tensor | None, step_rows: int) -> Tensor:
    """(rows, n - 1, vocabulary) float32: of the continuation's tokens but the first."""
    parts = []
    for first in range(0, len(case.continuation), step_rows):
        rows = slice(first, first + step_rows)
        hidden, _ = model.extend(case.continuation[rows, :-1], cache.rows(rows), key_offset)
        parts.append(F.log_softmax(model.logits(hidden).float(), dim=-1))
    return torch.cat(parts)


def greedy(model: Model, case: Case, cache: Cache, key_offset: Tensor | None, n: int) -> Tensor:
    """(rows, n): the most likely tokens after the prefix and the first token behind it."""
    token = case.continuation[:, :1]
    found = []
    for _ in range(n):
        hidden, cache = model.extend(token, cache, key_offset)
        token = model.logits(hidden).argmax(-1)
        found.append(token)
    return torch.cat(found, dim=1)


def refer(model: Model, case: Case, greedy_tokens: int) -> Reference:
    cache = prefill(model, case.prefix, case.prefix_tokens, PREFILL_ROWS)
    return _spoken(model, Reference(case, cache, torch.empty(0), None), None, greedy_tokens)


def shifted(model: Model, reference: Reference, key_offset: Tensor) -> Reference:
    """The reference with the offset on all keys."""
    greedy_tokens = 0 if reference.greedy is None else reference.greedy.shape[1]
    return _spoken(model, replace(reference, cache=_offset(reference.cache, key_offset)), key_offset, greedy_tokens)


def _spoken(model: Model, reference: Reference, key_offset: Tensor | None, greedy_tokens: int) -> Reference:
    case, cache = reference.case, reference.cache
    said = log_probabilities(model, case, cache, key_offset, PREFILL_ROWS)
    tokens = greedy(model, case, cache, key_offset, greedy_tokens) if case.name == TEXT else None
    return replace(reference, log_probabilities=said, greedy=tokens)


def offset_of(cache: Cache, condition: Condition) -> Tensor | None:
    """(layers, KV heads, head size) float32; the same direction for every condition."""
    if not condition.times:
        return None
    layers, _, heads, _, size = cache.k.shape
    random = torch.Generator().manual_seed(0)
    direction = torch.randn(layers, heads, size, generator=random)
    large = torch.rand(layers, heads, size, generator=random).argsort(-1) < LARGE_CHANNELS
    direction = F.normalize(direction * (1 + (LARGE_TIMES - 1) * large), dim=-1).to(cache.k.device)
    return direction * (condition.times * cache.k.float().norm(dim=-1).mean(dim=(1, 3)))[..., None]


def judge(model: Model, reference: Reference, method: Method, key_offset: Tensor | None) -> dict[str, Tensor]:
    """Measures of one method on one case, whose reference has the offset already.

    Raw is computed in other steps, of tokens and of rows: the noise floor.
    """
    case, cache, step_rows = reference.case, reference.cache, PREFILL_ROWS
    if method.round_trip is None:
        step_rows = max(1, len(case.prefix) // 3)
        cache = prefill(model, case.prefix, CHUNK_TOKENS, step_rows)
        cache = cache if key_offset is None else _offset(cache, key_offset)
    cache, n_refused = method.apply(cache)
    said = log_probabilities(model, case, cache, key_offset, step_rows)
    refused = {REFUSED: torch.tensor([[n_refused]])}
    if reference.greedy is None:
        return answers(case, said) | refused
    return against(reference, said, greedy(model, case, cache, key_offset, reference.greedy.shape[1])) | refused


def _offset(cache: Cache, key_offset: Tensor) -> Cache:
    return Cache(with_offset(cache.k, key_offset[:, None]), cache.v)


def against(reference: Reference, said: Tensor, goes_on: Tensor) -> dict[str, Tensor]:
    """Text: KL(reference || said) and the change of the NLL in nats, whether the likeliest token is the same, and of
    how many greedy tokens the first different one comes."""
    expected, true = reference.log_probabilities, reference.case.continuation[:, 1:, None]
    assert reference.greedy is not None
    return {
        "kl": (expected.exp() * (expected - said)).sum(-1).clamp_min(0),
        "top1": expected.argmax(-1) == said.argmax(-1),
        "nll_change": (expected.gather(2, true) - said.gather(2, true)).squeeze(2),
        "greedy": (goes_on == reference.greedy).cumprod(dim=1).sum(dim=1, keepdim=True),
    }


def answers(case: Case, said: Tensor) -> dict[str, Tensor]:
    """Tasks: (rows, answers) whether right; a needle's values count as one answer, and all must be right."""
    is_right = (said.argmax(-1) == case.continuation[:, 1:])[case.is_judged].view(len(case.prefix), -1)
    return {case.name: is_right.all(dim=1, keepdim=True) if case.name.startswith("needle") else is_right}


def of_reference(reference: Reference, plain: Reference) -> dict[str, Tensor]:
    """What the model can do before any codec: NLL of the text in nats, and whether answers are right. Under an offset
    also how far it is from what it says without (`plain`): what bf16 itself loses."""
    case, said = reference.case, reference.log_probabilities
    if case.name != TEXT:
        return answers(case, said)
    found = {"nll": -said.gather(2, case.continuation[:, 1:, None]).squeeze(2)}
    if reference is not plain and reference.greedy is not None:
        found |= against(plain, said, reference.greedy)
    return found
