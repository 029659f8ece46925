"""Loss of the codecs on a trained model, measured on text that its KV was computed from.

    python -m benchmarks.quality --model FOLDER [--out RESULT.json] [--presets raw,int8] [--rows 12] [--device cuda]

FOLDER is a Hugging Face checkpoint. As in the tier, whole chunks of a prefix go through a codec, and what follows is
computed on the result: in float32, teacher-forced, beside the same model on its own float32 KV. Rows are prose, code
and tables that this machine holds, one a file, no two of which share 12 tokens in a row. tc4 and tc3 are
calibrated on other rows, which share none with them either, of these kinds and of dialogue; and once more without each
kind. Facts are planted into prose; greedy answers continue rows. Intervals are 95 % bootstrap intervals over rows.

A control is a preset without one thing that it does: "tc4 CONTROL" or "k4v4 CONTROL", one of CONTROLS.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from benchmarks import report
from benchmarks.round_trip import bits_of, round_trip
from kvtier.codecs.measured_loss import KL_NATS
from kvtier.codecs.transform import model_statistics, texts
from kvtier.codecs.transform import reference as transform
from kvtier.codecs.transform.calibrate import PlaneStatistics, table_tensors
from kvtier.codecs.transform.model_statistics import KVStatistics
from kvtier.codecs.transform.table import PRESET_BITS, write_table
from kvtier.codecs.turboquant import reference as turboquant

CHUNK_TOKENS = 256
PREFIX_TOKENS, TEXT_TOKENS, GREEDY_TOKENS = 3 * CHUNK_TOKENS, 128, 64
RECALL_TOKENS = (12 * CHUNK_TOKENS, 24 * CHUNK_TOKENS)  # of prompts with facts
BATCH_ROWS = 4
KINDS = ("prose", "code", "tables")
FIRST_QUANTIZED, MEANS_LEFT_IN, K_LEFT_ROTATED, NO_GRADIENTS = CONTROLS = (
    "first-quantized",
    "means-left-in",
    "k-left-rotated",
    "no-gradients",
)
ALL_CONTROLS = (*(f"tc4 {name}" for name in CONTROLS), *(f"k4v4 {name}" for name in CONTROLS[:3]))
NAMES = ("Marcus", "Elena", "Tobias", "Ingrid", "Rashid", "Yuki", "Olga", "Pedro")
RESAMPLES = 2_000

Array = npt.NDArray[np.float64]
Result = dict[str, Any]


@dataclass(frozen=True)
class PrefixKV:
    """K and V of prefixes, (layers, prefixes, heads, tokens, size) each, float32."""

    k: Tensor
    v: Tensor

    def through(self, name: str, rope_base: float, tables: Mapping[str, Path] | None = None) -> PrefixKV:
        """Return the KV as a load brings it back to an engine that keeps it in bf16. name: of a preset or a control.
        rope_base: of K. tables: of the transform codecs, by control."""
        preset, _, control = name.partition(" ")
        k, v = self.k.bfloat16(), self.v.bfloat16()
        if preset == "kivi4":
            k = uniform(k.unflatten(-2, (-1, 32)), -2).flatten(-3, -2)
            v = uniform(v.unflatten(-1, (-1, 32)), -1).flatten(-2)
        elif preset != "raw":
            tables = tables if tables and preset in PRESET_BITS else {}
            table = tables.get(control, tables.get(""))
            base = 0.0 if control == K_LEFT_ROTATED else rope_base
            with _without(preset, control):
                k, v = round_trip(k, v, preset, base, chunk_tokens=CHUNK_TOKENS, table=table)
        return PrefixKV(k.float(), v.float())


def _without(preset: str, control: str) -> AbstractContextManager[Any]:
    """Have a codec not do what a control is without, where tables do not say so."""
    codec: Any = transform if preset in PRESET_BITS else turboquant
    if control == FIRST_QUANTIZED:
        return mock.patch.object(codec, "RAW_TOKENS", 0)
    if control == MEANS_LEFT_IN and codec is turboquant:
        return mock.patch.object(codec, "_mean", lambda k: torch.zeros_like(k[..., 0, :], dtype=torch.bfloat16))
    return nullcontext()


def uniform(x: Tensor, dim: int, bits: int = 4) -> Tensor:
    """Quantize as KIVI does (arXiv 2402.02750): least value and step of each group along `dim`, in fp16."""
    low = x.float().amin(dim, keepdim=True).half().float()
    step = ((x.float().amax(dim, keepdim=True) - low) / (2**bits - 1)).half().float().clamp_min(1e-7)
    return (((x - low) / step).round().clamp(0, 2**bits - 1) * step + low).to(x.dtype)


class Model:
    """A causal language model of transformers, in float32."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache  # take seconds

        self.folder, self._make_cache, self.device = folder, DynamicCache, device
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(device)
        self._needs_bos = str(self._model.config.model_type).startswith("gemma")
        rope = self._model.config.rope_parameters
        self.rope_base = float(rope["rope_theta"]) if rope.get("rope_type") == "default" else 0.0

    def calibrated(self) -> model_statistics.CalibratedModel:
        return model_statistics.CalibratedModel(self._model, self.tokenizer)

    def ids(self, text: str, is_start: bool = False) -> list[int]:
        """Return the tokens of a text; of a prompt's start with the mark that the model wants there."""
        found: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return [self.tokenizer.bos_token_id, *found] if is_start and self._needs_bos else found

    def prefill(self, rows: Sequence[Sequence[int]]) -> PrefixKV:
        """Compute the KV of prefixes."""
        found = [self._prefill(row) for row in rows]
        return PrefixKV(*(torch.stack(plane, 1) for plane in zip(*found, strict=True)))

    def _prefill(self, ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """K and V, (layers, heads, tokens, size) each."""
        cache = self._make_cache()
        self._model(self.tensor([ids]), past_key_values=cache, logits_to_keep=1)
        return torch.cat([x.keys for x in cache.layers]), torch.cat([x.values for x in cache.layers])

    def tensor(self, ids: Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(ids, device=self.device)

    def log_p(self, prefix: PrefixKV, ids: Tensor) -> Tensor:
        """Return the logarithms of probabilities that follow each of ids (rows, n): (rows, n, vocabulary)."""
        return torch.log_softmax(self._model(ids, past_key_values=self._cache(prefix)).logits.float(), -1)

    def greedy(self, prefix: PrefixKV, first: Tensor, n: int) -> Tensor:
        """Return the n most likely tokens that follow `first` (rows, 1), one after the other: (rows, n)."""
        cache, found = self._cache(prefix), [first]
        for _ in range(n):
            found.append(self._model(found[-1], past_key_values=cache).logits[:, -1:].argmax(-1))
        return torch.cat(found[1:], 1)

    def _cache(self, prefix: PrefixKV) -> Any:
        cache = self._make_cache()
        for layer, (k, v) in enumerate(zip(prefix.k, prefix.v, strict=True)):
            cache.update(k, v, layer)
        return cache


# --- text ---


def rows_of(kind: str, model: Model, n_rows: int, n_tokens: int, seen: set[tuple[int, ...]]) -> list[list[int]]:
    """Return rows of one file each that share no 12 tokens with each other or with `seen`, which grows."""
    found = texts.texts_of(kind, model.calibrated().chat)
    rows = texts.rows_of(found, lambda text: model.ids(text, is_start=True), n_rows, n_tokens, seen)
    if len(rows) < n_rows:
        raise SystemExit(f"only {len(rows)} of {n_rows} rows of {kind} on this machine")
    return rows


@dataclass(frozen=True)
class Amount:
    """Rows of each kind, prompts with facts, rows that are continued greedily, and rows to calibrate with, of each
    kind."""

    rows: int
    recall: int
    greedy: int
    calibration: int = 4

    @property
    def n_facts(self) -> int:
        """Number of rows that the prompts are made of."""
        return self.recall * max(RECALL_TOKENS) // PREFIX_TOKENS


@dataclass(frozen=True)
class Rows:
    """Rows of tokens: to measure on and to calibrate with, by kind, and of prose that facts are planted into."""

    measured: dict[str, list[list[int]]]
    facts: list[list[int]]
    calibration: dict[str, list[list[int]]]

    @classmethod
    def of_this_machine(cls, model: Model, amount: Amount) -> Rows:
        seen: set[tuple[int, ...]] = set()
        measured = {kind: rows_of(kind, model, amount.rows, PREFIX_TOKENS + TEXT_TOKENS, seen) for kind in KINDS}
        facts = rows_of("prose", model, amount.n_facts, PREFIX_TOKENS, set())
        seen.update(tuple(row[i : i + texts.GRAM]) for row in facts for i in range(len(row) - texts.GRAM + 1))
        n_tokens = model_statistics.PREFIX_TOKENS + model_statistics.TEXT_TOKENS
        kinds = (*KINDS, "dialogue")
        calibration = {kind: rows_of(kind, model, amount.calibration, n_tokens, seen) for kind in kinds}
        return cls(measured, facts, calibration)

    @classmethod
    def of_file(cls, path: Path, model: Model, amount: Amount) -> Rows:
        """Return rows of a file, at most as many as asked for. If it does not exist, this machine's are written to it
        first."""
        if not path.exists():
            path.write_text(json.dumps(asdict(cls.of_this_machine(model, amount))))
        found = json.loads(path.read_text())
        measured = {kind: rows[: amount.rows] for kind, rows in found["measured"].items()}
        calibration = {kind: rows[: amount.calibration] for kind, rows in found["calibration"].items()}
        return cls(measured, found["facts"][: amount.n_facts], calibration)


def calibrate(model: Model, rows: Mapping[str, list[list[int]]], controls: set[str], folder: Path) -> dict[str, Path]:
    """Return tables that were calibrated on rows of kinds: of all kinds by "", without a kind by its name, and those of
    controls by theirs."""
    measured = model.calibrated()
    frequencies = measured.frequencies(rows[KINDS[0]][0])

    def statistics_of(turns: Tensor) -> dict[str, KVStatistics]:
        return {kind: measured.statistics(found, turns, lambda *_: None) for kind, found in rows.items()}

    by_kind = statistics_of(frequencies)
    made = {left_out: (_mean(by_kind, left_out), frequencies) for left_out in ("", *KINDS)}
    if MEANS_LEFT_IN in controls:
        k, v = made[""][0]
        made[MEANS_LEFT_IN] = KVStatistics(k._replace(mean=torch.zeros_like(k.mean)), v), frequencies
    if K_LEFT_ROTATED in controls:
        unturned = torch.zeros_like(frequencies)
        made[K_LEFT_ROTATED] = _mean(statistics_of(unturned)), unturned
    if NO_GRADIENTS in controls:
        of = PlaneStatistics.of
        with mock.patch.object(PlaneStatistics, "of", lambda x, gradient: of(x, torch.zeros_like(gradient))):
            made[NO_GRADIENTS] = _mean(statistics_of(frequencies)), frequencies
    tables = {}
    for number, (name, (statistics, turns)) in enumerate(made.items()):
        tables[name] = folder / f"table-{number}"
        write_table(tables[name], table_tensors(*statistics, turns), model.folder.name, "")
    return tables


def _mean(by_kind: Mapping[str, KVStatistics], left_out: str = "") -> KVStatistics:
    mean, *others = (found for kind, found in by_kind.items() if kind != left_out)
    for number, found in enumerate(others, 1):
        mean = mean.with_row(found, number)
    return mean


# --- measurements ---


@dataclass
class Loss:
    """Losses of one preset. kl, same: (tokens,) of each row, by kind."""

    kl: dict[str, list[Array]]
    same: dict[str, list[Array]]
    agreed: list[int]  # greedy tokens before the first difference, of each answer
    recalled: dict[int, int] = field(default_factory=lambda: dict.fromkeys(RECALL_TOKENS, 0))  # by tokens of prompts

    @classmethod
    def of_kinds(cls) -> Loss:
        return cls({kind: [] for kind in KINDS}, {kind: [] for kind in KINDS}, [])


def measure_text(
    model: Model,
    kind: str,
    rows: Sequence[Sequence[int]],
    n_greedy: int,
    losses: dict[str, Loss],
    tables: Mapping[str, Path],
) -> None:
    """Add what the presets lose on rows of one kind; the first `n_greedy` rows are continued greedily as well."""
    for first in range(0, len(rows), BATCH_ROWS):
        batch = rows[first : first + BATCH_ROWS]
        ids = model.tensor([row[PREFIX_TOKENS:] for row in batch])
        own = model.prefill([row[:PREFIX_TOKENS] for row in batch])
        reference = model.log_p(own, ids)
        expected = model.greedy(own, ids[:, :1], GREEDY_TOKENS) if first < n_greedy else None
        for preset, loss in losses.items():
            loaded = own.through(preset, model.rope_base, tables)
            found = model.log_p(loaded, ids)
            loss.kl[kind] += list((reference.exp() * (reference - found)).sum(-1).double().cpu().numpy())
            loss.same[kind] += list((reference.argmax(-1) == found.argmax(-1)).double().cpu().numpy())
            if expected is not None:
                differs = (model.greedy(loaded, ids[:, :1], GREEDY_TOKENS) != expected).int().cpu()
                loss.agreed += torch.cat([differs, torch.ones(len(batch), 1).int()], 1).argmax(1).tolist()


def measure_recall(
    model: Model, prose: Sequence[Sequence[int]], n_tokens: int, losses: dict[str, Loss], tables: Mapping[str, Path]
) -> int:
    """Ask for facts that are planted into prompts of n_tokens of prose; return how many are asked for."""
    n_rows = n_tokens // PREFIX_TOKENS
    prompts, codes = [], []
    for number in range(len(prose) * PREFIX_TOKENS // max(RECALL_TOKENS)):
        draw = random.Random(number)
        codes.append([str(draw.randrange(10_000, 99_999)) for _ in NAMES])
        hay = [token for row in prose[n_rows * number :][:n_rows] for token in row]
        places = sorted(draw.sample(range(1, n_tokens // 256 - 1), len(NAMES)), reverse=True)
        for place, name, code in zip(places, NAMES, codes[-1], strict=True):
            hay[place * 256 : place * 256] = model.ids(f"\n\nThe pass code of {name} is {code}.\n\n")
        prompts.append(hay[:n_tokens])
    if prompts:
        own = model.prefill(prompts)
        for preset, loss in losses.items():
            loaded = own.through(preset, model.rope_base, tables)
            for name, wanted in zip(NAMES, zip(*codes, strict=True), strict=True):
                loss.recalled[n_tokens] += _n_recalled(model, loaded, name, wanted)
    return len(prompts) * len(NAMES)


def _n_recalled(model: Model, prefixes: PrefixKV, name: str, codes: Sequence[str]) -> int:
    """Return how many of the prefixes tell the code of a name. codes: that each of them has."""
    question, answers = model.ids(f"\n\nThe pass code of {name} is"), [model.ids(f" {code}") for code in codes]
    longest = max(map(len, answers))
    asked = model.tensor([question + answer + [0] * (longest - len(answer)) for answer in answers])
    found = model.log_p(prefixes, asked)[:, len(question) - 1 :].argmax(-1).tolist()
    return sum(row[: len(answer)] == answer for row, answer in zip(found, answers, strict=True))


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


def measure(model: Model, presets: Sequence[str], amount: Amount, file: Path | None = None) -> dict[str, Any]:
    """Return the result. file: of rows, which is written if it does not exist."""
    rows = Rows.of_file(file, model, amount) if file else Rows.of_this_machine(model, amount)
    losses = {preset: Loss.of_kinds() for preset in presets}
    calibrated = [preset for preset in presets if preset.partition(" ")[0] in PRESET_BITS]
    left_out = {preset: Loss.of_kinds() for preset in calibrated if preset in PRESET_BITS}
    controls = {preset.partition(" ")[2] for preset in calibrated}
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        tables = calibrate(model, rows.calibration, controls, Path(folder)) if calibrated else {}
        for kind, found in rows.measured.items():
            print(f"{kind}: {len(found)} rows, after {time.monotonic() - began:.0f} s", flush=True)
            measure_text(model, kind, found, amount.greedy, losses, tables)
            if left_out:
                measure_text(model, kind, found, 0, left_out, {"": tables[kind]})
        print(f"facts: after {time.monotonic() - began:.0f} s", flush=True)
        n_asked = {n: measure_recall(model, rows.facts, n, losses, tables) for n in RECALL_TOKENS}
        print(f"done after {time.monotonic() - began:.0f} s", flush=True)
    k = model.prefill([rows.measured[KINDS[0]][0][:PREFIX_TOKENS]]).k
    results = {}
    for preset, loss in losses.items():
        bits = {"raw": 16.0, "kivi4": 5.0}.get(preset) or bits_of(preset.partition(" ")[0], k.shape[-1])
        result = {"bits": bits} | figures(loss, KINDS) | {"kinds": {kind: figures(loss, [kind]) for kind in KINDS}}
        equal = sum(n == GREEDY_TOKENS for n in loss.agreed)
        result["greedy"] = {"answers": len(loss.agreed), "equal": equal, "equal_tokens": sum(loss.agreed)}
        result["recall"] = {str(n): {"asked": asked, "right": loss.recalled[n]} for n, asked in n_asked.items()}
        if preset in left_out:
            result["kind_left_out"] = {kind: figures(left_out[preset], [kind]) for kind in KINDS}
        results[preset] = result
    shape = {"layers": k.shape[0], "kv_heads": k.shape[2], "head_size": k.shape[-1]}
    return {"model": model.folder.name, "shape": shape, "rows_of_a_kind": len(rows.measured[KINDS[0]])} | {
        "rows_of_calibration": sum(map(len, rows.calibration.values())),
        "presets": results,
    }


def _presets(result: Result) -> list[str]:
    return [name for name in result["presets"] if " " not in name]


def loss_rows(results: Sequence[Result]) -> report.Table:
    """Return columns and rows, one row a preset: its loss on each model."""
    cells = []
    for preset in _presets(results[0]):
        found = {result["model"]: result["presets"][preset] for result in results}
        bits = sorted({f"{one['bits']:.2f}" for one in found.values()})
        losses = []
        for one in found.values():
            kl, top = one["kl_mean"], one["same_top"]["value"]
            losses.append(f"{kl['value']:.1e} ({kl['low']:.1e}-{kl['high']:.1e}), {top:.1%}")
        cells.append([f"`{preset}`", ", ".join(bits), *losses, _worst(found, "kinds"), _worst(found, "kind_left_out")])
    models = [result["model"] for result in results]
    return ["preset", "bits an element", *models, "worst kind", "kind left out"], cells


def _worst(found: dict[str, Result], group: str) -> str:
    """Return the largest loss over models and kinds of text, and where it is; "-" where none was measured."""
    losses = [
        (kl["kl_mean"]["value"], f"{model}, {kind}")
        for model, one in found.items()
        for kind, kl in one.get(group, {}).items()
    ]
    return "{:.1e}: {}".format(*max(losses)) if losses else "-"


def control_rows(results: Sequence[Result]) -> report.Table:
    """Return columns and rows, one row a control, of the models for which controls were measured."""
    results = [result for result in results if any(" " in name for name in result["presets"])]
    cells = []
    for name in results[0]["presets"] if results else ():
        preset, _, without = name.partition(" ")
        if without:
            losses = [[result["presets"][key]["kl_mean"]["value"] for key in (name, preset)] for result in results]
            texts = [f"{kl:.1e}, {kl / whole:.1f} times" for kl, whole in losses]
            cells.append([f"`{preset}`", without.replace("-", " "), *texts])
    return ["preset", "control", *(result["model"] for result in results)], cells


def recall_rows(results: Sequence[Result]) -> report.Table:
    """Return columns and rows, one row a preset: facts that are found again in prompts of each length."""
    cells = []
    for name in _presets(results[0]):
        recalls = [result["presets"][name]["recall"].values() for result in results]
        cells.append(
            [f"`{name}`", *(", ".join(f"{one['right']} of {one['asked']}" for one in each) for each in recalls)]
        )
    return ["preset", *(result["model"] for result in results)], cells


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of a checkpoint")
    parser.add_argument("--out", type=Path, help="result file; by default nothing is written")
    parser.add_argument("--presets", default=",".join(("raw", *KL_NATS, "kivi4")))
    parser.add_argument("--rows", type=int, default=12, help="rows of each kind of text")
    parser.add_argument("--recall", type=int, default=2, help=f"prompts of each length with {len(NAMES)} planted facts")
    parser.add_argument("--greedy", type=int, default=4, help="rows of each kind that are continued greedily")
    parser.add_argument("--calibration", type=int, default=4, help="rows of each kind to calibrate tc4 and tc3 with")
    parser.add_argument("--controls", action="store_true", help="measure all controls after the presets")
    parser.add_argument("--text", type=Path, help="file of rows: those of this machine are written if there is none")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model = Model(options.model, options.device)
    amount = Amount(options.rows, options.recall, options.greedy, options.calibration)
    presets = (*options.presets.split(","), *(ALL_CONTROLS if options.controls else ()))
    found = measure(model, presets, amount, options.text)
    for rows_of_table in (loss_rows, control_rows, recall_rows):
        report.table(*rows_of_table([found]))
    if options.out:
        report.write(options.out, "what do the codecs lose on a trained model", found)


if __name__ == "__main__":
    main()
