"""Tree of kvtier's commands: each module of this folder adds its own."""

import errno
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvtier._bootstrap import PREFIX
from kvtier.errors import IndexUnavailable, KVTierError, TierUnavailable
from kvtier.runtime.exit_status import INTERRUPTED, MEANINGS, NOT_DONE, OK
from kvtier.runtime.versions import commit, installed
from kvtier.storage.filesystem import FULL
from kvtier.storage.root import squash_hint

NEXT_STEPS = """
Next steps:

  kvtier doctor /nvme/kv                        is this machine fit: GPU, storage, memory, rates
  kvtier plan --model DIR --gpu-memory 80GB     what KV of a model takes, what fits, what a reload costs
  kvtier check kvtier.yaml                      would an engine start with these settings
  KVTIER_ROOT=/nvme/kv vllm serve MODEL         serve with a tier
  kvtier stats /nvme/kv                         what is stored there

kvtier --help lists all commands, kvtier COMMAND --help their options."""


class NotDone(KVTierError):
    """A command cannot do what it was asked."""


class Commands(TyperGroup):
    """A group that turns what a command returns or raises into the exit status of the process."""

    def invoke(self, ctx: Any) -> Any:
        raise typer.Exit(self._status(ctx))

    def _status(self, ctx: Any) -> int:
        try:
            status: int = super().invoke(ctx)
            sys.stdout.flush()
            return status
        except KeyboardInterrupt:
            return INTERRUPTED
        except BrokenPipeError:  # its reader has seen enough, as `head` does
            drop_output()
            return OK
        except (KVTierError, OSError) as error:
            text = f"{_said(error)}{_fix(error)}".removeprefix(PREFIX)
            print(" ".join(f"{PREFIX}{text}".split()), file=sys.stderr)
            try:
                sys.stdout.flush()
            except OSError:  # standard output is full; else the interpreter would report that again at its end
                drop_output()
            return NOT_DONE


def _said(error: Exception) -> str:
    if not isinstance(error, OSError):
        return str(error)
    return f"{'' if error.filename is None else f'{error.filename}: '}{error.strerror or error}"


def _fix(error: Exception) -> str:
    """Return what to do about an error whose text does not say it; "" where nothing is known."""
    if isinstance(error, IndexUnavailable):
        return f"; {error.fix}" if error.fix else ""
    fault = error.__cause__ if isinstance(error, TierUnavailable) else error
    if not isinstance(fault, OSError) or fault.filename is None:
        return ""
    if fault.errno == errno.EROFS:
        return "; mount it for writing"
    return "; make room there (df and df -i show it)" if fault.errno in FULL else squash_hint(fault)


# Without rich's panels: they break messages into lines of the terminal's width, and cost a tenth of a second to import.
app = typer.Typer(cls=Commands, add_completion=False, rich_markup_mode=None, epilog=MEANINGS)
index = typer.Typer(rich_markup_mode=None, epilog=MEANINGS, help="Work on the index.")
app.add_typer(index, name="index")
weights = typer.Typer(rich_markup_mode=None, epilog=MEANINGS, help="Work on the weights of a model.")
app.add_typer(weights, name="weights")


def refuse_together(ctx: typer.Context, given: dict[str, object]) -> None:
    """Refuse options that exclude each other. given: the value of each by its name."""
    names = [name for name, value in given.items() if value is not None and value is not False]
    if len(names) > 1:
        raise typer.BadParameter(f"{names[1]} does not go with {names[0]}", ctx)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print("kvtier", installed("kvtier", "of a checkout"), f"({commit() or 'unknown commit'})", flush=True)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _start(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print release and git commit.")
    ] = False,
) -> int:
    """Look after the root folder of a KV cache tier.

    PATH is a root, or the settings file of a deployment. Without it, the settings file is the one of --config or
    KVTIER_CONFIG, and the root is the one of the settings.
    """
    if ctx.invoked_subcommand is None:
        print(f"{ctx.get_usage()}\n{NEXT_STEPS}", file=sys.stderr)
    return NOT_DONE


def drop_output() -> None:
    """Send what is left of the standard output nowhere: it cannot be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
