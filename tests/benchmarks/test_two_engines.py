"""The benchmark of two engines: its list of prompts, and what it makes of the engines' records."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.gpu.two_engines import (
    MIX,
    figures,
    hits_of_the_other,
    is_good,
    lost_items,
    prefix_of,
    read_rows,
    table_rows,
    trim,
)


def test_the_list_has_shared_and_private_prefixes() -> None:
    items = [prefix_of(number, MIX) for number in range(1600)]
    assert items == [prefix_of(number, MIX) for number in range(1600)]
    counts = Counter(name for name, _ in items)
    private = [name for name in counts if name.startswith("private")]
    assert 150 < len(private) < 250 and all(counts[name] == 1 for name in private)
    assert len(counts) - len(private) <= MIX["window"] + 1600 // MIX["document_every"]
    assert len(dict(items)) == len(set(items))  # a prefix always has the same length
    assert all(MIX["shortest"] <= n_tokens <= MIX["longest"] for _, n_tokens in items)


def row(engine: str, prefix: str, first_s: float, hits: int, item: int = 0, **more: Any) -> dict[str, Any]:
    about = {"engine": engine, "prefix": prefix, "prefix_tokens": 600, "tokens": 800, "hit_tokens": hits, "item": item}
    times = {"began_s": first_s - 1.0, "first_s": first_s, "ended_s": first_s + 1.0}
    return about | times | {"answer": [7, 8], "reason": "length"} | more


def test_hits_of_the_other() -> None:
    rows = [row("a", "x", 1.0, 0), row("b", "x", 2.0, 512), row("b", "x", 3.0, 512)]  # b computed nothing of x
    rows += [row("a", "x", 4.0, 512)]  # its own
    rows += [row("b", "y", 5.0, 0), row("a", "y", 6.0, 256), row("a", "y", 7.0, 768)]  # a computes the rest
    assert hits_of_the_other(rows, 256) == 512 + 512 + 256
    assert hits_of_the_other(rows[::-1], 256) == 512 + 512 + 256


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))


def test_figures_of_a_killed_and_a_failed_request(tmp_path: Path) -> None:
    saved = {"key": "00", "first_block": 0, "first_head": 0, "digests": [[1], [2]]}
    loaded = saved | {"digests": [[1], [3]]}
    none: dict[str, Any] = {"saved": [], "loaded": [], "failed_loads": 0}
    write(tmp_path / "a.jsonl", [{"asked": 1}, row("a", "x", 1.0, 0, 1), {"blocks": none | {"saved": [saved]}}])
    write(tmp_path / "b.jsonl", [{"asked": 2}, {"asked": 3}, row("b", "y", 1.0, 0, 2)])
    with (tmp_path / "b.jsonl").open("a") as file:
        file.write('{"item": 3, "ans')  # killed
    assert lost_items(read_rows(tmp_path / "b.jsonl")) == [3]
    again = [{"asked": 3}, row("b", "x", 9.0, 512, 3, reason="error"), {"blocks": none | {"loaded": [loaded]}}]
    write(tmp_path / "b2.jsonl", again)
    facts = {"seconds": 4.0, "until_s": 5.0, "killed_s": 2.0, "failed_engines": [], "lost": 1}
    facts |= {"watch": 16, "away_s": 2.0}
    (tmp_path / "facts.json").write_text(json.dumps(facts))
    found = figures(tmp_path, 256)
    assert (found["requests"], found["requests_s"], found["answer_tokens_s"]) == (3, 0.5, 1.0)
    assert (found["failed"], found["other_hit_tokens"]) == (1, 512)
    assert found["blocks"] == {"equal": 1, "wrong": 1, "unknown": 0}
    assert not is_good(found)
    assert table_rows({"kvtier": found})[1][0][7:] == ["**1**", "1", "**1**"]


def test_the_oldest_files_are_deleted(tmp_path: Path) -> None:
    for number in range(4):
        path = tmp_path / str(number % 2) / f"{number}.bin"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(8192))
        os.utime(path, (number, number))
    trim(tmp_path, 3 * 8192)
    assert sorted(path.name for path in tmp_path.rglob("*.bin")) == ["1.bin", "2.bin", "3.bin"]
