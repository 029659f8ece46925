"""Measurements on a bed, each in a process of its own."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.network_fs.bed import Bed
from tests.network_fs.probe import STARTED
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 900.0  # for one measurement, seconds
SHOWN_TIMEOUT_S = 180.0  # until statvfs shows how much room is left, seconds
KILLED_S = 15.0  # a server is away, seconds
CUT_S = 10.0  # a link is cut, seconds
FULL_DISK_BYTES = 660 << 20  # room of the full-disk measurement: 20 segment sets of 8 files, bytes


def measure(bed: Bed, measurement: str) -> dict[str, Any]:
    """Run a measurement of tests.network_fs.probe on a bed; what it found. On one of a full disk nothing else ran."""
    if measurement.startswith("full"):
        bed.limit_room(FULL_DISK_BYTES)
        wait_until(lambda: 0 < bed.available() < 1.1 * FULL_DISK_BYTES, "the limited room", SHOWN_TIMEOUT_S)
    out = bed.folder / "out.json"
    words = [sys.executable, "-m", "tests.network_fs.probe", str(bed.m1), str(bed.m2), measurement, "--out", str(out)]
    words += ["--disks", *map(str, bed.disks)]
    log = bed.folder / "probe.log"
    with log.open("w+") as file:
        process = subprocess.Popen(words, cwd=ROOT, stdout=file, stderr=file)
        try:
            if measurement.startswith("faults"):
                wait_until(lambda: process.poll() is not None or STARTED in log.read_text(), STARTED, TIMEOUT_S)
                harm(bed)
            process.wait(TIMEOUT_S)
        finally:
            process.kill()
    print(log.read_text(), flush=True)
    assert process.returncode == 0, f"{measurement} on {bed.kind}:\n{log.read_text()}"
    return dict(json.loads(out.read_text()))


def harm(bed: Bed) -> None:
    """Kill a server of bytes for 15 s and cut the link of each node for 10 s, one after the other."""
    time.sleep(1)
    bed.kill_server()
    time.sleep(KILLED_S)
    bed.restart_server()
    time.sleep(5)
    for node in (1, 2):
        bed.cut_link(node)
        time.sleep(CUT_S)
        bed.mend_link(node)
        time.sleep(5)
