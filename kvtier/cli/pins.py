"""`kvtier pin` and `kvtier unpin`: what is not to be evicted."""

from __future__ import annotations

import argparse

from kvtier.admin.answers import PinRow, Pins
from kvtier.admin.change import PIN_KEYS_MAX, NewPin, add_pin, drop_pin, list_pins
from kvtier.admin.opened import Opened
from kvtier.cli.place import NotDone, add_place, deployment
from kvtier.cli.prompts import (
    add_namespace,
    add_prompt,
    duration_argument,
    has_prompt,
    namespace_of,
    prefix_keys,
)
from kvtier.cli.tables import counted, print_table, when
from kvtier.runtime.exit_status import OK, print_json
from kvtier.runtime.units import size

ID_CHARS_SHOWN = 12


def add_pin_options(parser: argparse.ArgumentParser) -> None:
    add_place(parser)
    add_namespace(parser)
    add_prompt(parser, "the prefix; without one, the whole namespace")
    parser.add_argument("--label", metavar="TEXT", default="", help="what it is for")
    text = "until when, such as 12h or 7d from now; left out: until it is unpinned"
    parser.add_argument("--for", metavar="TIME", dest="ttl_s", type=duration_argument, help=text)


def add_unpin_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("pin", metavar="PIN", help="id of the pin, or how it begins, as `kvtier pin` lists it")
    add_place(parser)


def run_pin(options: argparse.Namespace) -> int:
    """Without a namespace, lists what is pinned."""
    if options.namespace is None:
        if has_prompt(options):
            raise NotDone("a prefix is one of a namespace: add --namespace")
        if options.label or options.ttl_s is not None:
            raise NotDone("this says how long to pin, or what for, but not what: add --namespace")
        with deployment(options) as opened:
            found = list_pins(opened)
        if options.json:
            print_json(found.model_dump(mode="json"))
        else:
            _print(found)
        return OK
    with deployment(options) as opened:
        row = add_pin(opened, _wanted(options, opened))
    if options.json:
        print_json(row.model_dump(mode="json"))
    else:
        until = f" until {when(row.expires_s)}" if row.expires_s else ""
        print(f"pin {row.id}: {_what(row)}, {counted(row.sets, 'segment set')}, {size(row.n_bytes)}{until}")
    return OK


def run_unpin(options: argparse.Namespace) -> int:
    """Raises NotDone when there is no such pin."""
    with deployment(options) as opened:
        found = [pin.id for pin in list_pins(opened).pins if pin.id.startswith(options.pin)]
        if len(found) > 1 or not options.pin:
            raise NotDone(f"{len(found)} pins begin with {options.pin!r}: give more of the id")
        if not found or not drop_pin(opened, found[0]):
            raise NotDone(f"there is no pin {options.pin}")
    if options.json:
        print_json({"id": found[0]})
    else:
        print(f"pin {found[0]} is removed")
    return OK


def _wanted(options: argparse.Namespace, opened: Opened) -> NewPin:
    namespace = namespace_of(options, opened)
    assert namespace is not None
    keys = prefix_keys(options, opened, namespace) if has_prompt(options) else None
    if keys is not None and len(keys) > PIN_KEYS_MAX:
        raise NotDone(f"these are {len(keys)} chunks; a pin is of {PIN_KEYS_MAX} at most")
    expires_s = None if options.ttl_s is None else opened.clock() + options.ttl_s
    return NewPin(namespace, keys, options.label, expires_s)


def _what(row: PinRow) -> str:
    return "the whole namespace" if row.keys is None else counted(row.keys, "chunk")


def _print(found: Pins) -> None:
    if found.pins:
        rows = [("pin", "namespace", "what", "sets", "size", "until", "label")]
        rows += [
            (row.id[:ID_CHARS_SHOWN], row.namespace[:12], _what(row), f"{row.sets:,}", size(row.n_bytes),
             when(row.expires_s) if row.expires_s else "unpinned", row.label or "-")
            for row in found.pins
        ]  # fmt: skip
        print_table(rows, right=(3, 4))
    pins = counted(len(found.pins), "pin")
    print(f"{pins}, protecting {size(found.pinned_bytes)} of at most {size(found.max_bytes)}")
