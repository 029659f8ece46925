"""Target of a command: a root by its folder, or a deployment by its settings.

    kvtier stats /mnt/kv                    the folder alone: its content
    kvtier stats /etc/kvtier.yaml           the deployment: its index, capacity, engines
    kvtier stats --config /etc/kvtier.yaml  the same; so is KVTIER_CONFIG
    KVTIER_ROOT=/mnt/kv kvtier stats        the deployment of engines that have KVTIER_ROOT alone

Capacity, quotas, tenants and a Redis index are in the settings alone, so commands that depend on them require these.
"""

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier.admin.opened import Opened, open_for_admin, opened
from kvtier.admin.stats import read_reports
from kvtier.cli.root import readable_index
from kvtier.config.kv_transfer import ROOT_VARIABLE
from kvtier.config.settings import Settings, has_root_variable
from kvtier.errors import ConfigError
from kvtier.index.base import Index
from kvtier.index.open import open_index
from kvtier.maintenance.sweeper import is_to_be_rebuilt
from kvtier.model.config_json import NAME_A_FOLDER
from kvtier.storage.root import Root, find_root, is_read_only, with_default_capacity
from kvtier.storage.start_wait import in_time

SETTINGS_SUFFIXES = (".yaml", ".yml", ".toml", ".json")


@dataclass(frozen=True)
class CommandTarget:
    """Target of a command: settings and root. is_bare: only a folder was named, without settings. is_measured: no
    capacity was set, so it is a share of the disk."""

    settings: Settings
    root: Root
    is_bare: bool
    is_measured: bool = False


def path_argument(text: str) -> Path:
    if not text.strip():  # Path("") is the current folder
        raise typer.BadParameter("it is empty; is a variable of your shell not set?")
    if "://" in text and not Path(text).exists():  # a Path would be a folder `s3:` in the current one
        raise typer.BadParameter(f"{text}: it is a URL, and kvtier takes paths of files and folders only")
    return Path(text)


PathArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="PATH", parser=path_argument, help="The root, or a settings file; without it, the configured root."
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        parser=path_argument,
        help="The settings file; without it, the one that KVTIER_CONFIG names, or the root in KVTIER_ROOT.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print for programs.")]


def refuse_missing_file(path: Path | None) -> None:
    """Raise ConfigError for a missing path with a settings file's suffix: taken as a root, it would be a new one."""
    if path is not None and path.suffix.lower() in SETTINGS_SUFFIXES and not path.exists():
        fix = "there is no such file; correct the path, or name the root's folder instead"
        raise ConfigError("config", str(path), fix)


def refuse_missing_model(folder: Path) -> None:
    """Raises ConfigError unless the folder has a config.json."""
    if not (folder / "config.json").is_file():
        raise ConfigError("model", str(folder), f"there is no config.json; {NAME_A_FOLDER}")


def find_place(path: Path | None, config: Path | None) -> CommandTarget:
    """Find the target of a command. Writes nothing. Raises ConfigError."""
    if path is not None and path.is_file():
        if config is not None:
            raise ConfigError("config", str(config), f"{path} is a settings file too: leave one of them out")
        path, config = None, path
    if path is None:
        try:
            given = _load(config, {})
            settings = _with_measured_capacity(config, given, needs_room=False)
        except ConfigError as fault:
            if fault.key != "root" or fault.value is not None:
                raise
            raise ConfigError("root", None, f"{fault.fix}; or name the root, or its settings file, as PATH") from None
        return CommandTarget(settings, find_root(settings.root), False, is_measured=settings is not given)
    refuse_missing_file(path)
    root = find_root(path)
    settings = _load(config, {"root": str(root.path)})
    is_bare = config is None and not settings.model_fields_set & {"capacity_bytes", "index"}
    if is_bare and root.index_path is not None:
        settings = _load(None, {"root": str(root.path), "index": {"path": str(root.index_path)}})
    return CommandTarget(settings, root, is_bare)


@contextmanager
def deployment(
    path: Path | None, config: Path | None, needs_settings: bool = True, *, reads: bool = False
) -> Iterator[Opened]:
    """Open the root with its index. needs_settings: refuse a folder alone. reads: also on a read-only mount. Raises
    ConfigError, IndexUnavailable."""
    place = find_place(path, config)
    if place.is_bare and needs_settings:
        fix = (
            "what may stay depends on the capacity, quotas and pins in the engines' settings: add --config FILE, or "
            f"set {ROOT_VARIABLE} instead of naming the folder if the engines have that alone"
        )
        raise ConfigError("config", None, fix)
    if place.is_bare and place.root.index_path is None:
        raise ConfigError(
            "config", None, f"there is no index at {place.root.path}: name the settings with --config FILE"
        )
    if not (reads and is_read_only(place.root)):
        with closing(open_for_admin(place.settings)) as found:
            _say_if_partial(found.index, place.root)
            yield _with_capacity_of_engines(place, found)
    elif place.settings.index.kind == "redis" and place.root.root_id:
        with closing(open_index(place.settings, place.root)) as index:
            _say_if_partial(index, place.root)
            yield _with_capacity_of_engines(place, opened(place.settings, place.root, index))
    else:
        with readable_index(place.root, place.settings.index) as index:
            yield _with_capacity_of_engines(place, opened(place.settings, place.root, index))


def _with_capacity_of_engines(place: CommandTarget, found: Opened) -> Opened:
    """Return `found` with the capacity that living engines report, in place of a measured one: the engines measured
    theirs when they started, and other files have taken or freed space since. Raises IndexUnavailable."""
    if not place.is_measured:
        return found
    reports, _ = read_reports(found, found.clock())
    reported = [report.capacity_bytes for report in reports if report.capacity_bytes is not None]
    if not reported:
        return found
    # Each engine evicts what is above its own capacity, so the least of them counts.
    return replace(found, settings=found.settings.model_copy(update={"capacity_bytes": min(reported)}))


def _say_if_partial(index: Index, root: Root) -> None:
    if is_to_be_rebuilt(index, root.folder):
        said = "the index is partial until an engine, or kvtier index rebuild, has read the segments"
        print(f"{root.path}: {said}", file=sys.stderr)


def load_settings(config: Path | None) -> Settings:
    """Return the settings of a file; without one, those that the environment gives. Where it sets KVTIER_ROOT, they
    have the capacity of an engine that was started with this variable alone. Raises ConfigError, also for a disk that
    is full of other files, as an engine does."""
    return _with_measured_capacity(config, _load(config, {}), needs_room=True)


def _with_measured_capacity(config: Path | None, settings: Settings, *, needs_room: bool) -> Settings:
    """Return the settings with a share of the disk as capacity; the same object where a capacity is set, or where the
    settings are not those of KVTIER_ROOT. needs_room: raise ConfigError for a disk that is full of other files."""
    if config is not None or not has_root_variable():
        return settings
    measure = partial(with_default_capacity, settings, needs_room=needs_room)
    return in_time(settings.root, "measuring its free space", measure)


def _load(config: Path | None, overrides: dict[str, Any]) -> Settings:
    return Settings.load(overrides if config is None else {"config": str(config), **overrides})
