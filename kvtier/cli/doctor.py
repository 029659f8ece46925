"""`kvtier doctor [PATH]`: print one verdict a line, as each probe answers."""

from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.app import app
from kvtier.cli.place import JsonOption, PathArgument, path_argument, refuse_missing_file
from kvtier.doctor.report import examine, line
from kvtier.runtime.exit_status import FOUND_BAD, MEANINGS, OK, print_json


@app.command("doctor", epilog=MEANINGS)
def doctor(
    path: PathArgument = None,
    as_json: JsonOption = False,
    peer: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            parser=path_argument,
            help="Another mount of the same file system: measure when it reads what is written through the root's.",
        ),
    ] = None,
) -> int:
    """Tell whether this machine is fit, and what to do about it. Looks at GPU, storage, Lustre and rates."""
    refuse_missing_file(path)
    found = []
    for verdict in examine(path, peer=peer):
        found.append(verdict)
        if not as_json:
            print(line(verdict), flush=True)
    if as_json:
        print_json([verdict._asdict() for verdict in found])
    return FOUND_BAD if any(verdict.level == "bad" for verdict in found) else OK
