"""`kvtier weights`: bytes that each rank of an engine loads (`plan`), files with just those (`shard`), checksums of
weight files (`verify`), and the rate at which they load (`bench`)."""

import shlex
import time
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryFile
from types import ModuleType
from typing import Annotated, Literal

import typer

from kvtier.cli.app import NotDone, weights
from kvtier.cli.place import JsonOption, path_argument, refuse_missing_model
from kvtier.cli.progress import progress
from kvtier.cli.tables import percent, print_table
from kvtier.cli.tables import seconds as duration
from kvtier.runtime.exit_status import FOUND_BAD, MEANINGS, OK, print_json
from kvtier.runtime.units import counted, rate, size

RANKS_MAX = 1024  # largest --tp; a larger one is a typing error

FolderArgument = Annotated[
    Path,
    typer.Argument(metavar="FOLDER", parser=path_argument, help="Folder of a model with safetensors files."),
]
DtypeOption = Annotated[
    Literal["auto", "bfloat16", "float16", "float32"],
    typer.Option(help="The engine's --dtype; auto: the dtype that the engine chooses without that option."),
]
TensorOption = Annotated[int, typer.Option("--tp", metavar="N", min=1, max=RANKS_MAX, help="Tensor-parallel size.")]


@weights.command("verify", epilog=MEANINGS)
def verify_weights(
    folder: FolderArgument,
    write: Annotated[bool, typer.Option("--write", help="Make the manifest of the files as they are now.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Read all files of a model and compare their checksums with the manifest beside them.

    Loads by kvtier compare what they read with the manifest, if there is one.
    """
    from kvtier.model.safetensors import read_header
    from kvtier.weights import manifest
    from kvtier.weights.reader import WeightReader
    from kvtier.weights.verify import WeightFinding, verify, weight_files

    started_s = time.perf_counter()
    findings: list[WeightFinding] = []
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors") if path.is_file())
    with progress("reading") as show:
        if write:
            files = weight_files(folder)
            try:
                with TemporaryFile(dir=folder):  # a manifest that cannot be made is found before all is read
                    pass
            except OSError as error:
                fix = "run this as a user who may, on a machine that has it mounted for writing, with room on its disk"
                what = f"cannot be written to ({error.strerror}), and the manifest must stand there, beside the files"
                raise NotDone(f"{folder} {what}: {fix}") from None
            for path in files:  # a manifest of a broken file would declare it good
                read_header(path)
            with WeightReader(progress=lambda landed: show(landed, total)) as reader:
                manifest.write(folder, files, reader)
            n_bytes = sum(path.stat().st_size for path in files)
        else:
            findings, n_bytes = verify(folder, lambda done: show(done, total))
    took_s = time.perf_counter() - started_s
    if as_json:
        print_json({"folder": str(folder), "bytes": n_bytes, "bad": [asdict(finding) for finding in findings]})
    else:
        for finding in findings:
            print(f"BAD {finding.file}{f' at byte {finding.offset}' if finding.offset else ''}: {finding.what}")
        done = f"{folder}: {size(n_bytes)} read in {duration(took_s)} ({rate(n_bytes / max(took_s, 1e-9))})"
        print(f"{done}; manifest written" if write else f"{done}; {len(findings)} bad")
    return FOUND_BAD if findings else OK


@weights.command("bench", epilog=MEANINGS)
def bench_weights(
    folder: FolderArgument,
    device: Annotated[str, typer.Option(help="Where the bytes go, as in torch: cpu or cuda:N.")] = "cpu",
    as_json: JsonOption = False,
) -> int:
    """Read all tensors of a model to a device, and compare the rate with the ceilings of this minute.

    Needs no memory for the whole model: later tensors replace earlier ones.
    """
    from kvtier.weights.bench import measure  # torch, which takes seconds to import

    with progress("reading") as show:
        found = measure(folder, device, show)
    if as_json:
        print_json({"folder": str(folder), "device": device, **asdict(found), "share": found.share})
        return OK
    rows = [(str(folder), "rate", "of the ceiling")]
    rows += [("loading" + what, rate(value), percent(value / found.ceiling)) for what, value in found.rates()]
    rows += [(f"ceiling: {what}", rate(value), "") for what, value in found.ceilings()]
    print_table(rows, right=(1, 2))
    how = f"{found.direct_files} of {counted(found.files, 'file')} read past the page cache"
    print(f"{size(found.n_bytes)} to {device}, median of {found.rounds}; {how}")
    return OK


@weights.command("plan", epilog=MEANINGS)
def plan(folder: FolderArgument, tp: TensorOption = 1, dtype: DtypeOption = "auto", as_json: JsonOption = False) -> int:
    """Show what --load-format kvtier reads for each rank. Needs vLLM and no GPU."""
    found = [asdict(rank) for rank in _engine(folder).plans(folder, tp, dtype)]
    if as_json:
        print_json(found)
        return OK
    sizes = ("landed_bytes", "read_bytes", "materialized_bytes")
    rows = [[size(rank[name]) if name in sizes else str(rank[name]) for name in found[0]] for rank in found]
    print_table(
        [["rank", "copies", "into parameters", "from files", "converted", "read while planned"], *rows], range(6)
    )
    return OK


@weights.command("shard", epilog=MEANINGS)
def shard(
    folder: FolderArgument,
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR", parser=path_argument, help="Folder to make, or to go on with after an interruption."
        ),
    ],
    tp: TensorOption = 1,
    dtype: DtypeOption = "auto",
) -> int:
    """Write safetensors files with just what each rank loads, from which kvtier and vLLM's sharded_state load.

    Needs vLLM, no GPU, and host memory for the larger of 1 GiB and a rank's largest tensor. The shards take as much
    room as the checkpoint, and more where ranks share tensors.
    """
    engine = _engine(folder)
    with progress("sharding") as show:
        made = engine.shard(folder, tp, out, show, dtype)
    total, ranks = size(sum(made.files.values())), counted(tp, "rank")
    command = f"vllm serve {shlex.quote(str(out))} -tp {tp} --load-format kvtier"
    print(f"{counted(len(made.files), 'shard')}, {total}, for {ranks} of vLLM {made.release}: {command}")
    return OK


def _engine(folder: Path) -> ModuleType:
    """Return the module that plans with vLLM. Raises ConfigError without config.json, NotDone without vLLM."""
    refuse_missing_model(folder)
    try:
        from kvtier.connectors.vllm import weights_shard
    except ImportError as error:
        raise NotDone(f"vLLM makes the plans, and cannot be imported ({error}): install it beside kvtier") from None
    return weights_shard
