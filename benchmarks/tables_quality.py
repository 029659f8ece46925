"""What the codecs cost in quality, in benchmarks/README.md, from results/gpu/quality.json (benchmarks/quality)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.quality import plot
from benchmarks.tables_common import table

RESULT = Path(__file__).resolve().parent / "results" / "gpu" / "quality.json"
PLOT = RESULT.with_suffix(".svg")
AS_TRAINED = "as trained"
TIMES_MAX = 10_000
Rows = list[dict[str, Any]]


def read() -> Any:
    return json.loads(RESULT.read_text())


def percent(figure: dict[str, float]) -> str:
    """With its interval: 99.1% (98.8-99.4)."""
    return f"{figure['value']:.1%} ({100 * figure['low']:.1f}-{100 * figure['high']:.1f})"


def small(figure: dict[str, float], sign: str = "") -> str:
    """With half of its interval: 1.2e-04 ± 3e-06."""
    return f"{figure['value']:{sign}.1e} ± {(figure['high'] - figure['low']) / 2:.0e}"


def under(result: dict[str, Any], condition: str) -> Rows:
    return [row for row in result["rows"] if row["condition"] == condition]


def named(row: dict[str, Any]) -> str:
    return f"*{row['method']}*" if row["is_control"] else row["method"]


def model() -> list[str]:
    result = read()
    about, reference, machine = result["model"], result["reference"][0], result["machine"]
    shape, training = about["shape"], about["training"]
    where = machine["gpus"][0].split(",")[0] if machine["gpus"] else f"{machine['cores']} CPU cores"
    recall = ", ".join(f"{figure['value']:.1%} of {pairs} pairs" for pairs, figure in reference["recall"].items())
    copies = ", ".join(f"{figure['value']:.1%} at {prefix} tokens" for prefix, figure in reference["copy"].items())
    n_text = result["plan"]["text_rows"] * result["plan"]["seeds"]
    spans = {
        name: f"{span['mean']:.2g} ({span['min']:.2g} to {span['max']:.2g})" for name, span in result["keys"].items()
    }
    return [
        f"**Quality** (`python -m benchmarks.quality`, {where}, {result['date']}): a Llama of "
        f"{about['parameters'] / 1e6:.0f} million parameters ({shape['layers']} layers, {shape['heads']} heads of "
        f"{shape['head_size']}, {shape['kv_heads']} KV heads, bias on Q, K and V), trained from scratch for "
        f"{training['seconds']:.0f} s on {training['tokens'] / 1e6:.0f} million tokens: "
        f"{result['text_bytes'] / 1e6:.0f} MB of Python and its docs, byte by byte, and synthetic copying, recall and "
        "needles. Before any codec: "
        f"{reference['nll']['value']:.2f} nats a byte on held-out files, copies right {copies}, recall right {recall}, "
        f"needles {reference['needle_all']['value']:.1%}. A prefix's chunks go through the codec, the continuation is "
        f"computed in bf16 ({n_text} texts of {result['plan']['text_prefix_tokens']:,} tokens and "
        f"{result['plan']['text_tokens']} after them; {result['plan']['seeds']} seeds; 95% intervals). This says "
        "nothing about models that were not run.",
        "",
        f"Its keys, over layers and heads: share of the mean in the energy {spans['mean_energy_share']}, kurtosis "
        f"{spans['kurtosis']}, norm of K over that of V {spans['norm_k_over_v']}, largest channel over the median one "
        f"{spans['largest_channel_over_median']}. Large models can be less kind, so the second table adds an offset to "
        "all keys, which softmax does not see.",
    ]  # fmt: skip


def as_trained() -> list[str]:
    result = read()
    rows = under(result, AS_TRAINED)
    hardest = max(rows[0]["recall"], key=int)
    n = result["plan"]["greedy_tokens"]
    return [
        "**As trained** (controls in italics; raw is bf16 KV computed in other batches and steps: the noise floor):",
        "",
        *table(["", "bytes a K and V vector", "KL, nats: mean", "KL: 99th percentile", "same top token",
                "change of NLL, nats", f"recall, {hardest} pairs", "recall, all", "needles",
                f"same of {n} greedy tokens"],
               [[named(row), f"{row['vector_bytes']:.0f}", small(row["kl_mean"]), f"{row['kl_p99']['value']:.1e}",
                 percent(row["top1"]), small(row["nll_change"], "+"), percent(row["recall"][hardest]),
                 percent(row["recall_all"]), percent(row["needle_all"]),
                 f"{row['greedy_tokens']['value']:.1f}"] for row in rows]),
        "",
        f"![KL to bf16 KV of each codec, under each condition](results/gpu/{PLOT.name})",
    ]  # fmt: skip


def offsets() -> list[str]:
    result = read()
    conditions = list(dict.fromkeys(row["condition"] for row in result["rows"] if row["condition"] != AS_TRAINED))
    by_name = {condition: {row["method"]: row for row in under(result, condition)} for condition in conditions}
    methods = [row for row in under(result, AS_TRAINED) if all(row["method"] in found for found in by_name.values())]

    columns = [f"{condition}: {what}" for condition in conditions for what in ("KL", "same top token", "recall, all")]

    def cells(row: dict[str, Any]) -> list[str]:
        found = [by_name[condition][row["method"]] for condition in conditions]
        return [text for of in found for text in (small(of["kl_mean"]), percent(of["top1"]), percent(of["recall_all"]))]

    lost = "; ".join(f"{row['condition']} {small(row['kl_mean'])}" for row in result["reference"] if "kl_mean" in row)
    return [
        "**With an offset on all keys**, so many times their mean norm, most of it in 8 channels. The reference has it "
        f"too; what bf16 KV by itself loses by it, in KL: {lost}.",
        "",
        *table(["", *columns], [[named(row), *cells(row)] for row in methods]),
    ]  # fmt: skip


def looking_back() -> list[str]:
    """Recall by number of pairs, needles by prefix and depth."""
    result = read()
    rows = under(result, AS_TRAINED)
    pairs, prefixes = sorted(rows[0]["recall"], key=int), sorted(rows[0]["needle"], key=int)
    depths = " / ".join(f"{depth:g}" for depth in result["plan"]["needle_depths"])

    def cells(row: dict[str, Any]) -> list[str]:
        grid = [
            " / ".join(f"{100 * figure['value']:.0f}" for figure in row["needle"][prefix].values())
            for prefix in prefixes
        ]
        return [*(f"{row['recall'][n]['value']:.1%}" for n in pairs), *grid]

    return [
        "**Looking back, as trained**: right answers, percent, to pairs of a key and a value in the prefix, and to "
        f"needles in text at depths of {depths}:",
        "",
        *table(["", *(f"{n} pairs" for n in pairs), *(f"needle in {int(prefix):,} tokens" for prefix in prefixes)],
               [[named(row), *cells(row)] for row in rows]),
    ]  # fmt: skip


def power() -> list[str]:
    """Whether the benchmark sees the losses that it must see."""
    result = read()
    conditions = list(dict.fromkeys(row["condition"] for row in result["power"]))
    by_pair: dict[tuple[str, str], dict[str, str]] = {}
    for row in result["power"]:
        times = f"{row['kl_times']:,.1f}x" if row["kl_times"] < TIMES_MAX else f"over {TIMES_MAX:,}x"
        lost = f"{times}, recall {0.0 - 100 * row['recall_lost']:+.1f}, needles {0.0 - 100 * row['needles_lost']:+.1f}"
        text = lost if row["is_seen"] else f"{lost} (**not told apart**)"
        by_pair.setdefault((row["method"], row["beside"]), {})[row["condition"]] = text
    n_refused = sum(row["refused_chunks"] for row in result["rows"])
    stopped = f" The run was {result['stopped']}." if result["stopped"] else ""
    return [
        "**What it can tell apart**: the KL of one as a multiple of that of the other, and the difference in right "
        "answers, in points (told apart: the low end of its KL is above twice the high end of the other's):",
        "",
        *table(["", "beside", *conditions],
               [[*pair, *(found.get(condition, "-") for condition in conditions)] for pair, found in by_pair.items()]),
        "",
        f"Refused chunks: {n_refused or 'none'}.{stopped}",
    ]  # fmt: skip


def sketch() -> list[str]:
    """Why no codec has QJL. Empty where the paper's two algorithms were not measured beside each other."""
    pair = ("paper QJL k4v4", "paper mse k4v4", AS_TRAINED)
    found = [row["kl_times"] for row in read()["power"] if (row["method"], row["beside"], row["condition"]) == pair]
    return [
        "**No codec has QJL**: the paper's Algorithm 2, which gives a bit of each element of K to the signs of a "
        f"sketch, has {times:.1f} times the KL of its Algorithm 1 with as many bits (k4v4, as trained). What it makes "
        "of a product is right on average, but softmax does not average over keys."
        for times in found
    ]


def drawings() -> dict[Path, str]:
    return {PLOT: plot.svg(read())} if RESULT.exists() else {}


SECTIONS: tuple[Callable[[], list[str]], ...] = (model, as_trained, looking_back, offsets, power, sketch)
