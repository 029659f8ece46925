"""The table of a result on the screen; benchmarks/tables.py makes the README's of the same cells."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.report import ms, table_lines
from benchmarks.versus.contestants import CONTESTANTS
from benchmarks.versus.judge import Cell, Entries, goals, losses

COLUMNS = ("place", "tokens", "system", "TTFT ms", "all", "x computed", "GB/s", "% ceiling", "cold", "stored GB", "hit")


def lines(runs: list[dict[str, Any]], token_bytes: int) -> list[str]:
    entries = Entries(runs, token_bytes)
    cells = entries.cells()
    text = table_lines(COLUMNS, [row_of(cell) for cell in cells.values()])
    lengths = sorted({tokens for _, tokens, _ in cells})
    for tokens in lengths:
        computed, floor = entries.bare(tokens)
        text.append(f"{tokens:,} tokens: computed {ms(computed)} ms, vLLM's own prefix hit {ms(floor)} ms")
    for place in entries.places():
        for tokens, seconds in entries.kvikio(place).items():
            text.append(f"KvikIO alone, {place}, bytes of {tokens:,} tokens: {' '.join(map(ms, seconds))} ms")
    text += [
        f"LOST: {mine.place}, {mine.tokens:,} tokens: {CONTESTANTS[mine.system].title} {ms(mine.ttft)} ms, "
        f"{CONTESTANTS[peer.system].title} {ms(peer.ttft)} ms"
        for mine, peer in losses(cells)
    ]
    text += [f"{'met' if is_met else 'MISSED'}: {what}" for is_met, what in goals(cells)]
    text += [
        f"LOADED NOTHING: {cell.place}, {cell.tokens:,} tokens: {CONTESTANTS[cell.system].title} answers in "
        f"{ms(cell.ttft)} ms, its KV needs {ms(cell.least)} over PCIe"
        for cell in cells.values()
        if not cell.has_loaded
    ]
    text += [
        f"NOT WHOLE: {cell.place}, {cell.tokens:,} tokens: {CONTESTANTS[cell.system].title} hit {cell.hit_tokens:,}"
        for cell in cells.values()
        if not cell.is_whole
    ]
    if entries.machines() > 1 or len(entries.commits()) > 1:
        text.append(f"MIXED: {entries.machines()} machines, kvtier at {', '.join(entries.commits())}")
    text += [f"FAILED: {run['kind']} {run['place']} {run['system']} {run['repetition']}" for run in entries.failed]
    return text


def row_of(cell: Cell) -> tuple[str, ...]:
    return (
        cell.place,
        f"{cell.tokens:,}",
        cell.system,
        ms(cell.ttft),
        " ".join(map(ms, cell.times)),
        f"{cell.computed / cell.ttft:.1f}" if cell.computed else "-",
        f"{cell.rate / 1e9:.1f}" if cell.rate else "-",
        f"{100 * cell.of_ceiling:.0f}" if cell.of_ceiling else "-",
        f"{100 * cell.cold_cost:+.1f}%" if cell.cold_cost is not None else "-",
        f"{cell.stored / 1e9:.1f}" if cell.stored else "-",
        "whole" if cell.is_whole else f"{cell.hit_tokens:,}",
    )
