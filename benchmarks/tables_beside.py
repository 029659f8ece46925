"""Runs beside other systems that had a kvtier and a floor of their own, on other machines or of older code."""

from __future__ import annotations

from typing import Any

from benchmarks.tables_common import NAMES, PEERS, by_length, has, made, milliseconds, read, table


def peers() -> list[str]:
    """A table a run, the latest first."""
    titles = {"ttft_tmpfs_shared": "Beside vLLM's own tiering, which came minutes later",
              "ttft_tmpfs_native": "Beside vLLM's own tiering, an earlier run",
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
