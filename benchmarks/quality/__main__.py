"""Cost of the codecs in quality: trains a small Llama here, then reads prefixes through each codec.

    python -m benchmarks.quality --out RESULT.json [--minutes 5] [--device cuda] [--tiny]

Nothing is downloaded: the text is Python's own and that of the packages beside it, the rest is synthetic. As in the
tier, whole chunks of a prefix are encoded and decoded, and what follows is computed in bf16 on the result. It says
nothing about models that were not run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor

from benchmarks import report
from benchmarks.quality import data
from benchmarks.quality.evaluate import EvaluationSize, evaluate
from benchmarks.quality.model import ModelShape, SmallLlama
from benchmarks.quality.tasks import TaskSource
from benchmarks.quality.train import Recipe, train

NOTE = "a small model trained for this; no claim is made about models that were not run"
TRAINING_SEED = 0
FULL = ModelShape(layers=6, width=768, heads=8, kv_heads=2, mlp=2048, vocabulary=data.VOCABULARY)
TINY = ModelShape(layers=2, width=64, heads=2, kv_heads=1, mlp=128, vocabulary=data.VOCABULARY)
STAGES = ((0.0, (64, 128)), (0.15, (64, 256)), (0.3, (64, 512)), (0.45, (48, 1024)), (0.65, (28, 2305)))
TINY_STAGES = ((0.0, (8, 64)), (0.5, (4, 320)))
TINY_SIZE = EvaluationSize(2, 3, text_prefix_tokens=256, text_tokens=24, pairs=(8, 64), pairs_asked=8, recall_rows=3)
COLUMNS = ("condition", "method", "bytes", "KL", "same top token", "recall", "refused")


def trained(shape: ModelShape, training: Tensor, recipe: Recipe) -> tuple[SmallLlama, dict[str, object]]:
    device = training.device
    torch.manual_seed(TRAINING_SEED)
    model = SmallLlama(shape).to(device)
    source = TaskSource(training, torch.Generator(device).manual_seed(TRAINING_SEED))
    n = sum(parameter.numel() for parameter in model.parameters())
    print(f"training {n / 1e6:.1f} million parameters for {recipe.seconds:.0f} s on {device}", flush=True)
    about = train(model, source, recipe)
    return model.for_evaluation(), {"parameters": n, "shape": vars(shape), "training": about}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quality", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=5.0, help="of training")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="a model that learns nothing, to try all of it on a CPU")
    options = parser.parse_args()
    training, held_out = (text.to(options.device) for text in data.read((2 if options.tiny else 96) << 20))
    print(f"text: {training.numel():,} bytes", flush=True)
    seconds = 60 * options.minutes
    recipe = Recipe(seconds, 3e-3, 10, TINY_STAGES) if options.tiny else Recipe(seconds, 6e-4, 200, STAGES)
    model, about = trained(TINY if options.tiny else FULL, training, recipe)
    found = evaluate(model, held_out, TINY_SIZE if options.tiny else EvaluationSize())
    content = {"note": NOTE, "text_bytes": training.numel(), "model": about, **found}
    report.write(options.out, "what do the codecs cost in quality", content)
    rows = []
    for row in found["rows"]:
        figures = (f"{row['kl_mean']['value']:.2e}", f"{row['top1']['value']:.2%}", f"{row['recall_all']['value']:.1%}")
        rows.append((row["condition"], row["method"], f"{row['vector_bytes']:.0f}", *figures, row["refused_chunks"]))
    report.table(COLUMNS, rows)
    print("recall before any codec:", {name: f"{figure['value']:.1%}" for name, figure in found["reference"].items()})
    print(f"k2v2 is {'seen' if found['is_control_seen'] else 'NOT SEEN'} to be worse than k4v4")


if __name__ == "__main__":
    main()
