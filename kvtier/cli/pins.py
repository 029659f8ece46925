"""`kvtier pin` and `kvtier unpin`: protect prefixes and namespaces from eviction."""

from typing import Annotated

import typer

from kvtier.admin.answers import PinRow, Pins
from kvtier.admin.change import add_pin, drop_pin, list_pins
from kvtier.cli import prompts
from kvtier.cli.app import NotDone, app
from kvtier.cli.place import ConfigOption, JsonOption, PathArgument, deployment
from kvtier.cli.tables import print_table, show, when
from kvtier.runtime.exit_status import MEANINGS, OK, print_json
from kvtier.runtime.units import counted, size

ID_CHARS_SHOWN = 12


@app.command("pin", epilog=MEANINGS)
def pin(
    ctx: typer.Context,
    path: PathArgument = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
    namespace: prompts.NamespaceOption = None,
    tokens: prompts.TokensOption = None,
    prompt: prompts.PromptOption = None,
    prompt_file: prompts.PromptFileOption = None,
    salt: prompts.SaltOption = "",
    label: Annotated[str, typer.Option(metavar="TEXT", help="The purpose of the pin.", show_default=False)] = "",
    ttl_s: Annotated[
        float | None,
        typer.Option(
            "--for",
            metavar="TIME",
            parser=prompts.duration_argument,
            help="Life of the pin, such as 12h or 7d; without it, the pin stays until it is unpinned.",
        ),
    ] = None,
) -> int:
    """Keep a namespace or a prefix from being evicted, or list pins.

    Without --namespace, pins are listed. With a prompt, the pin is of the prompt's prefix in the namespace."""
    given = prompts.PromptOptions(tokens, prompt, prompt_file, salt)
    has_prompt = given.is_given(ctx)
    if namespace is None:
        if has_prompt:
            raise NotDone("a prefix belongs to a namespace: add --namespace")
        if label or ttl_s is not None:
            raise NotDone("this says how long to pin, or what for, but not what: add --namespace")
        with deployment(path, config, reads=True) as opened:
            show(list_pins(opened), as_json, _print)
        return OK
    with deployment(path, config) as opened:
        namespace_id = prompts.namespace_of(namespace, opened)
        keys = prompts.keys_of(given, opened, namespace_id) if has_prompt else None
        row = add_pin(opened, namespace_id, keys, label, ttl_s)
    show(row, as_json, _print_new)
    return OK


@app.command("unpin", epilog=MEANINGS)
def unpin(
    pin: Annotated[
        str, typer.Argument(metavar="PIN", help="Id of the pin or its beginning, as `kvtier pin` lists it.")
    ],
    path: PathArgument = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> int:
    """Remove a pin: the sets that it kept may be evicted again."""
    with deployment(path, config) as opened:
        found = [row.id for row in list_pins(opened).pins if row.id.startswith(pin)]
        if len(found) > 1 or not pin:
            raise NotDone(f"{len(found)} pins begin with {pin!r}: give more of the id")
        if not found:
            raise NotDone(f"there is no pin {pin}: kvtier pin lists the pins")
        drop_pin(opened, found[0])
    if as_json:
        print_json({"id": found[0]})
    else:
        print(f"pin {found[0]} is removed")
    return OK


def _print_new(row: PinRow) -> None:
    until = f" until {when(row.expires_s)}" if row.expires_s else ""
    print(f"pin {row.id}: {_what(row)}, {counted(row.sets, 'segment set')}, {size(row.n_bytes)}{until}")


def _what(row: PinRow) -> str:
    return "the whole namespace" if row.keys is None else counted(row.keys, "chunk")


def _print(found: Pins) -> None:
    if found.pins:
        rows = [("pin", "namespace", "what", "sets", "size", "until", "label")]
        rows += [
            (
                row.id[:ID_CHARS_SHOWN],
                row.namespace[:12],
                _what(row),
                f"{row.sets:,}",
                size(row.n_bytes),
                when(row.expires_s) if row.expires_s else "unpinned",
                row.label or "-",
            )
            for row in found.pins
        ]
        print_table(rows, right=(3, 4))
    pins = counted(len(found.pins), "pin")
    print(f"{pins}, protecting {size(found.pinned_bytes)} of at most {size(found.max_bytes)}")
