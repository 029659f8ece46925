"""`kvtier verify`: reads every record and checks every checksum, and signatures."""

from __future__ import annotations

import argparse

from kvtier.cli.place import add_place, deployment, find_place
from kvtier.cli.root import run_verify as run_root_verify


def add_options(parser: argparse.ArgumentParser) -> None:
    add_place(parser)


def run_verify(options: argparse.Namespace) -> int:
    """What lies on disk is read in any case; what should lie there is in the index, so one in Redis is asked."""
    place = find_place(options)
    signer = place.settings.signing.signer()
    if place.settings.index.kind != "redis":
        return run_root_verify(place.root, options.json, signer=signer)
    with deployment(options) as opened:
        return run_root_verify(place.root, options.json, opened.index, signer)
