"""Test of bursts, aborts, preemptions and evictions on GPUs while stored files are damaged: is any byte or token wrong?

    python -m benchmarks.gpu.chaos --folder /dev/shm/kv --out OUT/chaos.json [--model mla] [--tp 2]

One engine gets bursts of 1 to 32 requests, up to 95 in flight, on a pool of prompts that fits neither its KV cache nor
the tier. Some requests are aborted, some do not save. At the same time a thread flips bits, zeroes pages, and
truncates and deletes segments. Blocks must be bit-equal to what was saved, and no request may fail. Answers may differ
from those of the same engine without the tier only at a token whose lead over the second best one moved by no more than
between two passes without the tier (load_mix.compared).
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.gpu.engine import NO_TIER, MeasuredEngine, grown, parameters
from benchmarks.gpu.load_mix import EXCUSED_MAX, compared
from benchmarks.gpu.models import prompt
from benchmarks.gpu.setup import EngineSetup, parser
from benchmarks.gpu.systems import OWN_PROCESS
from benchmarks.gpu.watch import compare

SHAPE = {"pool": 48, "families": 5, "shared": 4096, "own": 3000}  # prompts, shared beginnings, tokens of both parts
TINY_SHAPE = {"pool": 24, "families": 5, "shared": 256, "own": 300}
# In float32 the order of sums decides few tokens. The KV cache has room for 41,600 tokens: about ten prompts.
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 16384,
    "gpu_memory_utilization": 0.5,
    "max_num_seqs": 64,
    "num_gpu_blocks_override": 2600,
}
TIER: dict[str, Any] = {
    "capacity_bytes": "3GiB",
    "segment_bytes": "64MiB",
    "host": {"arena_bytes": "256MiB"},
    "min_load_tokens": 256,
}
# vLLM's MLA attention takes only 16-bit types. A token's KV has a fourteenth of the bytes, so the tier gets less room.
MLA_ENGINE = {"dtype": "float16", "block_size": 64, "num_gpu_blocks_override": 650}
MLA_TIER: dict[str, Any] = {"capacity_bytes": "256MiB", "segment_bytes": "8MiB", "host": {"arena_bytes": "32MiB"}}
TINY_BLOCKS = 70
TINY_LIMITS: dict[str, Any] = {"capacity_bytes": "8MiB", "segment_bytes": "1MiB", "host": {"arena_bytes": "2MiB"}}
SECONDS, SEED = 50.0, 7
FULL = 64  # requests in flight from which on no burst begins
BURSTS, ANSWERS = (1, 1, 4, 16, 32), (1, 4, 16, 192)  # requests; tokens of an answer
ABORTED = 0.15  # share of the requests, each within 12 steps
DAMAGE_S = 0.4  # interval of damage, seconds
DAMAGE = {"flip the newest": 4, "flip": 6, "zero": 2, "truncate": 1, "delete": 1}  # kind -> weight
PLACES, PAGE = 12, 4096  # places of one file that are damaged at once; bytes


def pool_prompt(number: int, shape: dict[str, int], vocabulary: int) -> list[int]:
    """Return a prompt of the pool: all, half or nothing of a shared beginning, and an end of its own."""
    draw = random.Random(f"chaos {number}")
    shared = prompt(f"chaos-shared-{number % shape['families']}", shape["shared"], vocabulary)
    n_shared = draw.choice([shape["shared"], shape["shared"], shape["shared"] // 2, 0])
    n_own = draw.randrange(shape["own"] // 8, shape["own"])
    return shared[:n_shared] + prompt(f"chaos-own-{number}", n_own, vocabulary)


class Damager(threading.Thread):
    """Damages one segment below `folder` every DAMAGE_S until `stop`. done: number of damages, by kind."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.done: Counter[str] = Counter()
        self._folder, self._over = folder, threading.Event()
        self._draw = random.Random(SEED)

    def stop(self) -> None:
        """Raise RuntimeError if the thread has ended before."""
        if not self.is_alive():
            raise RuntimeError("the thread that damages segments has ended; see its traceback in the log")
        self._over.set()
        self.join()

    def run(self) -> None:
        while not self._over.wait(DAMAGE_S):
            kind = self._draw.choices(list(DAMAGE), list(DAMAGE.values()))[0]
            try:
                self.done[kind] += self._damage(kind)
            except (FileNotFoundError, IndexError, ValueError):  # evicted or truncated since the listing
                continue

    def _damage(self, kind: str) -> bool:
        files = [path for path in sorted(self._folder.rglob("*.kvseg")) if path.stat().st_size > 2 * PAGE]
        if not files:
            return False
        newest = kind == "flip the newest"
        path = max(files, key=lambda each: each.stat().st_mtime) if newest else self._draw.choice(files)
        if kind == "delete":
            path.unlink()
        elif kind == "truncate":
            os.truncate(path, self._draw.randrange(path.stat().st_size))
        else:
            with path.open("r+b", buffering=0) as file:
                for place in self._draw.sample(range(path.stat().st_size - PAGE), PLACES):
                    file.seek(place)
                    bad = bytes(PAGE) if kind == "zero" else bytes([file.read(1)[0] ^ 1 << self._draw.randrange(8)])
                    file.seek(place)
                    file.write(bad)
        return True


class Bursts:
    """Requests in flight, and the answers of those that ended."""

    def __init__(self, engine: MeasuredEngine, shape: dict[str, int]) -> None:
        self.answers: list[dict[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self.most = 0
        self._engine, self._shape = engine, shape
        self._draw = random.Random(SEED)
        self._live: dict[str, int] = {}  # request -> prompt
        self._aborts: dict[str, int] = {}  # request -> steps until it is aborted
        self._next_s = 0.0

    def add(self) -> None:
        """Add a burst if it is time for one."""
        if len(self._live) >= FULL or time.monotonic() < self._next_s:
            return
        for _ in range(self._draw.choice(BURSTS)):
            self.counts["requests"] += 1
            name, number = f"c{self.counts['requests']}", self._draw.randrange(self._shape["pool"])
            switches = self._draw.choice([None, None, None, {"kvtier_save": False}])
            asked = {"prompt_token_ids": pool_prompt(number, self._shape, self._engine.vocabulary)}
            self._engine.llm.llm_engine.add_request(
                name, asked, parameters(self._draw.choice(ANSWERS), switches, n_best=2)
            )
            self._live[name] = number
            if self._draw.random() < ABORTED:
                self._aborts[name] = self._draw.randrange(1, 12)
        self._next_s = time.monotonic() + self._draw.choice([0.0, 0.05, 0.3, 1.0])
        self.most = max(self.most, len(self._live))

    def step(self) -> bool:
        """Run one step of the engine. Return False if nothing is in flight."""
        if not self._live:
            return False
        for output in self._engine.llm.llm_engine.step():
            name = output.request_id.split("-")[0]
            if output.finished and name in self._live:
                self._aborts.pop(name, None)
                self.counts["failed"] += str(output.outputs[0].finish_reason) != "length"
                self.answers.append({"prompt": self._live.pop(name), **self._engine.answer_of(output, leads=True)})
        self._aborts = {name: left - 1 for name, left in self._aborts.items()}
        due = [name for name, left in self._aborts.items() if left <= 0]
        self._engine.llm.llm_engine.abort_request(due)
        for name in due:
            del self._aborts[name], self._live[name]
        self.counts["aborted"] += len(due)
        return True


def chaos(engine: MeasuredEngine, shape: dict[str, int], seconds: float) -> dict[str, Any]:
    """Run bursts for so long, with damage, and to the end of all requests."""
    bursts, damager, before = Bursts(engine, shape), Damager(engine.data), engine.counters()
    preempted = preemptions(engine)
    ends = time.monotonic() + seconds
    damager.start()
    while bursts.step() or time.monotonic() < ends:
        if time.monotonic() < ends:
            bursts.add()
    damager.stop()
    engine.settle()
    found = {"answers": bursts.answers, "most": bursts.most, "damage": damager.done, **bursts.counts}
    return found | {"preempted": preemptions(engine) - preempted, "counted": grown(before, engine.counters())}


def preemptions(engine: MeasuredEngine) -> int:
    """Return how many requests vLLM has preempted since its start."""
    return sum(metric.value for metric in engine.llm.get_metrics() if metric.name == "vllm:num_preemptions")


def answers_alone(engine: MeasuredEngine, shape: dict[str, int]) -> list[list[dict[str, Any]]]:
    """Return answers to the whole pool without the tier, twice, the second time asked in the other order."""
    found = []
    prompts = [pool_prompt(number, shape, engine.vocabulary) for number in range(shape["pool"])]
    for step in (1, -1):
        engine.forget()
        found.append(engine.ask(prompts[::step], max(ANSWERS), NO_TIER, leads=True)[::step])
    return found


def judge(result: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a run, and under `faults` all that is wrong with it."""
    found, (alone, again) = dict(result["chaos"]), result["answers_alone"]
    answers = found.pop("answers")
    expected = [
        {name: alone[one["prompt"]][name][: len(one["answer"])] for name in ("answer", "leads")} | {"hit_tokens": 0}
        for one in answers
    ]
    control, mine = compared([again], [alone]), compared([answers], [expected])
    width, leads = control["largest_shift"], [lead for one in alone for lead in one["leads"]]
    saved, loaded = ([seen for worker in result["watch"] for seen in worker[name]] for name in ("saved", "loaded"))
    found |= {
        "blocks": compare(saved, loaded),
        "failed_loads": sum(worker["failed_loads"] for worker in result["watch"]),
        "answers": len(answers),
        "equal_answers": mine["same_shared_answers"],
        "within_tie": sum(row["moved"] <= width for row in mine["differing"]),
        "tie_width": width,
        "tokens_within_tie": sum(lead <= width for lead in leads) / len(leads),
    }
    wrong = len(answers) - found["equal_answers"] - found["within_tie"]
    blocks, counted = found["blocks"], found["counted"]
    faults = [
        (not blocks["equal"], "no loaded block was found to be equal"),
        (blocks["wrong"] or blocks["unknown"], f"loaded blocks: {blocks}"),
        (found.get("failed"), f"{found.get('failed')} requests failed"),
        (wrong, f"{wrong} answers differ by more than the control"),
        (
            found["tokens_within_tie"] > EXCUSED_MAX,
            f"answers show nothing: the control excuses too many tokens ({width})",
        ),
        (not found.get("aborted"), "nothing was aborted"),
        (not found["preempted"], "nothing was preempted"),
        (not counted.get("checksum_failures"), "no damage was met"),
        (not counted.get("evicted_bytes"), "nothing was evicted"),
    ]
    return found | {"faults": [text for is_wrong, text in faults if is_wrong]}


def main() -> int:
    made = parser("gpu.chaos", __doc__, 300.0)
    made.add_argument("--model", choices=("small", "mla"), default="small", help="mla: a latent instead of heads")
    made.add_argument("--tp", type=int, default=1, help="tensor parallel size")
    made.add_argument("--seconds", type=float, default=SECONDS, help="of bursts")
    options = made.parse_args()
    llm, extra = (ENGINE | MLA_ENGINE, TIER | MLA_TIER) if options.model == "mla" else (ENGINE, TIER)
    setup = EngineSetup.of(options, options.model, llm, extra)
    setup.llm["tensor_parallel_size"] = options.tp
    setup.environment.update(OWN_PROCESS)
    if options.tiny:
        setup.llm["num_gpu_blocks_override"] = TINY_BLOCKS
        setup.extra.update(TINY_LIMITS)
    setup.clear()
    shape = TINY_SHAPE if options.tiny else SHAPE
    steps = [["warm_up", shape["shared"]], ["chaos", shape, options.seconds], ["answers_alone", shape]]
    result = judge(setup.run_watched("chaos", steps))
    setup.clear()
    bad = result["faults"]
    found = {"good": not bad, "model": setup.kind, "tp": options.tp, **result}
    report.write(options.out, "damage, aborts and preemptions under load", found)
    for name in sorted(result.keys() - {"counted", "faults"}):
        print(f"{name:18}", result[name])
    print("\n".join(["NOT GOOD", *bad]) if bad else "GOOD")
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
