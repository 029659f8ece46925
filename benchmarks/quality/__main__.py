"""What do the codecs cost in quality? Trains a small Llama here, then reads prefixes through each codec.

    python -m benchmarks.quality --out RESULT.json [--minutes 5] [--evaluation-minutes 3] [--device cuda] [--tiny]

Nothing is downloaded: the text is Python's own and that of the packages beside it, the rest is synthetic. The protocol
is the tier's: whole chunks of a prefix are encoded and decoded, what follows is computed in bf16 on what came back.
It says nothing about models that were not run.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import report
from benchmarks.quality import data, tasks
from benchmarks.quality.cases import Case, Plan
from benchmarks.quality.data import VOCABULARY, Corpus
from benchmarks.quality.evaluation import Evaluation
from benchmarks.quality.measure import answers
from benchmarks.quality.model import Model, Shape
from benchmarks.quality.tasks import Source
from benchmarks.quality.train import Recipe, Stages, train

NOTE = "a small model trained for this; no claim is made about models that were not run"
TRAINING_SEED, WATCH_SEED = 0, 1


@dataclass(frozen=True)
class Size:
    """What is run: the full size is for an H200, the tiny one shows on a CPU that all of it works."""

    shape: Shape
    rate: float
    warmup_steps: int
    rows: Stages[tuple[int, int]]
    text_bytes: int
    plan: Plan


FULL = Size(
    Shape(layers=6, width=768, heads=8, kv_heads=2, mlp=2048, vocabulary=VOCABULARY),
    6e-4,
    200,
    ((0.0, (64, 128)), (0.15, (64, 256)), (0.3, (64, 512)), (0.45, (48, 1024)), (0.65, (28, 2305))),
    96 << 20,
    Plan(),
)
TINY = Size(
    Shape(layers=2, width=64, heads=2, kv_heads=1, mlp=128, vocabulary=VOCABULARY),
    3e-3,
    10,
    ((0.0, (8, 64)), (0.5, (4, 320))),
    2 << 20,
    Plan(
        seeds=2,
        text_rows=3,
        text_prefix_tokens=256,
        text_tokens=24,
        greedy_tokens=4,
        copy_prefixes=(256,),
        copy_tokens=16,
        pairs=(8, 64),
        pairs_asked=8,
        recall_rows=3,
        needle_prefixes=(256,),
        needle_depths=(0.0, 1.0),
        needles=2,
        needle_rows=2,
    ),
)


def watch(model: Model, source: Source, row_tokens: int) -> dict[str, float]:
    """Shares of right answers on new rows, for the curve of the training."""
    n_pairs = row_tokens // 8
    asked = {
        "copy": tasks.copy(source, 8, row_tokens, (row_tokens // 2 - 1, row_tokens // 2 - 1)),
        "recall": tasks.recall(source, 8, 4 * n_pairs + 3, n_pairs, n_pairs),
        "needle": tasks.needles(source, 16, row_tokens, (row_tokens // 32, 1)),
    }
    found = {}
    for name, rows in asked.items():
        question = rows.tokens.shape[1] - {"copy": row_tokens // 2 - 1, "recall": 2 * n_pairs, "needle": 6}[name] - 1
        with torch.no_grad(), torch.autocast(source.device.type, torch.bfloat16, enabled=source.device.type == "cuda"):
            logits = model(rows.tokens[:, :-1])[:, question:]
        found[name] = answers(Case(name, rows, question), logits).popitem()[1].float().mean().item()
    return found


def trained(size: Size, corpus: Corpus, seconds: float) -> tuple[Model, dict[str, Any]]:
    device = corpus.training.device
    torch.manual_seed(TRAINING_SEED)
    model = Model(size.shape).to(device)
    source = Source(corpus.training, torch.Generator(device).manual_seed(TRAINING_SEED))
    watched = Source(corpus.held_out, torch.Generator(device).manual_seed(WATCH_SEED))
    recipe = Recipe(seconds, size.rate, size.warmup_steps, size.rows)
    n = sum(parameter.numel() for parameter in model.parameters())
    print(f"training {n / 1e6:.1f} million parameters for {seconds:.0f} s on {device}", flush=True)
    about = train(model, source, recipe, lambda model, row_tokens: watch(model, watched, row_tokens))
    return model.for_evaluation(), {"parameters": n, "shape": vars(size.shape), "training": about}


def show(result: dict[str, Any]) -> None:
    for row in result["reference"]:
        asked = [(f"{task} {size}", figure) for task in ("copy", "recall") for size, figure in row[task].items()]
        right = ", ".join(f"{name} {figure['value']:.1%}" for name, figure in (*asked, ("needles", row["needle_all"])))
        lost = f", KL to none {row['kl_mean']['value']:.1e}" if "kl_mean" in row else ""
        print(f"before any codec, {row['condition']}{lost}: {row['nll']['value']:.3f} nats a byte, {right}")
    columns = {
        "kl_mean": ".2e",
        "kl_p99": ".1e",
        "top1": ".2%",
        "nll_change": "+.1e",
        "recall_all": ".1%",
        "needle_all": ".1%",
        "greedy_tokens": ".1f",
    }
    report.table(
        ("condition", "method", "bytes", *columns),
        [
            (
                row["condition"],
                row["method"],
                f"{row['vector_bytes']:.0f}",
                *(f"{row[name]['value']:{form}}" for name, form in columns.items()),
            )
            for row in result["rows"]
        ],
    )
    refused = [
        f"{row['refused_chunks']} by {row['method']}, {row['condition']}"
        for row in result["rows"]
        if row["refused_chunks"]
    ]
    print(f"refused chunks: {'; '.join(refused) or 'none'}")
    for row in result["power"]:
        verdict = "seen" if row["is_seen"] else "NOT SEEN"
        print(f"{row['condition']}: {row['method']} has {row['kl_times']:.1f}x the KL of {row['beside']}: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=5.0, help="of training")
    parser.add_argument("--evaluation-minutes", type=float, default=3.0, help="after these nothing more is begun")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a model that learns nothing, to try all of it on a CPU")
    arguments = parser.parse_args()
    size = TINY if arguments.tiny else FULL
    corpus = data.read(size.text_bytes).to(torch.device(arguments.device))
    print(f"text: {corpus.training.numel():,} bytes of {corpus.files:,} files", flush=True)
    model, about = trained(size, corpus, 60 * arguments.minutes)
    evaluation = Evaluation(model, corpus, size.plan, 60 * arguments.evaluation_minutes)

    def save() -> None:
        content = {"note": NOTE, "text_bytes": corpus.training.numel(), "model": about, **evaluation.result()}
        report.write(arguments.out, "what do the codecs cost in quality", content)

    evaluation.run(save)
    save()
    show(evaluation.result())


if __name__ == "__main__":
    main()
