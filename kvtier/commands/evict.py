"""`kvtier evict`: removes segment sets by size, age, namespace, tenant or prefix."""

from __future__ import annotations

import argparse
import sys

from kvtier.admin.answers import Evicted, SetRow
from kvtier.admin.change import evict
from kvtier.admin.opened import Opened
from kvtier.commands.place import NotDone, add_place, deployment
from kvtier.commands.prompts import (
    add_namespace,
    add_prompt,
    duration_argument,
    has_prompt,
    namespace_of,
    prefix_keys,
    size_argument,
)
from kvtier.commands.status import OK, print_json
from kvtier.commands.tables import counted, print_table, when
from kvtier.eviction.choice import Selection
from kvtier.sizes import size

ROWS_MAX = 20


def add_options(parser: argparse.ArgumentParser) -> None:
    add_place(parser)
    text = "no more than make up so much, the least valuable first"
    parser.add_argument("--bytes", metavar="SIZE", type=size_argument, help=text)
    text = "only what was not used for so long, such as 12h or 7d"
    parser.add_argument("--unused", metavar="TIME", type=duration_argument, help=text)
    add_namespace(parser)
    text = 'only of the tenant with this label; "": of everybody without one'
    parser.add_argument("--tenant", metavar="LABEL", help=text)
    add_prompt(parser, "only sets in which chunks of it lie (others' chunks in them go too); needs --namespace")
    parser.add_argument("--all", action="store_true", help="everything, or with --namespace all of it")
    parser.add_argument("--include-pinned", action="store_true", help="with --all: what pins protect as well")
    parser.add_argument("--dry-run", action="store_true", help="only say what would go")
    parser.add_argument("--yes", action="store_true", help="do not ask; needed where there is no terminal to ask on")


def run_evict(options: argparse.Namespace) -> int:
    """Status 2 when not all of it could go."""
    chosen = (options.bytes, options.unused, options.namespace, options.tenant)
    if not options.all and all(value is None for value in chosen) and not has_prompt(options):
        raise NotDone("which sets? say --bytes, --unused, --namespace, --tenant or a prompt, or --all for everything")
    if options.include_pinned and not options.all:
        raise NotDone("--include-pinned goes with --all only: remove the pins of what is to go (kvtier unpin)")
    with deployment(options) as opened:
        selection = _selection(options, opened)
        planned = evict(opened, selection, dry_run=True, include_pinned=options.include_pinned)
        if options.dry_run or not planned.n_sets or not _is_meant(options, planned):
            done = planned
        else:
            done = evict(opened, selection, dry_run=False, include_pinned=options.include_pinned)
    if options.json:
        print_json(done.model_dump(mode="json"))
    else:
        _print(done)
    if not done.is_complete:
        raise NotDone("not all of it: another evictor took over, or the time was up; ask again for the rest")
    return OK


def _selection(options: argparse.Namespace, opened: Opened) -> Selection:
    namespace = namespace_of(options, opened)
    set_ids = None
    if has_prompt(options):
        if namespace is None:
            raise NotDone("a prefix is one of a namespace: add --namespace")
        set_ids = opened.evictor.sets_of(prefix_keys(options, opened, namespace))
    return Selection(options.bytes, options.unused, namespace, options.tenant, set_ids)


def _is_meant(options: argparse.Namespace, planned: Evicted) -> bool:
    if options.yes:
        return True
    if not sys.stdin.isatty():
        raise NotDone("there is no terminal to ask on: look with --dry-run, then say --yes")
    found = f"{counted(planned.n_sets, 'segment set')}, {size(planned.n_bytes)}"
    print(f"{found}. Evict them? [y/N] ", end="", file=sys.stderr)
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _print(done: Evicted) -> None:
    if done.sets:
        titles = ("set", "namespace", "tenant", "size", "uses", "last used")
        print_table([titles, *(_row(found) for found in done.sets[:ROWS_MAX])], right=(3, 4))
    if done.n_sets > ROWS_MAX:
        print(f"... and {done.n_sets - ROWS_MAX:,} more")
    would = "would go" if done.dry_run else "went"
    print(f"{counted(done.n_sets, 'segment set')} {would}, {size(done.n_bytes)}")


def _row(found: SetRow) -> tuple[str, ...]:
    tenant = found.tenant or "-"
    return found.set_id, found.namespace[:12], tenant, size(found.n_bytes), f"{found.uses:,}", when(found.used_s)
