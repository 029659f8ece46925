"""A small Llama with saved random weights and a tokenizer trained here: nothing is downloaded.

Random weights of this spread make the next token depend on all of the KV, so that wrong KV would show as other
output; weights near zero (vLLM's `dummy` format) would not. float32, so that equal outputs mean equal KV.
"""

from __future__ import annotations

import pydoc_data.topics
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

VOCABULARY = 4096
WEIGHT_SPREAD = 0.15
CONTEXT_TOKENS = 16384


def text() -> str:
    """Some 700 kB of English: the language reference that every Python carries."""
    topics = pydoc_data.topics.topics
    return "\n\n".join(topics[name] for name in sorted(topics))


def make_model(folder: Path) -> None:
    """Writes model and tokenizer; a folder that has them is left as it is."""
    if (folder / "model.safetensors").exists():
        return
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<pad>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text()], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[0], eos_token=special[1], pad_token=special[2]
    )
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
    fast.save_pretrained(folder)
    disable_progress_bar()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=768, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=12,
        num_key_value_heads=4, head_dim=64, max_position_embeddings=CONTEXT_TOKENS, bos_token_id=0, eos_token_id=1,
        pad_token_id=2, tie_word_embeddings=False, initializer_range=WEIGHT_SPREAD,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
