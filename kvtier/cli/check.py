"""`kvtier check CONFIG.yaml`: check whether an engine would start with these settings, and cache. Writes nothing.

It runs the checks of an engine's own start. An engine whose Redis does not answer starts, but caches nothing until
Redis answers; the check then ends with status 1.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from pydantic import BaseModel

from kvtier.cli.app import app
from kvtier.cli.place import JsonOption, load_settings, path_argument
from kvtier.config.capacity import few_sets
from kvtier.config.kv_transfer import read_transfer_config
from kvtier.config.settings import HOST_ADMIT, HOST_ARENA_BYTES, Settings
from kvtier.doctor.host import Host, ProbeFailed
from kvtier.doctor.storage import beyond_the_disk, out_of_inodes, place_of
from kvtier.errors import ConfigError
from kvtier.format.geometry import share_of_rank
from kvtier.format.record import FORMAT_VERSION
from kvtier.index.open import look_at_redis
from kvtier.io.ring import sizes_for
from kvtier.model.config_json import read_model
from kvtier.runtime.exit_status import FOUND_BAD, MEANINGS, OK, print_json
from kvtier.runtime.memory_limits import beyond_available, check_host_arena, memory_here
from kvtier.runtime.units import counted, exact, size
from kvtier.storage.filesystem import IN_MEMORY, file_system_of
from kvtier.storage.root import (
    check_mount,
    check_reserve,
    check_space,
    check_versions,
    find_root,
    squash_hint,
    unwritable,
)
from kvtier.storage.root_owner import Owner, check_claim, check_shared, default_index_path, read_owner, this_node

ON_ONE_RANK = " on one rank"


class CheckResult(NamedTuple):
    """root: state of root and index, by title. but: warnings. bad: reasons why an engine would start and cache
    nothing."""

    root: dict[str, str]
    but: list[str]
    bad: list[str]


@app.command("check", epilog=MEANINGS)
def check(
    path: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG.yaml",
            parser=path_argument,
            help="The settings file; without it, the settings of --kv-transfer-config, KVTIER_CONFIG or KVTIER_ROOT.",
        ),
    ] = None,
    as_json: JsonOption = False,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            parser=path_argument,
            help="Folder of a Hugging Face model: is it served, and do its chunks fit.",
        ),
    ] = None,
    kv_transfer_config: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="The option of vLLM: also check its kv_role and kv_load_failure_policy."),
    ] = None,
    shows_all: Annotated[
        bool, typer.Option("--all", help="Print every setting, also those that have their defaults.")
    ] = False,
) -> int:
    """Tell whether an engine would start and cache, and with which settings.

    It prints the settings that are set or chosen for this machine. The exit status is 1 if the engine would not start
    (one line on standard error has the reason) or would cache nothing.
    """
    try:
        settings, warning = _settings(path, kv_transfer_config)
        settings.signing.signer()
        _look_at_gpu(settings)
        found = _look_at_root(settings)
        few = few_sets(settings.capacity_bytes, settings.rank_set_bytes_max, None, ON_ONE_RANK)
        if model is not None:
            found.root["model is"], few = _look_at_model(settings, model)
        warnings = (warning, few, *_look_at_rooms(settings), _look_at_service(settings))
        found.but.extend(text for text in warnings if text)
    except (ConfigError, OSError) as fault:
        if isinstance(fault, OSError):
            fault = ConfigError("root", str(fault.filename or ""), f"{fault.strerror}{squash_hint(fault)}")
        print(" ".join(str(fault).split()), file=sys.stderr)
        return FOUND_BAD
    status = FOUND_BAD if found.bad else OK
    if as_json:
        print_json({"settings": settings.model_dump(mode="json"), "chosen": _chosen(settings), **found._asdict()})
        return status
    for title, lines in (("bad", found.bad), ("but", found.but)):
        for line in lines:
            print(f"{title}: {line}")
    if not found.bad:
        print("ok: an engine would start" + ("" if model else " (its model was not checked: add --model DIR)"))
    for line in _lines(settings, shows_all):
        print(line)
    for what, text in found.root.items():
        print(f"{what}: {text}")
    return status


def _settings(config: Path | None, transfer: str | None) -> tuple[Settings, str]:
    """Load the settings. Return them, and a warning or "". Raises ConfigError."""
    found, warning = ({}, "") if transfer is None else read_transfer_config(transfer)
    given = dict(found)
    if config is not None:
        if given.get("config") not in (None, str(config)):
            fix = f"--kv-transfer-config names it, and {config} was given: leave one of them out"
            raise ConfigError("config", given["config"], fix)
        given["config"] = str(config)
    return Settings.load(given) if given else load_settings(None), warning


def _lines(settings: Settings, shows_all: bool) -> list[str]:
    """Return a line for each setting that is set, then for each that kvtier chose, or with shows_all for all others."""
    values, usual, chosen = dict(_leaves(settings)), dict(_leaves(Settings(root=settings.root))), _chosen(settings)
    is_set = [name for name in values if name == "root" or values[name] != usual[name]]
    others = [name for name in values if name not in is_set and (shows_all or name in chosen)]
    lines = [f"{name}: {chosen.get(name) or _shown(name, values[name])}" for name in is_set]
    lines += [f"{name}: {chosen.get(name) or _shown(name, values[name])}  (the default)" for name in others]
    left = len(values) - len(lines)
    return [*lines, f"... and {left} more settings with their defaults: --all prints them"] if left else lines


def _leaves(model: BaseModel, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("io.threads", 16) and so on."""
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            yield from _leaves(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


def _shown(name: str, value: object) -> str:
    """Write a value as in a settings file, with a readable size."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, tuple):  # of models; JSON is YAML
        return json.dumps([item.model_dump(mode="json", exclude_none=True) for item in value])
    return f"{value} ({size(value)})" if name.endswith("_bytes") and isinstance(value, int) else str(value)


def _chosen(settings: Settings) -> dict[str, str]:
    """Return the values that are used for settings left to be chosen."""
    sizes = sizes_for(file_system_of(settings.root).kind in IN_MEMORY, settings.io.threads, settings.io.piece_bytes)
    measured = "; with a GPU as measured" if settings.io.calibrate else ""
    arenas = {device: _shown("host.arena_bytes", n_bytes) for device, n_bytes in HOST_ARENA_BYTES.items()}
    found = {
        "host.arena_bytes": f"{arenas['cpu']}; with a GPU {arenas['cuda']}",
        "host.admit": f"{HOST_ADMIT['cpu']}; with a GPU {HOST_ADMIT['cuda']}",
        "hbm.staging_bytes": "none; with a GPU what three steps of the engine fill, and 32 chunks",
        "io.threads": f"{sizes.threads}{measured}",
        "io.piece_bytes": f"reads of {size(sizes.piece_bytes)}, writes of {size(sizes.write_piece_bytes)}{measured}",
        "index.path": "chosen: see 'index is'" if settings.index.kind == "embedded" else "null",
    }
    values = dict(_leaves(settings))
    return {name: text for name, text in found.items() if values[name] is None}


def _look_at_rooms(settings: Settings) -> tuple[str, ...]:
    """Return warnings about space and memory; some may be "". Raises ConfigError if an engine would not start."""
    memory = memory_here()
    n_bytes = settings.host.arena_bytes_on("cpu")
    check_host_arena(n_bytes, memory)
    place = place_of(settings.root)
    return beyond_the_disk(place, settings.capacity_bytes), out_of_inodes(place), beyond_available(n_bytes, memory)


def _beyond_the_whole_disk(settings: Settings) -> str:
    """Return an error if the capacity is set above the size of the disk, where it limits nothing; else ""."""
    disk = os.statvfs(place_of(settings.root))
    total_bytes = disk.f_blocks * disk.f_frsize
    if "capacity_bytes" not in settings.model_fields_set or settings.capacity_bytes <= total_bytes:
        return ""
    what = f"capacity_bytes ({exact(settings.capacity_bytes)}) is more than the disk has in all ({exact(total_bytes)})"
    return f"{what}: set it to less than what is free"


def _look_at_service(settings: Settings) -> str:
    """Return a reason that stops `kvtier serve`, but no engine: an engine's host may lack its tokens. "": none."""
    try:
        settings.server.check()
    except ConfigError as fault:
        return f"kvtier serve would not start: {fault.key}: {fault.fix}"
    return ""


def _look_at_gpu(settings: Settings) -> None:
    """Refuse GPU memory on a host without a GPU. Raises ConfigError. `kvtier doctor` reports a driver that does not
    answer."""
    if settings.hbm.arena_bytes or settings.hbm.staging_bytes:
        with suppress(ProbeFailed):
            settings.check_device(has_gpu=Host().probe("kvtier.doctor.probe", "driver") is not None)


def _look_at_root(settings: Settings) -> CheckResult:
    """Return the state of the root, read only. Raises ConfigError as an engine's start would."""
    path = settings.root
    nearest = place_of(path)
    folder = path / f"v{FORMAT_VERSION}"
    if nearest == path:
        if os.path.lexists(folder):
            find_root(path)
        else:
            check_versions(path)
        if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):
            raise unwritable(path, folder)
    check_mount(settings)
    check_space(path, settings.rank_set_bytes_max)
    check_reserve(path, settings.capacity.reserve_bytes, settings.rank_set_bytes_max)
    kind = file_system_of(path)
    state = "there" if folder.is_dir() else "to be created"
    found = CheckResult({"root is": f"{state}, on {kind.kind} (mounted at {kind.mount_point})"}, [], [])
    if too_much := _beyond_the_whole_disk(settings):
        found.bad.append(too_much)
    if kind.nfs_fix is not None:
        found.but.append(kind.nfs_fix)
    found.root["index is"] = _look_at_index(settings, folder, found)
    return found


def _look_at_index(settings: Settings, folder: Path, found: CheckResult) -> str:
    if settings.index.kind == "memory":
        ends = "forgotten when the engine ends"
        return f"in memory: {ends}, and refused by an engine whose workers are processes of their own"
    owner = read_owner(folder) if folder.is_dir() else None
    if settings.index.kind == "redis":
        if owner is not None:
            check_shared(folder, owner)
        seen = look_at_redis(settings)
        if seen.does_answer:
            if seen.warning:
                found.but.append(seen.warning)
            return f"in Redis at {seen.url}, {seen.said}"
        what = f"the Redis of index.url ({seen.url}) does not answer ({seen.said})"
        without = "an engine starts, and caches nothing until it does"
        found.bad.append("; ".join(filter(None, (f"{what}: {without}", seen.fix))))
        return f"in Redis at {seen.url}, which does not answer"
    index_path = settings.index.path or default_index_path(settings.root, folder)
    kind = file_system_of(index_path)
    if kind.is_network:
        fix = f"it is on {kind.kind} (mounted at {kind.mount_point}): name a folder on a local disk"
        raise ConfigError("index.path", str(index_path), fix)
    if owner is None:
        return f"to be created at {index_path}"
    check_claim(folder, owner, Owner(this_node(), index_path))
    return f"at {index_path}, of this node"


def _look_at_model(settings: Settings, folder: Path) -> tuple[str, str]:
    """Return the sizes of a chunk and a segment set of the model on one rank, and a warning or "". Raises ConfigError
    if an engine would not start."""
    from kvtier.build import make_codec, set_shape  # with torch, which takes seconds

    model = read_model(folder)
    if 0 < model.max_tokens < settings.chunk_tokens:
        fix = f"only whole chunks are stored, and the model's longest context is {model.max_tokens} tokens"
        raise ConfigError("chunk_tokens", settings.chunk_tokens, f"{fix}: set it to less")
    codec = make_codec(settings)
    geometry = model.geometry("auto", settings.chunk_tokens)
    codec.check(geometry)
    shares = (share_of_rank(geometry, 0, 1, 0, range(geometry.layers)),)
    shape = set_shape(settings, geometry, codec, shares)
    settings.check_capacity(shape.set_bytes, shape.slots)
    check_space(settings.root, shape.set_bytes)
    served = (
        f"{model.family} of {counted(model.layers, 'layer')}, served: a segment set has "
        f"{counted(shape.slots, 'chunk')} of {settings.chunk_tokens} tokens and {size(shape.set_bytes)}{ON_ONE_RANK}"
    )
    return served, few_sets(settings.capacity_bytes, shape.set_bytes, shape.slots, ON_ONE_RANK)
