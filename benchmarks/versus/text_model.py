"""A model that understands text, for servers on a machine that reaches no registry: a model's dimensions, weights that
vLLM makes up, and a tokenizer trained here.

    python -m benchmarks.versus.text_model FOLDER [--model 8b]

Its vocabulary is the tokenizer's, which is smaller than the model's own, so that every token it answers is text.
" hi" is one token, as benchmarks/long_doc_qa.py would have it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from benchmarks.demo.model import VOCABULARY, make_tokenizer, text
from benchmarks.gpu.models import DIMENSIONS, config_of


def make(folder: Path, kind: str) -> None:
    """A folder that has one is left as it is."""
    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder, [text(), " hi" * 10_000])
    size = dataclasses.replace(DIMENSIONS[kind], vocabulary=VOCABULARY)
    (folder / "config.json").write_text(json.dumps(config_of(size), indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.versus.text_model", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=sorted(DIMENSIONS), default="8b")
    options = parser.parse_args()
    make(options.folder, options.model)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
