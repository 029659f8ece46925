"""Runs real vLLM with no connector but what the plugin allocators. Started as a script:

    KVTIER_ROOT=DIR python root_engine.py MODEL OUT.json [TRANSFER ...]

Runs an engine for each TRANSFER, one after another, each in a process that is forked once vLLM is imported. TRANSFER:
JSON of a KVTransferConfig; "": none is given. OUT.json gets a list of what each found; END is printed behind what each
printed.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

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

END = "-- the engine ended --"
PROMPT = [number % 250 for number in range(300)]


def ask(model: str, transfer: str) -> dict[str, Any]:
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=4,
        block_size=32,
        seed=0,
        kv_transfer_config=json.loads(transfer) if transfer else None,
    )
    parameters = SamplingParams(max_tokens=4, temperature=0, detokenize=False, ignore_eos=True)
    answer = llm.generate([{"prompt_token_ids": PROMPT}], parameters, use_tqdm=False)[0]
    config = llm.llm_engine.vllm_config.kv_transfer_config
    found = {
        "kvtier": kvtier.__file__,
        "compiler": shutil.which("c++") or shutil.which("g++") or shutil.which("cc") or shutil.which("gcc"),
        "cached": answer.num_cached_tokens or 0,
        "tokens": list(answer.outputs[0].token_ids),
        "connector": None if config is None else config.kv_connector,
        "extra": None if config is None else config.kv_connector_extra_config,
    }
    llm.llm_engine.engine_core.shutdown()
    return found


def main(model: str, output: str, *transfers: str) -> None:
    part, found = Path(f"{output}.part"), []
    for transfer in transfers:
        pid = os.fork()
        if pid == 0:
            part.write_text(json.dumps(ask(model, transfer)))
            sys.exit()
        _, status = os.waitpid(pid, 0)
        assert status == 0, f"status {status}"
        print(END, flush=True)
        found.append(json.loads(part.read_text()))
    Path(output).write_text(json.dumps(found))


main(*sys.argv[1:])
