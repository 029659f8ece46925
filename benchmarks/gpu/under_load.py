"""Many requests at once: rates at which bursts are saved and loaded, and of decoding beside them.

    python -m benchmarks.gpu.under_load --folder /dev/shm/kv --out OUT/under_load.json [--systems kvtier,native]

For each system one process computes and saves bursts (32 x 6,144 tokens, whose durable rate is compared with direct
writes over several files; 16 x 12,000, 64 x 4,000, one prefix of 8,000), and a fresh one loads each burst at once,
three times, then the 16 prompts beside 16 requests that decode. Rates are shares of what pinned copies, direct reads
and direct writes reach in the same run. With --host-gib N, each system has N GiB of host memory, and the process that
stored a burst loads it from there.

The engine's core has a process of its own, which is vLLM's default, so it begins with the first requests of a burst
while it receives the others. A token's time is the one at which the core emitted it, from vLLM's own metrics.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report
from benchmarks.gpu import inside
from benchmarks.gpu.ceilings import THREADS, copies, direct_writes, read_rate
from benchmarks.gpu.engine import NO_TIER, MeasuredEngine, grown, parameters
from benchmarks.gpu.models import prompt
from benchmarks.gpu.sampler import GrowthWatch
from benchmarks.gpu.setup import EngineSetup, Steps, add_timed_engine, parser
from benchmarks.gpu.systems import OWN_PROCESS, stored_bytes
from benchmarks.report import ms

FILES = 12  # files that the plain writes of a rank go to
SHAPES = {"save": (32, 6144), "long": (16, 12_000), "short": (64, 4000), "shared": (64, 8000)}
TINY_SHAPES = {"save": (4, 256), "long": (3, 512), "short": (6, 192), "shared": (6, 256)}
DECODERS, TAIL_TOKENS = 16, 60
REPETITIONS = 3  # of loads, in the fresh process
WARM_TOKENS = [100, 250, 1000, 4000, 11_700]  # of the prompts that the fresh process computes before it loads
WARM_TAIL = 224  # tokens that it computes behind each of these prompts


def ceilings(setup: EngineSetup, ranks: int, is_tiny: bool) -> dict[str, float]:
    """Return ceilings of all ranks together, bytes a second. Plain reads and writes use THREADS threads and FILES
    files a rank; the rates of copies are measured on one GPU and multiplied by the number of ranks."""
    n_bytes = (64 << 20) if is_tiny else (12 << 30)
    path, threads = setup.folder / "ceiling.bin", THREADS * ranks
    several = direct_writes(setup.folder, n_bytes, files=FILES * ranks, threads=threads)
    found = {"writes_1": direct_writes(setup.folder, n_bytes)["bytes_s"], "writes": several["bytes_s"]}
    direct_writes(setup.folder, n_bytes // 4, keep=True)
    found["reads"] = read_rate(path, threads, repeats=3)
    path.unlink()
    if not is_tiny:
        import torch

        found |= {name: ranks * rate for name, rate in copies().items()}
        torch.cuda.empty_cache()  # the engines want this memory
    return found


def read_once(folder: Path) -> None:
    """Read all files: the first read of tmpfs pages that another process wrote runs at a third of the later rate."""
    with ThreadPoolExecutor(FILES) as readers:
        list(readers.map(_read, (path for path in folder.rglob("*") if path.is_file())))


def _read(path: Path) -> None:
    buffer = bytearray(4 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def measure(
    setup: EngineSetup, system: str, kinds: list[str], shapes: dict[str, tuple[int, int]], is_tiny: bool
) -> dict[str, Any]:
    """Run the two processes of a system, with an empty folder before and after."""
    warm_up = ["warm_up", 256 if is_tiny else 2048]
    setup.clear(system)
    saves = [["save_burst", kind, *shapes[kind]] for kind in kinds]
    saves.append(["save_burst", "shared", 1, shapes["shared"][1]])
    stored = setup.run(f"store-{system}", system, [warm_up, *saves])
    read_once(setup.folder / system)
    loads = [["load_burst", kind, *shapes[kind], REPETITIONS] for kind in kinds]
    loads.append(["shared_burst", *shapes["shared"], TAIL_TOKENS])
    loads.append(["decode_beside", 2 if is_tiny else DECODERS, "long", *shapes["long"]])
    loaded = setup.run(
        f"load-{system}", system, [warm_up, ["compute_bursts", *WARM_TOKENS[: 1 if is_tiny else None]], *loads]
    )
    setup.clear(system)
    return {"stored": stored, "loaded": loaded}


def measure_warm(
    setup: EngineSetup, system: str, kinds: list[str], shapes: dict[str, tuple[int, int]], host_bytes: int
) -> dict[str, Any]:
    """Run one process that stores bursts and loads them from host memory, of which the system has `host_bytes`."""
    extra = {"kvtier": {"host": {"arena_bytes": host_bytes}}, "native": {"cpu_bytes_to_use": host_bytes}}
    lengths = [shapes["shared"][1]] if setup.kind == "tiny" else WARM_TOKENS
    steps: Steps = [["compute_bursts", *lengths]]
    for kind in kinds:
        steps += [["save_burst", kind, *shapes[kind]], ["load_burst", kind, *shapes[kind], REPETITIONS]]
    setup.clear(system)
    found = setup.run(f"warm-{system}", system, steps, extra[system])
    setup.clear(system)
    return found


def warm_rows_of(
    system: str, found: dict[str, Any], limits: dict[str, float], token_bytes: int
) -> list[tuple[str, ...]]:
    """Return the table's rows, one for each load. found: result of `measure_warm`. Columns as in `rows_of`."""
    rows = []
    for name, one in found.items():
        for load in [one, *one["again"]] if name.startswith("load_burst") else ():
            rate = load["hit_tokens"] * token_bytes / load["last_first_token_s"]
            share = f"{rate / limits.get('h2d_bytes_s', rate):.0%}"
            times = f"{ms(load['median_first_token_s'])} / {ms(load['last_first_token_s'])}"
            rows.append((system, f"{name}: median / last, ms", times, share))
    return rows


def rows_of(system: str, found: dict[str, Any], limits: dict[str, float], token_bytes: int) -> list[tuple[str, ...]]:
    """Return the rows of the table: system, measure, value, share of a ceiling."""
    burst, loaded = found["stored"]["save_burst"], found["loaded"]
    rate = min(limits["reads"], limits.get("h2d_bytes_s", limits["reads"]))
    rows: list[tuple[str, ...]] = []

    def add(measure: str, value: str, share: float | None = None) -> None:
        rows.append((system, measure, value, "" if share is None else f"{share:.0%}"))

    add("burst durable, GB/s", f"{burst['durable_bytes_s'] / 1e9:.1f}", burst["durable_bytes_s"] / limits["writes"])
    add("burst computed / durable after, s", f"{burst['computed_s']:.2f} / {burst['durable_after_s']:.2f}")
    add("burst: chunks stored", " of ".join(map(str, burst.get("stored_chunks", ()))))
    for name, one in loaded.items():
        if isinstance(one, dict) and "last_first_token_s" in one:
            times = [ms(one["median_first_token_s"]), ms(one["last_first_token_s"])]
            times += [ms(one["resident"]["last_first_token_s"])] if "resident" in one else []
            share = one["hit_tokens"] * token_bytes / one["last_first_token_s"] / rate
            add(f"{name}: median / last / last resident, ms", " / ".join(times), share)
            for more in one.get("again", ()):
                add(
                    f"{name}: again, ms",
                    ms(more["last_first_token_s"]),
                    share * one["last_first_token_s"] / more["last_first_token_s"],
                )
    decoders = loaded["decode_beside"]
    alone_s = decoders["alone"]["tokens_each_s"]
    for what, one in (("loads", decoders), ("resident", decoders["resident"])):
        pace = one["beside"]
        paces = f"{alone_s:.0f} / {pace['tokens_each_s']:.0f}, {ms(pace['longest_gaps_s'][-1])} ms"
        add(f"decoder alone / beside {what}, longest gap", paces, pace["tokens_each_s"] / alone_s)
    return rows


# --- steps, in the front end's process ---


DECODER_TOKENS = 256  # tokens of each decoder's prompt
ANSWER_TOKENS_MAX = 6000  # most tokens of each decoder's answer
ALONE_S = 2.0  # time of decoding before other requests come, seconds
SAVED, LOADED = {"kvtier_load": False}, {"kvtier_save": False}

Found = dict[str, Any]


def save_burst(engine: MeasuredEngine, kind: str, count: int, n_tokens: int) -> Found:
    """Compute `count` prompts at once with saving on and wait until what was taken is durable.

    `durable_bytes_s` is the mean over the time in which the durable bytes of any rank grew.
    """
    is_ours, before = engine.system == "kvtier", engine.counters()
    if is_ours:
        engine.llm.collective_rpc(inside.start_growth)
    else:
        watch = GrowthWatch(lambda: stored_bytes(engine.data))
    started = time.perf_counter()
    _ask_at_once(engine, kind, count, n_tokens, SAVED)
    computed_s = time.perf_counter() - started
    engine.settle()
    ranks = engine.llm.collective_rpc(inside.take_growth) if is_ours else [watch.close()]
    growth = [samples[1:] for samples in ranks if len(samples) > 1]
    grew_s = max(one[-1][0] for one in growth) - min(one[0][0] for one in growth) if growth else 0.0
    found: Found = {
        "computed_s": computed_s,
        "durable_after_s": max(samples[-1][0] for samples in ranks) - started,
        "saved_bytes": sum(samples[-1][1] - samples[0][1] for samples in ranks),
        "durable_bytes_s": sum(one[-1][1] - one[0][1] for one in growth) / grew_s if grew_s else 0.0,
        "counted": grown(before, engine.counters()),
    }
    if is_ours:
        prompts = [_tokens(engine, kind, number, n_tokens) for number in range(count)]
        found["stored_chunks"] = [sum(pair) for pair in zip(*map(engine.stored_chunks, prompts), strict=True)]
    engine.forget()
    return found


def compute_bursts(engine: MeasuredEngine, *lengths: int) -> Found:
    """Compute four prompts of each length at once, three times, then tails behind one and behind all four. CUDA and
    cuBLAS load code at the first step of a size, and attention loads other code for a tail behind a long beginning: the
    timed loads must not include that."""
    found: Found = {}
    for n_tokens in lengths:
        asked = [(f"warm-{turn}", 4, n_tokens) for turn in range(3)]
        asked += [("warm-0", 1, n_tokens + WARM_TAIL), ("warm-1", 4, n_tokens + WARM_TAIL)]
        found[str(n_tokens)] = [_ask_at_once(engine, *one, NO_TIER)["last_first_token_s"] for one in asked]
        engine.forget()
    return found


def load_burst(engine: MeasuredEngine, kind: str, count: int, n_tokens: int, repetitions: int) -> Found:
    """Ask `count` stored prompts at once, for one token each, and again while vLLM's own cache has them.

    `resident`: times of the second request of each prompt, which the engine itself needs. `again`: further loads, after
    the engine has dropped the prompts from its cache.
    """
    runs: list[Found] = []
    resident: Found = {}
    for _ in range(repetitions):
        before = engine.counters()
        runs.append(_ask_at_once(engine, kind, count, n_tokens, LOADED))
        runs[-1] |= {"tokens": count * n_tokens, "counted": grown(before, engine.counters())}
        resident = resident or _ask_at_once(engine, kind, count, n_tokens, NO_TIER)
        engine.forget()
    return runs[0] | {"resident": resident, "again": runs[1:]}


def shared_burst(engine: MeasuredEngine, count: int, n_tokens: int, tail: int) -> Found:
    """Ask `count` requests at once that have one stored prefix of `n_tokens` in common."""
    prefix = _tokens(engine, "shared", 0, n_tokens)
    prompts = [prefix + prompt(f"tail-{number}", tail, engine.vocabulary) for number in range(count)]
    before = engine.counters()
    found = _run(engine, {f"shared-{n}": tokens for n, tokens in enumerate(prompts)}, LOADED)
    found["counted"] = grown(before, engine.counters())
    engine.forget()
    return found


def decode_beside(engine: MeasuredEngine, decoders: int, kind: str, count: int, n_tokens: int) -> Found:
    """Measure `decoders` requests that decode, alone and while `count` stored prompts are asked for at once.

    `resident`: the same while vLLM's own cache has those prompts, which no tier can do better than.
    """
    llm = engine.llm.llm_engine
    times: dict[str, list[float]] = {f"decoder-{number}": [] for number in range(decoders)}
    for name in times:
        tokens = prompt(name, DECODER_TOKENS, engine.vocabulary)
        llm.add_request(name, {"prompt_token_ids": tokens}, parameters(ANSWER_TOKENS_MAX, NO_TIER))
    until = None
    while until is None or time.monotonic() < until:
        _note_tokens(llm.step(), times)
        if until is None and all(len(noted) > 3 for noted in times.values()):
            until = time.monotonic() + ALONE_S
    alone = _pace(times, until - ALONE_S, until)
    before = engine.counters()
    found = {"alone": alone} | _ask_at_once(engine, kind, count, n_tokens, LOADED, times)
    found["counted"] = grown(before, engine.counters())
    found["resident"] = _ask_at_once(engine, kind, count, n_tokens, NO_TIER, times)
    llm.abort_request(list(times))
    while llm.has_unfinished_requests():
        llm.step()
    engine.forget()
    return found


def _tokens(engine: MeasuredEngine, kind: str, number: int, n_tokens: int) -> list[int]:
    return prompt(f"{kind}-{number}", n_tokens, engine.vocabulary)


def _ask_at_once(
    engine: MeasuredEngine,
    kind: str,
    count: int,
    n_tokens: int,
    switches: dict[str, bool],
    others: dict[str, list[float]] | None = None,
) -> Found:
    wanted = {f"{kind}-{number}": _tokens(engine, kind, number, n_tokens) for number in range(count)}
    return _run(engine, wanted, switches, others)


def _run(
    engine: MeasuredEngine,
    wanted: dict[str, list[int]],
    switches: dict[str, bool],
    others: dict[str, list[float]] | None = None,
) -> Found:
    """Ask all prompts at once for one token each; return when the core emitted them, and the hit tokens.

    `added_s`: time to pass all requests to the core. `received_s`: time until this process had received all tokens.
    others: requests under way, whose pace until the last of the tokens is `beside`.
    """
    llm, first_token_s, n_hits = engine.llm.llm_engine, dict[str, float](), 0
    started = time.monotonic()
    for name, tokens in wanted.items():
        llm.add_request(name, {"prompt_token_ids": tokens}, parameters(1, switches))
    added_s = time.monotonic() - started
    while len(first_token_s) < len(wanted):
        outputs = llm.step()
        _note_tokens(outputs, others or {})
        for output in outputs:
            if output.request_id in wanted and output.finished:
                first_token_s[output.request_id] = output.metrics.first_token_ts - started
                n_hits += output.num_cached_tokens or 0
    found = {
        "added_s": added_s,
        "received_s": time.monotonic() - started,
        "median_first_token_s": median(first_token_s.values()),
        "last_first_token_s": max(first_token_s.values()),
        "first_tokens_s": sorted(first_token_s.values()),
        "hit_tokens": n_hits,
    }
    return found | ({"beside": _pace(others, started, started + found["last_first_token_s"])} if others else {})


def _note_tokens(outputs: list[Any], times: dict[str, list[float]]) -> None:
    for output in outputs:
        noted = times.get(output.request_id)
        if noted is not None:
            noted.extend([output.metrics.last_token_ts] * (len(output.outputs[0].token_ids) - len(noted)))


def _pace(times: dict[str, list[float]], start: float, end: float) -> Found:
    """Return how the decoders went between two times: tokens of each a second, and the gaps between tokens."""
    within = [[noted for noted in one if start <= noted <= end] for one in times.values()]
    gaps = sorted(later - earlier for one in within for earlier, later in zip([start, *one], [*one, end], strict=True))
    return {
        "seconds": end - start,
        "tokens_each": sum(map(len, within)) / len(within),
        "tokens_each_s": sum(map(len, within)) / len(within) / (end - start),
        "median_gap_s": median(gaps),
        "longest_gaps_s": gaps[-20:],
    }


def main() -> int:
    made = parser("gpu.under_load", __doc__, 200.0)
    add_timed_engine(made, 0.8)
    made.add_argument("--systems", default="kvtier,native", help="separated by commas")
    made.add_argument("--kinds", default="save,long,short", help="bursts, long among them; they take 86 GB in all")
    made.add_argument("--host-gib", type=int, help="GiB of host memory, from which the process that stored loads")
    options = made.parse_args()
    setup = replace(EngineSetup.timed(options), environment=OWN_PROCESS)
    shapes = TINY_SHAPES if options.tiny else SHAPES
    setup.folder.mkdir(parents=True, exist_ok=True)
    limits = ceilings(setup, options.tp, options.tiny)
    content: dict[str, Any] = {"folder": str(setup.folder), "model": setup.kind, "tp": options.tp, "shapes": shapes}
    content |= {"ceilings": limits, "systems": {}}
    rows: list[tuple[str, ...]] = []
    kinds, host = options.kinds.split(","), options.host_gib
    content |= {"host_gib": host} if host else {}
    for system in options.systems.split(","):
        if host:
            found = measure_warm(setup, system, kinds, shapes, host << 30)
        else:
            found = measure(setup, system, kinds, shapes, options.tiny)
        content["systems"][system] = found
        report.write(options.out, "bursts of saves and loads, and decoding beside them", content)
        rows += (warm_rows_of if host else rows_of)(system, found, limits, setup.token_bytes)
    report.table(("system", "measure", "value", "share"), rows)
    print("ceilings, GB/s: " + ", ".join(f"{name} {value / 1e9:.1f}" for name, value in limits.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
