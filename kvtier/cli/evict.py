"""`kvtier evict`: removes segment sets by size, age, namespace, tenant or prefix."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kvtier.admin.answers import Evicted, KeptSets, SetRow
from kvtier.admin.change import evict
from kvtier.admin.opened import Opened
from kvtier.cli.freed import free_bytes, holders, wait_until_free
from kvtier.cli.place import NotDone, add_place, deployment
from kvtier.cli.prompts import (
    add_namespace,
    add_prompt,
    duration_argument,
    has_prompt,
    namespace_of,
    prefix_keys,
    size_argument,
)
from kvtier.cli.tables import counted, print_table, when
from kvtier.eviction.choice import Selection
from kvtier.runtime.exit_status import OK, print_json
from kvtier.runtime.units import size

ROWS_MAX = 20


def add_options(parser: argparse.ArgumentParser) -> None:
    add_place(parser)
    text = "no more than make up so much, the least valuable first"
    parser.add_argument("--bytes", metavar="SIZE", type=size_argument, help=text)
    text = "only what was not used for so long, with its unit: 90s, 15m, 12h, 7d or 2w"
    parser.add_argument("--unused", metavar="TIME", type=duration_argument, help=text)
    add_namespace(parser)
    text = 'only of the tenant with this label; "": of everybody without one'
    parser.add_argument("--tenant", metavar="LABEL", help=text)
    add_prompt(parser, "only sets with chunks of it (with other prompts' chunks in them); needs --namespace")
    parser.add_argument(
        "--all", action="store_true", help="everything but what is pinned, or with --namespace all of it"
    )
    parser.add_argument("--include-pinned", action="store_true", help="with --all: what pins protect as well")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be evicted")
    parser.add_argument("--yes", action="store_true", help="do not ask; needed where there is no terminal to ask on")


def run_evict(options: argparse.Namespace) -> int:
    """Evicts. Status 2 where an open set stays, or one that was not reached; that pins keep theirs is as asked for."""
    chosen = (options.bytes, options.unused, options.namespace, options.tenant)
    by_prompt = has_prompt(options)
    if not options.all and all(value is None for value in chosen) and not by_prompt:
        raise NotDone("which sets? say --bytes, --unused, --namespace, --tenant or a prompt, or --all for everything")
    if options.include_pinned and not options.all:
        raise NotDone("--include-pinned goes with --all only: remove the pins of what is to go (kvtier unpin)")
    with deployment(options) as opened:
        selection, folder = _selection(options, opened), opened.root.folder
        before_bytes = free_bytes(folder)
        planned = evict(opened, selection, dry_run=True, include_pinned=options.include_pinned)
        if options.dry_run:
            done = planned
        elif options.yes or (planned.n_sets and _is_meant(planned)):
            done = evict(opened, selection, dry_run=False, include_pinned=options.include_pinned)
        else:  # there is nothing to ask about
            done = planned.model_copy(update={"dry_run": False})
        freed_bytes = wait_until_free(folder, before_bytes, done.unlinked_bytes)
        holding = holders(folder) if freed_bytes < done.unlinked_bytes else []
    if options.json:
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
    by = f"processes of this node hold files open: {', '.join(holding)}" if holding else (
        "no process of this node that this user sees holds it: another node does, or the file system frees it later, "
        "or it was used again"
    )  # fmt: skip
    return f"{size(freed_bytes)} of {size(done.unlinked_bytes)} became free on the disk so far; {by}"


def _selection(options: argparse.Namespace, opened: Opened) -> Selection:
    namespace = namespace_of(options, opened)
    set_ids = None
    if has_prompt(options):
        if namespace is None:
            raise NotDone("a prefix is one of a namespace: add --namespace")
        set_ids = opened.evictor.sets_of(prefix_keys(options, opened, namespace))
    return Selection(options.bytes, options.unused, namespace, options.tenant, set_ids)


def _is_meant(planned: Evicted) -> bool:
    """True where a person on the terminal says so. Raises NotDone."""
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
    """Says what stays, why, and what to do."""
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
