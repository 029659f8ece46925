"""Time to the first token of a prompt whose KV another process stored, next to the floor and to other systems.

    python -m benchmarks.gpu.ttft --folder /dev/shm/kv --out OUT/ttft-tmpfs.json [--systems none,kvtier,native,lmcache]

For each system one process computes and stores, exits, and a fresh one asks for the same prompts, one at a time. The
floor is a hit in vLLM's own prefix cache. What a reload takes over the floor is compared with its bytes at a limit:
with --ceilings, the folder's direct read rate or that of pinned copies to the GPU, whichever is smaller; with
--probe-tokens (for disks, whose rate wanders within a run) the mean rate of two direct reads, one right before and one
right after each reload, of records that kvtier wrote to the same disk for prompts that nobody asks for.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import options, report
from benchmarks.gpu.models import DIMENSIONS, make_model
from benchmarks.gpu.processes import EngineFailed, run_engine
from benchmarks.gpu.report import median, ms
from benchmarks.gpu.tiny import TINY_ENGINE, TINY_ENVIRONMENT, TINY_TIER

WARM_UP_TOKENS = 2048
GRAPHS: dict[str, Any] = {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 128, 192, 256]}}
"""vLLM's default, compiling and CUDA graphs, with fewer sizes than it captures on its own: starts are quicker. What is
left to compute of a hit (16 to 160 tokens here) fits into the larger ones."""


@dataclass(frozen=True)
class Setup:
    """What all engines of one run have in common."""

    model: Path
    kind: str
    folder: Path
    logs: Path
    llm: dict[str, Any]
    extra: dict[str, Any]
    timeout_s: float
    environment: dict[str, str]

    def job(self, system: str, folder: Path, extra: dict[str, Any]) -> dict[str, Any]:
        """Of an engine, without its steps."""
        return {
            "model": str(self.model),
            "vocabulary": DIMENSIONS[self.kind].vocabulary,
            "system": system,
            "folder": str(folder),
            "extra": extra,
            "llm": self.llm,
            "environment": self.environment,
        }

    def run(self, name: str, system: str, steps: list[list[Any]], extra: dict[str, Any] | None = None) -> Any:
        of_system = (self.extra | (extra or {})) if system == "kvtier" else {}
        job = self.job(system, self.folder, of_system) | {"steps": steps}
        return run_engine(name, job, self.logs, self.timeout_s)


def setup_of(arguments: argparse.Namespace) -> Setup:
    kind = "tiny" if arguments.tiny else arguments.model
    size = DIMENSIONS[kind]
    llm: dict[str, Any] = {"enforce_eager": True} if arguments.eager or arguments.tiny else dict(GRAPHS)
    llm["max_model_len"] = size.context_tokens
    # What is timed is loaded, also where the engine found that computing is quicker.
    extra: dict[str, Any] = {"capacity_bytes": "400GiB", "min_load_tokens": 256}
    if not size.is_saved:
        llm |= {"load_format": "dummy", "dtype": "bfloat16"}
        extra["model_tag"] = f"llama-{kind}-dummy"
    if arguments.tiny:
        llm |= TINY_ENGINE
        extra |= TINY_TIER
    else:
        llm |= {"gpu_memory_utilization": arguments.gpu_memory, "tensor_parallel_size": arguments.tp}
    extra |= json.loads(arguments.extra)
    return Setup(
        make_model(kind, arguments.models),
        kind,
        arguments.folder,
        arguments.logs,
        llm,
        extra,
        arguments.timeout,
        TINY_ENVIRONMENT if arguments.tiny else {},
    )


@dataclass(frozen=True)
class Asked:
    """lengths: in tokens. count: prompts of each, for kvtier and without a tier; peer_count: for other systems.

    probe_tokens: of the prompts whose records are read around each of kvtier's reloads; 0: none are.
    """

    lengths: list[int]
    count: int
    peer_count: int
    probe_tokens: int = 0

    @property
    def stored_tokens(self) -> int:
        """What kvtier stores of it at once."""
        return sum(self.lengths) * self.count + self.probe_tokens * self.probes

    @property
    def probes(self) -> int:
        return len(self.lengths) * self.count + 1


def measure(setup: Setup, systems: Sequence[str], asked: Asked) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each system's name with its results, or with why it could not be run."""
    lengths = asked.lengths
    warm = ["warm_up", min(WARM_UP_TOKENS, lengths[0])]
    for system in systems:
        count = asked.count if system in ("none", "kvtier") else asked.peer_count
        probe_tokens = asked.probe_tokens if system == "kvtier" else 0
        data = setup.folder / system
        shutil.rmtree(data, ignore_errors=True)
        try:
            if system == "none":
                yield system, setup.run("none", system, [warm, ["computed_and_own", lengths, count]])
                continue
            storing = [warm, ["store", lengths, count]]
            if probe_tokens:
                storing.append(["store_probes", probe_tokens, asked.probes])
            stored = setup.run(f"{system}-store", system, storing)
            loaded = setup.run(f"{system}-reload", system, [warm, ["first_tokens", lengths, count, probe_tokens]])
            yield system, {"store": stored, "reload": loaded}
        except EngineFailed as failure:
            print(f"FAILED {failure}", flush=True)
            yield system, {"failed": str(failure)}
        finally:
            shutil.rmtree(data, ignore_errors=True)


@dataclass(frozen=True)
class ArenaKind:
    """One of the arenas above the files: its name in results and rows, and the settings that let it hold all."""

    name: str
    row: str

    def settings(self, arena: str) -> dict[str, Any]:
        if self.name == "arena":
            return {"host": {"arena_bytes": arena, "admit": "always"}}
        return {"hbm": {"arena_bytes": arena, "admit": "saved"}, "host": {"admit": "never"}}


HOST_ARENA = ArenaKind("arena", "kvtier, host arena")
HBM_ARENA = ArenaKind("hbm_arena", "kvtier, hbm arena")


def measure_arena(setup: Setup, n_tokens: int, count: int, kind: ArenaKind, arena: str) -> Any:
    """kvtier again: from one of its arenas, in the process that stored."""
    steps = [["warm_up", min(WARM_UP_TOKENS, n_tokens)], ["store", [n_tokens], 1], ["from_arena", n_tokens, count]]
    try:
        return setup.run(f"kvtier-{kind.name}", "kvtier", steps, kind.settings(arena))
    except EngineFailed as failure:
        print(f"FAILED {failure}", flush=True)
        return {"failed": str(failure)}


def summary(
    results: dict[str, Any], lengths: list[int], token_bytes: int, limit_bytes_s: float | None = None
) -> list[dict[str, Any]]:
    """One row a length and system: median time, hits, rate, and whether the first tokens are those of a computation.

    limit_bytes_s: of those reloads that have no direct reads around them.
    """
    expected: dict[int, list[int]] = {}
    floor_s: dict[int, float] = {}
    rows = []
    for n_tokens in lengths:
        bare = results.get("none", {}).get("computed_and_own")
        if bare is not None:
            computed = [row for row in bare["computed"] if row["tokens"] == n_tokens]
            # The second of each pair: the first may still compile for the shape of a hit.
            own = [row for row in bare["own"] if row["tokens"] == n_tokens][1::2]
            expected[n_tokens] = [row["token"] for row in computed]
            floor_s[n_tokens] = median([row["ttft_s"] for row in own])
            rows += [_row("computed", computed, None), _row("floor", own, expected[n_tokens])]
        for system, result in results.items():
            loaded = [row for row in result.get("reload", {}).get("first_tokens", []) if row["tokens"] == n_tokens]
            if loaded:
                row = _row(system, loaded, expected.get(n_tokens))
                row["bytes"] = row["hit_tokens"] * token_bytes
                rows.append(row | _against_limit(loaded, floor_s.get(n_tokens), token_bytes, limit_bytes_s))
    return rows


def _against_limit(
    loaded: list[dict[str, Any]], floor_s: float | None, token_bytes: int, limit_bytes_s: float | None
) -> dict[str, Any]:
    """Medians over the prompts of one row.

    times_limit: what a reload takes over the floor, as a multiple of its bytes at the limit; one rank's bytes.
    load_percent_of_limit: of the rate from the start of the load's job to its verified blocks.
    """
    limits = [_mean_read(row) or limit_bytes_s for row in loaded]
    over_floor = [row["ttft_s"] - floor_s for row in loaded] if floor_s is not None else []
    counted = [row["counted"] for row in loaded]
    rates = [c["load_bytes"] / c["load_seconds"] if c.get("load_seconds") else None for c in counted]
    times = [
        over * limit / (row["hit_tokens"] * token_bytes)
        for over, limit, row in zip(over_floor, limits, loaded, strict=False)
        if limit and row["hit_tokens"]
    ]
    percents = [100 * rate / limit for rate, limit in zip(rates, limits, strict=True) if rate and limit]
    reads = [read["bytes_s"] for row in loaded for read in row.get("reads", [])]
    found = {
        "over_floor_s": _median(over_floor),
        "load_bytes_s": _median([rate for rate in rates if rate]),
        "times_limit": _median(times),
        "load_percent_of_limit": _median(percents),
    }
    if reads:
        found |= {"read_bytes_s": sum(reads) / len(reads), "all_read_bytes_s": reads, "all_times_limit": times}
    return found


def _mean_read(row: dict[str, Any]) -> float | None:
    """Bytes a second of the direct reads right before and right after: their mean, for the disk's rate wanders."""
    reads = [read["bytes_s"] for read in row.get("reads", [])]
    return sum(reads) / len(reads) if reads else None


def _median(values: list[float]) -> float | None:
    return median(values) if values else None


def limit_of(ceilings: Path | None, folder: Path) -> float | None:
    """The smaller of the folder's direct read rate and PCIe's, of a `ceilings` run on this machine; None without."""
    if ceilings is None or not ceilings.exists():
        return None
    found = json.loads(ceilings.read_text())
    reads = found["folders"].get(str(folder), {}).get("reads")
    return None if reads is None else min(reads["bytes_s"], found["copies"].get("h2d_bytes_s", float("inf")))


def encoded_token_bytes(results: dict[str, Any]) -> int | None:
    """Bytes of a token in a codec's layout, as kvtier's reloads counted them; None without a reload."""
    for row in results.get("kvtier", {}).get("reload", {}).get("first_tokens", []):
        if row["counted"].get("load_tokens"):
            return int(row["counted"]["load_bytes"] // row["counted"]["load_tokens"])
    return None


def _row(name: str, measured: list[dict[str, Any]], expected: list[int] | None) -> dict[str, Any]:
    tokens = [row["token"] for row in measured]
    if expected is not None and len(expected) == 1:  # one prompt, asked again and again
        expected = expected * len(tokens)
    return {
        "system": name,
        "tokens": measured[0]["tokens"],
        "hit_tokens": min(row["hit_tokens"] for row in measured),
        "ttft_s": median([row["ttft_s"] for row in measured]),
        "all_s": [row["ttft_s"] for row in measured],
        "same_first_token": None if expected is None else tokens == expected[: len(tokens)],
    }


def print_summary(rows: list[dict[str, Any]]) -> None:
    cells = [
        (
            row["tokens"],
            row["system"],
            row["hit_tokens"],
            ms(row["ttft_s"]),
            ms(row.get("over_floor_s")),
            f"{row['times_limit']:.2f}" if row.get("times_limit") else "-",
            f"{row['load_bytes_s'] / 1e9:.1f}" if row.get("load_bytes_s") else "-",
            f"{row['load_percent_of_limit']:.0f}" if row.get("load_percent_of_limit") else "-",
            " ".join(ms(value) for value in row["all_s"]),
            {True: "yes", False: "NO", None: "-"}[row["same_first_token"]],
        )
        for row in rows
    ]
    names = ("tokens", "system", "hit", "TTFT ms", "over floor", "x limit", "load GB/s", "% limit", "all", "same token")
    report.table(names, cells)


def parse(text: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.ttft", description=__doc__.splitlines()[0])
    options.of_runs(parser, timeout_s=240.0)
    options.of_kvtier(parser)
    options.of_timed_engines(parser, 0.6)
    parser.add_argument("--systems", default="none,kvtier,native,lmcache", help="may be empty: arenas alone")
    parser.add_argument("--lengths", default=None, help="tokens, divided by commas")
    parser.add_argument("--count", type=int, default=3, help="prompts of each length")
    parser.add_argument("--peer-count", type=int, default=1, help="the same for the other systems")
    parser.add_argument("--probe-tokens", type=int, default=0, help="direct reads of so much, around each reload")
    parser.add_argument("--arena", default=None, help="also from a host arena of this size")
    parser.add_argument("--hbm-arena", default=None, help="also from an hbm arena of this size")
    parser.add_argument("--ceilings", type=Path, default=None, help="JSON of a `ceilings` run on this machine")
    arguments = parser.parse_args(text)
    default = "300,600" if arguments.tiny else "8192,32768,100000"
    arguments.lengths = [int(part) for part in (arguments.lengths or default).split(",")]
    return arguments


def check_room(folder: Path, n_bytes: int) -> None:
    """Half an answer costs as much time as a whole one: without room for all, nothing is begun."""
    free = shutil.disk_usage(folder).free
    if n_bytes > free:
        raise SystemExit(f"{folder}: {n_bytes / 1e9:.1f} GB will be stored, {free / 1e9:.1f} are free; lower --count")


def write(arguments: argparse.Namespace, setup: Setup, results: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of what has been measured so far, which it writes to --out."""
    limit = None if arguments.probe_tokens else limit_of(arguments.ceilings, setup.folder)
    token_bytes = raw_token_bytes(arguments, setup)
    if setup.extra.get("codec", "raw") != "raw":
        token_bytes = encoded_token_bytes(results) or token_bytes
    rows = summary(results, arguments.lengths, token_bytes, limit)
    for kind in (HOST_ARENA, HBM_ARENA):
        asked_again = results.get(kind.name, {}).get("from_arena")
        if asked_again:
            rows.append(_row(kind.row, asked_again[1:], None) | {"first_s": asked_again[0]["ttft_s"]})
    report.write(
        arguments.out,
        "time to the first token after a reload",
        {
            "model": setup.kind,
            "tensor_parallel_size": arguments.tp,
            "folder": str(setup.folder),
            "extra": setup.extra,
            "llm": setup.llm,
            "limit_bytes_s": limit,
            "probe_tokens": arguments.probe_tokens,
            "rows": rows,
            "results": results,
        },
    )
    return rows


def raw_token_bytes(arguments: argparse.Namespace, setup: Setup) -> int:
    return DIMENSIONS[setup.kind].token_bytes(4 if arguments.tiny else 2)


def main() -> int:
    arguments = parse()
    setup = setup_of(arguments)
    if not arguments.tiny:  # as in benchmarks.versus: what vLLM compiled for one of them serves both
        setup.llm["max_model_len"] = max(arguments.lengths) + 256
    setup.folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(setup.folder / "kvtier", ignore_errors=True)
    asked = Asked(arguments.lengths, arguments.count, arguments.peer_count, arguments.probe_tokens)
    check_room(setup.folder, asked.stored_tokens * raw_token_bytes(arguments, setup))
    results: dict[str, Any] = {}
    rows: list[dict[str, Any]] = []
    # Written after each system: what a later one's time limit cuts off is that one alone.
    for system, result in measure(setup, [name for name in arguments.systems.split(",") if name], asked):
        results[system] = result
        rows = write(arguments, setup, results)
    for kind, of in ((HOST_ARENA, arguments.arena), (HBM_ARENA, arguments.hbm_arena)):
        if of:
            results[kind.name] = measure_arena(setup, arguments.lengths[-1], arguments.count, kind, of)
            rows = write(arguments, setup, results)
    shutil.rmtree(setup.folder / "kvtier", ignore_errors=True)
    print_summary(rows)
    return int(any("failed" in result for result in results.values()))


if __name__ == "__main__":
    raise SystemExit(main())
