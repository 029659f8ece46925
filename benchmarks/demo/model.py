"""Llama with saved random weights and a tokenizer trained here: nothing is downloaded.

    python -m benchmarks.demo.model FOLDER [8b]        # weights that vLLM makes up, for servers without a registry

Random weights of this spread make the next token depend on all of the KV, so that wrong KV would show as other output;
weights near zero (vLLM's `dummy` format) would not. float32, so that equal outputs mean equal KV. The vocabulary is the
tokenizer's, so that every token of an answer is text. " hi" is one token, as benchmarks/long_doc_qa.py assumes.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.gpu.models import DIMENSIONS, Dimensions, config_of, save_weights
from benchmarks.serving.documents import python_text

VOCABULARY = 4096
CONTEXT_TOKENS = 16384


def size_of(hidden: int, intermediate: int, heads: int, kv_heads: int, head_size: int, spread: float) -> Dimensions:
    sizes = (8, hidden, intermediate, heads, kv_heads, head_size, VOCABULARY, CONTEXT_TOKENS)
    return Dimensions(*sizes, is_saved=True, spread=spread)


ON_CPU = size_of(768, 2048, 12, 4, 64, 0.15)
# The same KV a token, but 0.8 billion weights (3 GB): a GPU computes the smaller one faster than any disk is read.
ON_GPU = size_of(3072, 8192, 24, 2, 128, 0.075)


def make_tokenizer(folder: Path, texts: Sequence[str]) -> None:
    """Train a tokenizer on these texts, with a template for chats. Token 0 begins a text, 1 ends it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[1], pad_token=special[2]
    )
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    fast.save_pretrained(folder)


def make_model(folder: Path, size: Dimensions) -> None:
    """Write model and tokenizer, unless the folder has them."""
    if not (folder / "model.safetensors").exists():
        make_tokenizer(folder, [python_text()])
        save_weights(size, folder, "float32")


def make_model_here(folder: Path) -> Path:
    """Make the model of this machine in a folder below; return that."""
    size = ON_GPU if torch.cuda.is_available() else ON_CPU
    make_model(folder / f"model-{size.hidden}", size)
    return folder / f"model-{size.hidden}"


def make_dummy(folder: Path, kind: str) -> None:
    """Write config.json of a model's dimensions and the tokenizer, unless the folder has them."""
    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        make_tokenizer(folder, [python_text(), " hi" * 10_000])
        size = dataclasses.replace(DIMENSIONS[kind], vocabulary=VOCABULARY)
        (folder / "config.json").write_text(json.dumps(config_of(size), indent=1))


if __name__ == "__main__":
    make_dummy(Path(sys.argv[1]), *(sys.argv[2:] or ["8b"]))
