"""`kvtier weights plan` and `kvtier weights shard`: bytes that each rank of an engine loads; files with just those."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Annotated, Literal

import typer

from kvtier.cli.app import NotDone, weights
from kvtier.cli.place import JsonOption
from kvtier.cli.progress import byte_progress
from kvtier.cli.tables import counted, print_table
from kvtier.errors import ConfigError
from kvtier.runtime.exit_status import MEANINGS, OK, print_json
from kvtier.runtime.units import size

RANKS_MAX = 1024  # largest --tp; more is a slip

FolderArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of a Hugging Face model.")]
DtypeOption = Annotated[
    Literal["auto", "bfloat16", "float16", "float32"],
    typer.Option(help="As the engine's --dtype; auto is what the engine takes without one."),
]
TensorOption = Annotated[int, typer.Option("--tp", metavar="N", min=1, max=RANKS_MAX, help="Tensor-parallel size.")]


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
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to make, or to go on with after an interruption.")],
    tp: TensorOption = 1,
    dtype: DtypeOption = "auto",
) -> int:
    """Write safetensors files with just what each rank loads, from which kvtier and vLLM's sharded_state load.

    Needs vLLM, no GPU, and host memory for the larger of 1 GiB and a rank's largest tensor. The shards take as much
    room as the checkpoint, and more where ranks share tensors.
    """
    engine = _engine(folder)
    with byte_progress("sharding") as bar:

        def begin(total_bytes: int) -> Callable[[int], None]:
            done = [0]

            def advance(n_bytes: int) -> None:
                done[0] += n_bytes
                bar(done[0], total_bytes)

            return advance

        made = engine.shard(folder, tp, out, begin, dtype)
    total, ranks = size(sum(made.files.values())), counted(tp, "rank")
    command = f"vllm serve {shlex.quote(str(out))} -tp {tp} --load-format kvtier"
    print(f"{counted(len(made.files), 'shard')}, {total}, for {ranks} of vLLM {made.release}: {command}")
    return OK


def _engine(folder: Path) -> ModuleType:
    """Return the module that works with vLLM. Raises ConfigError, NotDone without vLLM."""
    if not (folder / "config.json").is_file():
        raise ConfigError("model", str(folder), "there is no config.json; name the folder of a Hugging Face model")
    try:
        from kvtier.connectors.vllm import weights_shard
    except ImportError as error:
        raise NotDone(f"vLLM makes the plans, and cannot be imported ({error}): install it beside kvtier") from None
    return weights_shard
