"""Test of 32 requests at once on a full tier that evicts, half of them on one prefix: is every byte right, and is
the space that the tier takes bounded?

    python -m benchmarks.gpu.load_mix --folder /dev/shm/kv --out OUT/load_mix.json

Process A stores more prefixes than fit. Process B first gets only requests on the shared prefix (how often is it
read?), then rounds of mixed hits, misses and saves. A third process without the tier answers the same: in float32,
where the order of sums does not decide a token. A timeout ends a process that hangs, with the stacks in its log.

Blocks must be bit-equal. Answers need not be: 32 requests at once are batched differently with a tier than without one,
and so are their sums. The control is the engine without the tier, asked the same in another order. A lead is by how
much a token's log probability exceeds the second best one's (nats). The largest change of a lead in the control is the
width of a tie; an answer with the tier may differ where its lead changed no more.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks import report
from benchmarks.gpu import inside
from benchmarks.gpu.engine import MeasuredEngine, grown
from benchmarks.gpu.models import prompt
from benchmarks.gpu.sampler import Sampler
from benchmarks.gpu.setup import EngineSetup, parser
from benchmarks.gpu.systems import stored_bytes
from benchmarks.gpu.watch import compare

SHAPE = {"requests": 32, "shared": 8192, "other": 2048, "others": 14, "tail": 40}
TINY_SHAPE = {"requests": 8, "shared": 512, "other": 256, "others": 6, "tail": 10}
ROUNDS, ANSWER_TOKENS = 4, 16
# A token takes 64 KiB in float32: the shared prefix 512 MiB, another one 128 MiB, and 15 of them 2.3 GiB. With
# min_load_tokens at its default kvtier finds that so small a model computes faster than it loads.
TIER: dict[str, Any] = {
    "capacity_bytes": 1536 << 20,
    "segment_bytes": "128MiB",
    "touch_interval_s": 0.2,
    "host": {"arena_bytes": "512MiB"},
    "min_load_tokens": 256,
}
TINY_LIMITS: dict[str, Any] = {
    "capacity_bytes": 6 << 20,
    "segment_bytes": "512KiB",
    "touch_interval_s": 0.2,
    "host": {"arena_bytes": "2MiB"},
}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 16384,
    "gpu_memory_utilization": 0.4,
    "max_num_seqs": 64,
}

COPIES_MAX = 1.2  # reads of the shared prefix for all requests on it, in multiples of its bytes
EXCUSED_MAX = 0.1  # share of all tokens: a control that lets more pass for ties would show nothing
# Memory of the host or the GPU that kvtier may take beside its arenas: the rings' buffers (128 MiB), the index's map,
# the notes of the watch, and what allocators keep.
SPARE_BYTES = 512 << 20

Part = list[dict[str, Any]]  # answers of MeasuredEngine.ask with leads


def parts(process: dict[str, Any]) -> list[Part]:
    """Return the answers to the shared prefix alone, then those of each round."""
    return [process["shared_prefix"]["answers"], *(each["answers"] for each in process["mixed_rounds"]["rounds"])]


def compared(mine: Sequence[Part], reference: Sequence[Part]) -> dict[str, Any]:
    """Compare two passes over the same requests.

    Up to the token where two answers part, their contexts are the same. largest_shift: the largest change of a lead;
    at a parting it is the sum of both leads, for one token was ahead and now the other one is. In `differing`, round
    0 is the shared prefix alone, and lead is the reference's.
    """
    differing, shifts = [], [0.0]
    for round_number, (ours, theirs) in enumerate(zip(mine, reference, strict=True)):
        for request, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            pairs = enumerate(zip(a["answer"], b["answer"], strict=True))
            parting = next((n for n, (x, y) in pairs if x != y), None)
            shifts += [abs(x - y) for x, y in zip(a["leads"][:parting], b["leads"][:parting], strict=True)]
            if parting is not None:
                lead = b["leads"][parting]
                shifts.append(a["leads"][parting] + lead)
                row = {"round": round_number, "request": request, "token": parting, "lead": lead}
                differing.append(row | {"moved": round(shifts[-1], 7), "hit_tokens": a["hit_tokens"]})
    n_shared, n_rounds = len(reference[0]), sum(map(len, reference[1:]))
    shared_differing = sum(row["round"] == 0 for row in differing)
    return {
        "same_answers": n_rounds - len(differing) + shared_differing,
        "answers": n_rounds,
        "same_shared_answers": n_shared - shared_differing,
        "shared_answers": n_shared,
        "differing": differing,
        "hit_tokens": sum(a["hit_tokens"] for part in mine[1:] for a in part),
        "largest_shift": round(max(shifts), 7),
    }


def judge(stored: dict[str, Any], loaded: dict[str, Any], bare: dict[str, Any], limits: dict[str, int]) -> Any:
    """Return the figures of a run from the results of its processes. limits: token_bytes; capacity_bytes."""
    saved = [seen for process in (stored, loaded) for worker in process["watch"] for seen in worker["saved"]]
    seen_loaded = [seen for worker in loaded["watch"] for seen in worker["loaded"]]
    mixed, shared, without = loaded["mixed_rounds"], loaded["shared_prefix"], bare["mixed_rounds"]
    shared_hits = max(answer["hit_tokens"] for answer in shared["answers"])
    control = compared(bare["other_order"], parts(bare))
    leads = [lead for part in parts(bare) for answer in part for lead in answer["leads"]]
    # The kernel's counter (rchar) counts all reads of the process, kvtier's counter only those of segment files.
    read_bytes = shared["counted"].get("file_read_bytes", shared["counted"]["rchar"])
    return compared(parts(loaded), parts(bare)) | {
        "control": {"other_order": control},
        "tie_width": control["largest_shift"],
        "tokens_within_tie": sum(lead <= control["largest_shift"] for lead in leads),
        "tokens": len(leads),
        "blocks": compare(saved, seen_loaded),
        "failed_loads": sum(worker["failed_loads"] for worker in loaded["watch"]),
        "shared_hit_tokens": shared_hits,
        "copies_read": read_bytes / (max(1, shared_hits) * limits["token_bytes"]),
        "most_on_disk": max(stored["store_mix"]["most_on_disk"], mixed["most_on_disk"]),
        "capacity_bytes": limits["capacity_bytes"],
        "more_memory": {kind: mixed["memory"][kind] - without["memory"][kind] for kind in mixed["memory"]},
        "arenas": mixed["arenas"],
        "round_s": [each["elapsed_s"] for each in mixed["rounds"]],
        "bare_round_s": [each["elapsed_s"] for each in without["rounds"]],
        "rounds_counted": [each["counted"] for each in mixed["rounds"]],
        "counted": mixed["counted"],
    }


def faults(result: dict[str, Any]) -> list[str]:
    """Return all that is wrong with a run. A process that hangs or dies gives no result (processes.EngineFailed)."""
    return [*_bytes_faults(result), *_bounds_faults(result), *_answer_faults(result)]


def _bytes_faults(result: dict[str, Any]) -> Iterator[str]:
    blocks, failed = result["blocks"], result["failed_loads"]
    if not blocks["equal"]:
        yield "no loaded block was found to be equal"
    if blocks["wrong"] or blocks["unknown"]:
        yield f"loaded blocks: {blocks['wrong']} differ from what was saved, {blocks['unknown']} were not seen saved"
    if failed:
        yield f"{failed} loads failed"


def _bounds_faults(result: dict[str, Any]) -> Iterator[str]:
    more, capacity = result["more_memory"], result["capacity_bytes"]
    if result["most_on_disk"] > capacity:
        yield f"{result['most_on_disk']} bytes on disk, of {capacity}"
    if result["copies_read"] > COPIES_MAX:
        yield f"the shared prefix was read {result['copies_read']:.2f} times"
    if more["mapped_max"] > capacity:
        yield f"mapped: {more['mapped_max'] >> 20} MiB of the file system, of {capacity >> 20} MiB that may be on it"
    for kind, bound in (("device_used", "device"), ("own_max", "host")):
        limit = result["arenas"][bound]
        if more[kind] > limit + SPARE_BYTES:
            yield f"{kind}: {more[kind] >> 20} MiB more than without the tier, whose arenas take {limit >> 20} MiB"
    # Without these the rounds show nothing of loads among evictions.
    if not all(counted.get("load_tokens") for counted in result["rounds_counted"]):
        yield "a round loaded nothing"
    if not result["counted"].get("evicted_bytes"):
        yield "the rounds evicted nothing"


def _answer_faults(result: dict[str, Any]) -> Iterator[str]:
    width = result["tie_width"]
    for row in result["differing"]:
        if row["moved"] > width:
            yield (
                f"round {row['round']}, request {row['request']}: its answer differs at token {row['token']}, whose "
                f"lead moved by {row['moved']:.2g}; without the tier by {width:.2g} at most"
            )
    if result["tokens_within_tie"] > EXCUSED_MAX * result["tokens"]:
        yield (
            f"answers show nothing: {result['tokens_within_tie']} of {result['tokens']} tokens lead by no more than "
            f"the control's {width:.2g}"
        )


def table_rows(found: dict[str, Any]) -> report.Table:
    """Return columns and rows, one row a measure."""
    controls = ", ".join(f"{one['same_answers']} of {one['answers']}" for one in found["control"].values())
    blocks = found["blocks"]
    return ["measure", "value"], [
        ["answers equal to an engine without the tier", f"{found['same_answers']} of {found['answers']}"],
        ["answers of that engine equal to its own, asked again (control)", controls],
        [
            "loaded blocks equal / not equal",
            f"{blocks['equal']:,} / {report.bold(blocks['wrong'] + blocks['unknown'])}",
        ],
        ["failed loads", report.bold(found["failed_loads"])],
    ]


# --- steps, in the engine's process ---


SAMPLE_S = 0.05
SEGMENTS = ".kvseg"
SHARED_PASSES = 12  # most attempts to store the shared prefix whole
ROOM_S = 0.25  # interval between attempts, seconds; eviction makes room in it

Prompts = list[list[int]]
Shape = dict[str, int]  # requests; shared, other: tokens of the prefixes; others: how many; tail: tokens behind them


class UsageWatch:
    """Maxima of what a root's segments take on disk and of this process's memory, sampled every SAMPLE_S.

    Memory is sampled apart, because segments on tmpfs that kvtier pins count as resident too.
    """

    def __init__(self, engine: MeasuredEngine) -> None:
        self._folder = engine.data
        self._maxima = {"disk": 0, "own": 0, "mapped": 0}
        self._sampler = Sampler(self._sample, SAMPLE_S)

    def close(self) -> dict[str, int]:
        self._sampler.close()
        return self._maxima

    def _sample(self) -> None:
        now = (stored_bytes(self._folder, SEGMENTS), *inside.resident())
        for name, value in zip(self._maxima, now, strict=True):
            self._maxima[name] = max(self._maxima[name], value)


def mix_prompts(round_number: int, shape: Shape, vocabulary: int) -> Prompts:
    """Return one round's requests: half on one prefix; the rest whole and partial hits of earlier ones, and new."""
    shared = prompt("mix-shared", shape["shared"], vocabulary)
    requests = []
    for number in range(shape["requests"]):
        own = f"mix-{round_number}-{number}"
        tail = prompt(own, shape["tail"] + number, vocabulary)
        old = prompt(f"mix-other-{(number // 2 + round_number) % shape['others']}", shape["other"], vocabulary)
        if number % 2 == 0:
            requests.append(shared + tail)
        elif (kind := number // 2 % 4) < 2:
            requests.append(old + tail)
        elif kind == 2:
            requests.append(old[: shape["other"] // 2] + tail)
        else:
            requests.append(prompt(f"{own}-new", shape["other"], vocabulary))
    return requests


def shared_prompts(shape: Shape, vocabulary: int) -> Prompts:
    """Return requests on the shared prefix that no round has."""
    shared = prompt("mix-shared", shape["shared"], vocabulary)
    return [shared + prompt(f"only-shared-{n}", shape["tail"] + n, vocabulary) for n in range(shape["requests"] // 2)]


def store_mix(engine: MeasuredEngine, shape: Shape) -> dict[str, Any]:
    """Store the prefixes that later rounds hit, the shared one last and whole.

    A full tier has no room for the whole prefix at once: skipped chunks are offered again, from vLLM's own cache.
    """
    watch = UsageWatch(engine)
    for number in range(shape["others"]):
        engine.ask([prompt(f"mix-other-{number}", shape["other"], engine.vocabulary)], 1)
        engine.settle()
    shared = prompt("mix-shared", shape["shared"], engine.vocabulary)
    stored, wanted, passes = 0, 1, 0
    while stored < wanted and passes < SHARED_PASSES:
        engine.ask([shared], 1, {"kvtier_load": False})
        engine.settle()
        time.sleep(ROOM_S)
        stored, wanted = engine.stored_chunks(shared)
        passes += 1
    return {"most_on_disk": watch.close()["disk"], "shared_chunks": [stored, wanted], "passes": passes}


def shared_prefix(engine: MeasuredEngine, shape: Shape, answer: int) -> dict[str, Any]:
    """Ask only requests on the shared prefix, all at once, in a process that has none of it."""
    before = engine.counters()
    answers = engine.ask(shared_prompts(shape, engine.vocabulary), answer, {"kvtier_save": False}, leads=True)
    counted = grown(before, engine.counters())
    engine.forget()
    return {"answers": answers, "counted": counted}


def mixed_rounds(engine: MeasuredEngine, shape: Shape, rounds: int, answer: int) -> dict[str, Any]:
    """Ask rounds of concurrent requests, with vLLM's own prefix cache emptied between them.

    Saves of one round continue while the next one loads. Answers come with their leads (MeasuredEngine.ask).
    """
    watch, before, answered = UsageWatch(engine), engine.counters(), []
    for number in range(rounds):
        started, counted = time.perf_counter(), engine.counters()
        answers = engine.ask(mix_prompts(number, shape, engine.vocabulary), answer, leads=True)
        elapsed_s = time.perf_counter() - started
        answered.append({"answers": answers, "elapsed_s": elapsed_s, "counted": grown(counted, engine.counters())})
        engine.forget()
    engine.settle()
    maxima = watch.close()
    device_used = sum(engine.llm.collective_rpc(inside.device_used))
    return {
        "rounds": answered,
        "counted": grown(before, engine.counters()),
        "most_on_disk": maxima["disk"],
        "memory": {"device_used": device_used, "own_max": maxima["own"], "mapped_max": maxima["mapped"]},
        "arenas": engine.llm.collective_rpc(inside.arenas)[0],
    }


def other_order(engine: MeasuredEngine, shape: Shape, answer: int, rounds: int) -> list[list[dict[str, Any]]]:
    """Ask the shared prefix alone and each round again, the last request first: batched and so summed differently."""
    answered = []
    mixed = [mix_prompts(number, shape, engine.vocabulary) for number in range(rounds)]
    for prompts in (shared_prompts(shape, engine.vocabulary), *mixed):
        answered.append(engine.ask(prompts[::-1], answer, leads=True)[::-1])
        engine.forget()
    return answered


def main() -> int:
    options = parser("gpu.load_mix", __doc__, 100.0).parse_args()
    shape = TINY_SHAPE if options.tiny else SHAPE
    setup = EngineSetup.of(options, "small", ENGINE, TIER)
    setup.extra.update(TINY_LIMITS if options.tiny else {})
    setup.clear()
    rounds = [["shared_prefix", shape, ANSWER_TOKENS], ["mixed_rounds", shape, ROUNDS, ANSWER_TOKENS]]
    stored = setup.run_watched("load-store", [["warm_up", shape["other"]], ["store_mix", shape]])
    loaded = setup.run_watched("load-mix", rounds)
    bare = setup.run("load-bare", "none", [*rounds, ["other_order", shape, ANSWER_TOKENS, ROUNDS]])
    setup.clear()
    limits = {"token_bytes": setup.token_bytes, "capacity_bytes": setup.extra["capacity_bytes"]}
    result = judge(stored, loaded, bare, limits)
    bad = faults(result)
    content = {"good": not bad, "faults": bad, "shape": shape, "rounds": ROUNDS, "result": result}
    report.write(options.out, "concurrent mixed hits at capacity", content)
    report.table(*table_rows(result))
    print("\n".join(["NOT GOOD", *bad]) if bad else "GOOD")
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
