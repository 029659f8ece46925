"""Time of loading weights: kvtier, verified and not, beside other loaders and the machine's ceilings.

    python -m benchmarks.gpu.weights_rate --out OUT/weights_rate.json [--models 8b,0.6b,moe] [--loaders kvtier,...]
        [--folder /dev/shm/weights] [--wheels FOLDER] [--repetitions 3] [--no-ceilings] [--keep] [--tiny]
    python -m benchmarks.gpu.weights_rate --ranks 2 --out OUT/two_gpus_weights.json [--layers 36]      # two GPUs

Makes random bf16 checkpoints of the models' dimensions in the folder (8b: 16 GB, 0.6b: 1.2 GB, moe: 16 layers of
Qwen3-30B-A3B, 21 GB) with their manifests, and reads them once. Then each loader loads each of them in a process of its
own, in turns. Seconds are those from after the CUDA context was made until the last byte is in parameters that were
allocated before, as vLLM fuses them, and compared where the loader compares; imports do not count. `vllm:FORMAT` is
vLLM's own loader of that load format: its seconds are those of `load_weights`, kvtier compares checksums, and
kvtier-stored uses a stored plan. The sums of all parameters, weighted by position, must be equal. Host memory: highest
resident size over that before the load. `kvtier@12x2x4` is kvtier with 12 threads of 2 buffers of 4 MiB.

--ranks 2: a checkpoint of 70B's dimensions (80 layers: 141 GB, 36 layers: 66 GB), and with a loader of shards what
`kvtier weights shard` makes of it, which takes as much room again. Each load is two processes, the ranks of vLLM's own
groups (NCCL, on the CPU gloo). They build the model on their GPUs and meet at a barrier; then `load_weights` and a
synchronization are timed. Loaders are vLLM's formats: auto, fastsafetensors, instanttensor, kvtier (a new plan),
kvtier-stored, kvtier-shards; the last three also with -verified (with a manifest beside the files). reads-of-shards and
pinned-copies move as many bytes into host memory, and from there, and are the ceilings. A loader that fails is left out
of later turns. GB/s: bytes of a rank's parameters over its seconds. last: from the first rank's start to
the last rank's end. spread: (slowest - fastest) / slowest.

`instanttensor@CONCURRENCY=16+IO_DEPTH=64` sets INSTANTTENSOR_CONCURRENCY and so on; COPY=0 gives out views of its
buffer instead of copies. vLLM's `auto`, which is slow, runs once. --wheels: a folder of wheels that are not installed
(instanttensor); a loader that cannot be imported is left out. --tiny: on the CPU, to try this script.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report
from benchmarks.gpu.ceilings import copies as measure_copies
from benchmarks.gpu.ceilings import read_rate
from benchmarks.gpu.setup import TINY_ENVIRONMENT, check_room
from benchmarks.gpu.systems import environment_of
from benchmarks.gpu.weights_files import (
    MODELS,
    PlacedTensor,
    config_of,
    make,
    parameters_of,
    parser,
    position_sum,
    tensors_of,
    unpacked,
)
from benchmarks.processes import free_port, launch, stop, tail

QUESTION = "how long weights take from files into GPU memory"
LIMIT_S = 120.0  # time limit of one load without its imports, seconds
OTHER_RANK_S = 5.0  # time that a rank may run on after the other one has failed, seconds
IMPORTS_S = 200.0
POLL_S = 0.02

Place = Callable[[str], Any]
Found = dict[str, Any]
Runs = dict[str, list[Found]]  # loader -> its runs
Steps = Generator[Any, Any, None]


# --- loaders without vLLM: each fills the parameters; what is imported before the yield does not count ---


def _kvtier(
    files: list[Path], tensors: list[PlacedTensor], parameters: dict[str, Any], loader: str
) -> Iterator[object]:
    import numpy as np

    from kvtier.model.safetensors import read_header
    from kvtier.weights import manifest
    from kvtier.weights import reader as readers

    name, _, sizes = loader.partition("@")
    if sizes:
        _use_slots(sizes)
    yield None
    reader = readers.WeightReader()
    reader.prepare(next(iter(parameters.values())).device)
    numbers = {name: number for number, name in enumerate(parameters)}
    places = {tensor.name: (numbers[tensor.parameter], 2 * tensor.at) for tensor in tensors}
    rows = []
    for file, path in enumerate(files):
        for name, entry in read_header(path).tensors.items():
            rows.append((file, entry.start, 1, entry.n_bytes, entry.n_bytes, *places[name], entry.n_bytes))
    planned_s = time.perf_counter()
    expected = manifest.of_files(files) if name == "kvtier-verified" else None
    start_s = time.perf_counter()
    done = reader.read(files, np.array(rows, np.int64), list(parameters.values()), expected)
    yield {"planned_s": planned_s, "read_s": time.perf_counter() - start_s, "bytes_read": done.bytes_read}
    reader.close()


def _use_slots(sizes: str) -> None:
    """Have kvtier read with other buffers than its own choice. sizes: "12x2x4": threads, buffers a thread, MiB."""
    from kvtier.weights import reader

    threads, slots, mib = map(int, sizes.split("x"))
    reader.ranges.shared_sizes = lambda _: {}
    reader.RangeReader = partial(reader.RangeReader, threads=threads, slots=slots, piece_bytes=mib << 20)  # type: ignore[misc]


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
    opened = instanttensor.safe_open(list(map(str, files)), framework="pt", device=0, process_group=None, copy=True)
    with opened as file:
        _copied(file.tensors(), place)
    yield None


def _fastsafetensors(files: list[Path], place: Place) -> Iterator[object]:
    from fastsafetensors import SingleGroup
    from fastsafetensors.parallel_loader import ParallelLoader

    yield None
    names, alone = list(map(str, files)), SingleGroup()
    loader = ParallelLoader(
        pg=alone, hf_weights_files=names, queue_size=0, use_tqdm_on_load=False, device="cuda:0", nogds=True
    )
    _copied(loader.iterate_weights(), place)
    yield None
    loader.close()


PEERS = {"instanttensor": _instanttensor, "fastsafetensors": _fastsafetensors, "auto": _auto}
IN_VLLM = "vllm:"  # prefix of a load format: vLLM's own loader of that format
CEILINGS = ("reads-of-shards", "pinned-copies")  # no loaders: what both ranks together could reach at most
LOADERS = {  # by the number of ranks; with two all are vLLM's
    1: ("kvtier", "kvtier-verified", *PEERS, "vllm:kvtier", "vllm:kvtier-stored", *(f"{IN_VLLM}{p}" for p in PEERS)),
    2: (
        *("auto", "kvtier-verified", "kvtier-stored-verified", "kvtier-stored", "kvtier-shards-verified"),
        *("kvtier-shards", "fastsafetensors", "instanttensor", "instanttensor@COPY=0"),
        *("instanttensor@CONCURRENCY=15+IO_DEPTH=64", *CEILINGS),
    ),
}
ONCE = {1: f"{IN_VLLM}auto", 2: "auto"}


# --- one load, in a process for each rank: generators yield when all is imported, allocated, loaded, and summed ---


def _into_parameters(loader: str, files: list[Path], tensors: list[PlacedTensor], device: str) -> Steps:
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


def _in_vllm(loader: str, folder: Path, rank: int, n_ranks: int, device: str) -> Steps:
    """Load by vLLM's own loader, without an engine. The port of the ranks' groups is sent in after the imports."""
    import torch
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    from kvtier.connectors.vllm import plugin
    from kvtier.connectors.vllm.weights_ranks import as_rank, build_model, engine_config

    plugin.register_load_format()
    name, _, settings = loader.partition("@")
    if name in ("fastsafetensors", "instanttensor"):
        peer = import_module(name)
        if "COPY=0" in settings:
            _without_copies(peer)
    if (is_ours := name.startswith("kvtier")) and settings:
        _use_slots(settings)
    if name in CEILINGS:
        yield from _ceiling(name, folder, rank, n_ranks, device)
        return
    extra = {"plan_cache": str(folder / "plans") if "stored" in name else False} if is_ours else {}
    load_format = "kvtier" if is_ours else name
    load = LoadConfig(load_format=load_format, model_loader_extra_config=extra, use_tqdm_on_load=False)
    vllm_loader = get_model_loader(load)
    port = yield None
    if device == "cuda":
        torch.cuda.set_device(rank)
    config = engine_config(str(folder), n_ranks)
    with as_rank(config, 0) if n_ranks == 1 else _groups(config, rank, n_ranks, port, device):
        model = build_model(config, device)
        yield None
        vllm_loader.load_weights(model, config.model_config)
        yield {"bytes": sum(value.nbytes for value in model.parameters())}
        yield [position_sum(value) for _, value in sorted(model.named_parameters())]


def _ceiling(name: str, folder: Path, rank: int, n_ranks: int, device: str) -> Steps:
    """Move bytes as a rank's load does, but only from its shards into host memory, or from there to the GPU."""
    import torch

    from kvtier.connectors.vllm.weights_ranks import engine_config

    config = engine_config(str(folder.parent / "model"), n_ranks)
    port = yield None
    if device == "cuda":
        torch.cuda.set_device(rank)
    shards = list((folder.parent / "shards").glob(f"model-rank-{rank}-*.safetensors"))
    n_bytes = sum(shard.stat().st_size for shard in shards)
    host = torch.ones(min(n_bytes, 256 << 20), dtype=torch.uint8, pin_memory=device == "cuda")
    target = torch.empty_like(host, device=device)
    with _groups(config, rank, n_ranks, port, device):
        yield None
        for first in range(0, n_bytes, len(host)) if name == "pinned-copies" else ():
            target[: n_bytes - first].copy_(host[: n_bytes - first], non_blocking=True)
        for shard in shards if name == "reads-of-shards" else ():
            read_rate(shard)
        yield {"bytes": n_bytes}
        yield None


@contextmanager
def _groups(config: Any, rank: int, n_ranks: int, port: int, device: str) -> Iterator[None]:
    """Be one rank of vLLM's groups. Their communicators have been used once when the context begins."""
    import torch
    import torch.distributed as dist
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    backend = "gloo" if device == "cpu" else "nccl"
    with set_current_vllm_config(config):
        parallel_state.set_custom_all_reduce(False)
        parallel_state.init_distributed_environment(n_ranks, rank, f"tcp://127.0.0.1:{port}", rank, backend)
        parallel_state.initialize_model_parallel(n_ranks)
        for group in (dist.group.WORLD, parallel_state.get_world_group().device_group):
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        yield


def _without_copies(instanttensor: Any) -> None:
    """Make its `safe_open` give out views, also where vLLM asks for copies."""
    opened = instanttensor.safe_open.__init__

    def open_views(  # copy: what vLLM asks for
        self: Any, filename: Any, framework: str, device: Any, process_group: Any = None, copy: bool = True
    ) -> None:
        opened(self, filename, framework, device, process_group, copy=False)

    instanttensor.safe_open.__init__ = open_views


def load(job: Found, wait: Callable[[], int]) -> Found:
    """Load once and return what was measured. wait: called when all is imported; returns the port of the groups.

    job: folder, model, layers, loader, rank, ranks, device.
    """
    import torch

    folder, loader, device, n_ranks = Path(job["folder"]), job["loader"], job["device"], job["ranks"]
    if n_ranks > 1 or is_in_vllm(loader):
        steps = _in_vllm(loader.removeprefix(IN_VLLM), folder, job["rank"], n_ranks, device)
    else:
        shapes = shapes_of(job["model"], job["layers"])
        steps = _into_parameters(loader, make(folder, shapes), tensors_of(shapes), device)
    next(steps)
    if n_ranks == 1:
        torch.zeros(1, device=device)  # makes the CUDA context
    steps.send(wait())
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None

    def meet() -> None:
        if n_ranks > 1:
            torch.distributed.barrier(device_ids=[job["rank"]] if device == "cuda" else None)
        synchronize()

    Path("/proc/self/clear_refs").write_text("5")  # the highest resident size counts from here
    before = _resident("VmRSS")
    meet()
    cpu_s, start_s = time.process_time(), time.perf_counter()
    more = next(steps) or {}
    synchronize()
    end_s = time.perf_counter()  # all processes of a machine have the same clock
    found = {"start_s": start_s, "end_s": end_s, "seconds": end_s - start_s, "cpu_s": time.process_time() - cpu_s}
    found["host_bytes"] = _resident("VmHWM") - before
    if "planned_s" in more:
        more["planned_s"] -= start_s
    found["sums"] = next(steps)
    meet()
    next(steps, None)
    return found | more


def _resident(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition(f"{field}:")[2].split()[0])


def child(job: Found) -> None:
    """Import, wait for the file `go` with the port of the groups, load once and write the figures."""
    out, go = Path(job["out"]), Path(job["go"])

    def wait() -> int:
        out.with_suffix(".imported").touch()
        while not go.exists():
            time.sleep(POLL_S)
        return int(go.read_text())

    try:
        found = load(job, wait)
    except ImportError as error:
        found = {"skipped": str(error)}
    out.write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)


# --- the parent ---


class WaitingLoad:
    """The processes of one load, one a rank, which import what they need and wait."""

    def __init__(self, options: argparse.Namespace, model: str, loader: str, turn: int) -> None:
        self.loader = loader
        name = "".join(letter if letter.isalnum() else "-" for letter in f"{model}-{loader}-{turn}")
        paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), *unpacked(options.wheels))))
        environment = os.environ | environment_of("none", options.folder) | (TINY_ENVIRONMENT if options.tiny else {})
        environment |= {"PYTHONPATH": paths, "VLLM_DIST_IDENT": f"ranks-{os.getpid()}-{name}"}
        environment["VLLM_LOGGING_LEVEL"] = "INFO"
        for setting in loader.partition("@")[2].split("+") if "instanttensor@" in loader else ():
            key, _, value = setting.partition("=")
            environment[f"INSTANTTENSOR_{key}"] = value
        folder = options.folder / model / ("shards" if "shards" in loader else "model")
        self._go = options.logs / f"{name}.go"
        self._results = [options.logs / f"{name}-{rank}.json" for rank in range(options.ranks)]
        self._logs = [path.with_suffix(".log") for path in self._results]
        for path in (self._go, *self._results, *(path.with_suffix(".imported") for path in self._results)):
            path.unlink(missing_ok=True)
        job = {"folder": str(folder), "model": model, "layers": options.layers, "loader": loader, "go": str(self._go)}
        job |= {"ranks": options.ranks, "device": "cpu" if options.tiny else "cuda"}
        words = [sys.executable, "-m", "benchmarks.gpu.weights_rate"]
        self._processes = [
            launch([*words, json.dumps(job | {"rank": rank, "out": str(path)})], self._logs[rank], environment)
            for rank, path in enumerate(self._results)
        ]

    def wait_for_imports(self) -> None:
        deadline = time.monotonic() + IMPORTS_S
        while time.monotonic() < deadline and all(process.poll() is None for process in self._processes):
            if all(path.with_suffix(".imported").exists() for path in self._results):
                return
            time.sleep(POLL_S)

    def run(self) -> Found:
        """Let all ranks load. Return {"ranks": their figures}, {"skipped"} or {"failed"}."""
        part = self._go.with_suffix(".part")
        part.write_text(str(free_port()))
        part.rename(self._go)
        deadline = time.monotonic() + LIMIT_S
        while any(process.poll() is None for process in self._processes) and time.monotonic() < deadline:
            if any(process.poll() for process in self._processes):
                deadline = min(deadline, time.monotonic() + OTHER_RANK_S)
            time.sleep(POLL_S)
        for process in self._processes:
            stop(process)
        if not all(path.exists() for path in self._results):
            statuses = [process.returncode for process in self._processes]
            return {"failed": f"exit statuses {statuses}\n" + "\n".join(map(tail, self._logs))}
        found = [json.loads(path.read_text()) for path in self._results]
        for one, path in zip(found, self._logs, strict=True):
            lines = [line for line in path.read_text().splitlines() if "loading weights took" in line]
            one |= {"log": lines[-1]} if lines else {}
        skipped = [one for one in found if "skipped" in one]
        return skipped[0] if skipped else {"ranks": found}


def shapes_of(model: str, layers: int | None) -> Any:
    return MODELS[model] if layers is None else replace(MODELS[model], layers=layers)


def show_manifest(folder: Path, is_shown: bool) -> None:
    """Rename the folder's manifest to its usual name, so that loads are verified, or to one that no load knows."""
    from kvtier.weights.manifest import MANIFEST

    names = (folder / MANIFEST, folder / "hidden")
    source, target = reversed(names) if is_shown else names
    if source.exists():
        source.rename(target)


def make_files(options: argparse.Namespace, model: str, has_shards: bool) -> tuple[list[Path], Found]:
    """Make checkpoint, manifest and shards, and read them once. Return the files, and seconds and bytes."""
    from kvtier.weights import manifest
    from kvtier.weights.reader import WeightReader

    shapes, root = shapes_of(model, options.layers), options.folder / model
    n_bytes = 2 * sum(tensor.elements for tensor in tensors_of(shapes))
    if not (root / "model" / "made").exists():
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        check_room(root, n_bytes * (2 if has_shards else 1))
    start_s = time.perf_counter()
    files = make(root / "model", shapes)
    (root / "model" / "config.json").write_text(json.dumps(config_of(shapes)))
    found: Found = {"bytes": n_bytes, "layers": shapes.layers, "make_s": time.perf_counter() - start_s}
    start_s = time.perf_counter()
    show_manifest(root / "model", True)
    if not (root / "model" / manifest.MANIFEST).exists():
        with WeightReader() as reader:
            manifest.write(root / "model", files, reader)
    found["manifest_s"] = time.perf_counter() - start_s
    start_s = time.perf_counter()
    if has_shards and not (root / "shards").exists():
        words = [sys.executable, "-m", "kvtier.cli", "weights", "shard", str(root / "model")]
        environment = os.environ | environment_of("none", options.folder) | (TINY_ENVIRONMENT if options.tiny else {})
        words += ["--tp", str(options.ranks), "--out", str(root / "shards")]
        subprocess.run(words, env=environment, check=True, stdout=sys.stderr)
        found["shard_s"] = time.perf_counter() - start_s
    print(model, {key: round(value, 1) for key, value in found.items()}, flush=True)
    return files, found


def measure(options: argparse.Namespace, model: str, loaders: list[str]) -> Iterator[Runs]:
    """Run all loaders in turns; yield the runs of each after each turn. On one rank all turns import at once."""
    root = options.folder / model
    found: Runs = {loader: [] for loader in loaders}
    if stored := [name for name in loaders if "stored" in name]:
        warm = WaitingLoad(options, model, stored[0], 0)
        warm.wait_for_imports()
        warm.run()  # stores the plan and compiles the kernels
    turns: list[list[tuple[int, str]]] = []
    for turn in range(options.repetitions):
        start = 3 * turn % len(loaders)
        order = [name for name in loaders[start:] + loaders[:start] if turn == 0 or name != ONCE[options.ranks]]
        turns.append([(turn + 1, name) for name in order])
    for batch in turns if options.ranks > 1 else [sum(turns, [])]:
        good = [each for each in batch if all("ranks" in run for run in found[each[1]])]
        waiting = [WaitingLoad(options, model, name, turn) for turn, name in good]
        for each in waiting:
            each.wait_for_imports()
        for each in waiting:
            for name in ("model", "shards") if options.ranks > 1 else ():
                show_manifest(root / name, each.loader.endswith("-verified"))
            found[each.loader].append(run := each.run())
            print(f"{model} {each.loader}: {_line(run)}", flush=True)
        yield found


def _line(run: Found) -> str:
    seconds = ", ".join(f"{one['seconds']:.3f} s" for one in run.get("ranks", ()))
    return seconds or "; ".join(f"{key}: {value}" for key, value in run.items())


def is_in_vllm(loader: str) -> bool:
    return loader.startswith(IN_VLLM)


def figures(found: Runs) -> dict[str, Found]:
    """Return the figures of each loader that ran. equal: to the sums of the first one, rank by rank; loaders of vLLM
    and others have other parameters."""
    rows, expected = {}, dict[str, Any]()
    for loader, runs in found.items():
        ranks = [run["ranks"] for run in runs if "ranks" in run]
        if ranks:
            key = loader if loader in CEILINGS else str(is_in_vllm(loader))
            sums = expected.setdefault(key, [one["sums"] for one in ranks[0]])
            seconds = [[one["seconds"] for one in run] for run in ranks]
            medians = map(median, zip(*seconds, strict=True))
            lasts = (max(one["end_s"] for one in run) - min(one["start_s"] for one in run) for run in ranks)
            rows[loader] = {
                "rank_bytes_s": [one.get("bytes", 0) / s for one, s in zip(ranks[0], medians, strict=True)],
                "last_s": sorted(lasts),
                "spread": median((max(each) - min(each)) / max(each) for each in seconds),
                "equal": all([one["sums"] for one in run] == sums for run in ranks),
            }
    return rows


def written(found: Runs, n_ranks: int) -> Runs:
    """Return the runs for the file of results, without the sums, which would be most of it. With one rank, a run is the
    figures of that rank instead of a list of ranks."""
    kept: Runs = {}
    for loader, runs in found.items():
        for run in runs:
            ranks = [{key: value for key, value in one.items() if key != "sums"} for one in run.get("ranks", ())]
            one = {"ranks": ranks} if ranks and n_ranks > 1 else ranks[0] if ranks else run
            kept.setdefault(loader, []).append(one)
    return kept


def loader_rows(result: Found) -> report.Table:
    """Return columns and rows, one row a model and loader."""
    ceiling, cells = result.get("ceilings", {}).get("h2d_bytes_s"), []
    for model, found in result["models"].items():
        for loader, runs in found["runs"].items():
            if times := sorted(run["seconds"] for run in runs if "seconds" in run):
                good = [run for run in runs if "seconds" in run]
                share = f"{found['bytes'] / median(times) / ceiling:.0%}" if ceiling else "-"
                cpu_s = f"{median(run['cpu_s'] for run in good):.1f}"
                host = f"{max(run['host_bytes'] for run in good) / 2**20:,.0f}"
                about = f"{model}, {found['tensors']:,} tensors, {found['bytes'] / 1e9:.1f} GB"
                seconds = f"{median(times):.3f} ({times[0]:.3f}-{times[-1]:.3f})"
                cells.append([about, loader, seconds, share, cpu_s, host])
    return ["model", "loader", "s, median (all)", "of PCIe", "CPU s", "host MiB"], cells


def rank_rows(result: Found) -> report.Table:
    """Return columns and rows, one row a loader of several ranks."""
    cells = []
    for loader, found in result["figures"].items():
        rate, last = f"{median(found['rank_bytes_s']) / 1e9:.1f}", f"{median(found['last_s']):.3f}"
        cells.append([loader, rate, last, f"{found['spread']:.1%}", "equal" if found["equal"] else "DIFFER"])
    return ["load", "GB/s a rank", "last rank, s", "spread", "sums of parameters"], cells


def run_all(options: argparse.Namespace) -> int:
    default = "8b,0.6b,moe" if options.ranks == 1 else "70b"
    models = ["tiny"] if options.tiny else (options.models or default).split(",")
    loaders = (options.loaders or ",".join(LOADERS[options.ranks])).split(",")
    if options.tiny:
        loaders = [name for name in loaders if name.removeprefix(IN_VLLM).startswith(("kvtier", "auto", *CEILINGS))]
    content: Found = {"models": {}} if options.ranks == 1 else {"ranks": options.ranks}
    is_equal = True
    for model in models:
        files, made = make_files(options, model, any("shards" in name for name in loaders))
        if options.ranks == 1 and options.ceilings and "ceilings" not in content:
            largest = max(files, key=lambda path: path.stat().st_size)
            content["ceilings"] = {} if options.tiny else measure_copies()
            content["ceilings"] |= {"read_bytes_s": read_rate(largest, repeats=3)}
        for found in measure(options, model, loaders):
            judged, runs = figures(found), written(found, options.ranks)
            if options.ranks == 1:
                tensors, n_bytes = len(tensors_of(MODELS[model])), sum(path.stat().st_size for path in files)
                content["models"][model] = {"bytes": n_bytes, "tensors": tensors, "runs": runs}
            else:
                content |= {"files": made, "figures": judged, "runs": runs}
            report.write(options.out, QUESTION, content, "instanttensor", "fastsafetensors", "safetensors")
        if not options.keep:
            shutil.rmtree(options.folder / model)
        differing = [name for name, one in judged.items() if not one["equal"]]
        is_equal = is_equal and bool(judged) and not differing
        print(f"{model}: sums of parameters {f'DIFFER: {differing}' if differing else 'are equal'}", flush=True)
    report.table(*(loader_rows if options.ranks == 1 else rank_rows)(content))
    return int(not is_equal)


def main() -> int:
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        child(json.loads(sys.argv[1]))
    made = parser("weights_rate", __doc__)
    made.add_argument("--ranks", type=int, choices=(1, 2), default=1, help="tensor-parallel ranks, a GPU each")
    made.add_argument("--models", help="models, separated by commas (default: 8b,0.6b,moe; with two ranks 70b)")
    made.add_argument("--layers", type=int, help="layers of the checkpoints (default: those of the model)")
    made.add_argument("--loaders", help="loaders, separated by commas (default: all)")
    made.add_argument("--keep", action="store_true", help="keep the checkpoints for the next run")
    made.add_argument("--no-ceilings", dest="ceilings", action="store_false")
    options = made.parse_args()
    options.logs.mkdir(parents=True, exist_ok=True)
    return run_all(options)


if __name__ == "__main__":
    raise SystemExit(main())
