"""Runs real vLLM in this process with no connector but what the plugin supplies. Started as a script.

KVTIER_ROOT=DIR python root_engine.py MODEL OUT.json [JSON of a KVTransferConfig]
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
)

from vllm import LLM, SamplingParams

import kvtier

PROMPT = [number % 250 for number in range(300)]


def main(model: str, output: str, transfer: str | None = None) -> None:
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=4,
        block_size=32,
        seed=0,
        kv_transfer_config=None if transfer is None else json.loads(transfer),
    )
    parameters = SamplingParams(max_tokens=4, temperature=0, detokenize=False, ignore_eos=True)
    answer = llm.generate([{"prompt_token_ids": PROMPT}], parameters, use_tqdm=False)[0]
    config = llm.llm_engine.vllm_config.kv_transfer_config
    result = {
        "kvtier": kvtier.__file__,
        "compiler": shutil.which("c++") or shutil.which("g++") or shutil.which("cc") or shutil.which("gcc"),
        "cached": answer.num_cached_tokens or 0,
        "tokens": list(answer.outputs[0].token_ids),
        "connector": None if config is None else config.kv_connector,
        "extra": None if config is None else config.kv_connector_extra_config,
    }
    Path(output).write_text(json.dumps(result))
    llm.llm_engine.engine_core.shutdown()


main(*sys.argv[1:])
