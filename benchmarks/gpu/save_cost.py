"""What saving costs the engine, and how fast it becomes durable.

    python -m benchmarks.gpu.save_cost --folder /mnt/disk/kv --out OUT/save_cost.json [--parts ttft,decode,burst]

ttft: cold time to the first token with saving on against off, in turn, prompts that share nothing.
decode: tokens a second of a batch of 32 that decodes (by CUDA graphs) while a long prompt is computed and until it is
durable, saved or not in turn, in windows of one length.
burst: durable bytes a second when more is offered than the storage takes, against its direct writes in the same run.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from benchmarks.gpu import ceilings, options, report
from benchmarks.gpu.report import median, ms
from benchmarks.gpu.ttft import setup_of

DECODE_BATCH, TINY_DECODE_BATCH = 32, 4
WINDOW_LIMIT_S = 24.0
DECODE_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}
"""Steps that only decode run as one graph, or the pace of Python decides how many there are; a prefill runs
eagerly, and nothing is compiled."""


def parts_of(arguments: argparse.Namespace) -> list[list[Any]]:
    length, short = arguments.length, 256 if arguments.tiny else 8192
    batch = TINY_DECODE_BATCH if arguments.tiny else DECODE_BATCH
    every = {
        "ttft": ["saving_on_and_off", length, arguments.pairs],
        "decode": ["decode_windows", batch, length, arguments.decode_pairs, WINDOW_LIMIT_S],
        "burst": ["write_burst", short, 4 if arguments.tiny else 40, 0.5 if arguments.tiny else 4.0],
    }
    return [every[name] for name in arguments.parts.split(",")]


def summary(result: dict[str, Any], write_bytes_s: float | None) -> dict[str, Any]:
    """The figures that are asked for; a loss is in percent of what it is without saving."""
    found: dict[str, Any] = {"direct_write_bytes_s": write_bytes_s}
    if "saving_on_and_off" in result:
        times = {kind: [row["ttft_s"] for row in rows] for kind, rows in result["saving_on_and_off"].items()}
        on, off = median(times["on"]), median(times["off"])
        found |= {"ttft_on_s": on, "ttft_off_s": off, "ttft_loss_percent": 100 * (on / off - 1), "ttft_all": times}
        skipped = [v for row in result["saving_on_and_off"]["on"] for n, v in row["counted"].items() if "skip" in n]
        found["skipped_chunks"] = sum(skipped)
    if "decode_windows" in result:
        found["decode"] = decode_summary(result["decode_windows"])
    if "write_burst" in result:
        found["durable_bytes_s"] = result["write_burst"]["bytes_s"]
        if write_bytes_s:
            found["durable_percent_of_direct"] = 100 * found["durable_bytes_s"] / write_bytes_s
    return found


def decode_summary(windows: dict[str, Any]) -> dict[str, Any]:
    """Of pairs of windows of one length. off_spread_percent: of windows without saving, the noise of it all.

    is_durable_within: in all windows with saving, the long prompt was stored whole before the end.
    """
    pairs = windows["pairs"]
    on, off = ([pair[kind]["tokens_s"] for pair in pairs] for kind in ("on", "off"))
    losses = [100 * (1 - a / b) for a, b in zip(on, off, strict=True)]
    stored = [pair["on"]["stored_chunks"] for pair in pairs]
    return {
        "window_s": windows["window_s"],
        "on_tokens_s": median(on),
        "off_tokens_s": median(off),
        "loss_percent": median(losses),
        "all_loss_percent": losses,
        "on_all": on,
        "off_all": off,
        "off_spread_percent": 100 * (max(off) - min(off)) / median(off),
        "is_durable_within": all(have == of for have, of in stored),
    }


def print_summary(found: dict[str, Any]) -> None:
    rows = []
    if "ttft_on_s" in found:
        times = f"{ms(found['ttft_on_s'])} / {ms(found['ttft_off_s'])} ms"
        rows.append(("cold TTFT, saving on / off", times, f"{found['ttft_loss_percent']:+.1f}%"))
        rows.append(("chunks skipped in these", f"{found['skipped_chunks']:.0f}", ""))
    if "decode" in found:
        decode = found["decode"]
        rates = f"{decode['on_tokens_s']:,.0f} / {decode['off_tokens_s']:,.0f} tokens/s in {decode['window_s']:.1f} s"
        losses = decode["all_loss_percent"]
        rows.append(("decode batch, saving on / off", rates, f"{-decode['loss_percent']:+.1f}%"))
        rows.append(("each pair from - to", f"{-max(losses):+.1f}% to {-min(losses):+.1f}%", ""))
        rows.append(("windows without saving differ by", f"{decode['off_spread_percent']:.1f}%", ""))
        rows.append(("durable within the window", {True: "yes", False: "NO"}[decode["is_durable_within"]], ""))
    if "durable_bytes_s" in found:
        share = f"{found['durable_percent_of_direct']:.0f}%" if "durable_percent_of_direct" in found else "-"
        rows.append(
            (
                "durable / direct writes",
                f"{found['durable_bytes_s'] / 1e9:.2f} / {(found['direct_write_bytes_s'] or 0) / 1e9:.2f} GB/s",
                share,
            )
        )
    report.table(("what", "measured", "of it"), rows)


def parse(text: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.save_cost", description=__doc__.splitlines()[0])
    options.of_runs(parser, timeout_s=385.0)
    options.of_kvtier(parser)
    options.of_timed_engines(parser, 0.7)
    parser.add_argument("--parts", default="ttft,decode,burst")
    parser.add_argument("--length", type=int, default=None, help="tokens of the long prompts")
    parser.add_argument("--pairs", type=int, default=3, help="of cold prompts")
    parser.add_argument("--decode-pairs", type=int, default=5, help="of windows of the decoding batch")
    arguments = parser.parse_args(text)
    arguments.length = arguments.length or (700 if arguments.tiny else 100_000)
    return arguments


def main() -> int:
    arguments = parse()
    shutil.rmtree(arguments.folder / "kvtier", ignore_errors=True)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    writes = ceilings.direct_writes(arguments.folder, (64 << 20) if arguments.tiny else (8 << 30))
    setup = setup_of(arguments)
    if not (arguments.tiny or arguments.eager):
        setup.llm.update(enforce_eager=False, compilation_config=DECODE_GRAPHS)
    # What is saved stays within a capacity that the disk has; it is evicted as the run goes on.
    extra = {} if arguments.tiny else {"capacity_bytes": capacity_of(arguments.folder)}
    warm: list[Any] = ["warm_up", 256 if arguments.tiny else 2048]
    result = setup.run("save-cost", "kvtier", [warm, *parts_of(arguments)], extra)
    shutil.rmtree(arguments.folder / "kvtier", ignore_errors=True)
    found = summary(result, writes["bytes_s"])
    report.write(
        arguments.out,
        "what saving costs, and how fast it is durable",
        {
            "folder": str(arguments.folder),
            "length": arguments.length,
            "summary": found,
            "writes": writes,
            "decode_graphs": not (arguments.tiny or arguments.eager),
            "results": result,
        },
    )
    print_summary(found)
    return 0


def capacity_of(folder: Path) -> int:
    """Two thirds of what is free there."""
    return shutil.disk_usage(folder).free * 2 // 3


if __name__ == "__main__":
    raise SystemExit(main())
