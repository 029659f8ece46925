"""The command `kvtier`."""

import io
import os
import sys
from collections.abc import Sequence

from kvtier._bootstrap import PREFIX
from kvtier.runtime.exit_status import INTERRUPTED, NOT_DONE, OK


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status. `arguments`: without the program's name; None: those of the process."""
    try:
        return _run(arguments)
    except KeyboardInterrupt:  # before a command began
        return INTERRUPTED


def _run(arguments: Sequence[str] | None) -> int:
    for name, mode in (("stdin", "r"), ("stderr", "w")):  # closed, as by `2>&-`: print would write to stdout instead
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    if sys.stdout is None:  # closed, as by `>&-`: the next file that is opened would get its number
        print(f"{PREFIX}standard output is closed: send it to a file, or to /dev/null", file=sys.stderr)
        return NOT_DONE
    # Not at the top: they take a second, in which an interruption is to end without a traceback too.
    import typer

    from kvtier.cli import (  # noqa: F401
        bench,
        calibrate,
        check,
        doctor,
        evict,
        index,
        lookup,
        pins,
        plan,
        quotas,
        serve,
        stats,
        verify,
        weights,
    )
    from kvtier.cli.app import app, drop_output

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what its encoding cannot take is escaped
            stream.reconfigure(errors="backslashreplace")
    # The class of all usage errors, which releases of typer have in different modules.
    usage_error: type[typer.BadParameter] = typer.BadParameter.mro()[1]
    try:
        status: int = typer.main.get_command(app).main(arguments, prog_name="kvtier", standalone_mode=False)
        return status
    except usage_error as error:
        command = error.ctx.command_path if error.ctx else "kvtier"
        print(f"{command}: {' '.join(error.format_message().split())} (see {command} --help)", file=sys.stderr)
        return NOT_DONE
    except OSError as error:  # of --version and --help, which end before a command begins
        drop_output()
        if not isinstance(error, BrokenPipeError):
            print(PREFIX + " ".join(str(error).split()), file=sys.stderr)
            return NOT_DONE
        return OK
