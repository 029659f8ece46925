"""Test that a fresh process loads bit for bit what another saved, with the answers of vLLM's own prefix hit.

    python -m benchmarks.gpu.equality --folder /dev/shm/kv --out OUT/equality.json [--model mla] \\
        [--kv-cache-dtype turboquant_4bit_nc] [--skip-layers 0 3]
    python -m benchmarks.gpu.equality --across-tp --out OUT/two_gpus_equal.json      # two GPUs

Saved random weights in bf16, CUDA graphs on, 20 cases. Process A answers and saves, and asks each
case's question again from vLLM's own prefix cache. Processes B, one with prefix caching and one without, ask the
questions with only the tier. Digests of all blocks are taken on the engine's stream when they are saved and when a load
is answered (watch.py).

--across-tp: stored at TP=2 and loaded at TP=1, and the other way; blocks are compared head by head, and not answers:
another TP sums in another order.

A hit in the tier and one in vLLM's own cache end at the same token, so that what follows is computed in the same shapes
from the same bits: the answers must be equal token by token also in bf16, where a computation in other shapes may round
to another token. A case is a first prompt, the number of tokens of its answer, and a question that continues from its
first `shared` tokens, a whole number of chunks; `shared` may reach into the answer (a second turn).
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from benchmarks import report
from benchmarks.gpu.engine import NO_TIER, MeasuredEngine
from benchmarks.gpu.models import prompt
from benchmarks.gpu.setup import TINY_CHUNK, EngineSetup, parser
from benchmarks.gpu.watch import compare

COLUMNS = ("run", "cases", "blocks equal", "not equal", "failed loads")
ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "enforce_eager": False,
    "max_model_len": 16384,
    "gpu_memory_utilization": 0.3,
    "max_num_seqs": 64,
}
# With min_load_tokens at its default kvtier finds that so small a model computes faster than it loads.
TIER: dict[str, Any] = {
    "capacity_bytes": "32GiB",
    "host": {"arena_bytes": "2GiB"},
    "segment_bytes": "256MiB",
    "min_load_tokens": 256,
}


def judge(first: dict[str, Any], second: dict[str, Any], chunk: int) -> dict[str, Any]:
    """Compare one fresh process with the one that saved."""
    rows = []
    for case, asked, own in zip(cases(chunk), second["ask_cases"], first["answer_cases"]["own"], strict=True):
        rows.append(
            vars(case)
            | {
                "hit_tokens": asked["hit_tokens"],
                "is_hit": asked["hit_tokens"] == case.shared,
                "is_same_shape": own["hit_tokens"] == asked["hit_tokens"],
                "same_tokens": asked["answer"] == own["answer"],
            }
        )
    return {"cases": rows} | blocks_of(first, second)


def blocks_of(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """Compare the blocks that the second process loaded with what both saved."""
    saved = [seen for process in (first, second) for worker in process["watch"] for seen in worker["saved"]]
    loaded = [seen for worker in second["watch"] for seen in worker["loaded"]]
    failed = sum(worker["failed_loads"] for worker in second["watch"])
    return {"blocks": compare(saved, loaded), "chunks_loaded": len(loaded), "failed_loads": failed}


def are_blocks_equal(result: dict[str, Any]) -> bool:
    blocks = result["blocks"]
    return bool(blocks["equal"] and not (blocks["wrong"] or blocks["unknown"] or result["failed_loads"]))


def is_good(result: dict[str, Any]) -> bool:
    """Return whether every case was a hit, no block differs, and answers are equal where the shapes are."""
    rows = result["cases"]
    answers = all(row["same_tokens"] for row in rows if row["is_same_shape"])
    return answers and all(row["is_hit"] for row in rows) and are_blocks_equal(result)


def row_of(result: dict[str, Any]) -> list[str]:
    """Return cases that hit and answer alike, blocks that are equal and not equal, and failed loads."""
    blocks, cases_of = result["blocks"], result.get("cases", ())
    good = sum(case["is_hit"] and case["same_tokens"] for case in cases_of)
    wrong = [report.bold(count) for count in (blocks["wrong"] + blocks["unknown"], result["failed_loads"])]
    return [f"{good} of {len(cases_of)}" if cases_of else "", f"{blocks['equal']:,}", *wrong]


def across(setup: EngineSetup, chunk: int, stored_at: int, loaded_at: int) -> dict[str, Any]:
    """Store at one tensor-parallel size and load at another. Without CUDA graphs engines start in half the time."""
    setup.clear()
    llm = [{"tensor_parallel_size": size, "enforce_eager": True} for size in (stored_at, loaded_at)]
    steps: list[list[Any]] = [["warm_up", chunk], ["answer_cases", chunk]]
    first = setup.run_watched(f"tp{stored_at}-save-for-{loaded_at}", steps, llm[0])
    steps = [["ask_cases", chunk, first["answer_cases"]["histories"]]]
    second = setup.run_watched(f"tp{loaded_at}-load-of-{stored_at}", steps, llm[1])
    about = {"stored_at": stored_at, "loaded_at": loaded_at, "contexts": [first["contexts"], second["contexts"]]}
    hits = [asked["hit_tokens"] == case.shared for asked, case in zip(second["ask_cases"], cases(chunk), strict=True)]
    return about | {"hits": sum(hits)} | blocks_of(first, second)


def are_apart(ranks: list[list[int]]) -> bool:
    """Return whether each rank of an engine has a CUDA context on one GPU of its own.

    A stray context on GPU 0 is a classic fault of multi-GPU code.
    """
    gpus = [gpu for rank in ranks for gpu in rank]
    return all(len(rank) == 1 for rank in ranks) and len(set(gpus)) == len(gpus)


def run_across(options: argparse.Namespace, setup: EngineSetup, chunk: int) -> bool:
    found = [across(setup, chunk, 2, 1), across(setup, chunk, 1, 2)]
    good = all(map(are_blocks_equal, found)) and (
        options.tiny or all(are_apart(ranks) for result in found for ranks in result["contexts"])
    )
    report.write(options.out, "two GPUs: across tensor-parallel sizes", {"good": good, "equal": found})
    for result in found:
        print(result)
    return good


def run_cases(options: argparse.Namespace, setup: EngineSetup, chunk: int) -> bool:
    first = setup.run_watched("equality-save", [["warm_up", chunk], ["answer_cases", chunk]])
    results = {}
    for name, caching in (("prefix caching", True), ("no prefix caching", False)):
        steps = [["ask_cases", chunk, first["answer_cases"]["histories"]]]
        second = setup.run_watched(f"equality-load-{int(caching)}", steps, {"enable_prefix_caching": caching})
        results[name] = judge(first, second, chunk)
    good = all(map(is_good, results.values()))
    content = {"good": good, "model": setup.kind, "kv_cache_dtype": options.kv_cache_dtype, "results": results}
    report.write(options.out, "are loaded blocks and answers the ones that were saved", content)
    report.table(COLUMNS, [[name, *row_of(result)] for name, result in results.items()])
    return good


# --- steps, in the engine's process ---


ANSWER_TOKENS = 16

Answers = list[dict[str, Any]]


@dataclass(frozen=True)
class EqualityCase:
    """Numbers of tokens. n_first: of the first prompt; n_answer: of its answer; shared: kept by the question."""

    n_first: int
    n_answer: int
    shared: int
    n_more: int


def cases(chunk: int) -> list[EqualityCase]:
    """Return the cases: lengths at, beside and within multiples of a chunk; second turns; no hits."""
    # (chunks of the first prompt, tokens beside them, chunks shared, tokens of the question)
    sizes = ((1, 0, 1, 5), (1, 1, 1, 40), (2, -1, 1, chunk), (2, 0, 2, 1), (3, 0, 2, 100), (3, 17, 3, 33), (5, 0, 5, 2))
    sizes += ((6, 3, 4, 300), (8, 0, 8, 16), (9, chunk // 2, 9, 7), (12, 0, 6, 64), (16, 0, 16, 1), (17, 5, 17, 50))
    partial = [EqualityCase(n * chunk + beside, 1, shared * chunk, more) for n, beside, shared, more in sizes]
    # The last token of an answer has no KV yet: one more is generated than what is kept.
    turns = ((2, 30, 20), (4, 60, 9), (7, 11, 100))
    second = [EqualityCase(n * chunk - answer, answer + 1, n * chunk, more) for n, answer, more in turns]
    return partial + second + [EqualityCase(n, 1, 0, 30) for n in (1, chunk // 2, chunk - 1, 30)]


def question(number: int, case: EqualityCase, history: list[int], vocabulary: int) -> list[int]:
    """Return the question after `history`, the first prompt and its answer; it leaves the history at `shared`."""
    more = prompt(f"case-{number}-more", case.n_more, vocabulary)
    if case.shared < len(history) and more[0] == history[case.shared]:
        more[0] = more[0] + 1 if more[0] + 1 < vocabulary else more[0] - 1
    return history[: case.shared] + more


def answer_cases(engine: MeasuredEngine, chunk: int) -> dict[str, Any]:
    """Answer each first prompt and save; then ask its question from vLLM's own prefix cache, without the tier."""
    histories, own = [], []
    for number, case in enumerate(cases(chunk)):
        tokens = prompt(f"case-{number}", case.n_first, engine.vocabulary)
        history = tokens + engine.ask([tokens], case.n_answer, {"kvtier_load": False})[0]["answer"]
        engine.settle()
        own.append(engine.ask([question(number, case, history, engine.vocabulary)], ANSWER_TOKENS, NO_TIER)[0])
        histories.append(history)
        engine.forget()
    return {"histories": histories, "own": own}


def ask_cases(engine: MeasuredEngine, chunk: int, histories: list[list[int]]) -> Answers:
    """Ask each question with only the tier to take its prefix from."""
    answers = []
    for number, case in enumerate(cases(chunk)):
        tokens = question(number, case, histories[number], engine.vocabulary)
        answers += engine.ask([tokens], ANSWER_TOKENS, {"kvtier_save": False})
        if engine.llm.llm_engine.vllm_config.cache_config.enable_prefix_caching:
            engine.forget()
    engine.idle_steps()
    return answers


def main() -> int:
    made = parser("gpu.equality", __doc__, 150.0)
    made.add_argument("--across-tp", action="store_true", help="between tensor-parallel sizes 1 and 2")
    made.add_argument("--model", choices=("small", "mla"), default="small", help="mla: a latent instead of heads")
    made.add_argument("--kv-cache-dtype", default="auto", help="the engine's own, as vLLM takes it")
    made.add_argument("--skip-layers", nargs="*", default=[], help="that vLLM leaves out of --kv-cache-dtype")
    options = made.parse_args()
    chunk = TINY_CHUNK if options.tiny else 256
    setup = EngineSetup.of(options, options.model, dict(ENGINE), TIER)
    if options.kv_cache_dtype != "auto":
        setup.llm.update(kv_cache_dtype=options.kv_cache_dtype, kv_cache_dtype_skip_layers=options.skip_layers)
    setup.clear()
    good = (run_across if options.across_tp else run_cases)(options, setup, chunk)
    setup.clear()
    print("GOOD" if good else "NOT GOOD")
    return int(not good)


if __name__ == "__main__":
    raise SystemExit(main())
