"""`kvtier verify`: read every record, and check every checksum and signature."""

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict

from kvtier.cli.app import app
from kvtier.cli.place import ConfigOption, JsonOption, PathArgument, deployment, find_place
from kvtier.cli.progress import progress
from kvtier.cli.root import readable_index
from kvtier.cli.tables import seconds as duration
from kvtier.format.signing import Signer
from kvtier.index.base import Index
from kvtier.maintenance.scrub import VerifyReport
from kvtier.maintenance.scrub import verify as read_all
from kvtier.runtime.exit_status import FOUND_BAD, MEANINGS, OK, print_json
from kvtier.runtime.units import counted, rate, size
from kvtier.storage.root import Root


@app.command("verify", epilog=MEANINGS)
def verify(path: PathArgument = None, config: ConfigOption = None, as_json: JsonOption = False) -> int:
    """Read every record and check every checksum. Signatures are checked where the settings have their secret."""
    place = find_place(path, config)
    signer = place.settings.signing.signer()
    if place.settings.index.kind != "redis":  # an index in Redis says what should be on disk
        return _verify(place.root, as_json, signer, readable_index(place.root, place.settings.index))
    with deployment(path, config, reads=True) as opened:
        return _verify(place.root, as_json, signer, nullcontext(opened.index))


def _verify(root: Root, as_json: bool, signer: Signer | None, index: AbstractContextManager[Index]) -> int:
    """Verify a root and print the findings. signer: holds the secret of signed records; without it signatures are not
    checked."""
    started = time.monotonic()
    with index as found, progress("verifying", "segments") as show:
        report = read_all(root, found, show, signer)
    if as_json:
        print_json({"root": str(root.path), **asdict(report), "bad": [finding._asdict() for finding in report.bad]})
    else:
        _print(root, report, time.monotonic() - started)
    return FOUND_BAD if report.bad else OK


def _print(root: Root, report: VerifyReport, seconds: float) -> None:
    for finding in report.bad:
        place = f"{finding.namespace}/{finding.segment}" + ("" if finding.slot is None else f" slot {finding.slot}")
        print(f"BAD {place}: {finding.what}")
    took = f"read in {duration(seconds)}"
    if report.n_bytes:
        took += f" ({rate(report.n_bytes / max(seconds, 1e-9))})"
    print(
        f"{root.path}: {counted(report.records, 'record')} ({size(report.n_bytes)}) in "
        f"{counted(report.segments, 'segment')} {took}; {len(report.bad)} bad, "
        f"{report.unfinished} never finished"
    )
    if report.unproved:
        records = counted(report.unproved, "record")
        print(f"The signatures of {records} were not checked: name the settings with their secret.")
    if report.bad:
        print(
            "Bad records are misses at their next use: nothing has to be done. kvtier index rebuild removes those "
            "without a file from the index."
        )
