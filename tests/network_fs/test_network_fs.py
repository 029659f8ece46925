"""Two nodes on real network file systems: what one saved, the other loads; space is kept; faults lose nothing."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.network_fs import nfs
from tests.network_fs.beds import BEDS
from tests.network_fs.run import measure
from tests.redis_server import has_redis

pytestmark = has_redis

PLAIN_SHARE = 0.85  # of plain direct writes with one fdatasync a batch
NFS_IMAGES = Path(os.environ.get("KVTIER_NFS_GUEST", "/tmp/kvtier-nfs-guest"))  # kept: it takes minutes to build
LATE_RECLAIM = ("moose", "juice")  # these give room back minutes after a file was removed


def check(name: str, found: dict[str, Any], kind: str) -> None:
    """Assert what one measurement must show on a file system of this kind."""
    assert not found["tracebacks"], found["tracebacks"][0]
    if name == "fresh":
        assert found["wrong"] == found["later_wrong"] == found["later_failed"] == found["retracted"] == 0, found
        assert found["failed"] == 0 or kind == "juice", found
    elif name == "rate":
        assert max(found["share"], found["median_share"]) >= PLAIN_SHARE, found
    elif name == "capacity" and kind not in LATE_RECLAIM:
        assert found["stored_idle_mib"] <= found["limit_mib"], found
        assert found["most_stored_mib"] <= found["limit_mib"], found
    elif name == "full":
        assert found["least_share"] > 0.5, found
        assert found["freed_after_s"] is not None or kind in LATE_RECLAIM, found
    elif name == "faults":
        assert found["wrong"] == found["failed"] == 0, found
        outcomes = found["saves"]["outcomes"]
        assert found["loads"]["unanswered"] == outcomes.get("UNANSWERED", 0) == 0, found
        assert found["offered"] == found["claimed"] and found["lost"] == 0, found
        assert found["rebuild"]["records"] == 0, found


def on_bed(kind: str, folder: Path, *measurements: str) -> None:
    if reason := BEDS[kind].missing():
        pytest.skip(f"{BEDS[kind].kind}: {reason}")
    with BEDS[kind](folder) as bed:
        for one in measurements:
            found = measure(bed, one)
            name = one.partition("=")[0]
            check(name, found[name], kind)


def test_glusterfs_in_short(tmp_path: Path) -> None:
    on_bed("gluster", tmp_path, "fresh=40", "capacity=60")


@pytest.mark.soak
@pytest.mark.parametrize("kind", BEDS)
@pytest.mark.parametrize("measurement", ["fresh", "rate", "capacity", "full", "faults"])
def test_two_nodes(kind: str, measurement: str, tmp_path: Path) -> None:
    on_bed(kind, tmp_path, measurement)


@pytest.mark.soak
@pytest.mark.parametrize("options", ["vers=4.2", "vers=3"])
def test_two_nodes_on_kernel_nfs(options: str) -> None:
    if reason := nfs.missing():
        pytest.skip(reason)
    found = nfs.measure(NFS_IMAGES, options, ["fresh=30", "rate=6", "capacity", "full"])
    for name in ("fresh", "rate", "capacity", "full"):
        check(name, found[name], "nfs")
    assert found["full"]["fits_mib"] <= nfs.FULL_DISK_BYTES >> 20
