"""`kvtier quota`: limits of tenants and namespaces."""

from typing import Annotated

import typer

from kvtier.admin.answers import QuotaList
from kvtier.admin.change import drop_quota, list_quotas, set_quota, tenant_note
from kvtier.cli.app import NotDone, app, refuse_together
from kvtier.cli.place import ConfigOption, JsonOption, PathArgument, deployment
from kvtier.cli.prompts import NamespaceOption, namespace_of, size_argument
from kvtier.cli.tables import print_table, show
from kvtier.eviction.limits import namespace_note
from kvtier.runtime.exit_status import MEANINGS, OK
from kvtier.runtime.units import size


@app.command("quota", epilog=MEANINGS)
def quota(
    ctx: typer.Context,
    path: PathArgument = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    tenant: Annotated[str | None, typer.Option(metavar="LABEL", help="Label of a tenant, as in the settings.")] = None,
    namespace: NamespaceOption = None,
    quota_bytes: Annotated[
        int | None,
        typer.Option(
            "--set", metavar="SIZE", parser=size_argument, help="Its limit; above it, its own sets are evicted."
        ),
    ] = None,
    unlimited: Annotated[
        bool, typer.Option("--unlimited", help="As much as there is, whatever the settings say.")
    ] = False,
    reset: Annotated[bool, typer.Option("--reset", help="Back to the quota of the settings.")] = False,
) -> int:
    """List the quotas of tenants and namespaces, or change one."""
    refuse_together(ctx, {"--tenant": tenant, "--namespace": namespace})
    refuse_together(ctx, {"--set": quota_bytes, "--unlimited": unlimited, "--reset": reset})
    is_change = quota_bytes is not None or unlimited or reset
    if is_change != (tenant is not None or namespace is not None):
        fix = "--tenant LABEL or --namespace ID" if is_change else "--set SIZE, --unlimited or --reset"
        raise NotDone(f"a quota is changed by whose it is and what it is to be: add {fix}")
    with deployment(path, config, reads=not is_change) as opened:
        if is_change:
            note = tenant_note(tenant) if tenant is not None else namespace_note(namespace_of(namespace or "", opened))
            if reset:
                drop_quota(opened, note)
            else:
                set_quota(opened, note, None if unlimited else quota_bytes)
        found = list_quotas(opened)
        known = {known.name for known in opened.settings.capacity.tenants}
    show(found, as_json, _print)
    if not as_json and tenant is not None and not reset and tenant not in known:
        print(f"no tenant is called {tenant} in these settings: only engines whose settings have it keep that quota")
    return OK


def _print(found: QuotaList) -> None:
    if found.quotas:
        rows = [("of", "", "used", "quota", "set by")]
        rows += [
            (
                row.kind,
                row.of,
                size(row.used_bytes),
                "unlimited" if row.quota_bytes is None else size(row.quota_bytes),
                "kvtier quota" if row.is_run_time else "the settings",
            )
            for row in found.quotas
        ]
        print_table(rows, right=(2, 3))
    usual = found.default_namespace_bytes
    print(f"every other namespace: {'unlimited' if usual is None else size(usual)}; every other tenant: unlimited")
