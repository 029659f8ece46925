"""`kvtier verify`: read every record, and check every checksum and signature."""

from __future__ import annotations

from kvtier.cli.app import app
from kvtier.cli.place import ConfigOption, JsonOption, PathArgument, deployment, find_place
from kvtier.cli.root import run_verify as run_root_verify
from kvtier.runtime.exit_status import MEANINGS


@app.command("verify", epilog=MEANINGS)
def verify(path: PathArgument = None, config: ConfigOption = None, as_json: JsonOption = False) -> int:
    """Read every record and check every checksum. Signatures are checked where the settings have their secret."""
    place = find_place(path, config)
    signer = place.settings.signing.signer()
    if place.settings.index.kind != "redis":  # an index in Redis says what should be on disk
        return run_root_verify(place.root, as_json, signer=signer)
    with deployment(path, config) as opened:
        return run_root_verify(place.root, as_json, opened.index, signer)
