"""Greedy answers of real vLLM about documents whose KV comes back through a codec, beside those without a tier.

    python -m benchmarks.answers --model FOLDER [--table FILE] [--presets raw,int8,tc4,tc3,k4v4] [--out RESULT.json]

Documents are prose and code that this machine holds, QUESTIONS are asked about each. An engine for each preset stores
all documents, empties its own prefix cache, and answers ANSWER_TOKENS tokens, whatever the end mark; the first engine
also answers without the tier, and once more with the documents' KV rounded to bf16, the control. Runs on a CPU, in
float32. --table is what `kvtier calibrate` made, for tc4 and tc3.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import report
from benchmarks.gpu.setup import TINY_ENVIRONMENT
from benchmarks.gpu.systems import environment_of
from benchmarks.processes import EngineProcess
from kvtier.codecs.transform import texts
from kvtier.codecs.transform.model_statistics import CalibratedModel, default_rows
from kvtier.codecs.transform.table import PRESET_BITS

QUESTIONS = ("Explain in detail what the text above is about.", "List the names and terms that the text above defines.")
KINDS = {"prose": 5, "code": 5}  # documents of each kind
DOCUMENT_TOKENS, CHUNK_TOKENS, ANSWER_TOKENS = 1_100, 256, 64
STORED_TOKENS = DOCUMENT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 32,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 2_048,
    "max_model_len": 2_048,
    "enforce_eager": True,
    "gpu_memory_utilization": 0.1,
    "disable_hybrid_kv_cache_manager": True,
}
TIER: dict[str, Any] = {
    "chunk_tokens": CHUNK_TOKENS,
    "min_load_tokens": CHUNK_TOKENS,
    "segment_bytes": "64MiB",
    "capacity_bytes": "4GiB",
    "host": {"arena_bytes": "64MiB"},
}

COLUMNS = ("preset", "equal answers", "tokens until a difference, mean", "median")


def prompts_of(folder: Path, n_calibration: int) -> list[list[int]]:
    """Return the tokens of the prompts: of each document, all questions. None shares text with `kvtier calibrate`'s.

    n_calibration: its rows of each kind.
    """
    from transformers import AutoTokenizer  # takes seconds

    tokenizer = AutoTokenizer.from_pretrained(folder)
    calibration = default_rows(CalibratedModel(torch.nn.Module(), tokenizer), n_calibration)
    seen = {tuple(row[i : i + texts.GRAM]) for row in calibration for i in range(len(row) - texts.GRAM + 1)}
    found = []
    for kind, count in KINDS.items():
        rows = texts.rows_of(
            texts.texts_of(kind, str),
            lambda text: tokenizer(text, add_special_tokens=False).input_ids,
            count,
            DOCUMENT_TOKENS,
            seen,
        )
        for row in rows:
            for question in QUESTIONS:
                text = f"{tokenizer.decode(row)}\n\n{question}"
                if tokenizer.chat_template:
                    message = {"role": "user", "content": text}
                    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
                else:
                    text = f"{tokenizer.bos_token or ''}{text}\n"
                found.append(tokenizer(text, add_special_tokens=False).input_ids)
    return found


def compared(own: Sequence[dict[str, Any]], loaded: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Compare answers token by token. Raise SystemExit where a prompt had no hit."""
    if not all(one["hit_tokens"] for one in loaded):
        raise SystemExit(f"prompts without a hit: {[one['hit_tokens'] for one in loaded]} tokens")
    agreed = []
    for expected, got in zip(own, loaded, strict=True):
        pairs = zip(expected["answer"], got["answer"], strict=True)
        agreed.append(next((place for place, (a, b) in enumerate(pairs) if a != b), ANSWER_TOKENS))
    ordered = sorted(agreed)
    return {
        "answers": len(agreed),
        "equal": sum(n == ANSWER_TOKENS for n in agreed),
        "tokens_until_difference": agreed,
        "mean_tokens": sum(agreed) / len(agreed),
        "median_tokens": ordered[len(ordered) // 2],
        "hit_tokens": [one["hit_tokens"] for one in loaded],
    }


def table_rows(presets: dict[str, Any]) -> list[list[str]]:
    return [
        [
            f"`{preset}`",
            f"{one['equal']} of {one['answers']}",
            f"{one['mean_tokens']:.0f}",
            f"{one['median_tokens']:.0f}",
        ]
        for preset, one in presets.items()
    ]


def run_engine(preset: str, options: argparse.Namespace, prompts: list[list[int]], is_first: bool) -> dict[str, Any]:
    """Return the answers with a preset as "loaded"; of the first engine also "own" and "bf16"."""
    steps: list[list[Any]] = [["answer_documents", prompts, len(QUESTIONS), ANSWER_TOKENS, is_first]]
    if is_first:
        steps.append(["answer_in_bf16", prompts, STORED_TOKENS, ANSWER_TOKENS])
    extra = TIER | {"codec": preset}
    if preset in PRESET_BITS:
        extra["codec_table"] = str(options.table.resolve())
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        job = {
            "model": str(options.model.resolve()),
            "vocabulary": 0,
            "system": "kvtier",
            "folder": folder,
            "extra": extra,
            "llm": ENGINE,
            "environment": environment_of("kvtier", Path(folder)) | TINY_ENVIRONMENT,
            "steps": steps,
        }
        engine = EngineProcess(f"answers-{preset}", job, options.logs, options.timeout)
        found = engine.results(options.timeout)
        return {**found["answer_documents"], "bf16": found.get("answer_in_bf16")}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.answers", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of a checkpoint with a chat template")
    parser.add_argument("--table", type=Path, help="table of this model, for tc4 and tc3")
    parser.add_argument("--calibration", type=int, default=4, help="rows of each kind that the table was made with")
    parser.add_argument("--presets", default="raw,int8,tc4,tc3,k4v4")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where the tier stores")
    parser.add_argument("--logs", type=Path, default=Path("/tmp/bench/logs"))
    parser.add_argument("--timeout", type=float, default=3_600, help="seconds for one engine")
    parser.add_argument("--out", type=Path, help="result file; by default nothing is written")
    options = parser.parse_args()
    prompts = prompts_of(options.model, options.calibration)
    own: list[dict[str, Any]] = []
    presets: dict[str, Any] = {}
    for preset in options.presets.split(","):
        answers = run_engine(preset, options, prompts, not own)
        if not own:
            own = answers["own"]
            presets["bf16"] = compared(own, answers["bf16"])
        presets[preset] = compared(own, answers["loaded"])
        print(preset, json.dumps(presets[preset]), flush=True)
    report.table(COLUMNS, table_rows(presets))
    if options.out:
        content = {
            "model": options.model.resolve().name,
            "documents": sum(KINDS.values()),
            "prompt_tokens": [len(prompt) for prompt in prompts],
            "answer_tokens": ANSWER_TOKENS,
            "presets": presets,
        }
        report.write(options.out, "do greedy answers about stored documents stay equal", content)


if __name__ == "__main__":
    main()
