"""How fast do LMCache's objects go to and come from kvtier, beside LMCache's own adapters on the same folder?

    python -m benchmarks.lmcache_adapter --dir /dev/shm --dir /var/tmp --out benchmarks/results/lmcache_adapter.json

Measured by LMCache's own `lmcache bench l2`, a process a run, in an environment that is made for it (0.5.6, or
`--lmcache-version 0.5.3`). `fs` and `fs_native` are LMCache's adapters, with their defaults (through the page cache)
and with `use_odirect`; kvtier is direct wherever the file system can be. The ceiling, `copy`, writes and reads the same
objects with one system call each, from a thread a core, without checksums, index or LMCache. Systems take turns; each
has a folder of its own, removed after its run. On tmpfs `use_odirect` means nothing, and is left out.

A disk's loads of what was stored a moment ago come from the page cache where that is used: only direct ones tell of it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu import report
from benchmarks.lmcache_environment import OUTSIDE, VERSIONS, environment
from kvtier.io.filesystem import IN_MEMORY, file_system_of
from kvtier.io.ring import AlignedBuffer

QUESTION = "rates of LMCache's objects to and from kvtier, beside LMCache's own adapters on the same folder"
OBJECT_MIB = (4, 32)
"""A chunk of 256 tokens of Llama-3.1-8B in bf16, on one of eight ranks and on one of one."""
SUBMIT_BYTES = 256 << 20
RUN_TIMEOUT_S = 300.0
MIB = 1 << 20
OPERATIONS = ("Store", "Load")


@dataclass(frozen=True)
class Case:
    """rounds: measured; one before them is not."""

    folder: Path
    object_bytes: int
    n_objects: int
    rounds: int

    @property
    def in_memory(self) -> bool:
        return file_system_of(self.folder).kind in IN_MEMORY

    @property
    def total_bytes(self) -> int:
        return self.object_bytes * self.n_objects * (self.rounds + 1)


def kvtier_adapter(case: Case, root: Path) -> dict[str, Any]:
    settings = {"root": str(root), "capacity_bytes": 4 * case.total_bytes + (4 << 30), "segment_bytes": "512MiB"}
    return {"type": "native_plugin", "module_path": "kvtier.connectors.lmcache", "class_name": "KVTierConnector",
            "adapter_params": {"settings": settings}}  # fmt: skip


def adapters(case: Case) -> dict[str, Callable[[Path], dict[str, Any]]]:
    """By name: the JSON of `--l2-adapter`, given the folder that it is to use."""
    found: dict[str, Callable[[Path], dict[str, Any]]] = {"kvtier": lambda root: kvtier_adapter(case, root)}
    for kind in ("fs", "fs_native"):
        found[kind] = lambda root, kind=kind: {"type": kind, "base_path": str(root)}  # type: ignore[misc]
        if not case.in_memory:
            found[f"{kind} direct"] = lambda root, kind=kind: {  # type: ignore[misc]
                "type": kind, "base_path": str(root), "use_odirect": True,
            }  # fmt: skip
    return found


def run_lmcache(programs: Path, adapter: dict[str, Any], case: Case) -> dict[str, float]:
    """GB/s of Store and Load, over the measured rounds. Raises CalledProcessError, and SystemExit for a run in which
    not all objects came back as they were."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        # Direct adapters want aligned memory, and so all get it.
        flags = {"--num-keys": case.n_objects, "--data-size-kb": case.object_bytes >> 10, "--rounds": case.rounds,
                 "--warmup-rounds": 1, "--l1-align-bytes": 4096, "--format": "json", "--output": out}  # fmt: skip
        words = [str(word) for pair in flags.items() for word in pair]
        command = [str(programs / "lmcache"), "bench", "l2", "--l2-adapter", json.dumps(adapter), "--no-skip-verify"]
        ran = subprocess.run([*command, *words], capture_output=True, text=True, check=True, timeout=RUN_TIMEOUT_S,
                             env={**os.environ, **OUTSIDE})  # fmt: skip
        found = {row["operation"]: row for row in json.loads(out.read_text())["metrics"].values() if "operation" in row}
    if "data verified OK" not in ran.stdout:
        raise SystemExit(f"{adapter}: the objects did not come back as they were:\n{ran.stdout[-2000:]}")
    rates = {}
    for operation in OPERATIONS:
        row = found[operation]
        if row["total_success"] != row["total_keys"] or row["rounds_timed_out"]:
            raise SystemExit(f"{adapter}: {operation} of {row['total_keys']} objects, {row['total_success']} went well")
        rates[operation] = case.object_bytes * case.n_objects / row["duration_avg_ms"] / 1e6
    return rates


def copy(folder: Path, case: Case) -> dict[str, float]:
    """The ceiling, as `run_lmcache`: direct where the folder is on a disk."""
    flags = os.O_RDWR | os.O_CREAT | (0 if case.in_memory else os.O_DIRECT)
    memory = AlignedBuffer(case.n_objects * case.object_bytes)
    memory.view[:] = os.urandom(MIB) * (len(memory.view) // MIB)
    views = [memory.view[n * case.object_bytes :][: case.object_bytes] for n in range(case.n_objects)]
    names = [[folder / f"{turn}-{n}" for n in range(case.n_objects)] for turn in range(case.rounds + 1)]
    rates = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for operation, work in (("Store", os.pwrite), ("Load", lambda fd, view, at: os.preadv(fd, [view], at))):

            def one(path: Path, view: memoryview, work: Callable[..., int] = work) -> None:
                fd = os.open(path, flags, 0o600)
                try:
                    assert work(fd, view, 0) == len(view)
                finally:
                    os.close(fd)

            took_s = []
            for turn in names:
                started_s = time.perf_counter()
                list(pool.map(one, turn, views))
                took_s.append(time.perf_counter() - started_s)
            rates[operation] = len(memory.view) / statistics.mean(took_s[1:]) / 1e9
    return rates


def measure(programs: Path, case: Case, repeats: int) -> Iterator[dict[str, Any]]:
    """A row for each system and operation: GB/s of each repeat."""
    rates: dict[str, list[dict[str, float]]] = {}
    for repeat in range(repeats):
        turns = list(adapters(case).items())
        turns = turns[repeat % len(turns) :] + turns[: repeat % len(turns)]
        for name, adapter in [("copy", None), *turns]:
            work = Path(tempfile.mkdtemp(prefix="lmcache-adapter-", dir=case.folder))
            try:
                found = copy(work, case) if adapter is None else run_lmcache(programs, adapter(work), case)
            finally:
                shutil.rmtree(work, ignore_errors=True)
            rates.setdefault(name, []).append(found)
            print(f"  {case.folder} {case.object_bytes >> 20} MiB {name}: "
                  + ", ".join(f"{what} {rate:.2f}" for what, rate in found.items()), flush=True)  # fmt: skip
    for name, found_rates in rates.items():
        for operation in OPERATIONS:
            yield {
                "folder": str(case.folder), "file_system": file_system_of(case.folder).kind,
                "object_bytes": case.object_bytes, "objects": case.n_objects, "system": name,
                "operation": operation.lower(), "gb_s": [round(rate[operation], 3) for rate in found_rates],
            }  # fmt: skip


def show(rows: list[dict[str, Any]]) -> None:
    cells = {(r["folder"], r["object_bytes"], r["system"], r["operation"]): r["gb_s"] for r in rows}
    lines = []
    for folder, size, system in dict.fromkeys(key[:3] for key in cells):
        line = [folder, f"{size >> 20} MiB", system]
        for operation in ("store", "load"):
            rates, ceiling = (cells[folder, size, who, operation] for who in (system, "copy"))
            share = statistics.median(rates) / statistics.median(ceiling)
            line += [f"{statistics.median(rates):.2f} ({min(rates):.2f}-{max(rates):.2f})", f"{100 * share:.0f}%"]
        lines.append(line)
    report.table(["folder", "object", "system", "store GB/s", "of copy", "load GB/s", "of copy"], lines)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--dir", action="append", type=Path, required=True, help="folder on a file system to measure")
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--object-mib", action="append", type=int, help="instead of 4 and 32")
    made.add_argument("--submit-bytes", type=int, default=SUBMIT_BYTES, help="what is stored or loaded by one task")
    made.add_argument("--rounds", type=int, default=4)
    made.add_argument("--repeats", type=int, default=5)
    made.add_argument("--lmcache-version", choices=VERSIONS, default=VERSIONS[-1])
    made.add_argument("--note", default="", help="what else the machine did meanwhile")
    return made


def main() -> int:
    options = parser().parse_args()
    programs = environment(options.lmcache_version)
    rows: list[dict[str, Any]] = []
    load_before = os.getloadavg()
    for folder in options.dir:
        for mib in options.object_mib or OBJECT_MIB:
            case = Case(folder, mib * MIB, max(1, options.submit_bytes // (mib * MIB)), options.rounds)
            rows += measure(programs, case, options.repeats)
    show(rows)
    report.write(options.out, QUESTION, {
        "lmcache": options.lmcache_version, "rounds": options.rounds, "repeats": options.repeats, "note": options.note,
        "load_average": [load_before, os.getloadavg()], "rows": rows,
    })  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
