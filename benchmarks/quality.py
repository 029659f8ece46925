"""Loss of the codecs on a trained model, measured on text that its KV was computed from.

    python -m benchmarks.quality --model FOLDER [--out RESULT.json] [--presets raw,int8] [--rows 12] [--cache FOLDER]

FOLDER is a Hugging Face checkpoint. As in the tier, whole chunks of a prefix go through a codec, and what follows is
computed on the result: in float32 on the CPU, teacher-forced, beside the same model on its own float32 KV. Rows are
prose, code and tables that this machine holds, one a file, no two of which share 12 tokens in a row. Facts are planted
into prose; greedy answers continue rows. Intervals are 95 % bootstrap intervals over rows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks import report
from kvtier.codecs.measured_loss import KL_NATS
from kvtier.codecs.round_trip import bits_of, round_trip

CHUNK_TOKENS = 256
PREFIX_TOKENS, TEXT_TOKENS, GREEDY_TOKENS = 3 * CHUNK_TOKENS, 128, 64
RECALL_TOKENS = 12 * CHUNK_TOKENS
BATCH_ROWS = 4
GRAM = 12  # rows share no run of so many tokens
KINDS = {"prose": (".rst", ".md", ".txt", ".pod", ""), "code": (".py", ".c", ".h", ".js"), "tables": (".csv", ".json")}
FILE_BYTES = (6_000, 1 << 20)  # smaller files give no row, larger ones are generated
ROW_CHARS = 24_000  # of a file, enough for a row in any of the tokenizers
NAMES = ("Marcus", "Elena", "Tobias", "Ingrid", "Rashid", "Yuki", "Olga", "Pedro")
RESAMPLES = 2_000

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PrefixKV:
    """K and V of a prefix, (layers, heads, tokens, size) each, float32."""

    k: Tensor
    v: Tensor

    def through(self, preset: str, rope_base: float) -> PrefixKV:
        """Return the KV as a load brings it back to an engine that keeps it in bf16. rope_base: of K."""
        k, v = self.k.bfloat16(), self.v.bfloat16()
        if preset == "kivi4":
            k, v = uniform(k.unflatten(2, (-1, 32)), 3).flatten(2, 3), uniform(v.unflatten(3, (-1, 32)), 4).flatten(3)
        elif preset != "raw":
            k, v = round_trip(k, v, preset, rope_base, chunk_tokens=CHUNK_TOKENS)
        return PrefixKV(k.float(), v.float())


def uniform(x: Tensor, dim: int, bits: int = 4) -> Tensor:
    """Quantize as KIVI does (arXiv 2402.02750): least value and step of each group along `dim`, in fp16."""
    low = x.float().amin(dim, keepdim=True).half().float()
    step = ((x.float().amax(dim, keepdim=True) - low) / (2**bits - 1)).half().float().clamp_min(1e-7)
    return (((x - low) / step).round().clamp(0, 2**bits - 1) * step + low).to(x.dtype)


class Model:
    """A causal language model of transformers, in float32."""

    def __init__(self, folder: Path, cache: Path | None) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache  # take seconds

        self.folder, self._cache_folder, self._make_cache = folder, cache, DynamicCache
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._needs_bos = str(self._model.config.model_type).startswith("gemma")
        rope = self._model.config.rope_parameters
        self.rope_base = float(rope["rope_theta"]) if rope.get("rope_type") == "default" else 0.0

    def ids(self, text: str, is_start: bool = False) -> list[int]:
        """Return the tokens of a text; of a prompt's start with the mark that the model wants there."""
        found: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return [self.tokenizer.bos_token_id, *found] if is_start and self._needs_bos else found

    def prefill(self, ids: Sequence[int]) -> PrefixKV:
        """Compute the KV of a prefix, or take it from the cache folder."""
        key = hashlib.blake2b(json.dumps([self.folder.name, *ids]).encode(), digest_size=12).hexdigest()
        path = self._cache_folder / f"{key}.pt" if self._cache_folder else None
        if path and path.exists():
            return PrefixKV(*torch.load(path, mmap=True))
        cache = self._make_cache()
        self._model(torch.tensor([ids]), past_key_values=cache, logits_to_keep=1)
        found = PrefixKV(torch.cat([x.keys for x in cache.layers]), torch.cat([x.values for x in cache.layers]))
        if path:
            torch.save((found.k, found.v), path)
        return found

    def log_p(self, prefixes: Sequence[PrefixKV], ids: Tensor) -> Tensor:
        """Return the logarithms of probabilities that follow each of ids (rows, n): (rows, n, vocabulary)."""
        return torch.log_softmax(self._model(ids, past_key_values=self._cache(prefixes)).logits.float(), -1)

    def greedy(self, prefixes: Sequence[PrefixKV], first: Tensor, n: int) -> Tensor:
        """Return the n most likely tokens that follow `first` (rows, 1), one after the other: (rows, n)."""
        cache, found = self._cache(prefixes), [first]
        for _ in range(n):
            found.append(self._model(found[-1], past_key_values=cache).logits[:, -1:].argmax(-1))
        return torch.cat(found[1:], 1)

    def _cache(self, prefixes: Sequence[PrefixKV]) -> Any:
        cache = self._make_cache()
        for layer in range(len(prefixes[0].k)):
            cache.update(
                torch.stack([x.k[layer] for x in prefixes]), torch.stack([x.v[layer] for x in prefixes]), layer
            )
        return cache


# --- text ---


def files_of(kind: str) -> Iterator[str]:
    """Yield the starts of text files of a kind, in an order that mixes the packages and is equal in each run."""
    paths = sysconfig.get_paths()
    folders = [paths["stdlib"], paths["purelib"], "/usr/share/common-licenses", "/usr/share/doc", "/usr/share/perl"]
    found: set[Path] = set()
    for folder in folders:
        for place, inner, names in os.walk(folder):
            inner[:] = [name for name in inner if name not in ("__pycache__", "tests", "test")]
            found.update(Path(place, name) for name in names if Path(name).suffix in KINDS[kind])
    for path in sorted(found, key=lambda path: hashlib.blake2b(path.name.encode()).digest()):
        try:
            if FILE_BYTES[0] <= path.stat().st_size <= FILE_BYTES[1]:
                yield path.read_text()[:ROW_CHARS]
        except (OSError, UnicodeDecodeError):
            continue


def rows_of(kind: str, model: Model, n_rows: int, n_tokens: int, seen: set[tuple[int, ...]]) -> list[list[int]]:
    """Return rows of one file each that share no GRAM tokens with each other or with `seen`, which grows."""
    rows: list[list[int]] = []
    for text in files_of(kind):
        ids = model.ids(text, is_start=True)[:n_tokens]
        grams = {tuple(ids[i : i + GRAM]) for i in range(len(ids) - GRAM + 1)}
        if len(ids) == n_tokens and len(grams) > 0.8 * n_tokens and not grams & seen:
            rows.append(ids)
            seen |= grams
        if len(rows) == n_rows:
            return rows
    raise SystemExit(f"only {len(rows)} of {n_rows} rows of {kind} on this machine")


# --- measurements ---


@dataclass
class Loss:
    """Losses of one preset. kl, same: (tokens,) of each row, by kind."""

    kl: dict[str, list[Array]]
    same: dict[str, list[Array]]
    agreed: list[int]  # greedy tokens before the first difference, of each answer
    recalled: int = 0


def measure_text(
    model: Model, kind: str, rows: Sequence[Sequence[int]], n_greedy: int, losses: dict[str, Loss]
) -> None:
    """Add what the presets lose on rows of one kind; the first `n_greedy` rows are continued greedily as well."""
    for first in range(0, len(rows), BATCH_ROWS):
        batch = rows[first : first + BATCH_ROWS]
        ids = torch.tensor([row[PREFIX_TOKENS:] for row in batch])
        own = [model.prefill(row[:PREFIX_TOKENS]) for row in batch]
        reference = model.log_p(own, ids)
        expected = model.greedy(own, ids[:, :1], GREEDY_TOKENS) if first < n_greedy else None
        for preset, loss in losses.items():
            loaded = [prefix.through(preset, model.rope_base) for prefix in own]
            found = model.log_p(loaded, ids)
            loss.kl[kind] += list((reference.exp() * (reference - found)).sum(-1).double().numpy())
            loss.same[kind] += list((reference.argmax(-1) == found.argmax(-1)).double().numpy())
            if expected is not None:
                differs = (model.greedy(loaded, ids[:, :1], GREEDY_TOKENS) != expected).int()
                loss.agreed += torch.cat([differs, torch.ones(len(batch), 1).int()], 1).argmax(1).tolist()


def measure_recall(model: Model, n_prompts: int, losses: dict[str, Loss]) -> int:
    """Ask for facts that are planted into prose; return how many are asked for."""
    n_rows = RECALL_TOKENS // PREFIX_TOKENS
    prose = rows_of("prose", model, n_rows * n_prompts, PREFIX_TOKENS, set())
    for number in range(n_prompts):
        draw = random.Random(number)
        codes = [str(draw.randrange(10_000, 99_999)) for _ in NAMES]
        hay = [token for row in prose[n_rows * number :][:n_rows] for token in row]
        for place, name, code in zip(sorted(draw.sample(range(1, 11), 8), reverse=True), NAMES, codes, strict=True):
            hay[place * 256 : place * 256] = model.ids(f"\n\nThe pass code of {name} is {code}.\n\n")
        own = model.prefill(hay[:RECALL_TOKENS])
        for preset, loss in losses.items():
            loaded = own.through(preset, model.rope_base)
            loss.recalled += sum(_is_recalled(model, loaded, *asked) for asked in zip(NAMES, codes, strict=True))
    return n_prompts * len(NAMES)


def _is_recalled(model: Model, prefix: PrefixKV, name: str, code: str) -> bool:
    question, answer = model.ids(f"\n\nThe pass code of {name} is"), model.ids(f" {code}")
    found = model.log_p([prefix], torch.tensor([question + answer]))[0, len(question) - 1 : -1].argmax(-1)
    return found.tolist() == answer


def interval(rows: Sequence[Array], statistic: Callable[[Array], float]) -> dict[str, float]:
    """Return a statistic over all tokens, and its bootstrap interval over rows."""
    draw = np.random.default_rng(0)
    table = np.stack(rows)
    found = [statistic(table[draw.integers(0, len(rows), len(rows))]) for _ in range(RESAMPLES)]
    low, high = np.quantile(found, (0.025, 0.975))
    return {"value": statistic(table), "low": float(low), "high": float(high)}


def figures(loss: Loss, kinds: Sequence[str]) -> dict[str, Any]:
    kl = [row for kind in kinds for row in loss.kl[kind]]
    same = [row for kind in kinds for row in loss.same[kind]]
    return {
        "kl_mean": interval(kl, lambda x: float(x.mean())),
        "kl_p99": interval(kl, lambda x: float(np.quantile(x, 0.99))),
        "same_top": interval(same, lambda x: float(x.mean())),
    }


def measure(model: Model, presets: Sequence[str], n_rows: int, n_recall: int, n_greedy: int) -> dict[str, Any]:
    losses = {preset: Loss({kind: [] for kind in KINDS}, {kind: [] for kind in KINDS}, []) for preset in presets}
    seen: set[tuple[int, ...]] = set()
    for kind in KINDS:
        began = time.monotonic()
        rows = rows_of(kind, model, n_rows, PREFIX_TOKENS + TEXT_TOKENS, seen)
        measure_text(model, kind, rows, n_greedy, losses)
        print(f"{kind}: {n_rows} rows in {time.monotonic() - began:.0f} s", flush=True)
    n_asked = measure_recall(model, n_recall, losses) if n_recall else 0
    k = model.prefill(rows[0][:PREFIX_TOKENS]).k
    found: dict[str, Any] = {}
    for preset, loss in losses.items():
        found[preset] = {"bits": {"raw": 16.0, "kivi4": 5.0}.get(preset) or bits_of(preset, k.shape[-1])}
        found[preset] |= figures(loss, list(KINDS)) | {"kinds": {kind: figures(loss, [kind]) for kind in KINDS}}
        equal = sum(n == GREEDY_TOKENS for n in loss.agreed)
        found[preset]["greedy"] = {"answers": len(loss.agreed), "equal": equal, "equal_tokens": sum(loss.agreed)}
        found[preset]["recall"] = {"asked": n_asked, "right": loss.recalled}
    shape = {"layers": k.shape[0], "kv_heads": k.shape[1], "head_size": k.shape[-1]}
    return {"model": model.folder.name, "shape": shape, "rows_of_a_kind": n_rows, "presets": found}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of a checkpoint")
    parser.add_argument("--out", type=Path, help="result file; by default nothing is written")
    parser.add_argument("--presets", default=",".join(("raw", *KL_NATS, "kivi4")))
    parser.add_argument("--rows", type=int, default=12, help="rows of each kind of text")
    parser.add_argument("--recall", type=int, default=2, help=f"prompts with {len(NAMES)} planted facts each")
    parser.add_argument("--greedy", type=int, default=4, help="rows of each kind that are continued greedily")
    parser.add_argument("--cache", type=Path, help="folder that keeps the KV of prefixes for the next run")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    if options.cache:
        options.cache.mkdir(parents=True, exist_ok=True)
    model = Model(options.model, options.cache)
    found = measure(model, options.presets.split(","), options.rows, options.recall, options.greedy)
    rows = []
    for preset, row in found["presets"].items():
        kl, p99, top = (row[name] for name in ("kl_mean", "kl_p99", "same_top"))
        worst = max(row["kinds"], key=lambda kind: row["kinds"][kind]["kl_mean"]["value"])
        interval_text = f"{kl['value']:.1e} ({kl['low']:.1e}-{kl['high']:.1e})"
        answers = f"{row['greedy']['equal']}/{row['greedy']['answers']}"
        recall = f"{row['recall']['right']}/{row['recall']['asked']}"
        by_kind = f"{row['kinds'][worst]['kl_mean']['value']:.1e} {worst}"
        tops = (f"{p99['value']:.1e}", f"{top['value']:.2%}")
        rows.append((preset, f"{row['bits']:.2f}", interval_text, *tops, by_kind, recall, answers))
    report.table(("preset", "bits", "KL mean", "p99", "same top", "worst kind", "recall", "equal answers"), rows)
    if options.out:
        report.write(options.out, "what do the codecs lose on a trained model", found)


if __name__ == "__main__":
    main()
