"""The command line: looking at a root, checking every byte of it, making its index anew; settings; machine; models.

    kvtier stats [PATH]          what lies in the root; of a deployment also how its engines fare
    kvtier lookup [PATH] --tokens FILE     how much of a prompt is stored, and where (status 1: nothing)
    kvtier verify [PATH]         reads every record and checks every checksum
    kvtier evict [PATH] ...      removes segment sets by size, age, namespace, tenant or prefix; --dry-run: says which
    kvtier pin [PATH] ...        lists pins, or keeps a namespace or a prefix from being evicted
    kvtier unpin PIN [PATH]      what it kept may be evicted again
    kvtier quota [PATH] ...      lists and changes what tenants and namespaces may take
    kvtier bench [PATH]          measures the root's storage and index, each beside its ceiling
    kvtier index rebuild [PATH]  makes the index agree with the segment files
    kvtier index check [PATH]    whether every entry of the index has its record in a file, and the other way round
    kvtier check CONFIG.yaml     whether an engine would start with these settings, and what it would use
    kvtier doctor [PATH]         whether this machine is fit: GPU, storage, Lustre, rates; what to do about it
                                 (PATH may be CONFIG.yaml, too)
    kvtier plan --model DIR --gpu-memory SIZE    what KV of a model takes, what fits, what a reload costs
    kvtier serve [CONFIG.yaml]   the admin service: REST, metrics for Prometheus, the dashboard

PATH is the configured `root`, or with [PATH] a settings file, too: then, or with --config FILE or KVTIER_CONFIG, the
command works on the deployment that it describes, whatever its index. `--json` prints for programs. What the exit
status means stands in `kvtier.runtime.exit_status`, and `kvtier --help` prints it.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from kvtier.cli import bench, evict, lookup, pins, quotas, stats, verify
from kvtier.cli import index as on_index
from kvtier.cli.check import Asked, run_check
from kvtier.cli.doctor import run_doctor
from kvtier.cli.place import path_argument
from kvtier.cli.plan import add_options, run_plan
from kvtier.config.settings import Settings
from kvtier.errors import ConfigError, KVTierError
from kvtier.runtime.exit_status import INTERRUPTED, MEANINGS, NOT_DONE, OK
from kvtier.runtime.versions import commit, installed


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status. `arguments`: without the program's name; None: those of the process."""
    if sys.stdout is None:  # closed, as by `>&-`: the next file that is opened would get its number
        print("standard output is closed: send it to a file, or to /dev/null", file=sys.stderr)
        return NOT_DONE
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what its encoding cannot take is escaped
            stream.reconfigure(errors="backslashreplace")
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # its reader has seen enough, as `head` does
        _drop_output()
        return OK
    except (KVTierError, OSError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:  # it is full; the interpreter would say so once more as it ends
            _drop_output()
        return NOT_DONE


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _PrintVersion(argparse.Action):
    """Prints when it is asked for: argparse's own action would run git with every command."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print("kvtier", installed("kvtier", "of a checkout"), f"({commit() or 'unknown commit'})")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    about = "Looks after the folder of a KV cache tier."
    parser = argparse.ArgumentParser(prog="kvtier", description=about, epilog=MEANINGS)
    parser.add_argument("--version", nargs=0, action=_PrintVersion, help="print release and git commit, and exit")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    index = commands.add_parser("index", help="work on the index").add_subparsers(required=True, metavar="COMMAND")
    for name, description, add, act in (
        ("stats", "what lies in a root; of a deployment also how its engines fare", stats.add_options, stats.run_stats),
        ("lookup", "how much of a prompt is stored, and where", lookup.add_options, lookup.run_lookup),
        ("verify", "read every record and check every checksum", verify.add_options, verify.run_verify),
        ("evict", "remove segment sets", evict.add_options, evict.run_evict),
        ("pin", "list pins, or keep a namespace or a prefix from being evicted", pins.add_pin_options, pins.run_pin),
        ("unpin", "what a pin kept may be evicted again", pins.add_unpin_options, pins.run_unpin),
        ("quota", "what tenants and namespaces may take", quotas.add_options, quotas.run_quota),
        ("bench", "measure storage and index of a root, beside their ceilings", bench.add_options, bench.run_bench),
    ):
        add(_add_command(commands, name, description, act))
    for name, description, act in (
        ("rebuild", "make the index agree with the segment files", on_index.run_rebuild),
        ("check", "whether index and segment files agree", on_index.run_check_index),
    ):
        on_index.add_options(_add_command(index, name, description, act))
    _add_check(commands)
    _add_doctor(commands)
    add_options(_add_command(commands, "plan", "what KV of a model takes, what fits, what a reload costs", run_plan))
    about = "the admin service: REST, metrics for Prometheus, the dashboard at /ui"
    serve = commands.add_parser("serve", help=about, description=about, epilog=MEANINGS)
    serve.set_defaults(run=_serve)
    text = "the settings file; left out: the one that KVTIER_CONFIG names"
    serve.add_argument("path", metavar="CONFIG.yaml", type=path_argument, nargs="?", help=text)
    return parser


def _add_command(
    commands: Any, name: str, description: str, run: Callable[[argparse.Namespace], int]
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=description, description=description)
    parser.add_argument("--json", action="store_true", help="print for programs")
    parser.epilog = MEANINGS
    parser.set_defaults(run=run)
    return parser


def _add_check(commands: Any) -> None:
    def run(options: argparse.Namespace) -> int:
        if options.path is None and options.kv_transfer_config is None:
            check.error("name the settings file, or give --kv-transfer-config")
        return run_check(Asked(options.path, options.model, options.kv_transfer_config), options.json, options.all)

    check = _add_command(commands, "check", "whether an engine would start with a settings file", run)
    text = "the settings file; left out: the one that --kv-transfer-config names"
    check.add_argument("path", metavar="CONFIG.yaml", type=path_argument, nargs="?", help=text)
    text = "folder of a Hugging Face model: is it served, and do its chunks fit"
    check.add_argument("--model", metavar="DIR", type=path_argument, help=text)
    text = "what vLLM is given: also whether its kv_role and kv_load_failure_policy will do"
    check.add_argument("--kv-transfer-config", metavar="JSON", help=text)
    text = "print every setting; otherwise those that are set, and what tells most"
    check.add_argument("--all", action="store_true", help=text)


def _add_doctor(commands: Any) -> None:
    def run(options: argparse.Namespace) -> int:
        return run_doctor(options.path, options.json, options.peer)

    doctor = _add_command(commands, "doctor", "whether this machine is fit, and what to do about it", run)
    text = "the root, or a settings file; left out: the configured root"
    doctor.add_argument("path", metavar="PATH", type=path_argument, nargs="?", help=text)
    text = "another mount of the same file system: measures when it reads what is written through the root's"
    doctor.add_argument("--peer", metavar="PATH", type=path_argument, help=text)


def _serve(options: argparse.Namespace) -> int:
    """Its packages are an extra: who only looks at a root needs none of them."""
    if options.path is not None and options.path.is_dir():
        fix = f"is a folder: name a settings file with `root: {options.path}` and the engines' capacity_bytes"
        raise ConfigError("config", str(options.path), fix)
    settings = Settings.load({} if options.path is None else {"config": str(options.path)})
    try:
        from kvtier.server.serve import run_serve
    except ModuleNotFoundError as missing:
        fix = f"the package {missing.name} is not installed: pip install './kvtier[server]' beside its checkout"
        raise ConfigError("serve", str(options.path or ""), fix) from None
    return run_serve(settings)
