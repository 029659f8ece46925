"""`kvtier evict`: remove segment sets by size, age, namespace, tenant or prefix."""

import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from kvtier.admin import change
from kvtier.admin.answers import Evicted, KeptSets, SetRow
from kvtier.admin.opened import Opened
from kvtier.cli import prompts
from kvtier.cli.app import NotDone, app
from kvtier.cli.place import ConfigOption, JsonOption, PathArgument, deployment
from kvtier.cli.tables import print_table, when
from kvtier.eviction.choice import Selection
from kvtier.runtime.exit_status import MEANINGS, OK, print_json
from kvtier.runtime.units import counted, size
from kvtier.storage.filesystem import FreeSpace
from kvtier.storage.segments import KEPT_OPEN

ROWS_MAX = 20  # most sets that are listed
SHOW_TIMEOUT_S = 10.0  # longest wait for the space of evicted files to show, seconds
POLL_S = 0.2  # interval between two reads of the free space, seconds
DELETED = " (deleted)"  # ends the link of an open file without a name in /proc/PID/fd


@app.command("evict", epilog=MEANINGS)
def evict(
    ctx: typer.Context,
    path: PathArgument = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    n_bytes: Annotated[
        int | None,
        typer.Option(
            "--bytes",
            metavar="SIZE",
            parser=prompts.size_argument,
            help="No more sets than make up this size, the least recently used first.",
        ),
    ] = None,
    unused: Annotated[
        float | None,
        typer.Option(
            metavar="TIME",
            parser=prompts.duration_argument,
            help="Only sets without a use for this time, with its unit: 90s, 15m, 12h, 7d or 2w.",
        ),
    ] = None,
    namespace: prompts.NamespaceOption = None,
    tenant: Annotated[
        str | None, typer.Option(metavar="LABEL", help='Only sets of this tenant; "": those without a label.')
    ] = None,
    tokens: prompts.TokensOption = None,
    prompt: prompts.PromptOption = None,
    prompt_file: prompts.PromptFileOption = None,
    salt: prompts.SaltOption = "",
    everything: Annotated[
        bool, typer.Option("--all", help="All sets but the pinned ones; with --namespace, all of that namespace.")
    ] = False,
    include_pinned: Annotated[bool, typer.Option("--include-pinned", help="With --all: pinned sets as well.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be evicted.")] = False,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not ask; needed where there is no terminal to ask on.")
    ] = False,
) -> int:
    """Remove segment sets by size, age, namespace, tenant or prompt.

    A prompt selects the sets with chunks of it, which hold chunks of other prompts too, and needs --namespace. The exit
    status is 2 where an open set stays, or one that was not reached; pinned sets that stay change nothing.
    """
    given = prompts.PromptOptions(tokens, prompt, prompt_file, salt)
    by_prompt = given.is_given(ctx)
    if not everything and all(value is None for value in (n_bytes, unused, namespace, tenant)) and not by_prompt:
        raise NotDone("which sets? say --bytes, --unused, --namespace, --tenant or a prompt, or --all for everything")
    if include_pinned and not everything:
        raise NotDone(
            "--include-pinned goes with --all only: to evict fewer sets, remove their pins first (kvtier unpin)"
        )
    with deployment(path, config) as opened:
        namespace_id = None if namespace is None else prompts.namespace_of(namespace, opened)
        if by_prompt and namespace_id is None:
            raise NotDone("a prefix belongs to a namespace: add --namespace")
        set_ids = (
            opened.evictor.sets_of(prompts.keys_of(given, opened, namespace_id)) if by_prompt and namespace_id else None
        )
        selection = Selection(n_bytes, unused, namespace_id, tenant, set_ids)
        confirmed = None if dry_run else yes
        return _evict(opened, selection, include_pinned, confirmed, as_json)


def _evict(opened: Opened, selection: Selection, include_pinned: bool, confirmed: bool | None, as_json: bool) -> int:
    """Evict the selected sets. confirmed: None for a dry run, False where the terminal is to be asked first."""
    folder = opened.root.folder
    before_bytes = free_bytes(folder)
    planned = change.evict(opened, selection, dry_run=True, include_pinned=include_pinned)
    if confirmed is None:
        done = planned
    elif confirmed or (planned.n_sets and _is_meant(planned)):
        done = change.evict(opened, selection, dry_run=False, include_pinned=include_pinned)
    else:  # there is nothing to ask about
        done = planned.model_copy(update={"dry_run": False})
    freed_bytes = wait_until_free(folder, before_bytes, done.unlinked_bytes)
    holding = holders(folder) if freed_bytes < done.unlinked_bytes else []
    if as_json:
        print_json(done.model_dump(mode="json") | {"freed_bytes": freed_bytes, "held_by": holding})
    else:
        _print(done)
        if done.unlinked_bytes:
            print(_freed(done, freed_bytes, holding))
    asked_for = [kept for kept in done.kept if kept.why != "pinned"]
    if asked_for:
        raise NotDone("not all of it: " + "; ".join(_stays(kept) for kept in asked_for))
    return OK


def _freed(done: Evicted, freed_bytes: int, holding: Sequence[str]) -> str:
    if freed_bytes >= done.unlinked_bytes:
        return f"{size(freed_bytes)} became free on the disk"
    by = (
        f"processes of this node hold files open: {', '.join(holding)}"
        if holding
        else (
            "no process of this node that this user sees holds it: another node does, "
            "or the file system frees it later, or it was used again"
        )
    )
    return f"{size(freed_bytes)} of {size(done.unlinked_bytes)} became free on the disk so far; {by}"


def _is_meant(planned: Evicted) -> bool:
    """Return True if the user confirms on the terminal. Raises NotDone otherwise."""
    if not sys.stdin.isatty():
        raise NotDone("there is no terminal to ask on: look with --dry-run, then say --yes")
    found = f"{counted(planned.n_sets, 'segment set')}, {size(planned.n_bytes)}"
    print(f"{found}. Evict them? [y/N] ", end="", file=sys.stderr)
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    raise NotDone("nothing was evicted: it was not confirmed")


def _print(done: Evicted) -> None:
    if done.sets:
        titles = ("set", "namespace", "tenant", "size", "uses", "last used")
        print_table([titles, *(_row(found) for found in done.sets[:ROWS_MAX])], right=(3, 4))
    if done.n_sets > ROWS_MAX:
        print(f"... and {done.n_sets - ROWS_MAX:,} more")
    would = "would be evicted" if done.dry_run else "evicted"
    print(f"{counted(done.n_sets, 'segment set')} {would}, {size(done.n_bytes)}")
    for kept in done.kept:
        if kept.why == "pinned":
            print(_stays(kept))


def _stays(kept: KeptSets) -> str:
    """Say which sets stay, why, and what to do."""
    stays = f"{counted(kept.n_sets, 'segment set')} stay{'s' if kept.n_sets == 1 else ''}, {size(kept.n_bytes)}: "
    if kept.why == "pinned":
        return f"{stays}pinned (kvtier pin lists the pins; with --all, --include-pinned evicts these, too)"
    if kept.why == "not reached":
        return f"{stays}another evictor took over; ask again for the rest"
    who = ", ".join(kept.owners)
    return f"{stays}open, for a running engine fills them ({who}); ask again once it has filled them or has ended"


def _row(found: SetRow) -> tuple[str, ...]:
    tenant = found.tenant or "-"
    return found.set_id, found.namespace[:12], tenant, size(found.n_bytes), f"{found.uses:,}", when(found.used_s)


# --- freed space, and processes of this node that keep some of it ---


def free_bytes(folder: Path) -> int:
    return FreeSpace.of(os.statvfs(folder)).n_bytes


def wait_until_free(folder: Path, before_bytes: int, n_bytes: int) -> int:
    """Return how much of `n_bytes` became free since the disk of `folder` had `before_bytes`. Waits at most
    SHOW_TIMEOUT_S: engines close the files of evicted sets within seconds, and some file systems free late."""
    ends_s = time.monotonic() + SHOW_TIMEOUT_S
    while True:
        freed_bytes = min(n_bytes, max(0, free_bytes(folder) - before_bytes))
        if freed_bytes >= n_bytes or time.monotonic() >= ends_s:
            return freed_bytes
        time.sleep(POLL_S)


def holders(folder: Path) -> list[str]:
    """Return "name (pid N)" of each process of this node, readable by this user, that has an unlinked file of `folder`
    open."""
    below = f"{folder.resolve()}/"
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            links = [link for entry in os.scandir(process / "fd") if (link := _link(entry.path)).startswith(below)]
            if any(link.endswith(DELETED) or KEPT_OPEN.fullmatch(os.path.basename(link)) for link in links):
                found.append(f"{(process / 'comm').read_text().strip()} (pid {process.name})")
    return sorted(found)


def _link(path: str) -> str:
    """Return the target of a link, "" for a descriptor closed just now."""
    try:
        return os.readlink(path)
    except OSError:
        return ""
