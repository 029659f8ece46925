"""`kvtier doctor` over machines that are made up: files of the kernel in a folder, commands in PATH."""

import json
import os
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvtier.config.settings import HbmSettings, Settings
from kvtier.doctor import gpu, probe, storage
from kvtier.doctor.gpu import examine_gpu, examine_memory
from kvtier.doctor.host import Diagnosis, Host, ProbeFailed, Ran
from kvtier.doctor.lustre import examine_efa
from kvtier.doctor.report import examine, line
from kvtier.doctor.storage import examine_storage
from kvtier.runtime.units import size
from kvtier.storage import root as root_module
from kvtier.storage.root import default_capacity
from kvtier.storage.root_owner import Node, Owner, claim, this_node
from kvtier.storage.segments import fallocate
from tests.storage.conftest import Mount
from tests.storage.conftest import mount_tmpfs as mount_tmpfs  # a fixture


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("KVTIER_"):
            monkeypatch.delenv(name)


@pytest.fixture(name="host")
def _host(tmp_path: Path) -> Host:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "sys").mkdir()
    (tmp_path / "proc/modules").write_text("nvidia 1 0 - Live 0x0\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: 1000000 kB\nMemAvailable:   524288 kB\n")
    return Host(tmp_path / "proc", tmp_path / "sys", 10.0)


class Probed(Host):
    """A host whose probes answer what the test says; an exception is raised. asked: their last arguments."""

    __slots__ = ("answers", "asked")
    answers: dict[str, object]
    asked: list[str]

    def probe(self, module: str, *arguments: str, timeout_s: float | None = None) -> object:
        self.asked.extend(arguments[-1:])
        answer = self.answers[arguments[0] if arguments else "pcie"]
        if isinstance(answer, Exception):
            raise answer
        return answer


def probed(host: Host, answers: dict[str, object]) -> Probed:
    made = Probed(host.proc, host.sys, host.timeout_s)
    object.__setattr__(made, "answers", answers)
    object.__setattr__(made, "asked", [])
    return made


def with_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, commands: dict[str, str]) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, script in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def by_name(verdicts: list[Diagnosis]) -> dict[str, Diagnosis]:
    return {verdict.what: verdict for verdict in verdicts}


# --- this machine ---


def test_a_root_here(tmp_path: Path) -> None:
    found = by_name(list(examine(tmp_path)))
    assert all(verdict.level != "bad" for verdict in found.values()), found
    assert "GB/s" in found["storage rates"].value and "ring of" in found["I/O engine"].value
    assert found["Redis"].value == "not configured"
    assert not list(tmp_path.iterdir())  # nothing is left


def test_no_root_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Host, "probe", lambda *_, **__: None)
    found = by_name(list(examine(None)))
    assert found["storage"].level == "warn" and "kvtier doctor PATH" in found["storage"].fix


def test_the_configured_root_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_ROOT", str(tmp_path / "absent"))
    monkeypatch.setenv("KVTIER_CAPACITY_BYTES", "4GiB")
    monkeypatch.setattr(Host, "probe", lambda *_, **__: None)
    found = by_name(list(examine(None)))
    assert found["root"].level == "ok" and f"absent will be made, in {tmp_path} on " in found["root"].value


def test_a_settings_file_stands_for_its_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Host, "probe", lambda *_, **__: None)
    config = tmp_path / "kvtier.yaml"
    config.write_text(f"root: {tmp_path}/kv\nhost: {{arena_bytes: 9000TiB}}\n")
    found = by_name(list(examine(config)))
    assert f"{tmp_path}/kv will be made" in found["root"].value and "9000.0 TiB" in found["memory to pin"].fix
    config.write_text(f"root: {tmp_path}/kv\nhosts: 1\n")
    found = by_name(list(examine(config)))
    assert "hosts" in found["settings"].value and "root" not in found and found["storage"].level == "warn"


def test_wrong_settings_are_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_IO__THREADS", "none")
    monkeypatch.setattr(Host, "probe", lambda *_, **__: None)
    found = by_name(list(examine(tmp_path / "absent")))
    assert found["settings"].level == "bad" and "io.threads" in found["settings"].value


# --- GPU ---


GDS = {"mode": "gds", "reasons": ["nvidia_fs is loaded"]}
COMPAT = {"mode": "compat", "reasons": ["nvidia_fs is not loaded", "that KvikIO's is off does not prove GDS"]}
PCIE = {"name": "NVIDIA H200", "to_device_bytes_s": 55.6e9, "from_device_bytes_s": 55.4e9}


def with_gpu(host: Host, width: str = "16") -> None:
    folder = host.proc / "driver/nvidia/gpus/0000:04:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t\t NVIDIA H200\nIRQ: 5\n")
    device = host.sys / "bus/pci/devices/0000:04:00.0"
    device.mkdir(parents=True)
    for name, text in {
        "vendor": "0x10de",
        "class": "0x030200",
        "max_link_speed": "32.0 GT/s PCIe",
        "current_link_width": width,
    }.items():
        (device / name).write_text(text + "\n")


def test_h200_with_gds(host: Host) -> None:
    with_gpu(host)
    (host.proc / "driver/nvidia-fs").mkdir()
    found = by_name(list(examine_gpu(probed(host, {"driver": 13000, "cufile": GDS, "pcie": PCIE}))))
    assert {verdict.level for verdict in found.values()} == {"ok"}
    assert found["NVIDIA driver"].value == "CUDA 13.0, 1 x NVIDIA H200"
    assert found["nvidia_fs"].value == "loaded" and "GPUDirect" in found["cuFile"].value
    assert "55.6 GB/s to, 55.4 from NVIDIA H200; link 32.0 GT/s x16" in found["PCIe"].value


def test_compatibility_mode_is_not_called_gds(host: Host) -> None:
    found = by_name(list(examine_gpu(probed(host, {"driver": 13000, "cufile": COMPAT, "pcie": PCIE}))))
    assert found["nvidia_fs"].level == "warn" and "modprobe nvidia-fs" in found["nvidia_fs"].fix
    assert found["cuFile"].level == "warn" and found["cuFile"].value.startswith("compatibility mode")
    assert "does not prove" in found["cuFile"].value


def test_a_slow_link(host: Host) -> None:
    with_gpu(host)
    slow = PCIE | {"from_device_bytes_s": 20e9}
    found = by_name(list(examine_gpu(probed(host, {"driver": 13000, "cufile": GDS, "pcie": slow}))))
    assert found["PCIe"].level == "warn" and "(63 GB/s)" in found["PCIe"].value and "NUMA" in found["PCIe"].fix


def test_gpu_memory_where_there_is_no_gpu(host: Host) -> None:
    settings = Settings(root=Path("/x"), hbm=HbmSettings(arena_bytes=1 << 30))
    found = by_name(list(examine_gpu(probed(host, {"driver": None, "pcie": None}), settings)))
    assert found["settings"].level == "bad" and found["settings"].value == "hbm.arena_bytes = 1073741824"
    with_gpu(host)
    found = by_name(list(examine_gpu(probed(host, {"driver": 13000, "cufile": GDS, "pcie": PCIE}), settings)))
    assert "settings" not in found


def test_no_driver_says_what_was_looked_for(host: Host) -> None:
    (verdict,) = [line for line in examine_gpu(probed(host, {"driver": None})) if line.what == "NVIDIA driver"]
    assert verdict.level == "warn" and "nothing is to be done" in verdict.fix and "nvidia-smi" in verdict.fix
    assert verdict.value == "none, and there is no NVIDIA GPU on the PCI bus"
    with_gpu(host)
    shutil.rmtree(host.proc / "driver")
    (verdict,) = [line for line in examine_gpu(probed(host, {"driver": None})) if line.what == "NVIDIA driver"]
    assert (
        verdict.value.endswith("none of the 1 NVIDIA GPUs on the PCI bus") and "install NVIDIA's driver" in verdict.fix
    )


def test_a_container_without_the_driver(host: Host) -> None:
    with_gpu(host)
    found = by_name(list(examine_gpu(probed(host, {"driver": None}))))
    assert found["NVIDIA driver"].level == "bad" and "--gpus all" in found["NVIDIA driver"].fix
    assert found["PCIe"].value == "not measured: no driver"


def test_probes_that_do_not_answer(host: Host) -> None:
    hangs = ProbeFailed("no answer in 20 s")
    found = by_name(list(examine_gpu(probed(host, {"driver": hangs}))))
    assert found["NVIDIA driver"].level == "bad" and "no answer in 20 s" in found["NVIDIA driver"].value
    found = by_name(list(examine_gpu(probed(host, {"driver": 12080, "cufile": hangs, "pcie": hangs}))))
    assert found["cuFile"].level == "warn" and found["PCIe"].level == "bad"
    found = by_name(list(examine_gpu(probed(host, {"driver": 12080, "cufile": GDS, "pcie": None}))))
    assert found["PCIe"].level == "warn" and "torch with CUDA" in found["PCIe"].fix


@pytest.mark.parametrize("how", ["it is gone", "it does not find its modules"])
def test_a_python_that_cannot_run_is_no_fault_of_driver_or_storage(
    host: Host, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if how == "it is gone":
        monkeypatch.setattr(sys, "executable", str(tmp_path / "bin/python"))
    else:
        monkeypatch.setenv("PYTHONHOME", str(tmp_path / "nothing"))
    found = by_name([*examine_gpu(host), *examine_storage(host, tmp_path, None)])
    said = "No such file or directory" if how == "it is gone" else "Fatal Python error"
    for what in ("NVIDIA driver", "storage"):
        verdict = found[what]
        assert verdict.level == "bad" and "this Python cannot run the probe" in verdict.value and said in verdict.value
        assert "mend this Python environment" in verdict.fix


def test_memory(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    found = by_name(list(examine_memory(host, 1 << 30)))
    assert found["memory to pin"].level == "bad" and "host.arena_bytes (1.0 GiB" in found["memory to pin"].fix
    assert by_name(list(examine_memory(host, 1 << 20)))["memory to pin"].value == "512.0 MiB are available"
    cgroup = host.sys / "fs/cgroup"
    cgroup.mkdir(parents=True)
    (cgroup / "memory.max").write_text("1048576\n")
    (cgroup / "memory.current").write_text("524288\n")
    assert by_name(list(examine_memory(host, None)))["memory to pin"].value == "512.0 KiB are available"
    monkeypatch.setattr(gpu.resource, "getrlimit", lambda _: (64 << 10, 64 << 10))
    assert by_name(list(examine_memory(host, None)))["memlock limit"].level == "ok"
    (host.sys / "class/infiniband/efa_0").mkdir(parents=True)
    found = by_name(list(examine_memory(host, None)))
    assert found["memlock limit"].level == "warn" and "memlock=-1" in found["memlock limit"].fix


# --- EFA; Lustre is in test_lustre.py ---


LNET = "printf 'net:\\n - net type: lo\\n   - nid: 0@lo\\n - net type: tcp\\n   - nid: 10.0.0.5@tcp\\n'"


def with_efa(host: Host) -> None:
    (host.sys / "drivers/efa").mkdir(parents=True)
    device = host.sys / "class/infiniband/rdmap0s31/device"
    device.mkdir(parents=True)
    (device / "driver").symlink_to(host.sys / "drivers/efa")


def test_efa(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(examine_efa(host, on_lustre=False)) == []
    with_efa(host)
    (host.sys / "class/infiniband/mlx5_0/device").mkdir(parents=True)
    with_commands(tmp_path, monkeypatch, {"lnetctl": LNET})
    (verdict,) = examine_efa(host, on_lustre=True)
    assert verdict.level == "warn" and "10.0.0.5@tcp" in verdict.fix and "--if rdmap0s31" in verdict.fix
    (tmp_path / "bin/lnetctl").write_text("#!/bin/sh\necho '- nid: 10.0.0.5@efa'\n")
    (verdict,) = examine_efa(host, on_lustre=True)
    assert verdict.level == "ok" and "10.0.0.5@efa" in verdict.value and "mlx5_0" not in verdict.value
    (tmp_path / "bin/lnetctl").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin/lctl").write_text("#!/bin/sh\necho 10.0.0.5@efa1\n")
    (tmp_path / "bin/lctl").chmod(0o755)
    (verdict,) = examine_efa(host, on_lustre=True)
    assert verdict.level == "ok"


# --- storage ---


CALIBRATION = {
    "choice": {"engine": "ring", "threads": 12, "piece_bytes": 4 << 20, "slots": 2},
    "read_bytes_s": 51.4e9,
    "write_bytes_s": 3.4e9,
    "latency_s": 0.0001,
    "seconds": 1.0,
    "reasons": ["the fastest of 5 tried"],
}


def measured(host: Host, **changes: object) -> Probed:
    answer = {"is_full": False, "alignment": 512, "device": "NVIDIA H200", "calibration": CALIBRATION | changes}
    return probed(host, {"storage": answer})


def test_storage(host: Host, tmp_path: Path) -> None:
    table = f"27 1 254:0 / / rw - ext4 /dev/vda rw\n30 27 0:40 / {tmp_path} rw - lustre 10.0.0.1@tcp:/kv rw\n"
    (host.proc / "self/mountinfo").write_text(table)
    found = by_name(list(examine_storage(measured(host), tmp_path, None)))
    assert f"on lustre ({tmp_path}, shared)" in found["root"].value and "Lustre stripes" in found and "EFA" in found
    assert found["storage rates"].value == "reads 51.4 GB/s into NVIDIA H200, writes 3.4 GB/s, a page in 0.10 ms"
    assert found["I/O engine"].value == "ring of 12 threads x 2 x 4 MiB; the fastest of 5 tried"


@pytest.mark.parametrize(
    ("mount", "level", "said", "fix"),
    [
        ("ext4 /dev/vda rw", "ok", "ext4: local to this node; no fdatasync is needed", ""),
        ("tmpfs none rw", "ok", "tmpfs: in memory", ""),
        ("lustre 10.0.0.1@tcp:/kv rw", "ok", "lustre: coherent by its locks", ""),
        ("nfs4 server:/kv rw,vers=4.2,hard", "ok", "NFS 4.2: close-to-open", ""),
        ("nfs4 server:/kv rw,vers=4.1,hard", "warn", "NFS 4.1: close-to-open", "mount it with vers=4.2"),
        ("nfs server:/kv rw,vers=3,hard", "warn", "NFS 3: close-to-open", "mount it with vers=4.2"),
        ("fuse.glusterfs server:kv rw", "ok", "fuse.glusterfs: its client writes behind", "write-behind off"),
        ("fuse.ceph-fuse ceph-fuse rw", "ok", "CephFS, fuse.ceph-fuse: its clients' caches are coherent", "well below"),
        (r"fuse mfs\04310.79.0.1:9421 rw", "ok", "MooseFS, fuse: its client writes behind", "mfssettrashtime -r 0"),
        ("fuse.juicefs JuiceFS:kv rw", "ok", "fuse.juicefs: its client writes behind", "--trash-days 0"),
        ("beegfs beegfs_nodev rw", "ok", "beegfs: not known", "--peer"),
    ],
)
def test_the_file_system_is_named_with_what_is_known_of_it(
    mount: str, level: str, said: str, fix: str, host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (host.proc / "self/mountinfo").write_text(f"30 27 0:40 / {tmp_path} rw - {mount}\n")
    found = by_name(list(examine_storage(measured(host), tmp_path, None)))
    verdict = found["file system"]
    assert verdict.level == level and verdict.value.startswith(said) and fix in verdict.fix
    is_flushed = mount.split()[0] not in ("ext4", "tmpfs", "lustre")
    assert ("kvtier calls fdatasync before it publishes" in verdict.value) is is_flushed
    writes_behind = mount.startswith(("fuse.glusterfs", "fuse mfs", "fuse.juicefs", "beegfs"))
    assert ("written bytes may stay in the client" in found["direct I/O"].value) is writes_behind
    assert ("fdatasync counted" in found["storage rates"].value) is writes_behind


def test_a_shared_root_that_is_not_flushed_is_warned_of(host: Host, tmp_path: Path) -> None:
    (host.proc / "self/mountinfo").write_text(f"30 27 0:40 / {tmp_path} rw - fuse.glusterfs server:kv rw\n")
    redis = {"kind": "redis", "url": "redis://127.0.0.1:1/0"}
    settings = Settings.load({"root": str(tmp_path), "io": {"fdatasync": "never"}, "index": redis})
    verdict = by_name(list(examine_storage(measured(host), tmp_path, settings)))["file system"]
    assert verdict.level == "warn" and "set io.fdatasync to auto" in verdict.fix


def test_a_root_that_is_to_be_made(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an engine's start makes it, with its parents; what is measured is the mount that it will lie on."""
    (host.proc / "self/mountinfo").write_text(f"30 27 0:40 / {tmp_path} rw - lustre 10.0.0.1@tcp:/kv rw\n")
    machine = measured(host)
    root = tmp_path / "to/come"
    found = by_name(list(examine_storage(machine, root, None)))
    assert found["root"].level == "ok" and f"{root} will be made, in {tmp_path} on lustre" in found["root"].value
    assert str(tmp_path) in found["Lustre stripes"].fix and str(root) not in found["Lustre stripes"].fix
    assert json.loads(machine.asked[0])["folder"] == str(tmp_path) and not root.parent.exists()
    (tmp_path / "file").touch()
    (verdict,) = examine_storage(machine, tmp_path / "file/kv", None)
    assert verdict.level == "bad" and "is a file, not a folder" in verdict.fix
    (tmp_path / "link").symlink_to(root)
    (verdict,) = examine_storage(machine, tmp_path / "link/kv", None)
    assert verdict.level == "bad" and f"link is a link to {root}, which is not there" in verdict.fix
    monkeypatch.setattr(os, "access", lambda *_: False)
    (verdict,) = examine_storage(machine, root, None)
    assert verdict.level == "bad" and f"not writable: {tmp_path}" in verdict.fix


def test_a_root_that_an_engine_would_refuse(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was called ok, and measured."""
    monkeypatch.setattr(root_module, "MACHINE_ROOT", tmp_path)
    settings = Settings(root=tmp_path / "kv", require_mount=True)
    (verdict,) = examine_storage(measured(host), settings.root, settings)
    assert verdict.level == "bad" and "nothing is mounted there" in verdict.fix
    folder = tmp_path / "kv/v2"
    folder.mkdir(parents=True)
    claim(folder, Owner(this_node(), folder / "index"))
    assert by_name(list(examine_storage(measured(host), tmp_path / "kv", None)))["root"].level == "ok"
    (folder / "owner.json").write_bytes(Owner(Node("f00d", "gpu-07"), None).to_json(folder))
    (verdict,) = examine_storage(measured(host), tmp_path / "kv", None)
    assert verdict.level == "bad" and "it belongs to node gpu-07 (f00d)" in verdict.fix


def test_a_capacity_beyond_the_disk_is_warned_of(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies there counts as room: it can be evicted."""
    disk = os.statvfs(tmp_path)
    free = disk.f_bavail * disk.f_frsize
    settings = Settings(root=tmp_path, capacity_bytes=free + (1 << 40), segment_bytes=1 << 20)
    found = by_name(list(examine_storage(measured(host), tmp_path, settings)))
    assert found["root"].level == "warn" and "would fill the disk before it evicts" in found["root"].fix
    monkeypatch.setattr(storage, "segments_bytes", lambda path: 2 << 40)
    found = by_name(list(examine_storage(measured(host), tmp_path, settings)))
    assert found["root"].level == "ok"


def test_sets_of_a_small_capacity_need_little_room(host: Host, tmp_path: Path, mount_tmpfs: Mount) -> None:
    """The doctor warned of a disk with less than 1 GiB free, although segment_bytes was not set."""
    mount_tmpfs(tmp_path, "size=64m")
    for capacity_bytes, level in ((32 << 20, "ok"), (2 << 30, "warn")):
        probes = measured(host)
        settings = Settings(root=tmp_path, capacity_bytes=capacity_bytes)
        found = by_name(list(examine_storage(probes, tmp_path, settings)))
        assert found["root"].level == level
        assert f'"segment_bytes": {capacity_bytes // 16}' in probes.asked[-1]
    assert "a segment set takes 128.0 MiB" in found["root"].fix


def test_the_capacity_of_a_root_alone_is_that_of_check_and_of_an_engine(
    tmp_path: Path, mount_tmpfs: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The doctor used to assume 64 GiB, and warned that sets take 1 GiB."""
    mount_tmpfs(tmp_path, "size=64m")
    probes: list[str] = []
    monkeypatch.setattr(Host, "probe", lambda _, *words, **__: probes.append(words[-1]))
    monkeypatch.setenv("KVTIER_ROOT", str(tmp_path))
    for path in (tmp_path, None):
        assert by_name(list(examine(path)))["root"].level == "ok"
        assert f'"segment_bytes": {default_capacity(tmp_path) // 16}' in probes[-1]
    (tmp_path / "kvtier.yaml").write_text(f"root: {tmp_path}\nsegment_bytes: 1MiB\n")
    said = by_name(list(examine(tmp_path / "kvtier.yaml")))["root"].fix
    assert said.startswith("capacity_bytes (64GiB) is more than the tier can have here")


def test_of_what_was_tried_only_faults_and_the_other_engine_are_told(host: Host, tmp_path: Path) -> None:
    ring = "ring of 12 threads x 2 x 4 MiB"
    reasons = [
        f"{ring}: 51.40 GB/s",
        "ring of 8 threads x 2 x 4 MiB: not tried, 2 s are over",
        "kvikio of 16 threads x 4 MiB: 20.31 GB/s",
        "ring of 8 threads x 1 x 4 MiB: left out: no memory",
        f"{ring}: again 50.00 GB/s",
        f"{ring} is the fastest of 3 tried",
    ]
    verdicts = list(examine_storage(measured(host, reasons=reasons), tmp_path, None))
    assert by_name(verdicts)["I/O engine"].value == f"{ring}; the fastest of 3 tried"
    assert [verdict.value for verdict in verdicts if verdict.what == "I/O tried"] == [reasons[2], reasons[3]]


def test_storage_that_could_not_be_measured(host: Host, tmp_path: Path) -> None:
    found = by_name(list(examine_storage(measured(host, read_bytes_s=None, reasons=["no space"]), tmp_path, None)))
    assert found["storage rates"].level == "bad" and "no space" in found["storage rates"].value
    failing = probed(host, {"storage": ProbeFailed("[Errno 13] Permission denied")})
    found = by_name(list(examine_storage(failing, tmp_path, None)))
    assert found["storage"].level == "bad" and "Permission denied" in found["storage"].value
    refusing = probed(
        host, {"storage": {"is_full": False, "alignment": None, "device": "cpu", "calibration": CALIBRATION}}
    )
    found = by_name(list(examine_storage(refusing, tmp_path, None)))
    assert found["direct I/O"].level == "warn" and "refuses O_DIRECT" in found["direct I/O"].value
    assert storage.STORAGE_TIMEOUT_S > 30


def test_a_place_that_takes_no_files_is_one_sentence() -> None:
    """It was "[Errno 2] No such file or directory: '/proc/.calibrate-11987-a8...'"."""
    (verdict,) = [verdict for verdict in examine(Path("/proc")) if verdict.level == "bad"]
    assert "/.calibrate-" not in verdict.value and "Errno" not in verdict.value and "root" in verdict.fix


def test_a_small_tmpfs_has_no_quota(tmp_path: Path, mount_tmpfs: Mount) -> None:
    mount_tmpfs(tmp_path, "size=1m")
    rates = by_name(list(examine(tmp_path)))["storage rates"]
    assert "mount it with a larger size" in rates.fix and rates.value.endswith("32.0 MiB must be free")
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    found = by_name(list(examine(tmp_path)))
    assert all("a larger size" in found[what].fix for what in ("room for a segment", "storage rates"))


def test_a_quota_is_named_where_statvfs_has_room(host: Host, tmp_path: Path) -> None:
    answer = {"is_full": True, "alignment": 512, "device": "cpu", "calibration": CALIBRATION}
    found = by_name(list(examine_storage(probed(host, {"storage": answer}), tmp_path, None)))
    verdict = found["room for a segment"]
    assert verdict.level == "warn" and "a quota of this user" in verdict.value and "storage rates" in found
    found = by_name(list(examine_storage(probed(host, {"storage": {"is_full": True}}), tmp_path, None)))
    assert "a quota of this user" in found["room for a segment"].value and found["storage rates"].level == "bad"


@pytest.mark.parametrize("free", [1, 64])
def test_a_file_system_without_inodes_is_named(free: int, host: Host, tmp_path: Path, mount_tmpfs: Mount) -> None:
    mount_tmpfs(tmp_path, f"size=64m,nr_inodes={free + 1}")
    found = by_name(list(examine_storage(measured(host), tmp_path, None)))["root"]
    assert (found.level == "bad" and f"{free} inodes left" in found.fix) is (free == 1)


def test_room_for_a_segment_is_not_taken_from_others(
    tmp_path: Path, mount_tmpfs: Mount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe reserved 8 TiB: for seconds, until that failed, the disk was full for all its users."""
    mount_tmpfs(tmp_path, "size=8m")
    asked = list[int]()

    def reserve(fd: int, n_bytes: int) -> None:
        asked.append(n_bytes)
        fallocate(fd, n_bytes)

    monkeypatch.setattr(probe, "fallocate", reserve)
    assert probe._refuses(tmp_path, 1 << 43) and not probe._refuses(tmp_path, 1 << 20) and asked == [1 << 20]
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_blocks=0))  # a file system that does not tell
        assert probe._refuses(tmp_path, 16 << 20) and asked[1:] == [16 << 20]


def test_the_probe_sees_storage_that_refuses_a_segment(host: Host, tmp_path: Path) -> None:
    asked = {"folder": str(tmp_path), "direct": True, "threads": None, "piece_bytes": None, "engine": "auto"}
    for segment_bytes, is_full in ((1 << 20, False), (1 << 43, True)):
        found = host.probe("kvtier.doctor.probe", "storage", json.dumps(asked | {"segment_bytes": segment_bytes}))
        assert found["is_full"] is is_full and found["calibration"]


# --- commands ---


def test_a_command_that_hangs_is_left(host: Host) -> None:
    started = time.monotonic()
    ran = host.run("sleep", "30", timeout_s=0.2)
    assert ran == Ran(None, "", "no answer in 0.2 s") and time.monotonic() - started < 25


def test_commands(host: Host) -> None:
    assert host.run("/no/such/command").status is None
    assert host.run(sys.executable, "-c", "print('x'); exit(3)") == Ran(3, "x\n", "")
    with pytest.raises(ProbeFailed, match="No module named"):
        host.probe("kvtier.no_such_module")
    with pytest.raises(ProbeFailed, match="not an answer"):
        host.probe("this")
    assert host.text(host.proc / "absent") == ""


def test_probe_processes_answer_with_json(host: Host, tmp_path: Path) -> None:
    assert host.probe("kvtier.doctor.probe", "cufile")["mode"] in ("absent", "compat", "gds")
    asked = json.dumps(
        {
            "folder": str(tmp_path / "absent"),
            "direct": True,
            "threads": None,
            "piece_bytes": None,
            "engine": "auto",
            "segment_bytes": 1 << 20,
        }
    )
    with pytest.raises(ProbeFailed, match="No such file"):
        host.probe("kvtier.doctor.probe", "storage", asked)


def test_lines() -> None:
    assert line(Diagnosis("ok", "a", "b")) == "ok    a: b"
    assert line(Diagnosis("warn", "a", "b", "do c")) == "warn  a: b\n      -> do c"
    long = line(Diagnosis("warn", "a", "word " * 40, f"do {'c' * 200}")).splitlines()
    assert max(len(text) for text in long[:-1]) <= 110 and long[-1] == f"      -> do {'c' * 200}"
    assert [size(n) for n in (0, 1023, 1024, 3 << 29, 5 << 50)] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KiB",
        "1.5 GiB",
        "5120.0 TiB",
    ]
