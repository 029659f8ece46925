"""Statistics of a model's KV for a table, by transformers: vectors, and what the model makes of errors in them.

Of each row the first PREFIX_TOKENS are computed into a KV cache, as a load brings them back. The next tokens are
computed on it, one is drawn at each place by the model's own probabilities, and the gradient of their likelihood with
respect to the cache says which errors matter: the square of it is the Fisher information of what the codec changes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from kvtier.codecs.transform.calibrate import PlaneStatistics
from kvtier.codecs.transform.reference import RAW_TOKENS
from kvtier.codecs.transform.texts import KINDS, rows_of, texts_of
from kvtier.errors import ConfigError

PREFIX_TOKENS, TEXT_TOKENS = 1024, 256
PROBE_TOKENS = 64  # of the row that the rotary embedding is measured with
SHIFTS = (1, 4, 16, 64, 256, 1024)  # positions by which it is measured
TURN_ERROR_MAX = 0.05  # beside K, else K is no vector of pairs (j, j + dk / 2) that turn

Progress = Callable[[int, int], None]


class KVStatistics(NamedTuple):
    """Statistics of K, its rotary embedding taken off, and of V."""

    k: PlaneStatistics
    v: PlaneStatistics

    def with_row(self, row: KVStatistics, n: int) -> KVStatistics:
        """Return the mean over n rows and another."""
        return KVStatistics(*(
            PlaneStatistics(*(a + (b - a) / (n + 1) for a, b in zip(mean, found, strict=True)))
            for mean, found in zip(self, row, strict=True)
        ))  # fmt: skip


class CalibratedModel:
    """A causal language model of transformers and its tokenizer."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        for parameter in model.parameters():
            parameter.requires_grad_(False)

    @classmethod
    def load(cls, folder: Path, device: str) -> CalibratedModel:
        """Load a checkpoint: in fp32 on the CPU, in its own dtype on a GPU. Raises ConfigError for another device."""
        try:
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError) as error:
            raise ConfigError("--device", device, f"torch cannot use it ({error}); cpu works everywhere") from None
        from transformers import AutoModelForCausalLM, AutoTokenizer  # takes seconds

        dtype = torch.float32 if device == "cpu" else "auto"
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        return cls(model.eval().to(device), AutoTokenizer.from_pretrained(folder))

    def tokens(self, text: str) -> list[int]:
        """Return the tokens of a prompt's start."""
        found: list[int] = self._tokenizer(text).input_ids
        return found

    def chat(self, turns: Sequence[tuple[str, str]]) -> str:
        """Return questions and answers as the model has them."""
        if not getattr(self._tokenizer, "chat_template", None):
            return "\n".join(f"User: {question}\nAssistant: {answer}" for question, answer in turns)
        roles = ("user", "assistant")
        messages = [{"role": role, "content": text} for turn in turns for role, text in zip(roles, turn, strict=True)]
        return str(self._tokenizer.apply_chat_template(messages, tokenize=False)) if turns else ""

    def statistics(self, rows: Sequence[Sequence[int]], frequencies: torch.Tensor, progress: Progress) -> KVStatistics:
        """Return the mean over rows of PREFIX_TOKENS + TEXT_TOKENS."""
        mean = None
        for number, row in enumerate(rows):
            progress(number, len(rows))
            found = self._statistics(row, frequencies)
            mean = found if mean is None else mean.with_row(found, number)
        progress(len(rows), len(rows))
        assert mean is not None
        return mean

    def frequencies(self, row: Sequence[int]) -> torch.Tensor:
        """Measure the angle that each pair of K turns by a position, (L, dk / 2) fp64; 0 in layers whose K does not
        turn so. Attention depends on distances only, so K of one row at two places differs by its turn. Raises
        ConfigError for a model whose layers do not have KV of one shape."""
        row = row[:PROBE_TOKENS]
        first = _pairs(self._prefill(row, 0)[0])
        found = torch.zeros(first.shape[0], first.shape[-1], dtype=torch.float64)
        for shift in SHIFTS:
            at = _pairs(self._prefill(row, shift)[0])
            angle = (at * first.conj()).sum((1, 2)).angle()
            found += (torch.remainder(angle - found * shift + torch.pi, 2 * torch.pi) - torch.pi) / shift
        back = at * torch.polar(torch.ones_like(found), -found * SHIFTS[-1])[:, None, None]
        error = (back - first).abs().square().sum((1, 2, 3)) / first.abs().square().sum((1, 2, 3))
        return torch.where((error.sqrt() < TURN_ERROR_MAX)[:, None], found, 0.0)

    def _statistics(self, row: Sequence[int], frequencies: torch.Tensor) -> KVStatistics:
        k, v = self._prefill(row[:PREFIX_TOKENS], 0)
        planes = [[layer.clone().requires_grad_(True) for layer in plane] for plane in (k, v)]
        with torch.enable_grad():
            following = torch.tensor([row[PREFIX_TOKENS:]], device=k.device)
            logits = self._model(following, past_key_values=self._cache(*planes)).logits[0].float()
            likelihoods = torch.log_softmax(logits, -1)
            draw = torch.Generator().manual_seed(0)  # on the CPU, so that the same text gives the same table
            drawn = torch.multinomial(likelihoods.detach().exp().cpu(), 1, generator=draw).to(k.device)
            likelihoods.gather(1, drawn).sum().backward()  # type: ignore[no-untyped-call]
        found = []
        for plane, x in zip(planes, (k, v), strict=True):  # no gradient: nothing reads the layer
            gradient = torch.stack([torch.zeros_like(layer) if layer.grad is None else layer.grad for layer in plane])
            pair = [each.float().cpu()[:, :, RAW_TOKENS:] for each in (x, gradient)]
            if plane is planes[0]:
                pair = [turned_back(each, frequencies, RAW_TOKENS) for each in pair]
            found.append(PlaneStatistics.of(*pair))
        return KVStatistics(*found)

    @torch.no_grad()
    def _prefill(self, row: Sequence[int], position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the row, (L, H, tokens, size), as if it began at a position."""
        from transformers import DynamicCache

        cache: Any = DynamicCache()
        ids = torch.tensor([list(row)], device=self._model.device)
        places = torch.arange(position, position + len(row), device=ids.device)[None]
        self._model(ids, position_ids=places, past_key_values=cache, logits_to_keep=1)
        try:
            return torch.cat([layer.keys for layer in cache.layers]), torch.cat(
                [layer.values for layer in cache.layers]
            )
        except (AttributeError, RuntimeError, TypeError) as error:
            fix = f"its layers do not have KV of one shape ({error}): set codec to int8 or raw"
            raise ConfigError("codec", "tc4", fix) from None

    def _cache(self, k: Sequence[torch.Tensor], v: Sequence[torch.Tensor]) -> Any:
        from transformers import DynamicCache

        cache: Any = DynamicCache()
        for number, pair in enumerate(zip(k, v, strict=True)):
            cache.update(pair[0][None], pair[1][None], number)
        return cache


def turned_back(x: torch.Tensor, frequencies: torch.Tensor, position: int) -> torch.Tensor:
    """Take the rotary embedding off (L, H, tokens, dk) that begins at a position."""
    angles = torch.arange(position, position + x.shape[2], dtype=torch.float64)[:, None] * frequencies[:, None]
    z = _pairs(x) * torch.polar(torch.ones_like(angles), -angles)[:, None]
    return torch.cat([z.real, z.imag], -1).float()


def default_rows(model: CalibratedModel, rows_of_a_kind: int) -> list[list[int]]:
    """Return rows of all kinds of text on this machine."""
    seen: set[tuple[int, ...]] = set()
    n_tokens = PREFIX_TOKENS + TEXT_TOKENS
    kinds = [rows_of(texts_of(kind, model.chat), model.tokens, rows_of_a_kind, n_tokens, seen) for kind in KINDS]
    return [row for kind in kinds for row in kind]


def _pairs(x: torch.Tensor) -> torch.Tensor:
    """(..., size / 2) complex128."""
    a, b = x.double().cpu().chunk(2, -1)
    return torch.complex(a, b)
