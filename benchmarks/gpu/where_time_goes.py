"""Where does the time to the first token of a reload go?

    python -m benchmarks.gpu.where_time_goes --folder /dev/shm/kv --out OUT/where_time_goes.json

One process stores prompts, another reloads each and then hits it in vLLM's own prefix cache; calls of vLLM's and
kvtier's are timed in it. Printed: a reload's calls in their order, in milliseconds from the request's arrival.
"""

from __future__ import annotations

import argparse
import json
import shutil
from typing import Any

from benchmarks.gpu import options, report
from benchmarks.gpu.ttft import setup_of

SHORTEST_S = 0.0002
"""Of calls that are printed."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.where_time_goes", description=__doc__.splitlines()[0]
    )
    options.of_runs(parser, timeout_s=120.0)
    options.of_kvtier(parser)
    options.of_timed_engines(parser, 0.6)
    parser.add_argument("--lengths", default="8192")
    parser.add_argument("--count", type=int, default=4)
    parser.add_argument("--show", type=int, default=2, help="so many of the last reloads are printed")
    return parser.parse_args()


def show(row: dict[str, Any]) -> None:
    print(f"{row['tokens']:,} tokens, {row['kind']}: {1e3 * row['ttft_s']:.1f} ms, counted {row['counted']}")
    print(f"  milliseconds of threads: {row['busy_ms']}")
    for name, thread, began, ended in row["calls"]:
        if ended - began >= SHORTEST_S:
            print(f"  {1e3 * began:8.2f} {1e3 * (ended - began):8.2f}  {thread[:16]:16} {name}")


def main() -> int:
    arguments = parse()
    lengths = [int(length) for length in arguments.lengths.split(",")]
    if arguments.tiny:
        lengths = [700]
    shutil.rmtree(arguments.folder / "kvtier", ignore_errors=True)
    setup = setup_of(arguments)
    warm: list[Any] = ["warm_up", 256 if arguments.tiny else 2048]
    setup.run("timeline-store", "kvtier", [warm, ["store", lengths, arguments.count]])
    rows = setup.run("timeline-reload", "kvtier", [warm, ["timelines", lengths, arguments.count, 2]])["timelines"]
    shutil.rmtree(arguments.folder / "kvtier", ignore_errors=True)
    report.write(arguments.out, "where the time to the first token goes", {"rows": rows})
    reloads = [row for row in rows if row["kind"] == "reloaded"]
    for row in reloads[-arguments.show :]:
        show(row)
    show(rows[-1])
    print(json.dumps([[row["kind"], row["tokens"], round(1e3 * row["ttft_s"], 1)] for row in rows]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
