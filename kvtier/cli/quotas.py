"""`kvtier quota`: what a tenant or a namespace may take of the root."""

from __future__ import annotations

import argparse

from kvtier.admin.answers import QuotaList
from kvtier.admin.change import drop_quota, list_quotas, set_quota, tenant_note
from kvtier.admin.opened import Opened
from kvtier.cli.place import NotDone, add_place, deployment
from kvtier.cli.prompts import add_namespace, namespace_of, size_argument
from kvtier.cli.tables import print_table
from kvtier.eviction.limits import namespace_note
from kvtier.runtime.exit_status import OK, print_json
from kvtier.runtime.units import size


def add_options(parser: argparse.ArgumentParser) -> None:
    add_place(parser)
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--tenant", metavar="LABEL", help="label of a tenant, as in the settings")
    add_namespace(whose)
    change = parser.add_mutually_exclusive_group()
    change.add_argument("--set", metavar="SIZE", type=size_argument, help="what it may take; above it, its own sets go")
    change.add_argument("--unlimited", action="store_true", help="as much as there is, whatever the settings say")
    change.add_argument("--reset", action="store_true", help="back to what the settings say")


def run_quota(options: argparse.Namespace) -> int:
    """Lists them, after a change if one is asked for. Raises NotDone when a quota that is to be reset was never set."""
    is_change = options.set is not None or options.unlimited or options.reset
    if is_change != (options.tenant is not None or options.namespace is not None):
        fix = "--tenant LABEL or --namespace ID" if is_change else "--set SIZE, --unlimited or --reset"
        raise NotDone(f"a quota is changed by whose it is and what it is to be: add {fix}")
    with deployment(options) as opened:
        if is_change:
            _change(options, opened)
        found = list_quotas(opened)
        known = {tenant.name for tenant in opened.settings.capacity.tenants}
    if options.json:
        print_json(found.model_dump(mode="json"))
    else:
        _print(found)
        if options.tenant is not None and not options.reset and options.tenant not in known:
            print(f"no tenant is called {options.tenant} in these settings: only engines that know one by it keep that")
    return OK


def _change(options: argparse.Namespace, opened: Opened) -> None:
    if options.tenant is not None:
        note = tenant_note(options.tenant)
    else:
        namespace = namespace_of(options, opened)
        assert namespace is not None
        note = namespace_note(namespace)
    if not options.reset:
        set_quota(opened, note, None if options.unlimited else options.set)
    elif not drop_quota(opened, note):
        raise NotDone("nothing was reset: no such quota had been set")


def _print(found: QuotaList) -> None:
    if found.quotas:
        rows = [("of", "", "used", "quota", "set by")]
        rows += [
            (row.kind, row.of, size(row.used_bytes), "unlimited" if row.quota_bytes is None else size(row.quota_bytes),
             "kvtier quota" if row.is_run_time else "the settings")
            for row in found.quotas
        ]  # fmt: skip
        print_table(rows, right=(2, 3))
    usual = found.default_namespace_bytes
    print(f"every other namespace: {'unlimited' if usual is None else size(usual)}; every other tenant: unlimited")
