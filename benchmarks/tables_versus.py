"""The tables of benchmarks/README.md on kvtier beside its peers: of results/gpu/versus*.json and long_doc_qa*.json."""

from __future__ import annotations

import json
from typing import Any

from benchmarks import tables_tmpfs
from benchmarks.gpu.report import ms
from benchmarks.serving import counters, plot
from benchmarks.tables_common import code_of, forwards, has, judged, read, span, table
from benchmarks.tables_tmpfs import RUN, SECOND
from benchmarks.versus.contestants import CONTESTANTS
from benchmarks.versus.judge import PEERS, Cell, Entries, compared, goals, losses, slower_than_computing

RUNS = (RUN, SECOND, "versus_disk", "versus_earlier")
"""Of four machines; the plot is of the first."""
DOCUMENT_RUNS = ("long_doc_qa", "long_doc_qa-2")
PLOT = "versus.svg"
NOTHING = "†"
COLOURS = {"kvtier": 0, "kvtier-k4v4": 2, "native": 1, "lmcache": 3, "lmcache-mp": 4}


def versus() -> list[str]:
    texts = [_versus(name) for name in RUNS if has(name)]
    return [line for text in texts for line in ("", *text)][1:]


def _versus(name: str) -> list[str]:
    result = read(name)
    entries = Entries(result["runs"], result["settings"]["token_bytes"])
    cells = entries.cells()
    text = [
        f"**kvtier and its peers, side by side** (`python -m benchmarks.versus`, {_codes(result, entries)}, "
        f"{result['date']}; {_machines(result, entries)}; vLLM {result['versions'].get('vllm')}; "
        "Llama-3.1-8B's dimensions, "
        f"{forwards(result['settings'].get('llm', {}))}; the same prompts, the systems in turn, a "
        "fresh process for each repetition that reloads all lengths; ms to the first token, the median and in "
        f"brackets the fastest and the slowest; computed: 2 prompts, floor: the second hit of each).",
        *(("", f"![Time to the first token over tokens, of each system](results/gpu/{PLOT})") if name == RUN else ()),
    ]
    for place in entries.places():
        text += ["", *_times(entries, cells, place), "", *_rates(entries, cells, place)]
    return [
        *text,
        "",
        judged(goals(cells)),
        "",
        *_losses(cells),
        *_loaded_nothing(cells),
        *_failures(entries),
        *_settings(result),
    ]


def _codes(result: dict[str, Any], entries: Entries) -> str:
    """That of the entries, of which a file that was gone on with may have more than one."""
    return f"kvtier at {' and '.join(entries.commits())}" if entries.commits() else code_of(result)


def _machines(result: dict[str, Any], entries: Entries) -> str:
    count = entries.machines()
    cores = result["machine"]["cores"]
    if count > 1:
        return f"one H200 of each of {count} machines, of which the last has {cores} processors"
    return f"one H200 of a machine with {cores} processors"


def _times(entries: Entries, cells: dict[tuple[str, int, str], Cell], place: str) -> list[str]:
    names = _systems(cells, place)
    kvikio = entries.kvikio(place)
    rows = []
    for tokens in entries.lengths(place):
        of = {name: cells[place, tokens, name] for name in names if (place, tokens, name) in cells}
        first = next(iter(of.values()))
        row = [f"{tokens:,}", ms(first.computed, ""), ms(first.floor, ""), *(_cell(of.get(name)) for name in names)]
        rows.append(row + ([_spread(kvikio[tokens]) if tokens in kvikio else ""] if kvikio else []))
    columns = ["tokens", "computed", "floor: vLLM's own prefix hit", *(CONTESTANTS[name].title for name in names)]
    return [f"From {place}:", "", *table(columns + (["KvikIO alone, raw bytes"] if kvikio else []), rows)]


def _rates(entries: Entries, cells: dict[tuple[str, int, str], Cell], place: str) -> list[str]:
    tokens = entries.lengths(place)[-1]
    reads, copies = entries.reads(place), entries.copies()
    rows = []
    for name in _systems(cells, place):
        cell = cells.get((place, tokens, name))
        if cell is None:
            continue
        rows.append([
            CONTESTANTS[name].title, str(len(cell.times)), f"{cell.rate / 1e9:.1f} GB/s" if cell.rate else "",
            f"{100 * cell.of_ceiling:.0f}% of {cell.ceiling / 1e9:.1f}" if cell.of_ceiling and cell.ceiling else "",
            f"{100 * cell.cold_cost:+.1f}%" if cell.cold_cost is not None else "",
            f"{cell.stored / 1e9:.1f} GB" if cell.stored else "",
        ])  # fmt: skip
    limit = f"pinned copies, {copies / 1e9:.1f} GB/s, " if copies else ""
    slowest = ", the slowest the first after it was written" if place == tables_tmpfs.PLACE else ""
    return [
        f"At {tokens:,} tokens, the engine's KV over the time above the floor (ceiling: the smaller of {limit}and what "
        "the folder gives: the mean of direct reads around that system's repetitions, which are "
        f"{span([r / 1e9 for r in reads], 1)} GB/s{slowest}, or KvikIO alone where that is faster; a codec moves fewer "
        "bytes than it brings):",
        "",
        *table(["", "repetitions", "KV brought", "of the ceiling", "cold time while storing", "stored, all lengths"],
               rows),
    ]  # fmt: skip


def _losses(cells: dict[tuple[str, int, str], Cell]) -> list[str]:
    lost, late = losses(cells), slower_than_computing(cells)
    behind = "; ".join(
        f"{CONTESTANTS[mine.system].title} from {mine.place} at {mine.tokens:,} tokens {ms(mine.ttft)} ms, "
        f"{CONTESTANTS[peer.system].title} {ms(peer.ttft)} ms" for mine, peer in lost
    )  # fmt: skip
    slow = "; ".join(f"{CONTESTANTS[cell.system].title} from {cell.place} at {cell.tokens:,} tokens" for cell in late)
    return [
        f"**Where kvtier loses**: to a peer in {len(lost)} of {len(compared(cells))} comparisons"
        + (f" ({behind})" if lost else "")
        + (f"; to computing: {slow}." if late else "; to computing nowhere in this table.")
    ]


def _loaded_nothing(cells: dict[tuple[str, int, str], Cell]) -> list[str]:
    cases = [
        f"{CONTESTANTS[cell.system].title} at {cell.tokens:,} tokens from {cell.place} in {ms(cell.ttft)} ms (at least "
        f"{ms(cell.least)} ms)" for cell in cells.values() if not cell.has_loaded
    ]  # fmt: skip
    if not cases:
        return []
    return ["", f"{NOTHING} **Loaded nothing**, so it is compared with nobody: the first token came sooner than the KV "
            f"can have passed PCIe: {'; '.join(cases)}. Why, and what was changed after this run: [Beside its "
            "peers](#beside-its-peers)."]  # fmt: skip


def _failures(entries: Entries) -> list[str]:
    missing = [f"{CONTESTANTS[run['system']].title} ({run['kind']}, {run['place']})" for run in entries.failed]
    return ["", f"Did not come through and is in no cell: {'; '.join(missing)}."] if missing else []


def _settings(result: dict[str, Any]) -> list[str]:
    """Of the peers, as they ran; folders are shortened by nothing, so that a reader can repeat it."""
    found = {}
    for key, value in result["settings"].items():
        _, _, name = key.partition(": ")
        if name in PEERS and name not in found:
            found[name] = value
    if not found:
        return []
    lines = [f"- {CONTESTANTS[name].title}: `{json.dumps(value)}`" for name, value in found.items()]
    return ["", "The peers' settings; where two places differ, the first:", "", *lines]


def long_documents() -> list[str]:
    """LMCache's benchmark over HTTP, one and two requests in flight."""
    runs = [read(name) for name in DOCUMENT_RUNS if has(name)]
    if not runs:
        return []
    rows = []
    for result in runs:
        inflight = str(result["settings"]["max_inflight_requests"])
        for name, found in result["systems"].items():
            warmup, query = found["warmup_round"], found["query_round"]
            tokens = query["tokens"] or {}
            share = tokens.get("external_hit_tokens", 0) / tokens["prompt_tokens"] if tokens.get("prompt_tokens") else 0
            rows.append([
                inflight, name, ms(warmup["ttft"].get("mean"), ""), ms(query["ttft"].get("mean"), ""), _floor(found),
                f"{found['ttft_gain']:.1f}x" if "ttft_gain" in found else "", f"{warmup['round_time']:.1f} s",
                f"{query['round_time']:.1f} s", f"{100 * share:.0f}%",
            ])  # fmt: skip
    first = runs[0]
    settings, held = first["settings"], next(iter(first["systems"].values())).get("cache_tokens")
    beyond = f"; vLLM's own KV cache holds {held:,} tokens" if held else ""
    return [
        f"**long_doc_qa** (`python -m benchmarks.serving long_doc_qa`, {code_of(first)}, {first['date'][:10]}; "
        f"{settings['num_documents']} documents of {_document_tokens(first):,} tokens{beyond}; "
        "Llama-3.1-8B's dimensions, from tmpfs; mean ms to the first token; prefix: vLLM's prefix cache alone; native: "
        "vLLM's own tiering, raw; k4v4 is lossy; "
        + ("LMCache was not run):" if "kvtier" in first["systems"] else "raw kvtier and LMCache were not run):"),
        "",
        *table(["in flight", "system", "warm-up", "query", "floor: the same again, one at a time", "warm-up / query",
                "warm-up round", "query round", "of the query's tokens from the tier"], rows),
    ]  # fmt: skip


def _floor(found: dict[str, Any]) -> str:
    return ms(counters.floor_s(found.get("floor")), "")


def _document_tokens(result: dict[str, Any]) -> int:
    """Of each document in the mean, as the server counted."""
    query = next(iter(result["systems"].values()))["query_round"]
    return round(query["tokens"]["prompt_tokens"] / query["prompt_count"])


def drawing() -> str | None:
    """Times over lengths, of tmpfs drawn through, of a disk dashed."""
    if not has(RUN):
        return None
    result = read(RUN)
    entries = Entries(result["runs"], result["settings"]["token_bytes"])
    cells = entries.cells()
    drawn = []
    for style, place in enumerate(entries.places()):
        for name in _systems(cells, place):
            points = [(float(tokens), 1e3 * cell.ttft) for (at, tokens, of), cell in cells.items()
                      if (at, of) == (place, name) and cell.has_loaded]  # fmt: skip
            drawn.append(plot.Line(f"{CONTESTANTS[name].title}, {place}", points, COLOURS[name], style))
    computed = [(float(tokens), 1e3 * cell.computed) for (_, tokens, _), cell in cells.items() if cell.computed]
    drawn.append(plot.Line("computed", sorted(set(computed)), 5))
    return plot.lines("Time to the first token of a stored prompt", "tokens", "ms", drawn)


def _systems(cells: dict[tuple[str, int, str], Cell], place: str) -> list[str]:
    return [name for name in CONTESTANTS if any((at, of) == (place, name) for at, _, of in cells)]


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return ""
    mark = "" if cell.has_loaded else f" {NOTHING}"
    return _spread(cell.times) + mark + ("" if cell.is_whole else f", hits of {cell.hit_tokens:,} tokens alone")


def _spread(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    middle = (ordered[len(ordered) // 2] + ordered[(len(ordered) - 1) // 2]) / 2
    return ms(middle) + (f" ({ms(ordered[0])}-{ms(ordered[-1])})" if len(ordered) > 1 else "")


SECTIONS = (versus, long_documents)
