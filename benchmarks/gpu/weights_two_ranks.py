"""Time of loading weights on two real tensor-parallel ranks, a GPU each: kvtier, shards, and other load formats.

    python -m benchmarks.gpu.weights_two_ranks --out OUT/weights_two_ranks.json [--layers 80] [--arms auto,kvtier,...]
        [--folder /dev/shm/weights] [--wheels FOLDER] [--repetitions 3] [--keep] [--tiny]

Makes a random bf16 checkpoint of 70B's dimensions (80 layers: 141 GB, 36 layers: 66 GB), its manifest, and with an arm
of shards what `kvtier weights shard` makes of it, which takes as much room again. Each arm is two fresh processes, the
ranks of vLLM's own groups (NCCL, on the CPU gloo). They build the model on their GPUs and meet at a barrier; then
`load_weights` and a synchronization are timed. Imports, groups and the model do not count; `auto` runs once.

Arms: auto, fastsafetensors, instanttensor, kvtier (a new plan), kvtier-stored, kvtier-shards; the last three also with
-verified (with a manifest beside the files). `instanttensor@CONCURRENCY=16+IO_DEPTH=64` sets INSTANTTENSOR_CONCURRENCY
and so on; COPY=0 gives out views of its buffer instead of copies. An arm that fails is left out of later turns.
GB/s: bytes of a rank's parameters over its seconds. last: from the first rank's start to the last rank's end. spread:
(slowest - fastest) / slowest. Sums of all parameters, weighted by position, must be equal on each rank for all arms.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import report
from benchmarks.gpu.setup import TINY_ENVIRONMENT
from benchmarks.gpu.systems import environment_of
from benchmarks.gpu.weights_files import MODELS, make, parser, position_sum, tensors_of
from benchmarks.gpu.weights_in_vllm import config_of
from benchmarks.gpu.weights_rate import unpacked
from benchmarks.processes import launch, stop, tail

QUESTION = "how long two tensor-parallel ranks take to fill their parameters"
RANKS = 2
PEERS = ("fastsafetensors", "instanttensor")
ARMS = (
    "auto",
    *("kvtier-verified", "kvtier-stored-verified", "kvtier-stored", "kvtier-shards-verified", "kvtier-shards"),
    *("fastsafetensors", "instanttensor", "instanttensor@COPY=0", "instanttensor@CONCURRENCY=15+IO_DEPTH=64"),
)
LIMIT_S = 120.0  # of one arm, its imports left out
OTHER_RANK_S = 5.0  # that a rank may run on after the other one has failed
IMPORTS_S = 90.0
POLL_S = 0.02
COLUMNS = ("arm", "GB/s", "slower rank", "last, s", "min-max", "spread", "x auto", "parameters")

Found = dict[str, Any]


# --- one rank, in a process of its own ---


@contextmanager
def ranks(config: Any, rank: int, port: int, device: str) -> Iterator[None]:
    """Be one rank of vLLM's groups. Their communicators have been used once when the context begins."""
    import torch
    import torch.distributed as dist
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    backend = "gloo" if device == "cpu" else "nccl"
    with set_current_vllm_config(config):
        parallel_state.set_custom_all_reduce(False)
        parallel_state.init_distributed_environment(RANKS, rank, f"tcp://127.0.0.1:{port}", rank, backend)
        parallel_state.initialize_model_parallel(RANKS)
        for group in (dist.group.WORLD, parallel_state.get_world_group().device_group):
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        yield


def without_copies(instanttensor: Any) -> None:
    """Make its `safe_open` give out views, also where vLLM asks for copies."""
    opened = instanttensor.safe_open.__init__

    def open_views(  # copy: what vLLM asks for
        self: Any, filename: Any, framework: str, device: Any, process_group: Any = None, copy: bool = True
    ) -> None:
        opened(self, filename, framework, device, process_group, copy=False)

    instanttensor.safe_open.__init__ = open_views


def child(options: argparse.Namespace) -> int:
    """Import, wait for the file `go` with the port of the groups, load once and write the figures."""
    import torch
    import torch.distributed as dist
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader import get_model_loader

    from kvtier.connectors.vllm import plugin
    from kvtier.connectors.vllm.weights_ranks import build_model, engine_config

    plugin.register_load_format()
    name, rank = options.child.partition("@")[0], options.rank
    if name in PEERS:
        peer = import_module(name)
        if "COPY=0" in options.child:
            without_copies(peer)
    is_ours, device = name.startswith("kvtier"), "cpu" if options.tiny else "cuda"
    plans = str(options.folder.parent / "plans") if "stored" in name else False
    extra = {"plan_cache": plans} if is_ours else {}
    load = LoadConfig(
        load_format="kvtier" if is_ours else name, model_loader_extra_config=extra, use_tqdm_on_load=False
    )
    loader = get_model_loader(load)
    options.out.with_suffix(".imported").touch()
    while not options.go.exists():
        time.sleep(POLL_S)
    if device == "cuda":
        torch.cuda.set_device(rank)
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    port = int(options.go.read_text())
    config = engine_config(str(options.folder), RANKS)
    with ranks(config, rank, port, device):
        model = build_model(config, device)
        dist.barrier(device_ids=[rank] if device == "cuda" else None)
        synchronize()
        start_s = time.perf_counter()
        loader.load_weights(model, config.model_config)
        synchronize()
        end_s = time.perf_counter()
        parameters = dict(model.named_parameters())
        found = {
            "start_s": start_s,  # all processes of a machine have the same clock
            "end_s": end_s,
            "bytes": sum(value.nbytes for value in parameters.values()),
            "sums": {key: position_sum(value) for key, value in parameters.items()},
        }
        options.out.write_text(json.dumps(found))
        dist.barrier(device_ids=[rank] if device == "cuda" else None)
    sys.stdout.flush()
    os._exit(0)


# --- the parent ---


def _free_port() -> int:
    """Return a port below those that the kernel gives out, which NCCL could take until the ranks come to it."""
    while True:
        with suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", random.randrange(20_000, 30_000)))
            return int(free.getsockname()[1])


class WaitingRanks:
    """Both ranks of an arm, which import what they need and wait. Arms of a turn import at the same time."""

    def __init__(self, options: argparse.Namespace, arm: str, turn: int) -> None:
        self.arm = arm
        shards = "shards" if "shards" in arm else "model"
        name = "".join(letter if letter.isalnum() else "-" for letter in f"{arm}-{turn}")
        paths = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH", ""), *unpacked(options.wheels))))
        environment = os.environ | environment_of("none", options.folder) | {"PYTHONPATH": paths}
        environment |= {"VLLM_DIST_IDENT": f"ranks-{os.getpid()}-{name}", "VLLM_LOGGING_LEVEL": "INFO"}
        environment |= TINY_ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "INFO"} if options.tiny else {}
        for setting in filter(None, arm.partition("@")[2].split("+")):
            key, _, value = setting.partition("=")
            environment[f"INSTANTTENSOR_{key}"] = value
        self._results = [options.logs / f"{name}-{rank}.json" for rank in range(RANKS)]
        self._go = options.logs / f"{name}.go"
        self._logs = [path.with_suffix(".log") for path in self._results]
        for path in (self._go, *self._results, *(path.with_suffix(".imported") for path in self._results)):
            path.unlink(missing_ok=True)
        words = [sys.executable, "-m", "benchmarks.gpu.weights_two_ranks", "--child", arm]
        words += ["--folder", str(options.folder / shards), "--go", str(self._go), *["--tiny"] * options.tiny]
        self._processes = [
            launch([*words, "--rank", str(rank), "--out", str(path)], self._logs[rank], environment)
            for rank, path in enumerate(self._results)
        ]

    def wait_for_imports(self) -> None:
        deadline = time.monotonic() + IMPORTS_S
        while time.monotonic() < deadline and not self._has_failed():
            if all(path.with_suffix(".imported").exists() for path in self._results):
                return
            time.sleep(POLL_S)

    def run(self) -> Found:
        """Let both load. Return {"ranks": their figures} or {"failed"}."""
        part = self._go.with_suffix(".part")
        part.write_text(str(_free_port()))
        part.rename(self._go)
        deadline = time.monotonic() + LIMIT_S
        while any(process.poll() is None for process in self._processes):
            if self._has_failed():
                deadline = min(deadline, time.monotonic() + OTHER_RANK_S)
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        self.stop()
        if not all(path.exists() for path in self._results):
            failed = [process.returncode for process in self._processes]
            ends = [tail(path) for path in self._logs]
            return {"failed": f"exit statuses {failed}\n" + "\n".join(ends)}
        found = [json.loads(path.read_text()) for path in self._results]
        for one, path in zip(found, self._logs, strict=True):
            lines = [line for line in path.read_text().splitlines() if "loading weights took" in line]
            one["log"] = lines[-1].partition("loading weights ")[2] if lines else ""
        return {"ranks": found}

    def stop(self) -> None:
        for process in self._processes:
            stop(process)

    def _has_failed(self) -> bool:
        return any(process.poll() for process in self._processes)


def show_manifest(folder: Path, is_shown: bool) -> None:
    """Give the folder's manifest its name, without which nothing is verified, or another one."""
    from kvtier.weights.manifest import MANIFEST

    names = (folder / MANIFEST, folder / "hidden")
    source, target = reversed(names) if is_shown else names
    if source.exists():
        source.rename(target)


def make_files(options: argparse.Namespace, has_shards: bool) -> Found:
    """Make checkpoint, manifest and shards, and read them once. Return seconds and bytes."""
    from kvtier.weights import manifest
    from kvtier.weights.reader import WeightReader

    shapes = MODELS["tiny"] if options.tiny else replace(MODELS["70b"], layers=options.layers)
    n_bytes = 2 * sum(tensor.elements for tensor in tensors_of(shapes))
    model, shards = options.folder / "model", options.folder / "shards"
    if not (model / "made").exists():
        shutil.rmtree(options.folder, ignore_errors=True)
        options.folder.mkdir(parents=True)
        room, wanted = shutil.disk_usage(options.folder).free, n_bytes * (2 if has_shards else 1)
        if room < wanted:
            raise SystemExit(
                f"{options.folder}: {wanted / 1e9:.0f} GB do not fit into {room / 1e9:.0f}; fewer --layers"
            )
    start_s = time.perf_counter()
    files = make(model, shapes)
    (model / "config.json").write_text(json.dumps(config_of(shapes)))
    found: Found = {"bytes": n_bytes, "layers": shapes.layers, "make_s": time.perf_counter() - start_s}
    start_s = time.perf_counter()
    show_manifest(model, True)
    if not (model / manifest.MANIFEST).exists():
        with WeightReader() as reader:
            manifest.write(model, files, reader)
    found["manifest_s"] = time.perf_counter() - start_s
    start_s = time.perf_counter()
    if has_shards and not shards.exists():
        words = [sys.executable, "-m", "kvtier.cli", "weights", "shard", str(model), "--tp", str(RANKS)]
        environment = os.environ | environment_of("none", options.folder) | (TINY_ENVIRONMENT if options.tiny else {})
        subprocess.run([*words, "--out", str(shards)], env=environment, check=True, stdout=sys.stderr)
        found["shard_s"] = time.perf_counter() - start_s
    print({key: round(value, 1) for key, value in found.items()}, flush=True)
    return found


def measure(options: argparse.Namespace, arms: list[str]) -> Iterator[dict[str, list[Found]]]:
    """Run all arms in turns. Yield the runs of each after every turn."""
    if any("stored" in arm for arm in arms):
        show_manifest(options.folder / "model", True)
        warm = WaitingRanks(options, "kvtier-stored-verified", 0)
        warm.wait_for_imports()
        warm.run()  # stores the plan and compiles the kernels
    found: dict[str, list[Found]] = {arm: [] for arm in arms}
    for turn in range(options.repetitions):
        start = turn * 5 % len(arms)
        order = [arm for arm in arms[start:] + arms[:start] if not any("failed" in run for run in found[arm])]
        waiting = [WaitingRanks(options, arm, turn + 1) for arm in order if arm != "auto" or turn == 0]
        for each in waiting:
            each.wait_for_imports()
        for each in waiting:
            for name in ("model", "shards"):
                show_manifest(options.folder / name, each.arm.endswith("-verified"))
            began = time.perf_counter()
            found[each.arm].append(run := each.run())
            print(f"turn {turn + 1}, {each.arm}: {_line(run)}; {time.perf_counter() - began:.1f} s in all", flush=True)
        yield found


def _line(run: Found) -> str:
    if "failed" in run:
        return str(run["failed"])
    return ", ".join(f"{seconds:.3f} s" for seconds in seconds_of(run)) + f" {run['ranks'][-1]['log'][-90:]}"


def seconds_of(run: Found) -> list[float]:
    return [one["end_s"] - one["start_s"] for one in run["ranks"]]


def last_of(run: Found) -> float:
    return float(max(one["end_s"] for one in run["ranks"]) - min(one["start_s"] for one in run["ranks"]))


def summary(found: dict[str, list[Found]]) -> dict[str, Found]:
    """Return the figures of each arm that ran, without the sums. equal: to the sums of the first arm, rank by rank."""
    good = {arm: [run for run in runs if "ranks" in run] for arm, runs in found.items()}
    expected = next(([one["sums"] for one in runs[0]["ranks"]] for runs in good.values() if runs), [])
    rows = {}
    for arm, runs in good.items():
        if runs:
            seconds = [seconds_of(run) for run in runs]
            n_bytes = [one["bytes"] for one in runs[0]["ranks"]]
            rows[arm] = {
                "rank_bytes_s": [n / median(each) for n, each in zip(n_bytes, zip(*seconds, strict=True), strict=True)],
                "last_s": sorted(map(last_of, runs)),
                "spread": median((max(each) - min(each)) / max(each) for each in seconds),
                "equal": all([one["sums"] for one in run["ranks"]] == expected for run in runs),
            }
    return rows


def without_sums(found: dict[str, list[Found]]) -> dict[str, list[Found]]:
    """Return the runs as they are written: the sums would be most of the file."""
    return {
        arm: [
            {key: [{k: v for k, v in one.items() if k != "sums"} for one in value] if key == "ranks" else value}
            for run in runs
            for key, value in run.items()
        ]
        for arm, runs in found.items()
    }


def rows_of(figures: dict[str, Found]) -> list[list[object]]:
    auto_s = median(figures["auto"]["last_s"]) if "auto" in figures else None
    return [
        [
            arm, f"{median(one['rank_bytes_s']) / 1e9:.1f}", f"{min(one['rank_bytes_s']) / 1e9:.1f}",
            f"{median(one['last_s']):.3f}", f"{one['last_s'][0]:.3f}-{one['last_s'][-1]:.3f}", f"{one['spread']:.1%}",
            "-" if auto_s is None else f"{auto_s / median(one['last_s']):.1f}", "equal" if one["equal"] else "DIFFER",
        ]
        for arm, one in figures.items()
    ]  # fmt: skip


def run_all(options: argparse.Namespace) -> int:
    options.logs.mkdir(parents=True, exist_ok=True)
    arms = options.arms.split(",")
    if options.tiny:
        arms = [arm for arm in arms if arm.partition("@")[0] not in PEERS]
    made = make_files(options, any("shards" in arm for arm in arms))
    for found in measure(options, arms):
        figures = summary(found)
        content = {"ranks": RANKS, "files": made, "figures": figures, "runs": without_sums(found)}
        report.write(options.out, QUESTION, content, "instanttensor", "fastsafetensors", "safetensors")
    report.table(COLUMNS, rows_of(figures))
    if not options.keep:
        shutil.rmtree(options.folder)
    failed = [arm for arm, runs in found.items() if any("failed" in run for run in runs)]
    print(f"failed: {', '.join(failed) or 'none'}")
    return int(not figures or not all(one["equal"] for one in figures.values()))


def main() -> int:
    made = parser("weights_two_ranks", __doc__)
    made.add_argument("--arms", default=",".join(ARMS), help="separated by commas")
    made.add_argument("--layers", type=int, default=80, help="of the checkpoint")
    made.add_argument("--wheels", type=Path, help="folder of wheels to import loaders from")
    made.add_argument("--keep", action="store_true", help="keep the files for the next run")
    made.add_argument("--logs", type=Path, default=Path("/tmp/bench/logs/two-ranks"))
    for name, kind in (("--rank", int), ("--go", Path)):
        made.add_argument(name, type=kind, help=argparse.SUPPRESS)
    options = made.parse_args()
    return child(options) if options.child else run_all(options)


if __name__ == "__main__":
    raise SystemExit(main())
