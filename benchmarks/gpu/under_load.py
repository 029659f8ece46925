"""Many requests at once: rates at which bursts are saved and loaded, and of decoding beside them.

    python -m benchmarks.gpu.under_load --folder /dev/shm/kv --out OUT/under_load.json [--systems kvtier,native]

For each system one process computes and saves bursts (32 x 6,144 tokens, whose durable rate is compared with direct
writes over several files; 16 x 12,000, 64 x 4,000, one prefix of 8,000), and a fresh one loads each burst at once, then
the 16 prompts beside 16 requests that decode. Rates are shares of what pinned copies, direct reads and direct writes
reach in the same run.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.gpu.ceilings import THREADS, copies, direct_writes, read_rate
from benchmarks.gpu.setup import EngineSetup, add_timed_engine, parser
from benchmarks.report import ms

FILES = 12  # files that the plain writes of a rank go to
SHAPES = {"save": (32, 6144), "long": (16, 12_000), "short": (64, 4000), "shared": (64, 8000)}
TINY_SHAPES = {"save": (4, 256), "long": (3, 512), "short": (6, 192), "shared": (6, 256)}
DECODERS, TAIL_TOKENS = 16, 60


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
    loads = [["load_burst", kind, *shapes[kind]] for kind in kinds]
    loads.append(["shared_burst", *shapes["shared"], TAIL_TOKENS])
    loads.append(["decode_beside", 2 if is_tiny else DECODERS, "long", *shapes["long"]])
    loaded = setup.run(f"load-{system}", system, [warm_up, *loads])
    setup.clear(system)
    return {"stored": stored, "loaded": loaded}


def rows_of(system: str, found: dict[str, Any], limits: dict[str, float], token_bytes: int) -> list[tuple[str, ...]]:
    """Return the rows of the table: system, measure, value, share of a ceiling."""
    burst, loaded = found["stored"]["save_burst"], found["loaded"]
    writes = limits["writes"]
    rate = min(limits["reads"], limits.get("h2d_bytes_s", limits["reads"]))
    stored = " of ".join(map(str, burst.get("stored_chunks", ())))
    rows = [
        (
            system,
            "burst durable, GB/s",
            f"{burst['durable_bytes_s'] / 1e9:.1f}",
            f"{burst['durable_bytes_s'] / writes:.0%}",
        ),
        (
            system,
            "burst computed / durable after, s",
            f"{burst['computed_s']:.2f} / {burst['durable_after_s']:.2f}",
            "",
        ),
        (system, "burst: chunks stored", stored, ""),
    ]
    for name, one in loaded.items():
        if not isinstance(one, dict) or "last_first_token_s" not in one:
            continue
        got = one["hit_tokens"] * token_bytes / one["last_first_token_s"]
        times = [ms(one["median_first_token_s"]), ms(one["last_first_token_s"])]
        times += [ms(one["resident"]["last_first_token_s"])] if "resident" in one else []
        rows.append((system, f"{name}: median / last / last resident, ms", " / ".join(times), f"{got / rate:.0%}"))
    decoders = loaded["decode_beside"]
    alone_s = decoders["alone"]["tokens_each_s"]
    for what, one in (("loads", decoders), ("resident", decoders["resident"])):
        pace = one["beside"]
        paces = f"{alone_s:.0f} / {pace['tokens_each_s']:.0f}, {ms(pace['longest_gaps_s'][-1])} ms"
        rows.append(
            (system, f"decoder alone / beside {what}, longest gap", paces, f"{pace['tokens_each_s'] / alone_s:.0%}")
        )
    return rows


def main() -> int:
    made = parser("gpu.under_load", __doc__, 200.0)
    add_timed_engine(made, 0.8)
    made.add_argument("--systems", default="kvtier,native", help="separated by commas")
    made.add_argument("--kinds", default="save,long,short", help="bursts, long among them; they take 86 GB in all")
    options = made.parse_args()
    setup, shapes = EngineSetup.timed(options), TINY_SHAPES if options.tiny else SHAPES
    setup.folder.mkdir(parents=True, exist_ok=True)
    limits = ceilings(setup, options.tp, options.tiny)
    content: dict[str, Any] = {"folder": str(setup.folder), "model": setup.kind, "tp": options.tp, "shapes": shapes}
    content |= {"ceilings": limits, "systems": {}}
    rows: list[tuple[str, ...]] = []
    for system in options.systems.split(","):
        found = content["systems"][system] = measure(setup, system, options.kinds.split(","), shapes, options.tiny)
        report.write(options.out, "bursts of saves and loads, and decoding beside them", content)
        rows += rows_of(system, found, limits, setup.token_bytes)
    report.table(("system", "measure", "value", "share"), rows)
    print("ceilings, GB/s: " + ", ".join(f"{name} {value / 1e9:.1f}" for name, value in limits.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
