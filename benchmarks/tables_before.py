"""Texts for results that older scripts wrote; to be deleted with the last of these results."""

from __future__ import annotations

from statistics import median
from typing import Any

from benchmarks.tables_common import NAMES, PEERS, by_length, has, made, milliseconds, read, span, table, verdict


def peers() -> list[str]:
    """Runs beside other systems that had their own kvtier and floor."""
    titles = {"ttft_tmpfs_native": "Beside vLLM's own tiering, an earlier run",
              "ttft_tmpfs_peers": "Beside vLLM's own tiering and LMCache, a still earlier run"}  # fmt: skip
    text: list[str] = []
    for name, title in titles.items():
        if has(name) and is_whole(read(name)):
            text += [*([""] if text else []), *_peers(read(name), title)]
    return text


def is_whole(result: dict[str, Any]) -> bool:
    return any(row["system"] == "kvtier" for row in result["rows"])


def _peers(result: dict[str, Any], title: str) -> list[str]:
    lengths = by_length(result)
    systems = [system for system in NAMES if system in lengths[min(lengths)]]
    counts = ", ".join(f"{NAMES[s]} {len(lengths[min(lengths)][s]['all_s'])}" for s in systems)
    rows = [[f"{tokens:,}", *(milliseconds(of[s]) for s in systems)] for tokens, of in lengths.items()]
    slower = [f"{tokens:,}" for tokens, of in lengths.items()
              if any(of["kvtier"]["ttft_s"] > of[s]["ttft_s"] for s in systems if s in PEERS)]  # fmt: skip
    text = [
        f"**{title}** ({made(result)}; from tmpfs; prompts of each length: {counts}):",
        "",
        *table(["tokens", *(NAMES[s] for s in systems)], rows),
    ]
    return text + (["", f"Here kvtier was slower than another system at {', '.join(slower)} tokens."] if slower else [])


def disk(limit_bytes_s: float, goal_times: float) -> list[str]:
    result, ceilings = read("ttft_disk"), read("ceilings")
    rows, times = [], []
    for row in result["rows"]:
        times.append(row["ttft_s"] * limit_bytes_s / row["bytes"])
        rows.append([f"{row['tokens']:,}", milliseconds(row), f"{row['load_bytes_s'] / 1e9:.2f} GB/s",
                     f"{row['load_percent_of_limit']:.0f}%", f"{times[-1]:.2f}"])  # fmt: skip
    ring = max(row["bytes_s"] for row in ceilings["folders"][result["folder"]]["device_reads"])
    other = read("ceilings_host")["folders"][result["folder"]]["reads"]["bytes_s"]
    above = [f"{row['tokens']:,}" for row, value in zip(result["rows"], times, strict=True) if value > goal_times]
    return [
        f"**Reloads from the disk** ({len(result['rows'][0]['all_s'])} prompt of each length; {made(result)}; "
        f"direct reads of that run {limit_bytes_s / 1e9:.2f} GB/s):",
        "",
        *table(["tokens", "kvtier", "transfer", "share of direct reads", "time / (bytes at the direct rate)"], rows),
        "",
        f"The goal is {goal_times} in the last column once the floor is taken off. The floor is not in that run, "
        f"and nothing is taken off here; above it: {', '.join(above) or 'none'}. The disk is no firm ceiling: the ring "
        f"read it at {ring / 1e9:.2f} GB/s in that run's own ceilings, and on another machine lent direct "
        f"reads gave {other / 1e9:.2f} GB/s. First tokens were not compared with computed ones here.",
    ]  # fmt: skip


def decode(result: dict[str, Any], goal_percent: float) -> tuple[list[str], str]:
    """The row and the text of windows that ended while saving still went on."""
    found, windows = result["summary"], result["results"]["decode_windows"]

    def rates(name: str, is_on: bool) -> list[float]:
        return [row[name] for row in windows if row["saving"] is is_on]

    on, off = (median(rates("tokens_s_during", is_on)) for is_on in (True, False))
    loss = 100 * (1 - on / off)
    after_on, after_off = (span(rates("tokens_s_after", is_on)) for is_on in (True, False))
    settle = span(rates("settle_s", True), 1)
    row = [f"32 requests that decode while {result['length']:,} tokens are computed", f"{off:.2f} tokens/s",
           f"{on:.2f} tokens/s", f"{-loss:+.1f}%",
           f"-{goal_percent:.0f}%: {verdict(loss <= goal_percent)}, in this part"]  # fmt: skip
    return row, (
        f"Decoding is counted while the prompt is computed. In the 2 s after that, when saving still goes on (it ended "
        f"{settle} s after the window), the rate changed too much from window to window, with saving {after_on} and "
        f"without {after_off} tokens/s, so no figure is taken from it: what saving costs decoding there is not known. "
        f"The script's own summary, of both parts, says {found['decode_on_tokens_s']:,.0f} with and "
        f"{found['decode_off_tokens_s']:,.0f} without: faster with saving, which saving cannot explain."
    )


def rounds(result: dict[str, Any]) -> str:
    """What load_mix's rounds asked the tier for, when rounds were not counted one by one."""
    found, counted = result["result"], result["result"]["counted"]
    loaded = counted.get("load_tokens", 0)
    what = (
        f"**the tier was not asked once in the {result['rounds']} mixed rounds** (no lookup, no load: their "
        f"{found['hit_tokens']:,} hit tokens are vLLM's own), so loads among evictions are not shown by this run"
        if not loaded and not counted.get("lookups")
        else f"the mixed rounds loaded {loaded:,.0f} tokens"
    )
    return f"All those loads are of that part: {what}."
