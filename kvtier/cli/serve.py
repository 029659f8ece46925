"""`kvtier serve`: the admin service."""

from pathlib import Path
from typing import Annotated

import typer

from kvtier.cli.app import app
from kvtier.cli.place import load_settings, path_argument
from kvtier.config.kv_transfer import ROOT_VARIABLE
from kvtier.errors import ConfigError
from kvtier.runtime.exit_status import MEANINGS


@app.command("serve", epilog=MEANINGS)
def serve(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG.yaml",
            parser=path_argument,
            help="The settings file; without it, the one that KVTIER_CONFIG names, or the root in KVTIER_ROOT.",
        ),
    ] = None,
) -> int:
    """Run the admin service. It has REST, metrics for Prometheus, and the dashboard at /ui."""
    if path is not None and path.is_dir():
        root = path.absolute()
        fix = (
            f"is a folder: name a settings file with `root: {root}` and the engines' capacity_bytes, or, where the "
            f"engines have {ROOT_VARIABLE} alone, run `{ROOT_VARIABLE}={root} kvtier serve`"
        )
        raise ConfigError("config", str(path), fix)
    settings = load_settings(path)
    try:  # its packages are an extra: the other commands need none of them
        from kvtier.server.serve import run_serve
    except ModuleNotFoundError as missing:
        fix = f"the package {missing.name} is not installed: pip install './kvtier[server]' beside its checkout"
        raise ConfigError("serve", str(path or ""), fix) from None
    return run_serve(settings)
