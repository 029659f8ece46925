"""The command line over roots that real engines left: what it prints, and its exit status."""

import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import pytest

from kvtier.cli import check, doctor, evict
from kvtier.doctor.host import Diagnosis, Host, ProbeFailed
from kvtier.format.geometry import PAGE_BYTES
from kvtier.index.lmdb.index import LmdbIndex
from kvtier.runtime.exit_status import FOUND_BAD, INTERRUPTED, NOT_DONE, OK
from kvtier.runtime.memory_limits import MachineMemory
from kvtier.runtime.versions import commit
from kvtier.storage import root as root_module
from kvtier.storage.filesystem import IN_MEMORY, file_system_of
from kvtier.storage.root_owner import Node, Owner
from tests.cli.asking import CHUNKS, Cli
from tests.damage import flip_slab
from tests.model_configs import LLAMA_8B
from tests.storage.conftest import Mount
from tests.storage.conftest import mount_tmpfs as mount_tmpfs  # a fixture
from tests.support.rig import Engine, saved_by_another


def segment_of(root: Path) -> Path:
    return max(root.glob("v2/*/*.kvseg"), key=lambda path: path.stat().st_blocks)


def test_stats_of_what_an_engine_left(made: Path, cli: Cli) -> None:
    titles, row, summary, engines, left_out = cli.printed("stats", str(made)).splitlines()
    assert titles.split()[:3] == ["namespace", "model", "KV"]
    assert f" {CHUNKS} " in row and f" {64 * CHUNKS} " in row and "4x4 float32" in row and "raw" in row
    assert summary.startswith(f"{made}: ") and " in 1 namespace, " in summary
    assert engines.startswith("engines: 0") and left_out.startswith("not shown: capacity, ")


def test_a_root_without_a_free_inode_can_be_evicted_from(
    tmp_path: Path, mount_tmpfs: Mount, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """The check that the root is writable used to make a file."""
    mount_tmpfs(tmp_path, "size=64m,nr_inodes=64")
    saved_by_another(tmp_path / "kv", list(range(64)), list(range(4)))
    with suppress(OSError):
        for number in range(64):
            (tmp_path / str(number)).touch()
    monkeypatch.setenv("KVTIER_ROOT", str(tmp_path / "kv"))
    monkeypatch.setattr(evict, "SHOW_TIMEOUT_S", 0.0)
    assert "no free inodes" in cli.refused("check", status=1)
    assert cli.json("stats")["index"]["sets"] == 1
    assert cli.json("evict", "--all", "--yes")["n_sets"] == 1
    assert cli.json("stats")["index"]["sets"] == 0


def test_stats_of_a_root_without_segments_on_a_full_disk(
    tmp_path: Path, mount_tmpfs: Mount, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    mount_tmpfs(tmp_path, "size=24m")
    Engine(tmp_path / "kv").close()
    with suppress(OSError), open(tmp_path / "of others", "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    monkeypatch.setenv("KVTIER_ROOT", str(tmp_path / "kv"))
    for command in ("check", "serve"):
        assert "its disk is full" in cli.refused(command, status=1 if command == "check" else 2)
    found = cli.json("stats")["capacity"]
    assert found["capacity_bytes"] == found["used_bytes"] == found["disk_free_bytes"] == 0
    assert "0 bytes of 0 bytes reserved by segment sets" in cli.printed("stats")
    assert not cli.json("evict", "--all", "--yes")["n_sets"]


def test_stats_for_programs(made: Path, cli: Cli) -> None:
    values = cli.json("stats", str(made))
    entry = values["namespaces"][0]
    assert (entry["chunks"], entry["records"], entry["tokens"]) == (CHUNKS, CHUNKS, 64 * CHUNKS)
    assert (made / "v2" / entry["id"]).is_dir() and entry["namespace"]["geometry"]["layers"] == 4
    assert values["n_bytes"] == entry["n_bytes"] > 0 and values["unreadable"] == []


def test_stats_shows_a_namespace_that_contradicts_its_folder(root: Path, cli: Cli) -> None:
    next(root.glob("v2/*/namespace.json")).write_text("{}")
    assert "BAD " in cli.printed("stats", str(root), status=1)


def test_verify_of_what_an_engine_left(made: Path, tmp_path: Path, cli: Cli) -> None:
    """It printed "read in 0.0 s (0.0 GB/s)" of a root of some megabytes, and a rate of none at all."""
    out = cli.printed("verify", str(made))
    said = re.search(r"read in ([0-9.]+ (?:us|ms|s)) \(([0-9.]+) ([kMG]B/s)\)", out)
    assert said is not None and float(said[2]) > 0 and f"{CHUNKS} records" in out and "0 bad" in out
    Engine(tmp_path / "kv").close()
    assert "B/s" not in cli.printed("verify", str(tmp_path / "kv"))


def test_verify_names_what_is_bad(root: Path, cli: Cli) -> None:
    flip_slab(segment_of(root), 2)
    out = cli.printed("verify", str(root), status=1)
    place = f"{segment_of(root).parent.name}/{segment_of(root).name}"
    assert f"BAD {place} slot 2: checksum of head 0 does not match" in out and "1 bad" in out
    assert "are misses at their next use" in out.splitlines()[-1]


def test_verify_names_the_namespace_of_a_segment_that_is_gone(root: Path, cli: Cli) -> None:
    segment = segment_of(root)
    segment.unlink()
    out = cli.printed("verify", str(root), status=1)
    assert f"BAD {segment.parent.name}/{segment.name} slot 0: its segment is missing" in out


def test_verify_for_programs(root: Path, cli: Cli) -> None:
    flip_slab(segment_of(root), 3)
    values = cli.json("verify", str(root), status=1)
    assert values["records"] == CHUNKS
    segment = segment_of(root)
    found = [(finding["namespace"], finding["segment"], finding["slot"]) for finding in values["bad"]]
    assert found == [(segment.parent.name, segment.name, 3)]


def test_without_an_index_the_headers_are_read(root: Path, cli: Cli) -> None:
    shutil.rmtree(root / "v2" / "index")
    out, said = cli.run("stats", "--json", str(root))
    assert json.loads(out)["namespaces"][0]["chunks"] == CHUNKS and "no index of this root here" in said
    assert "not shown: engines, capacity" in cli.printed("stats", str(root))
    assert not (root / "v2" / "index").exists()  # looking makes nothing
    flip_slab(segment_of(root), 1)
    cli.run("verify", str(root), status=1)


def test_root_of_another_node_can_be_looked_at(root: Path, cli: Cli) -> None:
    owner = Owner(Node("f00d", "gpu-07"), root / "v2" / "index")
    (root / "v2" / "owner.json").write_bytes(owner.to_json(root / "v2"))
    cli.printed("stats", str(root))
    assert "gpu-07 (f00d): run this there" in cli.refused("index", "rebuild", str(root))


def test_rebuild_fills_an_index_that_was_lost(root: Path, cli: Cli) -> None:
    shutil.rmtree(root / "v2" / "index")
    assert cli.json("index", "rebuild", str(root))["records"] == CHUNKS
    index = LmdbIndex(str(root / "v2" / "index"))
    assert index.counts().records == CHUNKS and not index.was_reset
    index.close()
    out, said = cli.run("stats", "--json", str(root))
    assert json.loads(out)["namespaces"][0]["chunks"] == CHUNKS and said == ""


def test_rebuild_of_a_root_whose_index_is_in_memory(tmp_path: Path, cli: Cli) -> None:
    saved_by_another(tmp_path / "kv", list(range(64)), list(range(4)), changes={"index": {"kind": "memory"}})
    assert "no embedded index" in cli.refused("index", "rebuild", str(tmp_path / "kv"))
    cli.printed("verify", str(tmp_path / "kv"))


def test_rebuild_lists_what_it_cannot_read(root: Path, cli: Cli) -> None:
    segment = segment_of(root)
    with segment.open("r+b") as file:
        file.write(b"x" * PAGE_BYTES)
    rebuild = ("index", "rebuild", str(root))
    assert f"BAD {segment.parent.name}/{segment.name}: " in cli.printed(*rebuild, status=1)
    assert segment.name in cli.json(*rebuild, status=1)["unreadable"][0]


# --- check ---


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.upper().startswith("KVTIER_")]:
        monkeypatch.delenv(name)
    path = tmp_path / "kvtier.yaml"
    path.write_text(f"root: {tmp_path / 'kv'}\ncapacity_bytes: 4Gi\nio: {{threads: 3}}\n")
    return path


def test_check_prints_what_would_be_used(config: Path, cli: Cli) -> None:
    verdict, *lines = cli.printed("check", str(config)).splitlines()
    assert verdict == "ok: an engine would start (its model was not checked: add --model DIR)"
    assert lines[0].startswith("root: ") and lines[1:3] == ["capacity_bytes: 4294967296 (4.0 GiB)", "io.threads: 3"]
    assert "host.admit: always; with a GPU saved  (the default)" in lines
    assert not any(line.startswith("epoch") for line in lines)
    assert any(line.startswith("root is: to be created, on ") for line in lines)
    assert any(line.startswith("index is: to be created at ") for line in lines)
    assert [path.name for path in config.parent.iterdir()] == [config.name]  # nothing was made


def test_check_prints_what_is_set_or_chosen_unless_all_is_asked_for(config: Path, cli: Cli) -> None:
    everything = cli.printed("check", str(config), "--all").splitlines()
    assert len(everything) > 60 and "model_tag: null  (the default)" in everything
    config.write_text(config.read_text() + "epoch: 9\n")
    brief = cli.printed("check", str(config)).splitlines()
    assert len(brief) <= 25 and set(brief) - set(everything) == {brief[-3], "epoch: 9"}
    assert len(brief) - 1 + int(brief[-3].split()[2]) == len(everything)


def test_check_of_a_service_that_would_not_start(config: Path, cli: Cli) -> None:
    """An engine does, so it is no reason to refuse the file."""
    config.write_text(config.read_text() + "server: {host: 0.0.0.0}\n")
    said = cli.printed("check", str(config))
    assert said.startswith("but: kvtier serve would not start: server.host: others could reach it")
    assert "server.host" in cli.json("check", str(config))["but"][0]


def test_check_of_a_capacity_of_few_segments(config: Path, cli: Cli) -> None:
    """It was accepted without a word, and an engine with it stored next to nothing."""
    config.write_text(f"root: {config.parent}\ncapacity_bytes: 64MiB\nsegment_bytes: 64MiB\n")
    said = cli.printed("check", str(config))
    assert said.startswith("but: capacity_bytes (64MiB) is less than 4 times a segment set (64MiB on one rank)")
    for fine in ("capacity_bytes: 256MiB\nsegment_bytes: 64MiB", "capacity_bytes: 64MiB"):
        config.write_text(f"root: {config.parent}\n{fine}\n")
        assert "but:" not in cli.printed("check", str(config))


def test_check_of_a_capacity_of_few_chunks(config: Path, tmp_path: Path, cli: Cli) -> None:
    """Only the model tells that a set is one chunk. The advice was to lower segment_bytes, which changes nothing."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA_8B))
    for text, advice in (
        ("capacity_bytes: 100MiB", "lower chunk_tokens, for a set is one chunk"),
        ("capacity_bytes: 100MiB\nsegment_bytes: 40MiB", "lower chunk_tokens, for a set is one chunk"),
        ("capacity_bytes: 300MiB\nsegment_bytes: 100MiB", "lower segment_bytes"),
    ):
        config.write_text(f"root: {config.parent}\n{text}\n")
        (line,) = [
            line
            for line in cli.printed("check", str(config), "--model", str(model)).splitlines()[:2]
            if "4 times" in line
        ]
        assert line.endswith(advice)


def test_check_of_a_small_capacity_on_a_small_disk(config: Path, mount_tmpfs: Mount, cli: Cli) -> None:
    """`check` refused it, because it asked for 1 GiB for a segment set."""
    root = config.parent / "kv"
    root.mkdir()
    mount_tmpfs(root, "size=64m")
    config.write_text(f"root: {root}\ncapacity_bytes: 32MiB\ncapacity: {{reserve_bytes: 4MiB}}\n")
    assert "disk is full" not in cli.printed("check", str(config))


def test_check_of_a_capacity_beyond_the_disk(config: Path, cli: Cli) -> None:
    """More than is free is a warning; more than the whole disk can never be reached, and was called right."""
    disk = os.statvfs(config.parent)
    config.write_text(f"root: {config.parent}\ncapacity_bytes: {disk.f_blocks * disk.f_frsize}\n")
    assert "is more than the tier can have here" in cli.printed("check", str(config)).splitlines()[0]
    config.write_text(f"root: {config.parent}\ncapacity_bytes: 9000Ti\n")
    said = cli.printed("check", str(config), status=1)
    assert said.startswith("bad: capacity_bytes (9000TiB) is more than the disk has in all")
    values = cli.json("check", str(config), status=1)
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


def test_check_takes_what_vllm_is_given(config: Path, cli: Cli) -> None:
    assert "io.threads: 3" in cli.printed("check", "--kv-transfer-config", transfer_of(config)).splitlines()
    for changes, said in (
        ({"kv_role": "kv_all"}, "kv_role = 'kv_all': use kv_both"),
        ({"kv_load_failure_policy": "fail"}, 'add "kv_load_failure_policy": "recompute"'),
        ({"kv_connector": "LMCacheConnectorV1"}, "vLLM would not load kvtier: set it to KVTierConnector"),
        ({"kv_connector_extra_config": {"config": str(config), "io": {"threads": 0}}}, "io.threads = 0"),
    ):
        assert said in cli.errors("check", "--kv-transfer-config", transfer_of(config, **changes))
    without = {key: value for key, value in json.loads(transfer_of(config)).items() if "policy" not in key}
    assert "kv_load_failure_policy = 'fail'" in cli.errors("check", "--kv-transfer-config", json.dumps(without))
    said = cli.errors("check", "--kv-transfer-config", "{password: S3CRET}")
    assert "it is not JSON" in said and "S3CRET" not in said


def test_check_finds_kvtier_in_a_multi_connector(config: Path, cli: Cli) -> None:
    """It said that vLLM would not load kvtier. vLLM reads the failure policy of the whole."""
    child, other = json.loads(transfer_of(config)), {"kv_connector": "NixlConnector", "kv_role": "kv_both"}

    def multi(*children: object, **changes: object) -> str:
        extra = {"connectors": list(children)}
        whole = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        return json.dumps(whole | {"kv_load_failure_policy": "recompute"} | changes)

    assert "MultiConnector" not in cli.printed("check", "--kv-transfer-config", multi(other, child))
    said = cli.printed("check", "--kv-transfer-config", multi(other, child, kv_load_failure_policy="fail"))
    assert "at the MultiConnector too: vLLM reads it there" in said
    for children, said in (
        ((other,), "add KVTierConnector to its connectors"),
        ((other, child | {"kv_role": "both"}), "kv_role = 'both'"),
        ((child | {"kv_load_failure_policy": "fail"},), "kv_load_failure_policy = 'fail'"),
        ((child | {"kv_load_failure_policy": "fail"},), 'beside "kv_connector": "KVTierConnector"'),
    ):
        assert said in cli.errors("check", "--kv-transfer-config", multi(*children))


def test_check_looks_at_a_model(config: Path, tmp_path: Path, cli: Cli) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(LLAMA_8B))
    said = cli.printed("check", str(config), "--model", str(model))
    assert "model is: llama of 32 layers, served: a segment set has 7 chunks" in said
    config.write_text(config.read_text() + "segment_bytes: 16MiB\n")
    assert "segment_bytes" in cli.errors("check", str(config), "--model", str(model))
    (model / "config.json").write_text(json.dumps(LLAMA_8B | {"max_position_embeddings": 255}))
    assert "chunk_tokens = 256: only whole chunks are stored" in cli.errors("check", str(config), "--model", str(model))
    (model / "config.json").write_text(json.dumps(LLAMA_8B | {"model_type": "mamba2"}))
    assert "layers without attention" in cli.errors("check", str(config), "--model", str(model))


@pytest.mark.parametrize(("user", "said"), [(0, "root_squash"), (1000, "run this as the engines' user")])
def test_check_of_a_root_that_refuses_this_user(
    user: int, said: str, config: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """Under root_squash it ended with a bare errno."""

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/mnt/lustre/kv/v1")

    monkeypatch.setattr(check, "place_of", refuse)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    error = cli.errors("check", str(config))
    assert error.startswith("kvtier: root = '/mnt/lustre/kv/v1': Permission denied; ") and said in error


def test_check_says_what_is_used_where_a_setting_is_left_out(config: Path, cli: Cli) -> None:
    """It printed null."""
    text = cli.printed("check", str(config))
    assert "\nhost.arena_bytes: 1073741824 (1.0 GiB); with a GPU 8589934592 (8.0 GiB)  (the default)\n" in text
    assert "\nhost.admit: always; with a GPU saved  (the default)\n" in text
    config.write_text(f"root: {config.parent}\nio: {{piece_bytes: 2Mi, calibrate: false}}\n")
    in_memory = file_system_of(config.parent).kind in IN_MEMORY
    assert f"\nio.threads: {4 if in_memory else 16}  (the default)\n" in cli.printed("check", str(config))


def test_check_of_an_arena_and_the_memory_for_it(config: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """500GiB on a machine of 23 passed, and the engine died of it."""
    arena = f"root: {config.parent}\ncapacity_bytes: 4GiB\nhost: {{arena_bytes: 500GiB}}\n"
    monkeypatch.setattr(check, "memory_here", lambda: MachineMemory(23 << 30, "this machine's memory", 20 << 30))
    error = stopped(config, arena, cli)
    assert error.startswith("kvtier: host.arena_bytes = 536870912000: 500.0 GiB, more than this machine's memory (23.0")
    monkeypatch.setattr(check, "memory_here", lambda: MachineMemory(1 << 40, "this machine's memory", 20 << 30))
    said = cli.printed("check", str(config))
    assert said.startswith("but: host.arena_bytes (500.0 GiB for each worker) is more than is avail")


def test_check_of_a_root_that_is_there(root: Path, config: Path, cli: Cli) -> None:
    before = sorted(root.rglob("*"))
    values = cli.json("check", str(config))
    assert values["settings"]["io"]["threads"] == 3 and values["root"]["root is"].startswith("there, on ")
    assert values["root"]["index is"].endswith("of this node") and sorted(root.rglob("*")) == before


def stopped(config: Path, text: str, cli: Cli) -> str:
    """Return why no engine would start with these settings."""
    config.write_text(text)
    return cli.refused("check", str(config), status=1)


def test_check_says_what_stops_a_start(config: Path, root: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    tmp_path = config.parent
    assert "did you mean 'io.threads'" in stopped(config, f"root: {tmp_path}\nio: {{thread: 4}}\n", cli)
    monkeypatch.setattr(root_module, "MACHINE_ROOT", tmp_path)
    assert "nothing is mounted there" in stopped(config, f"root: {tmp_path}/kv\nrequire_mount: true\n", cli)
    assert "is a file, not a folder" in stopped(config, f"root: {config}/below\n", cli)
    assert "raise capacity_bytes" in stopped(
        config, f"root: {tmp_path}\ncapacity_bytes: 1Mi\nsegment_bytes: 1Gi\n", cli
    )
    assert "its disk is full" in stopped(
        config, f"root: {tmp_path}\nsegment_bytes: 9000Ti\ncapacity_bytes: 9000Ti\n", cli
    )
    assert "another" not in stopped(config, f"root: {root}\nindex: {{path: /var/tmp/other}}\n", cli)
    owner = Owner(Node("f00d", "gpu-07"), root / "v2" / "index")
    (root / "v2" / "owner.json").write_bytes(owner.to_json(root / "v2"))
    assert "belongs to node gpu-07" in stopped(config, f"root: {root}\n", cli)
    (root / "v99").mkdir()
    assert "upgrade kvtier" in stopped(config, f"root: {root}\n", cli)
    config.unlink()
    assert "cannot read this settings file" in cli.refused("check", str(config), status=1)


def test_check_of_a_root_of_older_formats_alone(config: Path, tmp_path: Path, cli: Cli) -> None:
    """An engine makes the folder of its own format beside the older ones, but `check` called the root none."""
    (tmp_path / "old" / "v1").mkdir(parents=True)
    config.write_text(f"root: {tmp_path / 'old'}\n")
    assert "root is: to be created" in cli.printed("check", str(config))
    (tmp_path / "old" / "v99").mkdir()
    assert "upgrade kvtier" in cli.errors("check", str(config))


def test_check_of_gpu_memory(config: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """Refused where there is no GPU, as by an engine; a driver that hangs is not this command's to judge."""
    text = f"root: {config.parent}\nhbm: {{arena_bytes: 4Gi}}\n"

    def driver(answer: object) -> Callable[..., object]:
        def probe(*_: object, **__: object) -> object:
            if isinstance(answer, Exception):
                raise answer
            return answer

        return probe

    monkeypatch.setattr(Host, "probe", driver(None))
    assert "hbm.arena_bytes = 4294967296: there is no GPU here" in stopped(config, text, cli)
    for answer in (13000, ProbeFailed("no answer in 20 s")):
        monkeypatch.setattr(Host, "probe", driver(answer))
        cli.run("check", str(config))


# --- doctor ---


def test_doctor_prints_a_verdict_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    verdicts = [Diagnosis("ok", "a", "b"), Diagnosis("warn", "c", "d", "do e")]
    asked: list[Path | None] = []

    def examine(path: Path | None, **_: object) -> list[Diagnosis]:
        asked.append(path)
        return verdicts

    monkeypatch.setattr(doctor, "examine", examine)
    assert cli.printed("doctor") == "ok    a: b\nwarn  c: d\n      -> do e\n"
    verdicts.append(Diagnosis("bad", "f", "g", "h"))
    assert cli.json("doctor", str(tmp_path), status=1)[2] == {"level": "bad", "what": "f", "value": "g", "fix": "h"}
    assert asked == [None, tmp_path]


# --- the whole command ---


@pytest.mark.parametrize("arguments", [["stats"], ["verify"], ["index", "rebuild"]])
def test_start_up_error_is_one_line_and_status_2(arguments: list[str], tmp_path: Path, cli: Cli) -> None:
    for path in (tmp_path / "absent", tmp_path):
        assert str(path) in cli.refused(*arguments, str(path))


def test_without_arguments_the_next_steps_are_named_and_torch_is_not_imported() -> None:
    """Importing torch takes seconds."""
    code = "import sys, kvtier.cli; status = kvtier.cli.main([]); sys.exit('torch' in sys.modules or status)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)
    steps = ("kvtier doctor", "kvtier plan", "kvtier check", "KVTIER_ROOT=/nvme/kv vllm serve")
    assert done.returncode == 2 and all(f"\n  {step} " in done.stderr for step in steps)


@pytest.mark.parametrize("command", ["stats", "verify", "check", "doctor"])
def test_empty_path_is_not_the_current_folder(command: str, cli: Cli) -> None:
    assert "it is empty; is a variable of your shell not set?" in cli.errors(command, "", status=2)


@pytest.mark.parametrize("command", [[], ["check"], ["index", "rebuild"], ["serve"]])
def test_help_says_what_a_status_means(command: list[str], cli: Cli) -> None:
    said = " ".join(cli.printed(*command, "--help").split())
    assert all(f"{status} " in said.split("Exit status:")[1] for status in (OK, FOUND_BAD, NOT_DONE, INTERRUPTED))


def test_version(cli: Cli) -> None:
    assert cli.printed("--version") == f"kvtier {version('kvtier')} ({commit()})\n" and commit()


def test_reader_that_stops_reading(made: Path) -> None:
    """`kvtier stats PATH | head -0`"""
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(
        [sys.executable, "-m", "kvtier.cli", "stats", str(made)], stdout=write, stderr=subprocess.PIPE, check=False
    )
    os.close(write)
    assert process.returncode == 0 and process.stderr == b""
