"""The probes that might hang or crash, each run as a process of its own by kvtier.doctor; they print JSON.

python -m kvtier.doctor.probe driver
python -m kvtier.doctor.probe cufile
python -m kvtier.doctor.probe storage '{"folder", "direct", "threads", "piece_bytes", "engine", "segment_bytes": ...}'
python -m kvtier.doctor.probe peer '{"folder", "peer", "direct": ...}'
"""

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

from kvtier.doctor.coherence import measure
from kvtier.doctor.host import FAULT
from kvtier.errors import TierUnavailable
from kvtier.format.geometry import PAGE_BYTES
from kvtier.io.calibrate import calibrate, scratch_file
from kvtier.io.calibration import Ask, engines_for
from kvtier.io.cuda import driver_version
from kvtier.io.cufile import cufile_state
from kvtier.io.engines import Target
from kvtier.io.kvikio_files import load_kvikio
from kvtier.io.ring import AlignedBuffer
from kvtier.storage.filesystem import FULL, IN_MEMORY, FreeSpace, file_system_of
from kvtier.storage.segments import fallocate

TARGET_BYTES = 128 << 20
SECTOR_BYTES = 512


def main(arguments: list[str]) -> None:
    what = arguments[0]
    if what == "driver":
        answer: Any = driver_version()
    elif what == "cufile":
        answer = _cufile()
    elif what == "peer":
        asked = json.loads(arguments[1])
        folder = Path(asked["folder"])
        answer = measure(folder, Path(asked["peer"]), asked["direct"] and _direct_alignment(folder) is not None)
    else:
        answer = _storage(json.loads(arguments[1]))
    print(json.dumps(answer))


def _cufile() -> Any:
    try:
        kvikio = load_kvikio()
    except TierUnavailable:
        kvikio = None
    return cufile_state(kvikio)._asdict()


def _storage(asked: dict[str, Any]) -> Any:
    """Return if there is no room for a segment, the least alignment of direct I/O (None where it does not work), and
    the calibration; the first alone where the storage has no room to measure."""
    folder = Path(asked["folder"])
    kind = file_system_of(folder).kind
    is_full = kind not in IN_MEMORY and _refuses(folder, asked["segment_bytes"])
    target, device, kept = _target()
    try:
        alignment = _direct_alignment(folder) if asked["direct"] else None
        engines = engines_for(asked["engine"], target)
        sizes = asked["threads"], asked["piece_bytes"]
        found = calibrate(Ask(folder, target, alignment is not None, kind in IN_MEMORY, engines, device, *sizes))
    except OSError as fault:
        if fault.errno not in FULL:
            raise
        return {"is_full": True}
    del kept
    return {"is_full": is_full, "alignment": alignment, "device": device, "calibration": found.to_json()}


def _refuses(folder: Path, n_bytes: int) -> bool:
    """Reserve so much in a scratch file. statvfs knows nothing of quotas. Raises OSError for other refusals."""
    disk = os.statvfs(folder)
    if disk.f_blocks and FreeSpace.of(disk).n_bytes < n_bytes:
        return True  # fallocate(2) would take all that is left from others before it fails
    try:
        with scratch_file(folder, direct=False) as fd:
            fallocate(fd, n_bytes)
    except OSError as fault:
        if fault.errno in FULL:
            return True
        if fault.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise
    return False


def _direct_alignment(folder: Path) -> int | None:
    """Return the smallest of 512 and 4096 bytes that direct I/O takes; None: it takes none. Raises OSError."""
    buffer = AlignedBuffer(PAGE_BYTES)
    try:
        with scratch_file(folder, direct=True) as fd:
            os.pwritev(fd, [buffer.view], 0)
            os.preadv(fd, [buffer.view], 0)
            try:
                os.preadv(fd, [buffer.view[:SECTOR_BYTES]], SECTOR_BYTES)
            except OSError:
                return PAGE_BYTES
            return SECTOR_BYTES
    except OSError as fault:
        if fault.errno != errno.EINVAL:
            raise
        return None


def _target() -> tuple[Target, str, object]:
    """Allocate device memory if torch can use a GPU, else host memory. Return it, its name, and the object that owns
    it."""
    if driver_version() is not None:
        from kvtier.kernels.pcie import device_memory

        found = device_memory(TARGET_BYTES)
        if found is not None:
            return Target(found.address, TARGET_BYTES, found.ordinal), found.name, found
    buffer = AlignedBuffer(TARGET_BYTES)
    return Target(buffer.address, TARGET_BYTES), "cpu", buffer


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (OSError, TierUnavailable) as error:
        print(error.strerror if isinstance(error, OSError) and error.strerror else error, file=sys.stderr)
        sys.exit(FAULT)
