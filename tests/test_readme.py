"""What the README says was measured is what benchmarks/results holds."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks import (
    tables,
    tables_codecs,
    tables_common,
    tables_cpu,
    tables_gpu,
    tables_headline,
    tables_serving,
    tables_tmpfs,
)

ROOT = Path(__file__).resolve().parent.parent


def test_tables_are_those_of_the_results() -> None:
    command = [sys.executable, "-m", "benchmarks.tables", "--check"]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0, "run python -m benchmarks.tables"


def test_a_lost_mark_is_an_error() -> None:
    """Without its marks a table would go stale unseen."""
    with pytest.raises(ValueError):
        tables.between("no marks here", tables.GPU_MARKS, tables_gpu.SECTIONS)


def test_a_goal_that_is_missed_is_named() -> None:
    missed, met = "\n".join(tables_tmpfs.ttft()).split("Met: ")
    for tokens, of in tables_tmpfs.reloads().items():
        if tokens in tables_tmpfs.TTFT_GOALS_S:
            is_met = of["kvtier"]["ttft_s"] <= tables_tmpfs.TTFT_GOALS_S[tokens]
            assert f"{tokens:,} tokens from tmpfs" in (met if is_met else missed.split("Missed: ")[1])


def test_the_readmes_table_says_of_each_time_whether_its_goal_was_met(monkeypatch: pytest.MonkeyPatch) -> None:
    result = tables_gpu.read(tables_tmpfs.RUN)
    rows = [row for run in result["runs"] if (run["kind"], run["place"], run["system"]) == ("reload", "tmpfs", "kvtier")
            for row in run["rows"] if row["tokens"] == 32_768]  # fmt: skip
    reading(monkeypatch, {tables_tmpfs.RUN: result})
    for seconds, said in ((0.1, "100 (goal 130: met)"), (0.2, "200 (goal 130: **missed**)")):
        for row in rows:
            row["ttft_s"] = seconds
        assert said in "\n".join(tables_headline.reloads())
    assert "32,768 tokens from tmpfs 200 ms (goal 130)" in "\n".join(tables_headline.reloads())


def test_the_share_of_a_transfer_is_of_its_own_runs_ceiling() -> None:
    result, rows = tables_gpu.read(tables_tmpfs.RUN), tables_tmpfs.reloads()
    copies = [run["copies"]["h2d_bytes_s"] for run in result["runs"] if run["kind"] == "alone"]
    for of in rows.values():
        least = 100 * of["kvtier"]["load_bytes_s"] / median(copies)
        assert of["kvtier"]["load_percent_of_limit"] >= least


def test_a_share_that_no_run_measured_is_no_column() -> None:
    lines = tables_gpu.two_ttft()
    heads = [place for place, line in enumerate(lines) if line.startswith("| tokens |")]
    assert heads and all(("share" in lines[head]) is ("%" in lines[head + 2]) for head in heads)


def test_an_arena_of_another_kind_of_machine_is_not_beside_these_reloads(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = tables_gpu.read("ttft_arena")
    assert "100,000 tokens from the host arena" in "\n".join(tables_tmpfs.ttft())
    reading(monkeypatch, {"ttft_arena": arena | {"machine": arena["machine"] | {"boot": "another"}}})
    assert "on a machine alike" in "\n".join(tables_tmpfs.ttft())
    reading(monkeypatch, {"ttft_arena": arena | {"machine": arena["machine"] | {"cores": 12}}})
    assert "100,000 tokens from the host arena" not in "\n".join(tables_tmpfs.ttft())


def test_the_readme_says_where_a_reload_was_slower_than_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    result = tables_gpu.read("ttft_disk")
    ways = {(row["tokens"], row["system"]): row for row in result["rows"]}
    reading(monkeypatch, {"ttft_disk": result})
    for tokens, seconds in ((8_192, 0.3), (32_768, 1.2), (100_000, 6.0)):
        ways[tokens, "computed"]["ttft_s"], ways[tokens, "kvtier"]["ttft_s"] = seconds, seconds - 0.1
    ways[32_768, "kvtier"]["ttft_s"] = 1.3
    (text,) = tables_headline.from_disk()
    assert "took 200 / 1,300 / 5,900 ms, where computing took 300 / 1,200 / 6,000: slower in 1 of 3." in text


def test_what_loaded_nothing_is_not_beside_these_reloads(monkeypatch: pytest.MonkeyPatch) -> None:
    result = tables_gpu.read(tables_tmpfs.RUN)
    reading(monkeypatch, {tables_tmpfs.RUN: result})
    assert "native" in tables_tmpfs.reloads()[32_768]
    for run in result["runs"]:
        if run["kind"] == "reload" and run["system"] == "native":
            run["rows"] = [row | {"ttft_s": 0.01} for row in run["rows"]]
    assert "native" not in tables_tmpfs.reloads()[32_768]


def test_a_working_set_is_compared_with_what_its_own_server_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    result = tables_serving.read("capacity")
    for found in result["systems"].values():
        for row in found["rows"]:
            row["ttft"]["mean"], row["computed_ttft"] = 0.2, {"mean": 0.8}
    result["systems"]["prefix"]["rows"][0]["computed_ttft"] = {}  # stored before
    monkeypatch.setattr(tables_serving, "read", lambda name: result)
    text = "\n".join(tables_serving.working_sets())
    n_rows = sum(len(found["rows"]) for found in result["systems"].values())
    assert text.count("| 200 | 800 | 25% |") == n_rows - 1 and text.count("| 200 |  |  |") == 1


def test_what_was_not_run_has_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(section() for section in tables_serving.SECTIONS) and len(tables_serving.drawings()) == 2
    monkeypatch.setattr(tables_serving, "RESULTS", tmp_path)
    assert not any(section() for section in tables_serving.SECTIONS) and not tables_serving.drawings()


def test_what_went_wrong_under_load_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    result = tables_gpu.read("load_mix")
    for good in (True, False):
        reading(monkeypatch, {"load_mix": result | {"good": good}})
        assert ("Not all of it is as it must be" in "\n".join(tables_headline.others())) is not good


def test_two_gpus_are_a_line_once_they_were_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ways = [
        {"stored_at": 2, "loaded_at": 1, "blocks": {"equal": 5000, "wrong": 1, "unknown": 2}, "failed_loads": 4},
        {"stored_at": 1, "loaded_at": 2, "blocks": {"equal": 1, "wrong": 0, "unknown": 0}, "failed_loads": 0},
    ]
    reading(monkeypatch, {"two_gpus_equal": {"equal": ways}})
    monkeypatch.setattr(tables_headline, "has", lambda name: name in ("two_gpus_equal", "equality_small"))
    text = "\n".join(tables_headline.others())
    assert "TP=2 to TP=1, TP=1 to TP=2: 5,001 loaded blocks" in text and "3 are not; failed loads: 4." in text


def test_every_table_names_its_code_and_its_day() -> None:
    """But for the first paragraph, which names the machine."""
    for section in (*tables_cpu.SECTIONS, *tables_headline.SECTIONS, *tables_gpu.SECTIONS[1:]):
        titles = [line for line in section() if re.match(r"\*\*[^*]+\*\* \(", line)]
        assert all(re.search(r"kvtier at .*2\d{3}-\d\d-\d\d", title) for title in titles), titles


def test_tables_of_codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of results as the benchmarks write them; there may be none yet."""
    kernels = [
        {"case": case, "kernel": kernel, "tb_s": 2.5, "percent_of_bound": 70.0, "device_tb_s": 2.75, "faults": []}
        for case in tables_codecs.GOAL_CASES
        for kernel in tables_codecs.KERNELS
    ]
    kernels[0]["tb_s"] = 1.5
    kernels[1]["faults"] = kernels[2]["faults"] = ["decode"]
    short = {"tokens": 8192, "hit_tokens": 8192, "ttft_s": 0.03, "all_s": [0.03], "load_bytes_s": 20e9}
    long = {"tokens": 100_000, "hit_tokens": 99_840, "ttft_s": 0.15, "all_s": [0.15]}
    rows = [short | {"system": "kvtier"}, *(long | {"system": name} for name in ("kvtier", "kvtier, hbm arena"))]
    head = {"commit": "abc", "date": "2026-11-21"}
    changed = {
        "codec_kernels": head | {"copy_gb_s": 4000.0, "rows": kernels},
        "ttft_tmpfs_k4v4": head | {"extra": {"codec": "k4v4"}, "rows": rows},
        "ttft_disk_k4v4": head | {"extra": {"codec": "k4v4"}, "rows": [long | {"system": "kvtier", "ttft_s": 1.3}]},
    }
    reading(monkeypatch, changed)
    monkeypatch.setattr(tables_codecs, "has", changed.__contains__)
    text = "\n".join(tables_codecs.kernels())
    assert f"**missed**: {tables_codecs.GOAL_CASES[0]} encode 1.50. On the device" in text and "2.50 TB/s, 70%" in text
    assert "verify+decode k4v4 2.75, k4v3 2.75." in text
    assert text.endswith(f"theory: {tables_codecs.GOAL_CASES[0]}: decode.")
    monkeypatch.setattr(tables_codecs, "codec_runs", lambda: ["ttft_tmpfs_k4v4"])
    text = "\n".join(tables_codecs.reloads())
    assert "codec k4v4" in text and "| tokens | from tmpfs | from the hbm arena | from the disk |" in text
    assert "| 8,192 | 30, 20.0 GB/s |  |  |" in text and "| 100,000 | 150 | 150 | 1,300 |" in text
    assert "Missed: 100,000 tokens from the disk 1,300 ms (goal 1,200); 100,000 tokens from the hbm arena" in text
    assert "Met: 100,000 tokens from tmpfs 150 ms (goal 180)" in text


def test_lookup_and_fio_are_absolute_and_with_their_spread() -> None:
    lookup, records = ("\n".join(section()) for section in (tables_cpu.lookup, tables_cpu.records))
    p50_us = tables_cpu.read("lookup")["parts"]["total"]["p50_us"]
    assert f"| 5 ms | {p50_us / 1000:.2f} ms, " in lookup
    cell = tables_cpu.read("records_vs_fio")["cells"][0]
    shares = [100 * ours / fio for ours, fio in zip(cell["ours"], cell["fio"], strict=True)]
    assert f"{cell['percent_of_fio']:.0f}% ({min(shares):.0f}-{max(shares):.0f})" in records


def test_every_refusal_of_the_connectors_is_in_kvtiers_readme() -> None:
    """By its key, as the error names it."""
    refused = (ROOT / "kvtier" / "README.md").read_text().split("## What stops start-up")[1].split("\n#")[0]
    keys = {key for path in (ROOT / "connectors").glob("*.py") for key in refusals(path.read_text())}
    assert len(keys) > 10 and not [key for key in sorted(keys) if f"`{key}`" not in refused]


def refusals(source: str) -> list[str]:
    """Keys of the ConfigErrors that are raised; those of a loop are the texts that it goes over."""
    found: list[str] = []
    tree = ast.parse(source)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "ConfigError"]
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For)]
    for call in calls:
        key = call.args[0]
        if isinstance(key, ast.Constant):
            found.append(key.value)
        for loop in loops:
            if isinstance(key, ast.Name) and ast.unparse(loop.target) == key.id and call in ast.walk(loop):
                found += ast.literal_eval(loop.iter)
    return found


PAGES = [ROOT / folder / "README.md" for folder in (".", "benchmarks", "configs", "tests")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.parent.name)
def test_links_lead_somewhere(page: Path) -> None:
    """To files that are there, and to headings that they have."""
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    assert len(links) > 2
    for path, _, heading in (link.partition("#") for link in links):
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not heading or heading in headings(target), f"{path}#{heading}"


def test_results_that_the_code_cites_are_there() -> None:
    """A comment cited one under the name that it had before."""
    paths = [path for folder in ("kvtier", "connectors", "server") for path in (ROOT / folder).rglob("*.py")]
    cited = {name for path in paths for name in re.findall(r"benchmarks/results/[\w/.-]+\.json", path.read_text())}
    assert cited and not [name for name in sorted(cited) if not (ROOT / name).exists()]


def headings(page: Path) -> set[str]:
    """As GitHub names them in links."""
    found = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


def reading(monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any]) -> None:
    """Lets the tables read these results instead of those on disk."""
    real = tables_common.read
    for module in (tables_codecs, tables_gpu, tables_headline, tables_tmpfs):
        monkeypatch.setattr(module, "read", lambda name: changed[name] if name in changed else real(name))
