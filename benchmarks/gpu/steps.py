"""What one engine is asked to do. Each step gets the Engine and returns facts as JSON; the scripts judge them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from benchmarks.gpu.engine import Engine
from benchmarks.gpu.prompts import prompt, timed_prompt
from benchmarks.gpu.stored import direct_read

STORE_PASSES = 3
NO_TIER = {"kvtier_load": False, "kvtier_save": False}
TURN_POLL_S = 0.02
PINNED_WITHIN_S = 8.0


def warm_up(engine: Engine, n_tokens: int) -> list[dict[str, Any]]:
    """Two prompts of no other use: computed, stored, loaded. Kernels are compiled here and not in what is timed, and
    kvtier's first segment sets are made."""
    done = []
    for number, size in enumerate((n_tokens, 300)):
        tokens = prompt(f"warm-up-{engine.system}-{number}", size, engine.vocabulary)
        done.append(engine.first_token(tokens))
        if engine.system in ("none", "kvtier"):
            engine.settle()
            engine.forget()
        done.append(engine.first_token(tokens))
    engine.idle_steps()
    return done


def take_turn(engine: Engine, ready: str, go: str, timeout_s: float) -> dict[str, float]:
    """Says that this engine is ready and waits until it may go on: others are measured meanwhile."""
    started = time.monotonic()
    Path(ready).touch()
    while not Path(go).exists():
        if time.monotonic() - started > timeout_s:
            raise TimeoutError(f"no turn within {timeout_s:.0f} s")
        time.sleep(TURN_POLL_S)
    return {"waited_s": time.monotonic() - started}


def store(engine: Engine, lengths: list[int], count: int) -> list[dict[str, Any]]:
    """Computes `count` prompts of each length with the tier on and waits until each is stored whole."""
    return [
        _store_whole(engine, timed_prompt(n_tokens, number, engine.vocabulary))
        for n_tokens in lengths
        for number in range(count)
    ]


def store_probes(engine: Engine, n_tokens: int, count: int) -> list[dict[str, Any]]:
    """Stores prompts that nobody asks again, for `first_tokens` to read their records: kvtier's data on that disk."""
    return [_store_whole(engine, _probe(engine, n_tokens, number)) for number in range(count)]


def first_tokens(engine: Engine, lengths: list[int], count: int, probe_tokens: int = 0) -> list[dict[str, Any]]:
    """Time to the first token of each prompt, one at a time.

    probe_tokens: right before and right after each, the records of a probe that were not read before are read with
    direct I/O (`store_probes` of that length, one more than there are prompts); `reads` are both.
    """
    prompts = [(n_tokens, number) for n_tokens in lengths for number in range(count)]
    probes = iter(_probe(engine, probe_tokens, number) for number in range(len(prompts) + 1))
    before = direct_read(engine, next(probes)) if probe_tokens else None
    rows = []
    for n_tokens, number in prompts:
        row = engine.first_token(timed_prompt(n_tokens, number, engine.vocabulary)) | {"number": number}
        if probe_tokens:
            after = direct_read(engine, next(probes))
            row["reads"], before = [before, after], after
        rows.append(row)
    return rows


def computed_and_own(engine: Engine, lengths: list[int], count: int) -> dict[str, list[dict[str, Any]]]:
    """Each prompt computed, and again from vLLM's own prefix cache: the floor of what a reload can reach."""
    computed, own = [], []
    for n_tokens in lengths:
        for number in range(count):
            tokens = timed_prompt(n_tokens, number, engine.vocabulary)
            computed.append(engine.first_token(tokens))
            own += [engine.first_token(tokens) for _ in range(2)]
    return {"computed": computed, "own": own}


def all_in_one(engine: Engine, lengths: list[int], reloads: int) -> dict[str, list[dict[str, Any]]]:
    """One prompt of each length: computed and saved, twice from vLLM's own prefix cache, then `reloads` times from the
    tier, vLLM's cache emptied each time. Before, PINNED_WITHIN_S without work, as an engine that was just started has,
    so that segments on tmpfs are pinned. Rows that had to wait for nothing but themselves; by kind."""
    rows: dict[str, list[dict[str, Any]]] = {"computed": [], "own": [], "reloaded": []}
    for n_tokens in lengths:
        tokens = timed_prompt(n_tokens, 0, engine.vocabulary)
        rows["computed"].append(_store_whole(engine, tokens))
        rows["own"] += [engine.first_token(tokens) for _ in range(2)]
        time.sleep(PINNED_WITHIN_S)
        for _ in range(reloads):
            engine.settle()
            engine.forget()
            rows["reloaded"].append(engine.first_token(tokens))
    return rows


def from_arena(engine: Engine, n_tokens: int, count: int) -> list[dict[str, Any]]:
    """A prompt stored by this process, asked again and again, vLLM's own prefix cache emptied each time.

    The first time may fill the host arena; later ones come from it if it is large enough.
    """
    tokens = timed_prompt(n_tokens, 0, engine.vocabulary)
    rows = []
    for _ in range(count + 1):
        engine.settle()
        engine.forget()
        rows.append(engine.first_token(tokens))
    return rows


def saving_on_and_off(engine: Engine, n_tokens: int, pairs: int) -> dict[str, list[dict[str, Any]]]:
    """Cold prompts that share nothing, saved or not in turn; each pair in the other order."""
    rows: dict[str, list[dict[str, Any]]] = {"on": [], "off": []}
    for number in range(pairs):
        order = ("on", "off") if number % 2 == 0 else ("off", "on")
        for kind in order:
            tokens = prompt(f"saving-{kind}-{number}", n_tokens, engine.vocabulary)
            row = engine.first_token(tokens, NO_TIER if kind == "off" else {"kvtier_load": False})
            row["settle_s"] = engine.settle()
            rows[kind].append(row)
    return rows


def write_burst(engine: Engine, n_tokens: int, count: int, seconds: float) -> dict[str, Any]:
    """Durable bytes a second when more is offered than the storage takes.

    Prompts are computed unsaved; then asked again from vLLM's own cache, saved now, until the time is up. Counted
    from the first of these to the last chunk published.
    """
    prompts = [prompt(f"burst-{number}", n_tokens, engine.vocabulary) for number in range(count)]
    for tokens in prompts:
        engine.ask([tokens], 1, NO_TIER)
    before, started = engine.counters(), time.perf_counter()
    asked = 0
    while time.perf_counter() - started < seconds and asked < 4 * count:
        engine.ask([prompts[asked % count]], 1, {"kvtier_load": False})
        asked += 1
    offered_s = time.perf_counter() - started
    engine.settle()
    elapsed = time.perf_counter() - started
    counted = grown_bytes(before, engine.counters())
    return {
        "asked": asked,
        "offered_s": offered_s,
        "elapsed_s": elapsed,
        "saved_bytes": counted["save_bytes"],
        "bytes_s": counted["save_bytes"] / elapsed,
        "counted": counted,
    }


def grown_bytes(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    names = {*after, "save_bytes"}
    return {name: after.get(name, 0) - before.get(name, 0) for name in names}


def _store_whole(engine: Engine, tokens: list[int]) -> dict[str, Any]:
    """kvtier skips chunks rather than hold a forward back; what was skipped is offered again."""
    before = _skipped(engine.counters())
    row = engine.first_token(tokens)
    row["settle_s"] = engine.settle()
    row["skipped"] = newly = (now := _skipped(engine.counters())) - before
    row["passes"] = 1
    while newly and row["passes"] < STORE_PASSES:
        engine.ask([tokens], 1)  # a hit in vLLM's own cache offers all chunks once more
        engine.settle()
        row["passes"] += 1
        before, now = now, _skipped(engine.counters())
        newly = now - before
    return row


def _probe(engine: Engine, n_tokens: int, number: int) -> list[int]:
    return prompt(f"probe-{n_tokens}-{number}", n_tokens, engine.vocabulary)


def _skipped(counted: dict[str, float]) -> float:
    return sum(value for name, value in counted.items() if name.startswith("skipped") and "present" not in name)
