"""The command line over roots that real engines left: what it prints, and its exit status."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from kvtier.cli import check, doctor, main
from kvtier.doctor.host import Diagnosis, Host, ProbeFailed
from kvtier.format.geometry import PAGE_BYTES
from kvtier.format.record import SegmentHeader
from kvtier.index.lmdb.index import LmdbIndex
from kvtier.runtime.exit_status import FOUND_BAD, INTERRUPTED, NOT_DONE, OK
from kvtier.runtime.memory_limits import MachineMemory
from kvtier.runtime.versions import commit
from kvtier.storage import root as root_module
from kvtier.storage.filesystem import IN_MEMORY, file_system_of
from kvtier.storage.root_owner import Node, Owner
from tests.model_configs import LLAMA_8B
from tests.support.rig import Engine

CHUNKS = 5


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with five chunks of 64 tokens, whose engine has ended."""
    root = tmp_path_factory.mktemp("made") / "kv"
    engine = Engine(root)
    assert len(engine.save(list(range(64 * CHUNKS)), list(range(4 * CHUNKS)))) == CHUNKS
    engine.close()
    return root


@pytest.fixture
def root(made: Path, tmp_path: Path) -> Path:
    """A copy to damage, with an index of its own."""
    copy = Path(shutil.copytree(made, tmp_path / "kv"))
    shutil.rmtree(copy / "v2" / "index")
    owner = json.loads((copy / "v2" / "owner.json").read_bytes())
    node = Node(owner["node"]["machine"], owner["node"]["host"])
    (copy / "v2" / "owner.json").write_bytes(Owner(node, copy / "v2" / "index").to_json(copy / "v2"))
    assert main(["index", "rebuild", str(copy)]) == 0
    return copy


def segment_of(root: Path) -> Path:
    return max(root.glob("v2/*/*.kvseg"), key=lambda path: path.stat().st_blocks)


def flip_payload(path: Path, slot: int) -> None:
    with path.open("r+b") as file:
        header = SegmentHeader.unpack(file.read(PAGE_BYTES))
        offset = header.slot_offset(slot) + PAGE_BYTES + 100
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def printed_json(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_stats_of_what_an_engine_left(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", str(made)]) == 0
    out = capsys.readouterr().out
    titles, row, summary = out.splitlines()
    assert titles.split()[:3] == ["namespace", "engine", "KV"]
    assert f" {CHUNKS} " in row and f" {64 * CHUNKS} " in row and "4x4 float32" in row and "raw" in row
    assert summary.startswith(f"{made}: ") and summary.endswith(" in 1 namespace")


def test_stats_for_programs(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stats", "--json", str(made)]) == 0
    values = printed_json(capsys)
    entry = values["namespaces"][0]
    assert (entry["chunks"], entry["records"], entry["tokens"]) == (CHUNKS, CHUNKS, 64 * CHUNKS)
    assert (made / "v2" / entry["id"]).is_dir() and entry["namespace"]["geometry"]["layers"] == 4
    assert values["n_bytes"] == entry["n_bytes"] > 0 and values["unreadable"] == []


def test_stats_shows_a_namespace_that_contradicts_its_folder(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    next(root.glob("v2/*/namespace.json")).write_text("{}")
    assert main(["stats", str(root)]) == 1
    assert "BAD " in capsys.readouterr().out


def test_verify_of_what_an_engine_left(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(made)]) == 0
    assert f"{CHUNKS} records" in (out := capsys.readouterr().out) and "0 bad" in out


def test_verify_prints_the_rate_of_a_small_root_as_it_is(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It printed "read in 0.0 s (0.0 GB/s)" of a root of some megabytes, and a rate of none at all."""
    assert main(["verify", str(made)]) == 0
    said = re.search(r"read in ([0-9.]+ (?:us|ms|s)) \(([0-9.]+) ([kMG]B/s)\)", capsys.readouterr().out)
    assert said is not None and float(said[2]) > 0
    Engine(tmp_path / "kv").close()
    assert main(["verify", str(tmp_path / "kv")]) == 0
    assert "B/s" not in capsys.readouterr().out


def test_verify_names_what_is_bad(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_payload(segment_of(root), 2)
    assert main(["verify", str(root)]) == 1
    out = capsys.readouterr().out
    place = f"{segment_of(root).parent.name}/{segment_of(root).name}"
    assert f"BAD {place} slot 2: checksum of head 0 does not match" in out and "1 bad" in out
    assert "is a miss at its next use" in out.splitlines()[-1]


def test_verify_names_the_namespace_of_a_segment_that_is_gone(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    segment = segment_of(root)
    segment.unlink()
    assert main(["verify", str(root)]) == 1
    assert f"BAD {segment.parent.name}/{segment.name} slot 0: its segment is missing" in capsys.readouterr().out


def test_verify_for_programs(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    flip_payload(segment_of(root), 3)
    assert main(["verify", "--json", str(root)]) == 1
    values = printed_json(capsys)
    assert values["records"] == CHUNKS
    segment = segment_of(root)
    found = [(finding["namespace"], finding["segment"], finding["slot"]) for finding in values["bad"]]
    assert found == [(segment.parent.name, segment.name, 3)]


def test_without_an_index_the_headers_are_read(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(root / "v2" / "index")
    capsys.readouterr()
    assert main(["stats", "--json", str(root)]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["namespaces"][0]["chunks"] == CHUNKS
    assert "no index of this root here" in captured.err
    assert not (root / "v2" / "index").exists()  # looking makes nothing
    flip_payload(segment_of(root), 1)
    assert main(["verify", str(root)]) == 1


def test_root_of_another_node_can_be_looked_at(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    owner = Owner(Node("f00d", "gpu-07"), root / "v2" / "index")
    (root / "v2" / "owner.json").write_bytes(owner.to_json(root / "v2"))
    assert main(["stats", str(root)]) == 0
    capsys.readouterr()
    assert main(["index", "rebuild", str(root)]) == 2
    assert "gpu-07 (f00d): run this there" in capsys.readouterr().err


def test_rebuild_fills_an_index_that_was_lost(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(root / "v2" / "index")
    capsys.readouterr()
    assert main(["index", "rebuild", "--json", str(root)]) == 0
    assert printed_json(capsys)["records"] == CHUNKS
    index = LmdbIndex(str(root / "v2" / "index"))
    assert index.counts().records == CHUNKS and not index.was_reset
    index.close()
    assert main(["stats", "--json", str(root)]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["namespaces"][0]["chunks"] == CHUNKS and captured.err == ""


def test_rebuild_of_a_root_whose_index_is_in_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = Engine(tmp_path / "kv", changes={"index": {"kind": "memory"}})
    engine.save(list(range(64)), list(range(4)))
    engine.close()
    assert main(["index", "rebuild", str(tmp_path / "kv")]) == 2
    assert "no embedded index" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "kv")]) == 0


def test_rebuild_lists_what_it_cannot_read(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    segment = segment_of(root)
    with segment.open("r+b") as file:
        file.write(b"x" * PAGE_BYTES)
    capsys.readouterr()
    assert main(["index", "rebuild", str(root)]) == 1
    assert f"BAD {segment.parent.name}/{segment.name}: " in capsys.readouterr().out
    assert main(["index", "rebuild", "--json", str(root)]) == 1
    assert segment.name in printed_json(capsys)["unreadable"][0]


# --- check ---


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.upper().startswith("KVTIER_")]:
        monkeypatch.delenv(name)
    path = tmp_path / "kvtier.yaml"
    path.write_text(f"root: {tmp_path / 'kv'}\ncapacity_bytes: 4Gi\nio: {{threads: 3}}\n")
    return path


def test_check_prints_what_would_be_used(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(config)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("root: ") and lines[1:3] == ["capacity_bytes: 4294967296 (4.0 GiB)", "io.threads: 3"]
    assert "codec: raw  (the default)" in lines and not any(line.startswith("epoch") for line in lines)
    assert any(line.startswith("root is: to be created, on ") for line in lines)
    assert any(line.startswith("index is: to be created at ") for line in lines)
    assert [path.name for path in config.parent.iterdir()] == [config.name]  # nothing was made


def test_check_prints_a_screen_unless_all_is_asked_for(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*options: str) -> list[str]:
        assert main(["check", str(config), *options]) == 0
        return capsys.readouterr().out.splitlines()

    everything = printed("--all")
    assert len(everything) > 60 and "model_tag: null  (the default)" in everything
    brief = printed()
    assert len(brief) <= 25 and set(brief) - set(everything) == {brief[-3]}
    left = int(brief[-3].split()[2])
    assert len(brief) - 1 + left == len(everything) and "all with their defaults: --all" in brief[-3]
    queues = "queues: {save_chunks_max: 9, load_requests_max: 9, save_threads: 9, load_threads: 9}"
    more = "epoch: 9\nmodel_tag: m\nsave_generated: false\nmin_load_tokens: 9\nwriter_lease_s: 9\ntouch_interval_s: 9"
    server = "server: {port: 9, body_bytes_max: 9, timeout_s: 9, connections_max: 9, history_s: 9}\nshutdown_drain_s: 9"
    config.write_text("\n".join([config.read_text(), queues, more, server, "host: {admit: never}"]))
    brief = printed()
    assert len(brief) <= 25 and "2 of them set, the others with their defaults" in brief[-3]


def test_check_of_a_service_that_would_not_start(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An engine does, so it is no reason to refuse the file."""
    config.write_text(config.read_text() + "server: {host: 0.0.0.0}\n")
    assert main(["check", str(config)]) == 0
    assert capsys.readouterr().out.startswith("but: kvtier serve would not start: server.host: others could reach it")
    assert main(["check", "--json", str(config)]) == 0
    assert "server.host" in printed_json(capsys)["but"][0]


def test_check_of_a_capacity_of_few_segments(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was accepted without a word, and an engine with it stored next to nothing."""
    config.write_text(f"root: {config.parent}\ncapacity_bytes: 64MiB\nsegment_bytes: 64MiB\n")
    assert main(["check", str(config)]) == 0
    assert capsys.readouterr().out.startswith("but: capacity_bytes (64MiB) is less than 4 times segment_bytes (64MiB)")
    config.write_text(f"root: {config.parent}\ncapacity_bytes: 256MiB\nsegment_bytes: 64MiB\n")
    assert main(["check", str(config)]) == 0 and "but:" not in capsys.readouterr().out


def test_check_of_a_capacity_beyond_the_disk(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """More than is free is a warning; more than the whole disk can never be reached, and was called right."""
    disk = os.statvfs(config.parent)
    config.write_text(f"root: {config.parent}\ncapacity_bytes: {disk.f_blocks * disk.f_frsize}\n")
    assert main(["check", str(config)]) == 0
    assert "is more than the tier can have here" in capsys.readouterr().out.splitlines()[0]
    config.write_text(f"root: {config.parent}\ncapacity_bytes: 9000Ti\n")
    assert main(["check", str(config)]) == 1
    assert capsys.readouterr().out.startswith("bad: capacity_bytes (9000TiB) is more than the disk has in all")
    assert main(["check", "--json", str(config)]) == 1
    values = printed_json(capsys)
    assert [line.split(" ")[0] for line in (*values["bad"], *values["but"])] == ["capacity_bytes", "capacity_bytes"]
    assert values["settings"]["host"]["admit"] is None and values["chosen"]["host.admit"].startswith("always")


def transfer_of(config: Path, **changes: object) -> str:
    return json.dumps(
        {
            "kv_connector": "KVTierConnector",
            "kv_connector_module_path": "kvtier.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"config": str(config)},
        }
        | changes
    )


def test_check_takes_what_vllm_is_given(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--kv-transfer-config", transfer_of(config)]) == 0
    assert "io.threads: 3" in capsys.readouterr().out.splitlines()
    for changes, said in (
        ({"kv_role": "kv_all"}, "kv_role = 'kv_all': use kv_both"),
        ({"kv_load_failure_policy": "fail"}, 'add "kv_load_failure_policy": "recompute"'),
        ({"kv_connector": "LMCacheConnectorV1"}, "vLLM would not load kvtier: set it to KVTierConnector"),
        ({"kv_connector_extra_config": {"config": str(config), "io": {"threads": 0}}}, "io.threads = 0"),
    ):
        assert main(["check", "--kv-transfer-config", transfer_of(config, **changes)]) == 1
        assert said in capsys.readouterr().err
    without = {key: value for key, value in json.loads(transfer_of(config)).items() if "policy" not in key}
    assert main(["check", "--kv-transfer-config", json.dumps(without)]) == 1
    assert "kv_load_failure_policy = 'fail'" in capsys.readouterr().err
    assert main(["check", "--kv-transfer-config", "{password: S3CRET}"]) == 1
    assert "it is not JSON" in (said := capsys.readouterr().err) and "S3CRET" not in said


def test_check_looks_at_a_model(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA_8B))
    assert main(["check", str(config), "--model", str(model)]) == 0
    assert "model is: llama of 32 layers, served: a segment set has 31 chunks" in capsys.readouterr().out
    config.write_text(config.read_text() + "segment_bytes: 16MiB\n")
    assert main(["check", str(config), "--model", str(model)]) == 1
    assert "segment_bytes" in capsys.readouterr().err
    (model / "config.json").write_text(json.dumps(LLAMA_8B | {"model_type": "mamba2"}))
    assert main(["check", str(config), "--model", str(model)]) == 1
    assert "layers without attention" in capsys.readouterr().err


@pytest.mark.parametrize(("user", "said"), [(0, "root_squash"), (1000, "run this as the engines' user")])
def test_check_of_a_root_that_refuses_this_user(
    user: int, said: str, config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under root_squash it ended with a bare errno."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/mnt/lustre/kv/v1")

    monkeypatch.setattr(check, "place_of", refuse)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert main(["check", str(config)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("kvtier: root = '/mnt/lustre/kv/v1': Permission denied; ") and said in error


def test_check_says_what_is_used_where_a_setting_is_left_out(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It printed null."""
    assert main(["check", str(config)]) == 0
    text = capsys.readouterr().out
    assert "\nhost.arena_bytes: 1073741824 (1.0 GiB); with a GPU 8589934592 (8.0 GiB)  (the default)\n" in text
    assert "\nhost.admit: always; with a GPU saved  (the default)\n" in text
    config.write_text(f"root: {config.parent}\nio: {{piece_bytes: 2Mi, calibrate: false}}\n")
    in_memory = file_system_of(config.parent).kind in IN_MEMORY
    assert main(["check", str(config)]) == 0
    assert f"\nio.threads: {4 if in_memory else 16}  (the default)\n" in capsys.readouterr().out


def test_check_of_an_arena_and_the_memory_for_it(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """500GiB on a machine of 23 passed, and the engine died of it."""
    arena = f"root: {config.parent}\ncapacity_bytes: 4GiB\nhost: {{arena_bytes: 500GiB}}\n"
    monkeypatch.setattr(check, "memory_here", lambda: MachineMemory(23 << 30, "this machine's memory", 20 << 30))
    error = refused(config, arena, capsys)
    assert error.startswith("kvtier: host.arena_bytes = 536870912000: 500.0 GiB, more than this machine's memory (23.0")
    monkeypatch.setattr(check, "memory_here", lambda: MachineMemory(1 << 40, "this machine's memory", 20 << 30))
    assert main(["check", str(config)]) == 0
    assert capsys.readouterr().out.startswith("but: host.arena_bytes (500.0 GiB for each worker) is more than is avail")


def test_check_of_a_root_that_is_there(root: Path, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    before = sorted(root.rglob("*"))
    assert main(["check", "--json", str(config)]) == 0
    values = printed_json(capsys)
    assert values["settings"]["io"]["threads"] == 3 and values["root"]["root is"].startswith("there, on ")
    assert values["root"]["index is"].endswith("of this node") and sorted(root.rglob("*")) == before


def refused(config: Path, text: str, capsys: pytest.CaptureFixture[str]) -> str:
    config.write_text(text)
    capsys.readouterr()
    assert main(["check", str(config)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    return captured.err


def test_check_says_what_stops_a_start(
    config: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path = config.parent
    assert "did you mean 'io.threads'" in refused(config, f"root: {tmp_path}\nio: {{thread: 4}}\n", capsys)
    monkeypatch.setattr(root_module, "MACHINE_ROOT", tmp_path)
    assert "nothing is mounted there" in refused(config, f"root: {tmp_path}/kv\nrequire_mount: true\n", capsys)
    assert "is a file, not a folder" in refused(config, f"root: {config}/below\n", capsys)
    assert "raise capacity_bytes" in refused(config, f"root: {tmp_path}\ncapacity_bytes: 1Mi\n", capsys)
    assert "its disk is full" in refused(
        config, f"root: {tmp_path}\nsegment_bytes: 9000Ti\ncapacity_bytes: 9000Ti\n", capsys
    )
    assert "another" not in refused(config, f"root: {root}\nindex: {{path: /var/tmp/other}}\n", capsys)
    owner = Owner(Node("f00d", "gpu-07"), root / "v2" / "index")
    (root / "v2" / "owner.json").write_bytes(owner.to_json(root / "v2"))
    assert "belongs to node gpu-07" in refused(config, f"root: {root}\n", capsys)
    (root / "v99").mkdir()
    assert "upgrade kvtier" in refused(config, f"root: {root}\n", capsys)
    config.unlink()
    assert main(["check", str(config)]) == 1
    assert "cannot read this settings file" in capsys.readouterr().err


def test_check_of_gpu_memory(config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Refused where there is no GPU, as by an engine; a driver that hangs is not this command's to judge."""
    text = f"root: {config.parent}\nhbm: {{arena_bytes: 4Gi}}\n"

    def driver(answer: object) -> Callable[..., object]:
        def probe(*_: object, **__: object) -> object:
            if isinstance(answer, Exception):
                raise answer
            return answer

        return probe

    monkeypatch.setattr(Host, "probe", driver(None))
    assert "hbm.arena_bytes = 4294967296: there is no GPU here" in refused(config, text, capsys)
    for answer in (13000, ProbeFailed("no answer in 20 s")):
        monkeypatch.setattr(Host, "probe", driver(answer))
        assert main(["check", str(config)]) == 0


# --- doctor ---


def test_doctor_prints_a_verdict_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verdicts = [Diagnosis("ok", "a", "b"), Diagnosis("warn", "c", "d", "do e")]
    asked: list[Path | None] = []

    def examine(path: Path | None, **_: object) -> list[Diagnosis]:
        asked.append(path)
        return verdicts

    monkeypatch.setattr(doctor, "examine", examine)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out == "ok    a: b\nwarn  c: d\n      -> do e\n"
    verdicts.append(Diagnosis("bad", "f", "g", "h"))
    assert main(["doctor", "--json", str(tmp_path)]) == 1
    assert printed_json(capsys)[2] == {"level": "bad", "what": "f", "value": "g", "fix": "h"}
    assert asked == [None, tmp_path]


# --- as a process ---


def run(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvtier.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, **more)


@pytest.mark.parametrize("arguments", [["stats"], ["verify"], ["index", "rebuild"]])
def test_start_up_error_is_one_line_and_status_2(arguments: list[str], tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        done = run(*arguments, str(path))
        assert done.returncode == 2 and done.stdout == ""
        assert len(done.stderr.splitlines()) == 1 and str(path) in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [[], ["stat"], ["check"], ["index"], ["stats", "/x", "--jsn"]])
def test_wrong_usage_is_status_2(arguments: list[str]) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and done.stdout == "" and "Usage: kvtier" in done.stderr


def test_without_arguments_the_next_steps_are_named() -> None:
    said = run().stderr
    steps = ("kvtier doctor", "kvtier plan", "kvtier check", "KVTIER_ROOT=/nvme/kv vllm serve")
    assert all(f"\n  {step} " in said for step in steps)


@pytest.mark.parametrize("command", ["stats", "verify", "check", "doctor"])
def test_empty_path_is_not_the_current_folder(command: str) -> None:
    done = run(command, "")
    assert done.returncode == 2 and "it is empty; is a variable of your shell not set?" in done.stderr


@pytest.mark.parametrize("command", [[], ["check"], ["index", "rebuild"], ["serve"]])
def test_help_says_what_a_status_means(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert all(f"{status} " in said.split("Exit status:")[1] for status in (OK, FOUND_BAD, NOT_DONE, INTERRUPTED))


def test_version() -> None:
    done = run("--version")
    assert done.returncode == 0 and done.stdout == f"kvtier {version('kvtier')} ({commit()})\n" and commit()


def test_newer_root(tmp_path: Path) -> None:
    (tmp_path / "v99").mkdir()
    done = run("stats", str(tmp_path))
    assert done.returncode == 2 and "upgrade kvtier" in done.stderr


def test_reader_that_stops_reading(made: Path) -> None:
    """`kvtier stats PATH | head -0`"""
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(
        [sys.executable, "-m", "kvtier.cli", "stats", str(made)], stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)
    assert process.returncode == 0 and process.stderr == b""
