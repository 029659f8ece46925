"""The command line: looking at a root, checking every byte of it, making its index anew; settings; machine; models.

    kvtier stats PATH            what lies in the root
    kvtier verify PATH           reads every record and checks every checksum
    kvtier index rebuild PATH    makes the index agree with the segment files
    kvtier check CONFIG.yaml     whether an engine would start with these settings, and what it would use
    kvtier doctor [PATH]         whether this machine is fit: GPU, storage, Lustre, rates; what to do about it
                                 (PATH may be CONFIG.yaml, too)
    kvtier plan --model DIR --gpu-memory SIZE    what KV of a model takes, what fits, what a reload costs

PATH is the configured `root`. `--json` prints for programs. Exit status: 0 all is well, 1 something bad was found,
2 it could not be done (one line on standard error says why).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvtier.commands.check import run_check
from kvtier.commands.doctor import run_doctor
from kvtier.commands.plan import add_options, run_plan
from kvtier.commands.root import run_rebuild, run_stats, run_verify
from kvtier.commands.status import INTERRUPTED, NOT_DONE, OK
from kvtier.errors import KVTierError
from kvtier.root import Root, find_root


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status. `arguments`: without the program's name; None: those of the process."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # its reader has seen enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (KVTierError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return NOT_DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvtier", description="Looks after the folder of a KV cache tier.")
    parser.add_argument("--version", action="version", version=f"kvtier {_version()}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    index = commands.add_parser("index", help="work on the index").add_subparsers(required=True, metavar="COMMAND")
    for place, name, description, run in (
        (commands, "stats", "what lies in the root", run_stats),
        (commands, "verify", "read every record and check every checksum", run_verify),
        (index, "rebuild", "make the index agree with the segment files", run_rebuild),
    ):
        command = _add_command(place, name, description, _on_path(_on_root(run)))
        command.add_argument("path", metavar="PATH", type=_path, help="the configured root")
    check = _add_command(commands, "check", "whether an engine would start with a settings file", _on_path(run_check))
    check.add_argument("path", metavar="CONFIG.yaml", type=_path, help="the settings file")
    doctor = _add_command(
        commands, "doctor", "whether this machine is fit, and what to do about it", _on_path(run_doctor)
    )
    doctor.add_argument(
        "path",
        metavar="PATH",
        type=_path,
        nargs="?",
        help="the root, or a settings file; left out: the configured root",
    )
    add_options(_add_command(commands, "plan", "what KV of a model takes, what fits, what a reload costs", run_plan))
    return parser


def _add_command(
    commands: Any, name: str, description: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=description, description=description)
    parser.add_argument("--json", action="store_true", help="print for programs")
    parser.set_defaults(run=run)
    return parser


def _on_path(run: Callable[..., int]) -> Callable[[argparse.Namespace], int]:
    return lambda options: run(options.path, options.json)


def _on_root(run: Callable[[Root, bool], int]) -> Callable[[Path, bool], int]:
    return lambda path, as_json: run(find_root(path), as_json)


def _path(text: str) -> Path:
    if not text.strip():  # Path("") is the current folder
        raise argparse.ArgumentTypeError("it is empty; is a variable of your shell not set?")
    return Path(text)


def _version() -> str:
    try:
        return version("kvtier")
    except PackageNotFoundError:  # a checkout that was never installed
        return "of a checkout"


if __name__ == "__main__":
    sys.exit(main())
