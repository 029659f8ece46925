"""`kvtier check CONFIG.yaml`: would an engine start with these settings? Writes nothing.

Shown are the settings that are set, then those that tell most of a deployment, as far as there is room.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from kvtier.capacity_words import few_segments
from kvtier.commands.status import FOUND_BAD, OK, print_json
from kvtier.config import HOST_ADMIT, HOST_ARENA_BYTES, Settings
from kvtier.doctor.host import Host, ProbeFailed
from kvtier.doctor.storage import beyond_the_disk, place_of
from kvtier.errors import ConfigError
from kvtier.indexes import look_at_redis
from kvtier.io.filesystem import IN_MEMORY, file_system_of
from kvtier.io.ring import sizes_for
from kvtier.machine import beyond_available, check_host_arena, memory_here
from kvtier.owner import Owner, check_claim, default_index_path, read_owner, this_node
from kvtier.record import FORMAT_VERSION
from kvtier.root import check_mount, check_space, find_root
from kvtier.sizes import size

SHOWN_MAX = 18
"""Settings, unless all are asked for: with what lies at the root and what may hurt, a screen of 25 lines."""
TELLING = (
    "capacity_bytes", "segment_bytes", "chunk_tokens", "codec", "index.kind", "index.path", "host.arena_bytes",
    "host.admit", "hbm.staging_bytes", "hbm.arena_bytes", "io.threads", "io.piece_bytes", "capacity.policy",
)  # fmt: skip


def run_check(config: Path, as_json: bool, shows_all: bool) -> int:
    """Prints what an engine would use; status 1, and one line on standard error, when it would not start."""
    try:
        settings = Settings.load({"config": str(config)})
        settings.signing.signer()
        _look_at_gpu(settings)
        root = _look_at_root(settings)
        warnings = [*_look_at_rooms(settings), *_look_at_service(settings)]
    except ConfigError as fault:
        print(" ".join(str(fault).split()), file=sys.stderr)
        return FOUND_BAD
    if as_json:
        chosen = _chosen_where_unset(settings)
        found = {"settings": settings.model_dump(mode="json"), "chosen": chosen, "root": root, "but": warnings}
        print_json(found)
        return OK
    for warning in warnings:
        print(f"but: {warning}")
    for line in _lines(settings, shows_all):
        print(line)
    for what, text in root.items():
        print(f"{what}: {text}")
    return OK


def _lines(settings: Settings, shows_all: bool) -> list[str]:
    values, chosen = dict(_leaves(settings)), _chosen_where_unset(settings)
    usual = dict(_leaves(Settings(root=settings.root)))
    is_set = [name for name in values if name == "root" or values[name] != usual[name]]
    others = [name for name in values if name not in is_set]
    shown = is_set + others if shows_all else (is_set + [name for name in TELLING if name in others])[:SHOWN_MAX]
    lines = [
        f"{name}: {chosen.get(name) or _shown(name, values[name])}{'' if name in is_set else '  (the default)'}"
        for name in shown
    ]
    left = len(values) - len(shown)
    if left:
        n_set = len(set(is_set) - set(shown))
        kept = f"{n_set} of them set, the others" if n_set else "all"
        lines.append(f"... and {left} more settings, {kept} with their defaults: --all prints them")
    return lines


def _leaves(model: BaseModel, before: str = "") -> Iterator[tuple[str, Any]]:
    """("io.threads", 16) and so on."""
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _leaves(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _shown(name: str, value: object) -> str:
    """As in a settings file; sizes for people, too."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, tuple):  # of models; JSON is YAML
        return json.dumps([item.model_dump(mode="json", exclude_none=True) for item in value])
    return f"{value} ({size(value)})" if name.endswith("_bytes") and isinstance(value, int) else str(value)


def _chosen_where_unset(settings: Settings) -> dict[str, str]:
    values = dict(_leaves(settings))
    return {name: text for name, text in _chosen(settings).items() if values[name] is None}


def _chosen(settings: Settings) -> dict[str, str]:
    """What is used where a setting is left to be chosen."""
    sizes = sizes_for(file_system_of(settings.root).kind in IN_MEMORY, settings.io.threads, settings.io.piece_bytes)
    measured = "; with a GPU as measured" if settings.io.calibrate else ""
    arenas = {device: _shown("host.arena_bytes", n_bytes) for device, n_bytes in HOST_ARENA_BYTES.items()}
    return {
        "host.arena_bytes": f"{arenas['cpu']}; with a GPU {arenas['cuda']}",
        "host.admit": f"{HOST_ADMIT['cpu']}; with a GPU {HOST_ADMIT['cuda']}",
        "hbm.staging_bytes": "none; with a GPU what three steps of the engine fill, and 32 chunks",
        "io.threads": f"{sizes.threads}{measured}",
        "io.piece_bytes": f"reads of {size(sizes.piece_bytes)}, writes of {size(sizes.write_piece_bytes)}{measured}",
        "index.path": "null" if settings.index.kind == "memory" else "chosen: see 'index is'",
    }


def _look_at_rooms(settings: Settings) -> list[str]:
    """What an engine starts with and may suffer from later. Raises ConfigError for what it can't start with."""
    memory = memory_here()
    n_bytes = settings.host.arena_bytes or HOST_ARENA_BYTES["cpu"]
    check_host_arena(n_bytes, memory)
    found = (
        few_segments(settings.capacity_bytes, settings.segment_bytes),
        beyond_the_disk(place_of(settings.root), settings.capacity_bytes),
        beyond_available(n_bytes, memory),
    )
    return [warning for warning in found if warning]


def _look_at_service(settings: Settings) -> list[str]:
    """What stops `kvtier serve`, but no engine: on an engine's host its tokens may rightly be missing."""
    try:
        settings.server.check()
    except ConfigError as fault:
        return [f"kvtier serve would not start: {fault.key}: {fault.fix}"]
    return []


def _look_at_gpu(settings: Settings) -> None:
    """Raises ConfigError for GPU memory on a host without a GPU. A driver that does not answer is doctor's to tell."""
    if settings.hbm.arena_bytes or settings.hbm.staging_bytes:
        with suppress(ProbeFailed):
            settings.check_device(has_gpu=Host().probe("kvtier.doctor.probe", "driver") is not None)


def _look_at_root(settings: Settings) -> dict[str, str]:
    """What lies at the root, as far as looking tells. Raises ConfigError as an engine's start would."""
    path = settings.root
    nearest = place_of(path)
    folder = path / f"v{FORMAT_VERSION}"
    if nearest == path:
        if any(path.glob("v[0-9]*")):
            find_root(path)  # one of a newer version is refused
        if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
            fix = f"not writable: {folder}; make it writable for this user or choose another root"
            raise ConfigError("root", str(path), fix)
    check_mount(settings)
    check_space(path, settings.segment_bytes)
    kind = file_system_of(path)
    state = "there" if folder.is_dir() else "to be created"
    return {
        "root is": f"{state}, on {kind.kind} (mounted at {kind.mount_point})",
        "index is": _look_at_index(settings, folder),
    }


def _look_at_index(settings: Settings, folder: Path) -> str:
    if settings.index.kind == "memory":
        return "in memory: forgotten when the engine ends"
    if settings.index.kind == "redis":
        seen = look_at_redis(settings)
        silent = f"which does not answer: engines start, and go on without ({seen.said})"
        return f"in Redis at {seen.url}, {seen.said if seen.does_answer else silent}"
    index_path = settings.index.path or default_index_path(settings.root, folder)
    kind = file_system_of(index_path)
    if kind.is_network:
        fix = f"it is on {kind.kind} (mounted at {kind.mount_point}): name a folder on a local disk"
        raise ConfigError("index.path", str(index_path), fix)
    owner = read_owner(folder) if folder.is_dir() else None
    if owner is None:
        return f"to be created at {index_path}"
    check_claim(folder, owner, Owner(this_node(), index_path))
    return f"at {index_path}, of this node"
