"""Loss of the codecs on a trained model, measured on text that its KV was computed from.

    python -m benchmarks.quality --model FOLDER [--out RESULT.json] [--presets raw,int8] [--rows 12] [--cache FOLDER]

FOLDER is a Hugging Face checkpoint. As in the tier, whole chunks of a prefix go through a codec, and what follows is
computed on the result: in float32 on the CPU, teacher-forced, beside the same model on its own float32 KV. Rows are
prose, code and tables that this machine holds, one a file, no two of which share 12 tokens in a row. tc4 and tc3 are
calibrated on other rows, which share none with them either, of these kinds and of dialogue; and once more without each
kind. Facts are planted into prose; greedy answers continue rows. Intervals are 95 % bootstrap intervals over rows.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
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
from kvtier.codecs.transform import model_statistics, texts
from kvtier.codecs.transform.calibrate import table_tensors
from kvtier.codecs.transform.table import PRESET_BITS, write_table

CHUNK_TOKENS = 256
PREFIX_TOKENS, TEXT_TOKENS, GREEDY_TOKENS = 3 * CHUNK_TOKENS, 128, 64
RECALL_TOKENS = 12 * CHUNK_TOKENS
BATCH_ROWS = 4
KINDS = ("prose", "code", "tables")
NAMES = ("Marcus", "Elena", "Tobias", "Ingrid", "Rashid", "Yuki", "Olga", "Pedro")
RESAMPLES = 2_000

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class PrefixKV:
    """K and V of a prefix, (layers, heads, tokens, size) each, float32."""

    k: Tensor
    v: Tensor

    def through(self, preset: str, rope_base: float, table: Path | None = None) -> PrefixKV:
        """Return the KV as a load brings it back to an engine that keeps it in bf16. rope_base: of K. table: of the
        transform codecs."""
        k, v = self.k.bfloat16(), self.v.bfloat16()
        if preset == "kivi4":
            k, v = uniform(k.unflatten(2, (-1, 32)), 3).flatten(2, 3), uniform(v.unflatten(3, (-1, 32)), 4).flatten(3)
        elif preset != "raw":
            k, v = round_trip(
                k, v, preset, rope_base, chunk_tokens=CHUNK_TOKENS, table=table if preset in PRESET_BITS else None
            )
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

    def calibrated(self) -> model_statistics.CalibratedModel:
        return model_statistics.CalibratedModel(self._model, self.tokenizer)

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


def rows_of(kind: str, model: Model, n_rows: int, n_tokens: int, seen: set[tuple[int, ...]]) -> list[list[int]]:
    """Return rows of one file each that share no 12 tokens with each other or with `seen`, which grows."""
    found = texts.texts_of(kind, model.calibrated().chat)
    rows = texts.rows_of(found, lambda text: model.ids(text, is_start=True), n_rows, n_tokens, seen)
    if len(rows) < n_rows:
        raise SystemExit(f"only {len(rows)} of {n_rows} rows of {kind} on this machine")
    return rows


def calibrate(model: Model, n_rows: int, seen: set[tuple[int, ...]], folder: Path) -> dict[str, Path]:
    """Return tables that were calibrated on n_rows of each kind: of all kinds by "", without a kind by its name."""
    n_tokens = model_statistics.PREFIX_TOKENS + model_statistics.TEXT_TOKENS
    rows = {kind: rows_of(kind, model, n_rows, n_tokens, seen) for kind in (*KINDS, "dialogue")}
    measured = model.calibrated()
    frequencies = measured.frequencies(rows[KINDS[0]][0])
    statistics = {kind: measured.statistics(found, frequencies, lambda *_: None) for kind, found in rows.items()}
    tables = {}
    for left_out in ("", *KINDS):
        kinds = [found for kind, found in statistics.items() if kind != left_out]
        mean = kinds[0]
        for number, found in enumerate(kinds[1:], 1):
            mean = mean.with_row(found, number)
        tables[left_out] = folder / f"table-without-{left_out or 'none'}"
        write_table(tables[left_out], table_tensors(*mean, frequencies), model.folder.name, "")
    return tables


# --- measurements ---


@dataclass
class Loss:
    """Losses of one preset. kl, same: (tokens,) of each row, by kind."""

    kl: dict[str, list[Array]]
    same: dict[str, list[Array]]
    agreed: list[int]  # greedy tokens before the first difference, of each answer
    recalled: int = 0

    @classmethod
    def of_kinds(cls) -> Loss:
        return cls({kind: [] for kind in KINDS}, {kind: [] for kind in KINDS}, [])


def measure_text(
    model: Model, kind: str, rows: Sequence[Sequence[int]], n_greedy: int, losses: dict[str, Loss], table: Path | None
) -> None:
    """Add what the presets lose on rows of one kind; the first `n_greedy` rows are continued greedily as well."""
    for first in range(0, len(rows), BATCH_ROWS):
        batch = rows[first : first + BATCH_ROWS]
        ids = torch.tensor([row[PREFIX_TOKENS:] for row in batch])
        own = [model.prefill(row[:PREFIX_TOKENS]) for row in batch]
        reference = model.log_p(own, ids)
        expected = model.greedy(own, ids[:, :1], GREEDY_TOKENS) if first < n_greedy else None
        for preset, loss in losses.items():
            loaded = [prefix.through(preset, model.rope_base, table) for prefix in own]
            found = model.log_p(loaded, ids)
            loss.kl[kind] += list((reference.exp() * (reference - found)).sum(-1).double().numpy())
            loss.same[kind] += list((reference.argmax(-1) == found.argmax(-1)).double().numpy())
            if expected is not None:
                differs = (model.greedy(loaded, ids[:, :1], GREEDY_TOKENS) != expected).int()
                loss.agreed += torch.cat([differs, torch.ones(len(batch), 1).int()], 1).argmax(1).tolist()


def measure_recall(
    model: Model, prose: Sequence[Sequence[int]], n_prompts: int, losses: dict[str, Loss], table: Path | None
) -> int:
    """Ask for facts that are planted into rows of prose; return how many are asked for."""
    n_rows = RECALL_TOKENS // PREFIX_TOKENS
    for number in range(n_prompts):
        draw = random.Random(number)
        codes = [str(draw.randrange(10_000, 99_999)) for _ in NAMES]
        hay = [token for row in prose[n_rows * number :][:n_rows] for token in row]
        for place, name, code in zip(sorted(draw.sample(range(1, 11), 8), reverse=True), NAMES, codes, strict=True):
            hay[place * 256 : place * 256] = model.ids(f"\n\nThe pass code of {name} is {code}.\n\n")
        own = model.prefill(hay[:RECALL_TOKENS])
        for preset, loss in losses.items():
            loaded = own.through(preset, model.rope_base, table)
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


@dataclass(frozen=True)
class Amount:
    """Rows of each kind, prompts with facts, rows that are continued greedily, and rows to calibrate with, of each
    kind."""

    rows: int
    recall: int
    greedy: int
    calibration: int = 4


def measure(model: Model, presets: Sequence[str], amount: Amount) -> dict[str, Any]:
    losses = {preset: Loss.of_kinds() for preset in presets}
    left_out = {preset: Loss.of_kinds() for preset in presets if preset in PRESET_BITS}
    seen: set[tuple[int, ...]] = set()
    rows = {kind: rows_of(kind, model, amount.rows, PREFIX_TOKENS + TEXT_TOKENS, seen) for kind in KINDS}
    prose = rows_of("prose", model, amount.recall * RECALL_TOKENS // PREFIX_TOKENS, PREFIX_TOKENS, set())
    seen.update(tuple(row[i : i + texts.GRAM]) for row in prose for i in range(len(row) - texts.GRAM + 1))
    with tempfile.TemporaryDirectory() as folder:
        tables = calibrate(model, amount.calibration, seen, Path(folder)) if left_out else {}
        for kind in KINDS:
            began = time.monotonic()
            measure_text(model, kind, rows[kind], amount.greedy, losses, tables.get(""))
            if left_out:
                measure_text(model, kind, rows[kind], 0, left_out, tables[kind])
            print(f"{kind}: {amount.rows} rows in {time.monotonic() - began:.0f} s", flush=True)
        n_asked = measure_recall(model, prose, amount.recall, losses, tables.get(""))
    k = model.prefill(rows[KINDS[0]][0][:PREFIX_TOKENS]).k
    found: dict[str, Any] = {}
    for preset, loss in losses.items():
        found[preset] = {"bits": {"raw": 16.0, "kivi4": 5.0}.get(preset) or bits_of(preset, k.shape[-1])}
        found[preset] |= figures(loss, list(KINDS)) | {"kinds": {kind: figures(loss, [kind]) for kind in KINDS}}
        equal = sum(n == GREEDY_TOKENS for n in loss.agreed)
        found[preset]["greedy"] = {"answers": len(loss.agreed), "equal": equal, "equal_tokens": sum(loss.agreed)}
        found[preset]["recall"] = {"asked": n_asked, "right": loss.recalled}
        if preset in left_out:
            found[preset]["kind_left_out"] = {kind: figures(left_out[preset], [kind]) for kind in KINDS}
    shape = {"layers": k.shape[0], "kv_heads": k.shape[1], "head_size": k.shape[-1]}
    return {"model": model.folder.name, "shape": shape, "rows_of_a_kind": amount.rows} | {
        "rows_of_calibration": amount.calibration * (1 + len(KINDS)),
        "presets": found,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="folder of a checkpoint")
    parser.add_argument("--out", type=Path, help="result file; by default nothing is written")
    parser.add_argument("--presets", default=",".join(("raw", *KL_NATS, "kivi4")))
    parser.add_argument("--rows", type=int, default=12, help="rows of each kind of text")
    parser.add_argument("--recall", type=int, default=2, help=f"prompts with {len(NAMES)} planted facts each")
    parser.add_argument("--greedy", type=int, default=4, help="rows of each kind that are continued greedily")
    parser.add_argument("--calibration", type=int, default=4, help="rows of each kind to calibrate tc4 and tc3 with")
    parser.add_argument("--cache", type=Path, help="folder that keeps the KV of prefixes for the next run")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    if options.cache:
        options.cache.mkdir(parents=True, exist_ok=True)
    model = Model(options.model, options.cache)
    amount = Amount(options.rows, options.recall, options.greedy, options.calibration)
    found = measure(model, options.presets.split(","), amount)
    rows = []
    for preset, row in found["presets"].items():
        kl, p99, top = (row[name] for name in ("kl_mean", "kl_p99", "same_top"))
        worst = max(row["kinds"], key=lambda kind: row["kinds"][kind]["kl_mean"]["value"])
        interval_text = f"{kl['value']:.1e} ({kl['low']:.1e}-{kl['high']:.1e})"
        answers = f"{row['greedy']['equal']}/{row['greedy']['answers']}"
        recall = f"{row['recall']['right']}/{row['recall']['asked']}"
        by_kind = f"{row['kinds'][worst]['kl_mean']['value']:.1e} {worst}"
        tops = (f"{p99['value']:.1e}", f"{top['value']:.2%}")
        unseen = [(each["kl_mean"]["value"], kind) for kind, each in row.get("kind_left_out", {}).items()]
        left_out = "{:.1e} {}".format(*max(unseen)) if unseen else ""
        rows.append((preset, f"{row['bits']:.2f}", interval_text, *tops, by_kind, left_out, recall, answers))
    columns = ("preset", "bits", "KL mean", "p99", "same top", "worst kind", "left out", "recall", "equal answers")
    report.table(columns, rows)
    if options.out:
        report.write(options.out, "what do the codecs lose on a trained model", found)


if __name__ == "__main__":
    main()
