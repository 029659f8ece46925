"""The beds themselves end: guests with their script, mounts whose client hangs."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.network_fs.bed import STOP_TIMEOUT_S
from tests.network_fs.beds import Gluster
from tests.waiting import wait_until

END_TIMEOUT_S = 60.0  # of a script and its guest, on a machine that runs more than it can; seconds
SCRIPT = Path(__file__).with_name("nfs_guest.sh")


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_guest_ends_with_its_script(sent: signal.Signals, tmp_path: Path) -> None:
    programs, pid = tmp_path / "bin", tmp_path / "pid"
    programs.mkdir()
    qemu = programs / "qemu-system-x86_64"
    qemu.write_text(f"#!/bin/sh\necho $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 600\n")
    qemu.chmod(0o755)
    images, job = tmp_path / "images", tmp_path / "job"
    images.mkdir()
    (images / "root.ext4").touch()
    job.touch()
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    script = subprocess.Popen([str(SCRIPT), str(images), "vers=4.2", str(job)], env=environment)
    try:
        wait_until(pid.exists, "the guest", 30)
        script.send_signal(sent)
        script.wait(END_TIMEOUT_S)
        guest = Path("/proc", pid.read_text().strip())
        wait_until(lambda: not guest.exists(), "the end of the guest", END_TIMEOUT_S)
    finally:
        script.kill()
    assert sent == signal.SIGKILL or not list(images.glob("rig.*"))


def test_bed_ends_though_a_client_hangs(tmp_path: Path) -> None:
    if reason := Gluster.missing():
        pytest.skip(f"{Gluster.kind}: {reason}")
    with Gluster(tmp_path) as bed:
        bed.cut_link(1)  # umount asks the client, which waits for a server
        began = time.monotonic()
    assert time.monotonic() - began < 5 * STOP_TIMEOUT_S
    assert not bed.m1.is_mount()
