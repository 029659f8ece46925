"""The commands that work on a deployment: what they print and change, and their exit status."""

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import bench, bench_storage, progress, tables
from kvtier.cli import root as own_index
from kvtier.config.settings import CONFIG_VARIABLE
from kvtier.eviction.evictor import EvictionResult, Evictor
from kvtier.index.lmdb.index import LmdbIndex
from kvtier.io.ring import FlushOp, sizes_for
from kvtier.scheduler.engine_report import Times, TopPrefix, WorkerReport
from kvtier.storage.filesystem import FileSystem
from kvtier.storage.root import CAPACITY_UNIT, MODEL_FILE, default_capacity
from tests.cli.asking import CHUNKS, TOKENS, Cli

CAPACITY = 64 << 20


@pytest.fixture
def config(root: Path, tmp_path: Path) -> Path:
    """Settings of a deployment with that root."""
    path = tmp_path / "kvtier.yaml"
    tenants = "[{name: search, cache_salts: ['search-*'], quota_bytes: 16MiB}]"
    path.write_text(
        f"root: {root}\ncapacity_bytes: {CAPACITY}\nsegment_bytes: 1MiB\ncapacity: {{tenants: {tenants}}}\n"
    )
    return path


def root_of(config: Path) -> Path:
    return config.parent / "kv"


def namespace_of(config: Path) -> str:
    return next(root_of(config).glob("v2/*/namespace.json")).parent.name


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps(TOKENS + [1, 2, 3]))
    return str(path)


@pytest.fixture
def read_only(config: Path, tokens: str, cli: Cli) -> Iterator[Path]:
    """The settings of a root that has a pin and is mounted read-only, as a volume of a pod may be."""
    root = root_of(config)
    cli.run("pin", str(config), "--namespace", namespace_of(config), "--tokens", tokens)
    if subprocess.run(["mount", "--bind", str(root), str(root)], capture_output=True).returncode:
        pytest.skip("mounting takes root")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(root)], check=True)
        yield config
    finally:
        subprocess.run(["umount", "-l", str(root)], check=True)


# --- which place ---


def test_settings_are_named_in_three_ways(config: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    named = cli.json("stats", "--config", str(config))
    assert named["capacity"]["capacity_bytes"] == CAPACITY and named["index_kind"] == "embedded"
    assert cli.json("stats", str(config))["root"] == str(root_of(config))
    assert "namespaces" in cli.json("stats", str(root_of(config)))  # the folder alone
    monkeypatch.setenv(CONFIG_VARIABLE, str(config))
    assert cli.json("stats")["capacity"]["capacity_bytes"] == CAPACITY
    assert cli.json("stats", str(root_of(config)))["capacity"]["capacity_bytes"] == CAPACITY


def test_what_depends_on_the_settings_asks_for_them(config: Path, cli: Cli) -> None:
    """With the default capacity in place of the real one, pins would not protect what they should."""
    root = str(root_of(config))
    for command in (["evict", root, "--all", "--yes"], ["pin", root], ["unpin", "x", root], ["quota", root]):
        assert "add --config FILE, or set KVTIER_ROOT" in cli.refused(*command)
    assert "leave one of them out" in cli.refused("stats", str(config), "--config", str(config))
    assert "no such folder" in cli.refused("lookup", f"{root}/absent", "--tokens", "x")


def test_the_root_variable_alone_is_a_deployment(config: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """Its capacity is that of an engine with this variable alone: by another one, other sets would be protected."""
    monkeypatch.setenv("KVTIER_ROOT", str(root_of(config)))
    monkeypatch.setenv("KVTIER_SEGMENT_BYTES", "1MiB")
    expected = pytest.approx(default_capacity(root_of(config)), abs=2 * CAPACITY_UNIT)
    assert cli.json("stats")["capacity"]["capacity_bytes"] == expected
    assert cli.json("check")["settings"]["capacity_bytes"] == expected
    monkeypatch.setenv("KVTIER_CAPACITY_BYTES", str(CAPACITY))
    assert cli.json("stats")["capacity"]["capacity_bytes"] == CAPACITY


def test_a_running_engine_knows_the_capacity(config: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """The disk that it measured at its start has filled since: stats showed the tier as more than full."""
    report(config, capacity_bytes=CAPACITY)
    monkeypatch.setenv("KVTIER_ROOT", str(root_of(config)))
    monkeypatch.setenv("KVTIER_SEGMENT_BYTES", "1MiB")
    assert cli.json("stats")["capacity"]["capacity_bytes"] == CAPACITY
    assert f"of at most {CAPACITY >> 21}.0 MiB" in cli.printed("pin")
    monkeypatch.setenv("KVTIER_CAPACITY_BYTES", str(2 * CAPACITY))
    assert cli.json("stats")["capacity"]["capacity_bytes"] == 2 * CAPACITY, "what is set counts"


def test_looking_makes_no_root(tmp_path: Path, cli: Cli) -> None:
    config = tmp_path / "kvtier.yaml"
    config.write_text(f"root: {tmp_path / 'kv'}\n")
    for command in ("stats", "verify", "pin", "quota", "bench"):
        assert "no such folder" in cli.refused(command, "--config", str(config))
    assert not (tmp_path / "kv").exists()


# --- stats ---


def test_stats_of_a_deployment(config: Path, cli: Cli) -> None:
    assert "(no engine now)" in cli.printed("stats", str(config)), "the engine's kind stood there as the model"
    report(config)
    out = cli.printed("stats", str(config))
    assert f"{root_of(config)}: " in out and "of 64.0 MiB" in out
    assert f"index: embedded, {CHUNKS} chunks in 1 segment set\n" in out
    assert "engines: 1\n" in out and "hit ratio 75.0 %" in out
    for title in (
        "tiers:",
        "namespaces:",
        "tenants:",
        "engines, since the start of each:",
        "prefixes that are loaded most:",
    ):
        assert f"\n{title}\n" in out
    assert "search" in out and "0 bytes of 16.0 MiB" in out and "a-model" in out
    assert " raw, chunks of 64 " in out, "two namespaces that differed in chunk_tokens alone looked alike"


def test_stats_of_a_folder_shows_its_engines(config: Path, cli: Cli) -> None:
    """It showed the namespaces alone, although the index in the folder has the engines' reports."""
    report(config)
    out = cli.printed("stats", str(root_of(config)))
    for title in ("engines, since the start of each:", "prefixes that are loaded most:"):
        assert f"\n{title}\n" in out
    assert "engines: 1\n" in out and "filesystem" not in out, "the default capacity is not that of the engines"
    assert out.splitlines()[-1].startswith("not shown: capacity, quotas and pins; name the engines' settings")
    assert cli.json("stats", str(root_of(config)))["workers"][0]["report"]["host"] == "gpu-01"


def report(config: Path, capacity_bytes: int | None = None) -> None:
    """Leaves a note as an engine does."""
    index = LmdbIndex(str(root_of(config) / "v2" / "index"))
    index.bind(root_of(config) / "v2")
    now = time.time()
    lookup = Times()
    lookup.add(0.002)
    counters = {"lookup_tokens": 400.0, "hit_tokens": 300.0, "load_bytes": 1e9}
    made = WorkerReport(
        owner="gpu-01-7",
        host="gpu-01",
        pid=7,
        kvtier_version="0.1.0",
        engine="vllm",
        engine_version="0.32.0",
        model="a-model",
        capacity_bytes=capacity_bytes,
        namespace=namespace_of(config),
        ranks=2,
        started_s=now - 60,
        at_s=now,
        interval_s=5.0,
        counters=counters,
        recent=counters,
        lookup=lookup.latency(),
        read_ceiling_bytes_s=2e9,
        top_prefixes=(TopPrefix(key="01" * 16, tokens=320, hits=9),),
    )
    index.put_note("worker/gpu-01-7", made.note(), now + 600)
    index.close()


# --- lookup ---


def test_lookup_says_how_much_and_where(config: Path, tokens: str, cli: Cli) -> None:
    out = cli.printed("lookup", str(config), "--tokens", tokens)
    head, titles, row = out.splitlines()
    assert head.startswith(f"{namespace_of(config)[:12]}: {64 * CHUNKS} of {64 * CHUNKS + 3} tokens, 5 of 5 chunks")
    assert titles.split()[0] == "set" and row.split()[1:3] == ["0", "5"] and ".kvseg" in row
    (root_of(config) / "v2" / namespace_of(config) / MODEL_FILE).write_text('"a-model"')
    answer = cli.json("lookup", str(root_of(config)), "--tokens", tokens)  # the folder alone will do
    assert answer["hits"][0]["hit_tokens"] == 64 * CHUNKS
    assert answer["hits"][0]["model"] == "a-model", "only running engines said it"
    names = [place["files"] for place in answer["hits"][0]["sets"]]
    assert all((root_of(config) / "v2" / namespace_of(config) / name).is_file() for files in names for name in files)


def test_lookup_of_what_is_not_stored_is_status_1(config: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(" ".join(map(str, range(7, 200)))))
    assert "nothing is stored of these 193 tokens" in cli.printed("lookup", str(config), "--tokens", "-", status=1)
    for text, said in (
        ("7", "this token (less than a chunk), in 1 name"),
        ("7 8", "these 2 tokens (less than a chunk)"),
    ):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert f"nothing is stored of {said}" in cli.printed("lookup", str(config), "--tokens", "-", status=1)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({"count": len(TOKENS), "tokens": TOKENS})))
    salted = ["lookup", str(config), "--tokens", "-", "--salt", "someone"]
    assert cli.json(*salted, status=1)["hits"][0]["hit_tokens"] == 0


def test_lookup_that_cannot_be_done(config: Path, tmp_path: Path, cli: Cli) -> None:
    bad = tmp_path / "bad"
    assert "which prompt?" in cli.refused("lookup", str(config))
    for text in ("", "{}", '["a"]'):  # of an empty file it said that nothing is stored
        bad.write_text(text)
        assert f"{bad}: no token ids" in cli.refused("lookup", str(config), "--tokens", str(bad))
    said = cli.refused("lookup", str(config), "--prompt", "a text")
    assert "no running engine reports a tokenizer: send token ids with --tokens" in said
    for namespace in ("ffff", ""):
        text = cli.refused("lookup", str(config), "--tokens", str(bad), "--namespace", namespace)
        assert ("--namespace ffff: there is no such" if namespace else "--namespace is empty") in text


# --- evict, pin, quota ---


def sets_left(config: Path, cli: Cli) -> int:
    return int(cli.json("stats", str(config))["index"]["sets"])


def test_evict_says_first_and_then_does(config: Path, tokens: str, cli: Cli) -> None:
    by_prefix = ["--tokens", tokens, "--namespace", namespace_of(config)[:6]]
    for which in (["--bytes", "1KiB"], ["--unused", "0.001s"], ["--tenant", ""], ["--all"], by_prefix):
        would = cli.json("evict", str(config), *which, "--dry-run")
        assert (would["n_sets"], would["dry_run"]) == (1, True), which
    for which in (["--unused", "1w"], ["--tenant", "search"], ["--all", "--namespace", namespace_of(config)]):
        assert cli.json("evict", str(config), *which, "--dry-run")["n_sets"] == ("--all" in which)
    assert sets_left(config, cli) == 1
    assert "1 segment set evicted" in cli.printed("evict", str(config), "--all", "--yes")
    assert sets_left(config, cli) == 0 and not list(root_of(config).glob("v2/*/*.kvseg"))
    assert "0 segment sets evicted" in cli.printed("evict", str(config), "--all")


def test_evict_asks_on_a_terminal_and_does_nothing_without_one(
    config: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    assert "say --yes" in cli.refused("evict", str(config), "--all")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for answer, left in (("\n", 1), ("no\n", 1), ("y\n", 0)):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        said = cli.errors("evict", str(config), "--all", status=2 if left else 0)
        assert "Evict them? [y/N]" in said and ("nothing was evicted" in said) == bool(left)
        assert sets_left(config, cli) == left


def test_evict_that_is_ended_before_says_so(config: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setattr(Evictor, "_remove", lambda *_: EvictionResult((), 0))  # another one took over at once
    out, said = cli.run("evict", str(config), "--all", "--yes", "--json", status=2)
    assert json.loads(out)["is_complete"] is False and "ask again for the rest" in said


def test_evict_of_nothing_in_particular_is_refused(config: Path, tokens: str, cli: Cli) -> None:
    assert "which sets?" in cli.refused("evict", str(config), "--yes")
    assert "add --namespace" in cli.refused("evict", str(config), "--tokens", tokens, "--yes")
    for command in (["evict", "--all", "--yes"], ["pin"], ["pin", "--namespace", namespace_of(config)]):
        said = cli.refused(command[0], str(config), *command[1:], "--salt", "x")
        assert "--salt belongs to a prompt" in said
    assert "goes with --all only" in cli.refused("evict", str(config), "--bytes", "1", "--include-pinned")


def test_what_is_pinned_stays_until_it_is_unpinned(config: Path, tokens: str, cli: Cli) -> None:
    namespace = namespace_of(config)
    row = cli.json("pin", str(config), "--namespace", namespace, "--tokens", tokens, "--label", "a demo", "--for", "2h")
    assert (row["keys"], row["sets"], row["label"]) == (CHUNKS, 1, "a demo")
    assert 7100 < row["expires_s"] - row["created_s"] <= 7200
    whole = cli.printed("pin", str(config), "--namespace", namespace[:8])
    assert "the whole namespace, 1 segment set," in whole
    listed = cli.printed("pin", str(config))
    assert "a demo" in listed and "2 pins, protecting " in listed and "unpinned" in listed
    answer = cli.json("evict", str(config), "--all", "--yes")
    assert answer["n_sets"] == 0 and [kept["why"] for kept in answer["kept"]] == ["pinned"]
    assert "pinned (kvtier pin lists" in cli.printed("evict", str(config), "--all", "--yes")
    assert cli.json("evict", str(config), "--all", "--include-pinned", "--dry-run")["n_sets"] == 1
    assert "2 pins begin with" in cli.refused("unpin", "", str(config))
    for pin in cli.json("pin", str(config))["pins"]:
        assert "is removed" in cli.printed("unpin", pin["id"][:8], str(config))
    assert "there is no pin ffffff: kvtier pin lists the pins" in cli.refused("unpin", "ffffff", str(config))
    assert cli.json("evict", str(config), "--all", "--yes")["n_sets"] == 1


@pytest.mark.parametrize("label", ["x" * 201, "\udcff", "a\nb"])
def test_a_label_that_cannot_be_shown_pins_nothing(config: Path, label: str, cli: Cli) -> None:
    pin = ("pin", str(config), "--namespace", namespace_of(config), "--label", label)
    assert "printable characters" in cli.refused(*pin)
    assert cli.json("pin", str(config))["pins"] == []


@pytest.mark.parametrize("more", [("--label", "a demo"), ("--for", "2h")])
def test_a_pin_of_nothing_is_refused(config: Path, more: tuple[str, str], cli: Cli) -> None:
    assert "add --namespace" in cli.refused("pin", str(config), *more)


def test_quotas_are_set_lifted_and_reset(config: Path, cli: Cli) -> None:
    def tenant() -> tuple[Any, Any]:
        (row,) = [row for row in cli.json("quota", str(config))["quotas"] if row["kind"] == "tenant"]
        return row["quota_bytes"], row["is_run_time"]

    assert tenant() == (16 << 20, False)
    out = cli.printed("quota", str(config), "--tenant", "search", "--set", "1GiB")
    assert "1.0 GiB" in out and "kvtier quota" in out and "no tenant" not in out
    assert tenant() == (1 << 30, True)
    unknown = ("quota", str(config), "--tenant", "serch")
    assert "no tenant is called serch" in cli.printed(*unknown, "--set", "1GiB")
    assert "no tenant" not in cli.printed(*unknown, "--reset")
    assert "unlimited" in cli.printed("quota", str(config), "--tenant", "search", "--unlimited")
    assert tenant() == (None, True)
    cli.printed("quota", str(config), "--tenant", "search", "--reset")
    assert tenant() == (16 << 20, False)
    assert "nothing was reset" in cli.refused("quota", str(config), "--tenant", "search", "--reset")
    cli.printed("quota", str(config), "--namespace", namespace_of(config)[:10], "--set", "2MiB")
    (row,) = [row for row in cli.json("quota", str(config))["quotas"] if row["kind"] == "namespace"]
    assert (row["of"], row["quota_bytes"]) == (namespace_of(config), 2 << 20)
    for which in (["--tenant", "search"], ["--namespace", namespace_of(config)]):
        assert "no room for one segment set (1MiB" in cli.refused("quota", str(config), *which, "--set", "1023KiB")
    config.write_text(config.read_text().replace("segment_bytes: 1MiB\n", ""))  # then a sixteenth of the capacity
    cli.printed("quota", str(config), "--tenant", "search", "--set", "4MiB")
    cli.printed("quota", str(config), "--tenant", "search", "--set", "0")
    assert "add --tenant LABEL" in cli.refused("quota", str(config), "--set", "1GiB")
    assert "add --set SIZE" in cli.refused("quota", str(config), "--tenant", "search")
    for label in ("a/b", "\u00e9" * 17, " a", "\udcff"):  # the last is what a shell makes of a byte that is no UTF-8
        assert "1 to 32 bytes" in cli.refused("quota", str(config), "--tenant", label, "--set", "1GiB")
    cli.printed("quota", str(config), "--tenant", "\u00e9" * 16, "--set", "1GiB")


# --- bench, verify ---


def test_a_read_only_root_can_be_looked_at(read_only: Path, tokens: str, cli: Cli) -> None:
    """Commands that change nothing were refused: each tried to write to the root first."""
    values = cli.json("stats", str(read_only))
    assert values["namespaces"][0]["chunks"] == CHUNKS and values["root"] == str(root_of(read_only))
    assert cli.json("lookup", str(read_only), "--tokens", tokens)["hits"][0]["hit_chunks"] == CHUNKS
    assert [pin["keys"] for pin in cli.json("pin", str(read_only))["pins"]] == [CHUNKS]
    assert [quota["of"] for quota in cli.json("quota", str(read_only))["quotas"]] == ["search"]
    assert cli.json("verify", str(read_only))["records"] == CHUNKS
    out, said = cli.run("stats", str(read_only))
    assert "engines, capacity, quotas and pins; the index is on a read-only" in out
    assert len(said.splitlines()) == 1, "two lines, which contradicted each other"


@pytest.mark.parametrize("words", [("index", "check"), ("index", "rebuild"), ("evict", "--bytes", "1MiB", "--yes")])
def test_what_needs_a_writable_root_says_so(words: tuple[str, ...], read_only: Path, cli: Cli) -> None:
    assert "mount it for writing" in cli.refused(*words, "--config", str(read_only))


def test_bench_measures_beside_ceilings(config: Path, cli: Cli) -> None:
    found = cli.json("bench", str(config), "--size", "16MiB")
    by_name = {figure["what"]: figure for figure in found["figures"]}
    assert set(by_name) == {"writing records", "reading and checking records", f"lookup of {CHUNKS} chunks"}
    for figure in by_name.values():
        is_rate = figure["unit"] == "bytes/s"
        over = figure["value"] / figure["ceiling"] if is_rate else figure["ceiling"] / figure["value"]
        assert figure["share"] == pytest.approx(over) and figure["value"] > 0
    assert not list(root_of(config).rglob(".calibrate-*"))
    assert "the ceiling is" in cli.printed("bench", str(root_of(config)), "--size", "16MiB")


def test_bench_counts_fdatasync_where_engines_call_it(config: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """On a file system whose client writes behind it reported the rate of the client's memory."""
    real, flushed = os.fdatasync, []

    def flush(fd: int) -> None:
        flushed.append(fd)
        time.sleep(0.2)
        real(fd)

    monkeypatch.setattr(os, "fdatasync", flush)
    found = cli.json("bench", str(config), "--size", "16MiB")
    assert not flushed and "writes count no fdatasync" in found["notes"][0]
    gluster = FileSystem("fuse.glusterfs", True, "/")
    monkeypatch.setattr(bench, "file_system_of", lambda _: gluster)
    found = cli.json("bench", str(config), "--size", "16MiB")
    plain = next(figure for figure in found["figures"] if figure["what"] == "writing records")["ceiling"]
    assert len(flushed) == bench_storage.ROUNDS and plain < (16 << 20) / 0.2
    assert "writes count the fdatasync that engines call" in found["notes"][0]


def test_the_ring_flushes_what_bench_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, ops = bench_storage._run, []
    monkeypatch.setattr(bench_storage, "_run", lambda ring, batch: ops.append(type(batch[0])) or run(ring, batch))
    sizes = sizes_for(False, 2, None)
    for flushes in (False, True):
        bench_storage.measure(tmp_path, sizes, False, flushes, 16 << 20, lambda: None)
    assert ops.count(FlushOp) == bench_storage.ROUNDS + 1


def test_bench_of_less_than_a_record_is_refused(config: Path, cli: Cli) -> None:
    """The command used to say that the disk has no room."""
    assert "--size 1: one record takes" in cli.refused("bench", str(config), "--size", "1")


def test_bench_of_a_full_disk_is_said(config: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    monkeypatch.setattr(bench.bench_storage, "RECORD_BYTES", 1 << 60)
    assert "no room for" in cli.refused("bench", str(config))


def test_commands_open_the_index_as_the_settings_say(config: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """The commands waited 2 s for its locks, whatever index.timeout_s was."""
    config.write_text(f"{config.read_text()}index: {{map_bytes: 32MiB, timeout_s: 7}}\n")
    given = []

    class Noted(LmdbIndex):
        def __init__(self, path: str, map_bytes: int = 0, timeout_s: float = 0.0) -> None:
            given.append((map_bytes, timeout_s))
            super().__init__(path, map_bytes, timeout_s)

    monkeypatch.setattr(own_index, "LmdbIndex", Noted)
    for words in (("index", "check"), ("index", "rebuild"), ("verify",)):
        cli.run(*words, str(config))
    assert given == [(32 << 20, 7.0)] * 3


def test_verify_takes_settings_too(config: Path, cli: Cli) -> None:
    for place in ([str(root_of(config))], [str(config)], ["--config", str(config)]):
        assert cli.json("verify", *place)["records"] == CHUNKS


# --- arguments, progress, processes ---


@pytest.mark.parametrize(
    "arguments",
    [
        ["evict", "x", "--bytes", "many"],
        ["evict", "x", "--unused", "soon"],
        ["evict", "x", "--unused", "0s"],
        ["quota", "x", "--tenant", "a", "--namespace", "b", "--reset"],
        ["lookup", "x", "--tokens", "a", "--prompt", "b"],
        ["unpin"],
        ["stat"],
        ["index"],
        ["stats", "/x", "--jsn"],
        ["quota", "x", "--tenant", "a", "--set", "1", "--reset"],
        ["quota", "x", "--tenant", "a", "--set", "0", "--unlimited"],
        ["stats", ""],
        ["stats", "--config", ""],
    ],
)
def test_wrong_usage_is_status_2(arguments: list[str], cli: Cli) -> None:
    """Each took three lines, of which the last one said what is wrong."""
    said = cli.refused(*arguments)
    assert said.startswith(f"kvtier{' ' if arguments[0] != 'stat' else ':'}") and said.endswith(" --help)\n")


def test_a_bar_is_drawn_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    seen = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", seen)
    with progress.progress("verifying", "segments") as show:
        show(5, 10)
        show(10, 10)
    drawn = re.sub(r"\x1b\[[?\d;]*[a-zA-Z]", "", seen.getvalue()).replace("\r", "\n").split("\n")
    last = [line for line in drawn if line.strip()][-1]
    assert last.startswith("verifying ") and "100%" in last and "10 of 10 segments" in last
    assert seen.getvalue().rstrip().endswith("\x1b[?25h"), "the cursor is shown again"
    quiet = io.StringIO()
    monkeypatch.setattr(sys, "stderr", quiet)
    with progress.progress("verifying", "segments") as show:
        show(1, 1)
    assert quiet.getvalue() == ""


@pytest.mark.parametrize("columns", ["40", "400"])
def test_a_terminal_folds_cells_and_nothing_is_cut(
    columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("LINES", "25")  # without it rich takes a dumb terminal for 80 columns wide
    rows = [("title [bold]", "x"), (f"{'long ' * 12}end", "1")]
    tables.print_table(rows, right=(1,))
    assert capsys.readouterr().out == f"title [bold]{' ' * 53}x\n{'long ' * 12}end  1\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    tables.print_table(rows, right=(1,))
    out = capsys.readouterr().out
    assert out.count("long") == 12 and "[bold]" in out and max(map(len, out.splitlines())) <= int(columns)


def test_a_prompt_that_cannot_be_read_is_named(config: Path, tmp_path: Path, cli: Cli) -> None:
    missing, binary = tmp_path / "missing.json", tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\xff")
    assert f"{missing}: no prompt can be read there: No such file" in cli.refused(
        "lookup", str(config), "--tokens", str(missing)
    )
    said = cli.refused("lookup", str(config), "--tokens", "1,2,3")
    assert "--tokens and --prompt-file name a file, or - for the standard input" in said
    assert f"{binary}: no prompt can be read there" in cli.refused("lookup", str(config), "--tokens", str(binary))
