"""`kvtier weights verify` and `bench`: checksums of weight files, and the rate at which they load."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.app import NotDone, weights
from kvtier.cli.place import JsonOption
from kvtier.cli.progress import byte_progress
from kvtier.cli.tables import counted, percent, print_table
from kvtier.cli.tables import seconds as duration
from kvtier.runtime.exit_status import FOUND_BAD, MEANINGS, OK, print_json
from kvtier.runtime.units import rate, size

FolderArgument = Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder with a model's safetensors files.")]


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
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    with byte_progress("reading") as show:
        if write:
            files = weight_files(folder)
            if not os.access(folder, os.W_OK):
                raise NotDone(f"{folder} cannot be written to, and the manifest must stand there, beside the files")
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
            print(f"BAD {finding.file}: {finding.what}")
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

    with byte_progress("reading") as show:
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
