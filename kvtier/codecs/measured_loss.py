"""Loss of the lossy codecs on trained models, and the refusal of fp8 for models whose K has biases.

Measured is the KL divergence of the next token's distribution to that with raw KV, in nats, mean over prose whose first
1,280 tokens went through the codec. e4m3 has 3 bits of mantissa. Where K is mostly a bias (Qwen2.5, layer 0: a norm of
900 of which the token's own part is 11), its error is larger than what tells tokens apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError
from kvtier.model.safetensors import read_tensor_ranges

MODELS = ("SmolLM2-135M", "Qwen2.5-Coder-0.5B", "Qwen2.5-Coder-1.5B", "Gemma 3 270M")  # those of KL_NATS, in its order
KL_NATS: Mapping[str, tuple[float | None, ...]] = {
    "fp8": (1.3e-3, 5.7e-3, 0.78, 1.7e-3),
    "k6v4": (1.6e-3, 1.2e-3, 7e-4, 2.0e-3),
    "k5v3": (6.3e-3, None, None, None),
    "k4v4": (1.1e-2, 5.9e-2, 3.6e-3, 1.4e-2),
    "k4v3": (1.4e-2, None, None, None),
    "k3v3": (3.8e-2, None, None, None),
    "k4v2": (2.7e-2, None, None, None),
}
# Projections to K, alone or with Q and V, by the names of published checkpoints.
_KEY_BIAS = re.compile(r"(^|\.)(k_proj|qkv_proj|query_key_value|c_attn|[Ww]qkv|W_pack|wk|key|k_lin)\.bias$")
_NOT_TEXT = re.compile(r"(^|[._])(vis\w*|image|img|audio|speech|talker|vpm|apm|resampler|\w*projector)([._]|$)")
_CONFIG_KEYS = ("attention_bias", "qkv_bias", "add_qkv_bias", "use_qkv_bias", "use_bias", "enable_bias")
_ALWAYS = re.compile(r"qwen$|qwen2|gpt2$|gpt_bigcode$|gpt_neox$|gpt_oss$|opt$|phi$|starcoder2$")  # model_type


def loss_text(codec: str) -> str:
    """Return on which models a codec's loss was measured, and how large it is; "" for raw."""
    if codec not in KL_NATS:
        return ""
    found = [f"{model} {kl:.2g}" for model, kl in zip(MODELS, KL_NATS[codec], strict=True) if kl is not None]
    return f"codec {codec} is lossy: KL to raw KV in nats, measured on {', '.join(found)} and on no other model"


def losses_line(codecs: Iterable[str]) -> str:
    """Return the losses of these codecs, in one line; "" where all are raw."""
    shown = [name for name in codecs if name in KL_NATS]
    if not shown:
        return ""
    figures = (f"{name} {', '.join('-' if kl is None else f'{kl:.2g}' for kl in KL_NATS[name])}" for name in shown)
    return f"lossy: KL to raw KV in nats, measured on {', '.join(MODELS)} and no other model: {'; '.join(figures)}"


def check_key_bias(codec: str, is_accepted: bool, folder: Path | None, config: Mapping[str, Any]) -> None:
    """Refuse codec fp8 for a model whose K has biases, unless the setting that accepts it is given.

    folder: of the checkpoint, None where it is not known; config: the text part of its config.json, which decides only
    where no tensors can be read. Raises ConfigError.
    """
    if codec != "fp8" or is_accepted:
        return
    found = key_bias(folder, config)
    if found:
        fix = (
            f"K of this model has biases ({found}), and e4m3 loses what differs between tokens beside them: KL 0.78 "
            "nats and 22 % of top tokens on Qwen2.5-Coder-1.5B, where k6v4 has 7e-4. Use raw or k6v4, or set "
            "codec_accept_key_bias to true"
        )
        raise ConfigError("codec", codec, fix)


def key_bias(folder: Path | None, config: Mapping[str, Any]) -> str:
    """Return the tensor, or the setting, by which K of a model has a bias; "" if it has none."""
    files = [] if folder is None else sorted(folder.glob("*.safetensors"))
    for path in files:
        for name, part in _key_biases(path):
            with path.open("rb") as file:
                file.seek(part.start)
                if any(file.read(len(part))):  # GPTQ writes biases of 0 for models that have none
                    return name
    if files:
        return ""
    model_type = str(config.get("model_type", ""))
    if _ALWAYS.match(model_type):
        return f"model_type {model_type}"
    return next((f"{key} true" for key in _CONFIG_KEYS if config.get(key) is True), "")


def _key_biases(path: Path) -> Iterator[tuple[str, range]]:
    for name, part in read_tensor_ranges(path):
        if _KEY_BIAS.search(name) and not _NOT_TEXT.search(name):
            yield name, part
