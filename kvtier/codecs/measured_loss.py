"""Loss of the lossy codecs on trained models, for `kvtier plan` and an engine's log.

The loss is the KL divergence of the next token's distribution to that with KV in float32, in nats, mean over text whose
first tokens went through the codec: benchmarks/results/quality has it, and its intervals.
"""

from collections.abc import Iterable, Mapping

MODELS = ("SmolLM2-135M", "Qwen2.5-Coder-0.5B", "Qwen2.5-Coder-1.5B", "Gemma 3 270M")  # those of KL_NATS, in its order
KL_NATS: Mapping[str, tuple[float, ...]] = {
    "int8": (2.1e-5, 3.8e-5, 1.5e-5, 2.7e-5),
    "k6v5": (3.7e-4, 3.6e-4, 1.4e-4, 6.8e-4),
    "k4v4": (3.9e-3, 3.7e-3, 1.3e-3, 9.5e-3),
    "tc4": (6.2e-4, 4.7e-4, 3.5e-4, 7.8e-4),
    "tc3": (2.4e-3, 2.4e-3, 1.5e-3, 2.3e-3),
}


def loss_text(codec: str) -> str:
    """Return on which models a codec's loss was measured, and how large it is; "" for raw."""
    if codec not in KL_NATS:
        return ""
    found = [f"{model} {kl:.2g}" for model, kl in zip(MODELS, KL_NATS[codec], strict=True)]
    return f"codec {codec} is lossy: KL to raw KV in nats, measured on {', '.join(found)} and on no other model"


def losses_line(codecs: Iterable[str]) -> str:
    """Return the losses of these codecs, in one line; "" where all are raw."""
    shown = [name for name in codecs if name in KL_NATS]
    if not shown:
        return ""
    figures = (f"{name} {', '.join(f'{kl:.2g}' for kl in KL_NATS[name])}" for name in shown)
    return f"lossy: KL to raw KV in nats, measured on {', '.join(MODELS)} and no other model: {'; '.join(figures)}"
