"""Llama with saved random weights and a tokenizer trained here: nothing is downloaded.

Random weights of this spread make the next token depend on all of the KV, so that wrong KV would show as other output;
weights near zero (vLLM's `dummy` format) would not. float32, so that equal outputs mean equal KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from benchmarks.serving.documents import python_text

VOCABULARY = 4096
CONTEXT_TOKENS = 16384


@dataclass(frozen=True)
class ModelSize:
    """spread: of the weights; spread**2 x hidden is the same for all sizes, and with it how a layer treats errors."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    spread: float

    @property
    def name(self) -> str:
        return f"model-{self.hidden}"


ON_CPU = ModelSize(768, 2048, 12, 4, 64, 0.15)
# The same KV a token, but 0.8 billion weights (3 GB): a GPU computes the smaller one faster than any disk is read.
ON_GPU = ModelSize(3072, 8192, 24, 2, 128, 0.075)


def size_here() -> ModelSize:
    return ON_GPU if torch.cuda.is_available() else ON_CPU


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


def make_model(folder: Path, size: ModelSize) -> None:
    """Write model and tokenizer, unless the folder has them."""
    if (folder / "model.safetensors").exists():
        return
    make_tokenizer(folder, [python_text()])
    disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=8,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_size,
        max_position_embeddings=CONTEXT_TOKENS,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
        initializer_range=size.spread,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
