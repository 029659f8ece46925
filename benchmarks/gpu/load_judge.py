"""Judgement of load_mix.py's three processes.

Blocks must be bit-equal. Answers need not be: 32 requests at once are batched differently with a tier than without one,
and so are their sums. The control is the engine without the tier, asked the same in another order. A lead is by how
much a token's log probability exceeds the second best one's (nats). The largest change of a lead in the control is the
width of a tie; an answer with the tier may differ where its lead changed no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.gpu.watch import compare

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
