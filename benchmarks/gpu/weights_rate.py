"""Time of loading weights: kvtier, verified and not, beside other loaders and the machine's ceilings.

    python -m benchmarks.gpu.weights_rate --out OUT/weights_rate.json [--models 8b,0.6b,moe] [--loaders kvtier,...]
        [--folder /dev/shm/weights] [--wheels FOLDER] [--repetitions 3] [--no-ceilings] [--tiny]

Makes random bf16 checkpoints of the models' dimensions in the folder (8b: 16 GB, 0.6b: 1.2 GB, moe: 16 layers of
Qwen3-30B-A3B, 21 GB) and reads them once. Then each loader loads each of them in a process of its own, in turns.
Seconds are those from after the CUDA context was made until the last byte is in parameters that were allocated before,
as vLLM fuses them, and compared where the loader compares; imports do not count. `vllm:FORMAT` is vLLM's own loader of
that load format: its seconds are those of `load_weights`, kvtier compares checksums, and kvtier-stored uses a stored
plan. The sums of all parameters must be equal. Host memory: highest resident size over that before the load.
`kvtier@12x2x4` is kvtier with 12 threads of 2 buffers of 4 MiB. --wheels: a folder of wheels that are not installed
(instanttensor); a loader that cannot be imported is left out. --tiny: on the CPU, to try this script.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report
from benchmarks.gpu.ceilings import copies as measure_copies
from benchmarks.gpu.ceilings import read_rate
from benchmarks.gpu.setup import TINY_ENVIRONMENT
from benchmarks.gpu.weights_files import (
    MODELS,
    PlacedTensor,
    add_models,
    make,
    parameters_of,
    parser,
    position_sum,
    tensors_of,
)
from benchmarks.gpu.weights_in_vllm import config_of
from benchmarks.gpu.weights_in_vllm import load as load_in_vllm

QUESTION = "how long weights take from files into GPU memory"
LIMIT_S = 120  # of one process
Place = Callable[[str], Any]


# --- loaders: each fills the parameters; what is imported before the yield does not count ---


def _kvtier(
    files: list[Path], tensors: list[PlacedTensor], parameters: dict[str, Any], loader: str
) -> Iterator[object]:
    import numpy as np

    from kvtier.model.safetensors import read_header
    from kvtier.weights import manifest
    from kvtier.weights import reader as readers

    verify = loader.startswith("kvtier-verified")
    if "@" in loader:
        threads, slots, mib = map(int, loader.partition("@")[2].split("x"))
        sizes = {"threads": threads, "slots": slots, "piece_bytes": mib << 20}
        readers.RangeReader = partial(readers.RangeReader, **sizes)  # type: ignore[misc]
    yield None
    reader = readers.WeightReader()
    reader.prepare(next(iter(parameters.values())).device)
    numbers = {name: number for number, name in enumerate(parameters)}
    places = {tensor.name: (numbers[tensor.parameter], 2 * tensor.at) for tensor in tensors}
    rows = []
    for file, path in enumerate(files):
        for name, entry in read_header(path).tensors.items():
            size = entry.stop - entry.start
            rows.append((file, entry.start, 1, size, size, *places[name], size))
    planned_s = time.perf_counter()
    expected = manifest.of_files(files) if verify else None
    done = reader.read(files, np.array(rows, np.int64), list(parameters.values()), expected)
    yield {"planned_s": planned_s, "read_s": done.seconds, "bytes_read": done.bytes_read}
    reader.close()


def _copied(iterate: Iterator[Any], place: Place) -> None:
    for name, tensor in iterate:
        place(name).copy_(tensor)


def _auto(files: list[Path], place: Place) -> Iterator[object]:
    from safetensors import safe_open

    yield None
    for path in files:
        with safe_open(path, "pt") as file:
            _copied(((name, file.get_tensor(name)) for name in file.keys()), place)  # noqa: SIM118
    yield None


def _instanttensor(files: list[Path], place: Place) -> Iterator[object]:
    import instanttensor

    yield None
    with instanttensor.safe_open(
        list(map(str, files)), framework="pt", device=0, process_group=None, copy=True
    ) as file:
        _copied(file.tensors(), place)
    yield None


def _fastsafetensors(files: list[Path], place: Place) -> Iterator[object]:
    from fastsafetensors import SingleGroup
    from fastsafetensors.parallel_loader import ParallelLoader

    yield None
    loader = ParallelLoader(
        pg=SingleGroup(), hf_weights_files=list(map(str, files)), queue_size=0, use_tqdm_on_load=False,
        device="cuda:0", nogds=True,
    )  # fmt: skip
    _copied(loader.iterate_weights(), place)
    yield None
    loader.close()


PEERS = {"instanttensor": _instanttensor, "fastsafetensors": _fastsafetensors, "auto": _auto}
IN_VLLM = "vllm:"  # prefix of a load format: vLLM's own loader of that format
LOADERS = (
    "kvtier", "kvtier-verified", *PEERS, "vllm:kvtier", "vllm:kvtier-stored", *(f"{IN_VLLM}{name}" for name in PEERS)
)  # fmt: skip


# --- one load, in a process of its own ---


def _into_parameters(
    loader: str, files: list[Path], tensors: list[PlacedTensor], device: str
) -> Iterator[dict[str, float] | list[int] | None]:
    """Import, allocate, load and sum the parameters, with a yield after each of these."""
    import torch

    parameters: dict[str, Any] = {}
    steps: Iterator[Any]
    if loader.startswith("kvtier"):
        steps = _kvtier(files, tensors, parameters, loader)
    else:
        by_name = {tensor.name: tensor for tensor in tensors}

        def place(name: str) -> Any:
            tensor = by_name[name]
            return parameters[tensor.parameter][tensor.at : tensor.at + tensor.elements].view(tensor.shape)

        steps = PEERS[loader](files, place)
    next(steps)
    yield None
    for name, elements in parameters_of(tensors).items():
        parameters[name] = torch.zeros(elements, dtype=torch.bfloat16, device=device)
    yield None
    yield next(steps)
    yield list(map(position_sum, parameters.values()))
    next(steps, None)


def load(loader: str, files: list[Path], tensors: list[PlacedTensor], device: str) -> dict[str, Any]:
    """Load once and return what was measured. Waits for a line of input when all is imported."""
    import torch

    steps: Iterator[Any] = (
        load_in_vllm(loader.removeprefix(IN_VLLM), files[0].parent, device)
        if is_in_vllm(loader)
        else _into_parameters(loader, files, tensors, device)
    )
    next(steps)
    torch.zeros(1, device=device)  # makes the CUDA context
    print("imported", flush=True)
    sys.stdin.readline()
    next(steps)
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    synchronize()
    Path("/proc/self/clear_refs").write_text("5")  # the highest resident size counts from here
    before, cpu_s, start_s = _resident("VmRSS"), time.process_time(), time.perf_counter()
    more = next(steps) or {}
    synchronize()
    found = {"seconds": time.perf_counter() - start_s, "cpu_s": time.process_time() - cpu_s}
    found["host_bytes"] = _resident("VmHWM") - before
    if "planned_s" in more:
        more["planned_s"] -= start_s
    found["sums"] = next(steps)
    next(steps, None)
    return found | more


def _resident(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{field}:")[2].split()[0])


def child(options: argparse.Namespace) -> int:
    model = MODELS[options.models]
    files = make(options.folder, model)
    try:
        found = load(options.child, files, tensors_of(model), "cpu" if options.tiny else "cuda")
    except ImportError as error:
        found = {"skipped": str(error)}
    print(json.dumps(found), flush=True)
    return 0


# --- the parent ---


class WaitingLoader:
    """Process of a loader that waits before it loads. All loaders of a model import at the same time."""

    def __init__(self, options: argparse.Namespace, loader: str, model: str) -> None:
        command = [sys.executable, "-m", "benchmarks.gpu.weights_rate", "--child", loader, "--models", model]
        command += ["--folder", str(options.folder / model), "--out", str(options.out), *["--tiny"] * options.tiny]
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), *unpacked(options.wheels))))
        environment = os.environ | {"PYTHONPATH": path} | (TINY_ENVIRONMENT if options.tiny else {})
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env=environment | {"VLLM_LOGGING_LEVEL": "INFO"},
        )  # fmt: skip

    def wait_for_imports(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line == "imported\n":
                return

    def run(self) -> dict[str, Any]:
        """Return what was measured, with the last line of the log that gives its time, or {"failed"}."""
        try:
            output = self._process.communicate("go\n", timeout=LIMIT_S)[0]
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return {"failed": f"no end after {LIMIT_S} s"}
        self._log.seek(0)
        errors = self._log.read()
        lines = [line for line in output.splitlines() if line.startswith("{")]
        if self._process.returncode or not lines:
            return {"failed": (errors or output)[-2000:]}
        log_lines = [line for line in (output + errors).splitlines() if "loading weights took" in line]
        return dict(json.loads(lines[-1])) | ({"log": log_lines[-1]} if log_lines else {})


def measure(options: argparse.Namespace, model: str, loaders: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Run all loaders in turns, but vLLM's `auto`, which is slow, only once. Return the runs of each."""
    found: dict[str, list[dict[str, Any]]] = {loader: [] for loader in loaders}
    if (stored := f"{IN_VLLM}kvtier-stored") in loaders:
        WaitingLoader(options, stored, model).run()  # stores the plan
    waiting = []
    for turn in range(options.repetitions):
        start = turn % len(loaders)
        order = [name for name in loaders[start:] + loaders[:start] if turn == 0 or name != f"{IN_VLLM}auto"]
        waiting += [(loader, WaitingLoader(options, loader, model)) for loader in order]
    for _, process in waiting:
        process.wait_for_imports()
    for loader, process in waiting:
        run = process.run()
        found[loader].append(run)
        for reason in ("skipped", "failed"):
            if reason in run and len(found[loader]) == 1:
                print(f"{model} {loader} {reason}: {run[reason]}", flush=True)
    return found


def unpacked(wheels: Path | None) -> list[str]:
    if wheels is None:
        return []
    target = Path(tempfile.gettempdir(), "kvtier-bench-wheels")
    for wheel in sorted(wheels.glob("*.whl")):
        if not (target / wheel.name).exists():
            zipfile.ZipFile(wheel).extractall(target)
            (target / wheel.name).touch()
    return [str(target)]


def ceilings(files: list[Path], tiny: bool) -> dict[str, float]:
    found = {"read_bytes_s": read_rate(max(files, key=lambda path: path.stat().st_size), repeats=3)}
    return found if tiny else measure_copies() | found


def is_in_vllm(loader: str) -> bool:
    return loader.startswith(IN_VLLM)


def rows_of(model: str, runs: dict[str, list[dict[str, Any]]], n_bytes: int) -> Iterator[list[object]]:
    best = {name: [run for run in found if "seconds" in run] for name, found in runs.items()}
    times = {name: median(run["seconds"] for run in found) for name, found in best.items() if found}
    sums = {is_in_vllm(name): found[0]["sums"] for name, found in reversed(best.items()) if found}
    ours = {is_in_vllm(name): times[name] for name in OURS if name in times}
    for name, seconds in times.items():
        group = is_in_vllm(name)
        spread = sorted(run["seconds"] for run in best[name])
        yield [
            model, name, f"{seconds:.3f}", f"{spread[0]:.3f}-{spread[-1]:.3f}", f"{n_bytes / seconds / 1e9:.1f}",
            f"{seconds / ours[group]:.2f}" if group in ours else "-",
            f"{median(run['cpu_s'] for run in best[name]):.1f}",
            f"{max(run['host_bytes'] for run in best[name]) / 2**20:,.0f}",
            "equal" if all(run["sums"] == sums[group] for run in best[name]) else "DIFFER",
        ]  # fmt: skip


def run_all(options: argparse.Namespace) -> int:
    from kvtier.weights import manifest
    from kvtier.weights.reader import WeightReader

    models = ["tiny"] if options.tiny else options.models.split(",")
    loaders = [
        name
        for name in options.loaders.split(",")
        if not options.tiny or name.removeprefix(IN_VLLM).startswith(("kvtier", "auto"))
    ]
    content: dict[str, Any] = {"models": {}}
    rows: list[list[object]] = []
    for model in models:
        folder = options.folder / model
        start_s = time.perf_counter()
        files = make(folder, MODELS[model])
        (folder / "config.json").write_text(json.dumps(config_of(MODELS[model])))
        made_s = time.perf_counter()
        with WeightReader() as reader:
            manifest.write(folder, files, reader)
        print(
            f"{model}: made in {made_s - start_s:.1f} s, read once in {time.perf_counter() - made_s:.1f} s", flush=True
        )
        if "ceilings" not in content and options.ceilings:
            content["ceilings"] = ceilings(files, options.tiny)
        n_bytes = sum(path.stat().st_size for path in files)
        runs = measure(options, model, loaders)
        model_rows = list(rows_of(model, runs, n_bytes))
        content["models"][model] = {"bytes": n_bytes, "tensors": len(tensors_of(MODELS[model])), "runs": runs}
        rows += model_rows
        report.table(COLUMNS, model_rows)
        if not options.keep:
            shutil.rmtree(folder)
    for each in content["models"].values():
        for run in (run for found in each["runs"].values() for run in found):
            run.pop("sums", None)
    report.write(options.out, QUESTION, content, "instanttensor", "fastsafetensors", "safetensors")
    print(*(f"{name} {value / 1e9:.1f} GB/s" for name, value in content.get("ceilings", {}).items()), sep=", ")
    report.table(COLUMNS, rows)
    return int(any("DIFFER" in row for row in rows) or not rows)


# The column `x kvtier` compares with the last of these, inside vLLM and outside of it.
OURS = ("kvtier", "kvtier-verified", f"{IN_VLLM}kvtier", f"{IN_VLLM}kvtier-stored")
COLUMNS = ("model", "loader", "s", "min-max", "GB/s", "x kvtier", "CPU s", "host MiB", "sums")


def main() -> int:
    made = parser("weights_rate", __doc__)
    add_models(made)
    made.add_argument("--loaders", default=",".join(LOADERS), help="separated by commas")
    made.add_argument("--wheels", type=Path, help="folder of wheels to import loaders from")
    made.add_argument("--no-ceilings", dest="ceilings", action="store_false")
    options = made.parse_args()
    return child(options) if options.child else run_all(options)


if __name__ == "__main__":
    raise SystemExit(main())
