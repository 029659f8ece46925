"""Model that understands text, for servers on a machine without access to a registry: a model's dimensions, weights
that vLLM makes up, and a tokenizer trained here.

    python -m benchmarks.versus.text_model FOLDER [8b]

Its vocabulary is the tokenizer's, which is smaller than the model's own, so that every token it answers is text.
" hi" is one token, as benchmarks/long_doc_qa.py assumes.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from benchmarks.demo.model import VOCABULARY, make_tokenizer
from benchmarks.gpu.models import DIMENSIONS, config_of
from benchmarks.serving.documents import python_text


def make(folder: Path, kind: str) -> None:
    """Write config.json and the tokenizer, unless the folder has them."""
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder, [python_text(), " hi" * 10_000])
    size = dataclasses.replace(DIMENSIONS[kind], vocabulary=VOCABULARY)
    (folder / "config.json").write_text(json.dumps(config_of(size), indent=1))


if __name__ == "__main__":
    make(Path(sys.argv[1]), *(sys.argv[2:] or ["8b"]))
