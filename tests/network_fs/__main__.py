"""Run measurements on a bed: python -m tests.network_fs BED MEASUREMENT... [--out FILE].

BED is gluster, moose, ceph, juice, or the options of NFS mounts in a guest (vers=4.2), whose image is kept in --images.
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.network_fs import nfs
from tests.network_fs.bed import Bed
from tests.network_fs.beds import BEDS
from tests.network_fs.run import measure


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("bed")
    parser.add_argument("measurements", nargs="+")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--images", type=Path, default=Path(tempfile.gettempdir()) / "kvtier-nfs-guest")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # beds end with the process
    if "vers=" in options.bed:
        results = nfs.measure(options.images, options.bed, options.measurements)
    else:
        results = on_bed(BEDS[options.bed], options.measurements)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


def on_bed(kind: type[Bed], wanted: Sequence[str]) -> dict[str, Any]:
    """Run measurements on a bed of this kind; what each found."""
    if reason := kind.missing():
        sys.exit(f"{kind.kind}: {reason}")
    results: dict[str, Any] = {}
    # The full-disk measurement has a bed of its own: what others removed may keep its room for minutes.
    runs = [[one for one in wanted if not one.startswith("full")]]
    runs += [[one] for one in wanted if one.startswith("full")]
    for measurements in filter(None, runs):
        with tempfile.TemporaryDirectory(prefix="kvbed-") as folder, kind(Path(folder)) as bed:
            results["file_system"] = bed.versions()
            for one in measurements:
                results |= measure(bed, one)
    return results


if __name__ == "__main__":
    main()
