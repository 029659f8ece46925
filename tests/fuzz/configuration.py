"""Settings as people write them: YAML files, the environment, a connector's config, and files that settings name."""

import json
import os
from pathlib import Path
from unittest.mock import patch

from kvtier.config.settings import CONFIG_VARIABLE, Settings
from kvtier.errors import ConfigError

TENANTS = """root: /mnt/kv
capacity:
  ttl_s: 7d
  tenants:
    - {name: a, cache_salts: ["a*", "b"], quota_bytes: 5GiB}
index:
  kind: redis
  url: redis://127.0.0.1:6379/0
"""


def _load(overrides: object, environment: dict[str, str]) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
    with patch.dict(os.environ, kept | environment, clear=True):
        settings = Settings.load(overrides)  # type: ignore[arg-type]
    repr(settings)


def settings_file(data: bytes, folder: Path) -> None:
    path = folder / "settings.yaml"
    path.write_bytes(data)
    try:
        _load({"config": str(path)}, {})
    except ConfigError as fault:
        assert len(str(fault)) < 100 * len(data) + 10_000, "the message is out of proportion"
        raise


def environment(data: bytes, _: Path) -> None:
    """Lines NAME=value, as the system has them: any bytes but zero."""
    given = {}
    for line in data.decode("utf-8", "surrogateescape").replace("\0", "").splitlines():
        name, equals, value = line.partition("=")
        if equals and name and name != CONFIG_VARIABLE:
            given[f"KVTIER_{name}"] = value
    _load({}, given)


def connector_config(data: bytes, _: Path) -> None:
    """As an engine hands it on: JSON from its command line."""
    try:
        overrides = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(overrides, dict):
        _load(overrides, {})


def secret_file(data: bytes, folder: Path) -> None:
    """A password, and a token, in a file."""
    path = folder / "secret"
    path.write_bytes(data)
    for name in ("index.password_file", "server.admin_token_file"):
        group, key = name.split(".")
        settings = Settings.load(
            {
                "root": "/mnt/kv",
                group: {key: str(path)},
                "index": {"kind": "redis", "url": "redis://h/0"} | ({key: str(path)} if group == "index" else {}),
            }
        )
        try:
            settings.index.secret()
            settings.server.tokens()
        except ConfigError as fault:
            assert not data.strip() or data.strip().decode("utf-8", "replace") not in str(fault) or len(data) < 16
            raise


SEEDS = {
    "settings_file": [TENANTS.encode()],
    "environment": [
        b'ROOT=/mnt/kv\nIO__THREADS=4\nCAPACITY__TENANTS=[{"name": "a", "cache_salts": ["b"]}]\n',
        b"ROOT=/mnt/kv\nSAVE_GENERATED=true\nMIN_LOAD_TOKENS=auto\nINDEX__URL=redis://u:p@h:1/2\nINDEX__KIND=redis\n",
    ],
    "connector_config": [
        json.dumps(one).encode()
        for one in (
            {"root": "/mnt/kv", "io": {"threads": 4}, "capacity": {"tenants": [{"name": "a", "cache_salts": ["b"]}]}},
            {"root": "/mnt/kv", "index": {"kind": "redis", "url": "redis://h:1/2"}, "min_load_tokens": 5, "epoch": 1},
        )
    ],
    "secret_file": [b"a secret of many characters\n", b"0123456789abcdef0123456789abcdef"],
}
