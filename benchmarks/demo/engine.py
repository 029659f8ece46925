"""One engine process of the demo: answers questions one after another and writes the answers and their times.

    python -m benchmarks.demo.engine JOB.json RESULT.json

Job: model, kvtier (settings), and `questions`: a list of {name, tokens, shared (whether the tier may be used)}. A
question with `follows` continues the conversation of an earlier one: its tokens, its answer, then these.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.systems import kvtier_transfer

ANSWER_TOKENS = 24
WARM_UP_TOKENS = 100  # less than a chunk, so that nothing of it is stored


def start(job: dict[str, Any]) -> Any:
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
        VLLM_LOGGING_LEVEL="ERROR",
        VLLM_CPU_KVCACHE_SPACE="1",
        TOKENIZERS_PARALLELISM="false",
        VLLM_CPU_NUM_OF_RESERVED_CPU="1",  # as without a connector: with one, vLLM computes on a core less
        VLLM_USE_FLASHINFER_SAMPLER="0",  # it would be compiled first, with a CUDA toolkit that may not be there
    )
    from vllm import LLM
    from vllm.config import KVTransferConfig
    from vllm.platforms import current_platform

    # On a GPU: a KV cache of a fixed size, so that the tier's staging has room; vLLM picks Triton's attention there,
    # which takes float32. On the CPU the environment gives the size.
    memory = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.5} if current_platform.is_cuda() else {}
    return LLM(
        model=job["model"],
        dtype="float32",
        enforce_eager=True,
        max_model_len=16384,
        block_size=32,
        seed=0,
        max_num_batched_tokens=2048,
        max_num_seqs=4,
        disable_log_stats=False,
        enable_prefix_caching=False,  # so that what is reused came from the tier
        kv_transfer_config=KVTransferConfig(**kvtier_transfer(job["kvtier"])),
        **memory,
    )


def ask(llm: Any, name: str, tokens: list[int], shared: bool) -> dict[str, Any]:
    """Run one request alone; return its answer, the tokens that were hits, and the time to the first token."""
    from vllm import SamplingParams

    switches = {"kv_transfer_params": {"kvtier_load": shared, "kvtier_save": shared}}
    params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0.0, ignore_eos=True, extra_args=switches)
    engine = llm.llm_engine
    started = time.perf_counter()
    first_s = 0.0
    final: Any = None
    engine.add_request(name, {"prompt_token_ids": tokens}, params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            first_s = first_s or time.perf_counter() - started
            final = output
    return {
        "name": name,
        "tokens": len(tokens),
        "hit_tokens": final.num_cached_tokens or 0,
        "ttft_s": first_s,
        "answer": list(final.outputs[0].token_ids),
    }


def main(job_path: Path, result_path: Path) -> None:
    job = json.loads(job_path.read_text())
    llm = start(job)
    ask(llm, "warm-up", list(range(10, 10 + WARM_UP_TOKENS)), shared=False)
    conversations: dict[str, list[int]] = {}
    results = []
    for question in job["questions"]:
        tokens = conversations.get(question.get("follows"), []) + question["tokens"]
        results.append(ask(llm, question["name"], tokens, question["shared"]))
        conversations[question["name"]] = tokens + results[-1]["answer"]
    llm.llm_engine.engine_core.shutdown()
    result_path.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
