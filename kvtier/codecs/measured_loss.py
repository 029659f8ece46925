"""Loss of the lossy codecs on trained models, for `kvtier plan` and an engine's log.

The loss is the KL divergence of the next token's distribution to that with KV in float32, in nats, mean over text whose
first tokens went through the codec: benchmarks/results/quality has it, and its intervals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

MODELS = ("SmolLM2-135M", "Qwen2.5-Coder-0.5B", "Qwen2.5-Coder-1.5B", "Gemma 3 270M")  # those of KL_NATS, in its order
KL_NATS: Mapping[str, tuple[float | None, ...]] = {
    "int8": (3.7e-5, 3.9e-5, 3.6e-5, 3.8e-5),
    "k6v5": (3.8e-4, 3.1e-4, 1.5e-4, 7.7e-4),
    "k4v4": (3.4e-3, 3.1e-3, 1.1e-3, 1.1e-2),
    "tc4": (8.1e-4, 1.6e-3, None, 1.3e-3),
    "tc3": (3.4e-3, 6.9e-3, None, 5.7e-3),
}


def loss_text(codec: str) -> str:
    """Return on which models a codec's loss was measured, and how large it is; "" for raw."""
    if codec not in KL_NATS:
        return ""
    found = [f"{model} {kl:.2g}" for model, kl in zip(MODELS, KL_NATS[codec], strict=True) if kl is not None]
    if not found:
        return f"codec {codec} is lossy, and was not measured yet"
    return f"codec {codec} is lossy: KL to raw KV in nats, measured on {', '.join(found)} and on no other model"


def losses_line(codecs: Iterable[str]) -> str:
    """Return the losses of these codecs, in one line; "" where all are raw."""
    shown = [name for name in codecs if any(KL_NATS.get(name, ()))]
    if not shown:
        return ""
    figures = (f"{name} {', '.join('-' if kl is None else f'{kl:.2g}' for kl in KL_NATS[name])}" for name in shown)
    return f"lossy: KL to raw KV in nats, measured on {', '.join(MODELS)} and no other model: {'; '.join(figures)}"
