"""What load_mix.py makes of its processes' results, and what of it is bad.

Blocks must be bit-equal. Answers need not be: 32 requests at once are batched otherwise with a tier than without one,
and so their sums. What an engine without the tier does to its own answers is the control, in two more passes: the same
requests in another order, and with vLLM's own prefix hits where the tier had its hits. The width of a tie is the most
that any lead moved in these; an answer with the tier may differ where its lead moved no further.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.answers import Part, compared, within
from benchmarks.gpu.watch import compare

COPIES_MAX = 1.2
"""Of the shared prefix, read for all requests on it."""
EXCUSED_MAX = 0.1
"""A control that lets more than this share of all tokens pass for ties would show nothing."""
SPARE_BYTES = 512 << 20
"""Beside kvtier's arenas, on the host and on the GPU: the rings' buffers (128 MiB), the index's map, what the watch
notes, and what allocators keep."""
CONTROLS = ("other_order", "own_hits")


def parts(process: dict[str, Any]) -> list[Part]:
    """The answers to the shared prefix alone, then those of each round."""
    return [process["shared_prefix"]["answers"], *(each["answers"] for each in process["mixed_rounds"]["rounds"])]


def judge(stored: dict[str, Any], loaded: dict[str, Any], bare: dict[str, Any], limits: dict[str, int]) -> Any:
    """stored, loaded, bare: results of the three processes. limits: shared_tokens; token_bytes; capacity_bytes."""
    saved = [seen for process in (stored, loaded) for worker in process["watch"] for seen in worker["saved"]]
    seen_loaded = [seen for worker in loaded["watch"] for seen in worker["loaded"]]
    rounds = loaded["mixed_rounds"]["rounds"]
    shared = loaded["shared_prefix"]
    shared_hits = [answer["hit_tokens"] for answer in shared["answers"]]
    prefix_bytes = max(1, max(shared_hits)) * limits["token_bytes"]  # what was there of it to be read
    # What the kernel counted holds all reads of the process; what kvtier counted, those of segment files alone.
    counted = shared["counted"]
    return (
        compared(parts(loaded), parts(bare))
        | _control(loaded, bare)
        | {
            "blocks": compare(saved, seen_loaded),
            "failed_loads": sum(w["failed_loads"] for w in loaded["watch"]),
            "shared_hit_tokens": shared_hits,
            "shared_tokens": limits["shared_tokens"],
            "prefix_bytes": prefix_bytes,
            "copies_read": counted.get("file_read_bytes", counted["rchar"]) / prefix_bytes,
            "copies_by_kernel": counted["rchar"] / prefix_bytes,
            "evicted_bytes": sum(_evicted(part) for part in (loaded["mixed_rounds"]["counted"], stored["counters"])),
            "most_on_disk": max(stored["store_mix"]["most_on_disk"], loaded["mixed_rounds"]["most_on_disk"]),
            "capacity_bytes": limits["capacity_bytes"],
            "memory": {
                "kvtier": loaded["mixed_rounds"]["memory"],
                "bare": bare["mixed_rounds"]["memory"],
                "arenas": loaded["mixed_rounds"]["arenas"],
            },
            "round_s": [r["elapsed_s"] for r in rounds],
            "rounds_counted": [r["counted"] for r in rounds],
            "bare_round_s": [r["elapsed_s"] for r in bare["mixed_rounds"]["rounds"]],
            "counted": loaded["mixed_rounds"]["counted"],
        }
    )


def _control(loaded: dict[str, Any], bare: dict[str, Any]) -> dict[str, Any]:
    """The engine without the tier against its own first pass, and what follows for a tie."""
    control = {name: compared(bare[name], parts(bare)) for name in CONTROLS}
    width = max(found["largest_shift"] for found in control.values())
    n_within, n_tokens = within(parts(bare), width)
    as_own_hits = compared(parts(loaded), bare["own_hits"])
    return {
        "control": control,
        "tie_width": width,
        "tokens_within_tie": n_within,
        "tokens": n_tokens,
        "same_answers_as_own_hits": as_own_hits["same_answers"],
    }


def _evicted(counted: dict[str, Any]) -> float:
    return float(counted.get("evicted_bytes", 0))


def faults(result: dict[str, Any]) -> list[str]:
    """What is not as it must be, in words; empty for a good run. A process that hangs or dies gives no result at all
    (processes.EngineFailed)."""
    return [*_bytes_faults(result), *_bounds_faults(result), *_answer_faults(result)]


def _bytes_faults(result: dict[str, Any]) -> Iterator[str]:
    blocks, failed = result["blocks"], result["failed_loads"]
    if not blocks["equal"]:
        yield "no loaded block was found to be equal"
    if blocks["wrong"] or blocks["unknown"]:
        yield f"loaded blocks: {blocks['wrong']} are not what was saved, of {blocks['unknown']} that is not known"
    if failed:
        yield f"{failed} loads failed"


def _bounds_faults(result: dict[str, Any]) -> Iterator[str]:
    if result["most_on_disk"] > result["capacity_bytes"]:
        yield f"{result['most_on_disk']} bytes on disk, of {result['capacity_bytes']}"
    if result["copies_read"] > COPIES_MAX:
        yield f"the shared prefix was read {result['copies_read']:.2f} times"
    mapped, capacity = more_memory(result["memory"], "mapped_max"), result["capacity_bytes"]
    if mapped > capacity:
        yield f"mapped: {mapped >> 20} MiB of the file system, of {capacity >> 20} MiB that may be on it"
    for kind, bound in (("device_used", "device"), ("own_max", "host")):
        more, limit = more_memory(result["memory"], kind), sum(of[bound] for of in result["memory"]["arenas"])
        if more > limit + SPARE_BYTES:
            yield f"{kind}: {more >> 20} MiB more than without the tier, whose arenas take {limit >> 20} MiB"
    # Or the rounds show nothing of loads among evictions.
    if not all(counted.get("load_tokens") for counted in result["rounds_counted"]):
        yield "a round loaded nothing"
    if not result["counted"].get("evicted_bytes"):
        yield "the rounds evicted nothing"


def more_memory(memory: dict[str, Any], kind: str) -> int:
    """Bytes that the engine with the tier took more than the one without."""
    with_tier, without = (sum(of[kind] for of in memory[who]) for who in ("kvtier", "bare"))
    return int(with_tier - without)


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
