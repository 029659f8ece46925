"""Sources of settings: YAML files, merging by precedence, and the names of keys in messages."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from kvtier.config.kv_transfer import ROOT_VARIABLE
from kvtier.errors import ConfigError

ENV_PREFIX = "KVTIER_"
CONNECTOR = "connector config"


@dataclass(frozen=True, slots=True)
class SettingsSource:
    """One source: its name, and its values, nested as they were given."""

    name: str
    values: Mapping[str, Any]

    def describe(self, path: tuple[str, ...]) -> str:
        """Name the key as this source spells it, for messages."""
        if self.name == "environment":
            return f"environment variable {ENV_PREFIX}{'__'.join(path).upper()}"
        return self.name + self.written(path)

    def written(self, path: tuple[str, ...]) -> str:
        """Spell a nested key as it is written in this source: a dotted name cannot be pasted there."""
        if len(path) < 2 or self.name == "environment":
            return ""
        if self.name == CONNECTOR:
            return ", written " + "".join(f'{{"{name}": ' for name in path) + "..." + "}" * len(path)
        return ", written " + ": {".join(path) + ": ..." + "}" * (len(path) - 1)

    def holds(self, path: tuple[str, ...]) -> bool:
        """Return whether this source sets the key."""
        values: object = self.values
        for name in path:
            if not isinstance(values, Mapping) or name not in values:
                return False
            values = values[name]
        return True


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two trees of values, key by key at every depth. `over` wins."""
    both = dict(base)
    for name, value in over.items():
        below = both.get(name)
        both[name] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return both


class _YamlLoader(yaml.SafeLoader):
    """Loader that refuses a key given twice, of which YAML would silently take the last, and an alias of a list or
    mapping, which can expand to gigabytes or contain itself."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        if is_alias and isinstance(node, yaml.CollectionNode):
            raise yaml.composer.ComposerError(
                None, None, "an alias of a list or mapping: write it out", node.start_mark
            )
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key for key, _ in node.value]
        names = [self.construct_object(key, deep=True) for key in keys]
        for number, name in enumerate(names):
            first = names.index(name)
            if first < number:
                what = f"key {name!r} stands twice, in line {keys[first].start_mark.line + 1} and"
                raise yaml.constructor.ConstructorError(None, None, what, keys[number].start_mark)
        return super().construct_mapping(node, deep)


def read_yaml(path: object, namer: str) -> Mapping[str, Any]:
    """Return the mapping in a settings file. `namer`: the setting that named the file, for the message."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(namer, path, "must be the path of a YAML file")
    if path == "":
        raise ConfigError(namer, path, "it is empty: name a settings file, or unset it")
    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.load(file, _YamlLoader)
    except IsADirectoryError:
        root = shlex.quote(os.path.abspath(path))
        fix = (
            "it is a folder: name a YAML file with settings; a root alone is named by a variable instead, as in "
            f"`{ROOT_VARIABLE}={root} kvtier check`, and `kvtier doctor {root}` examines it"
        )
        raise ConfigError(namer, str(path), fix) from None
    except OSError as error:
        raise ConfigError(namer, str(path), f"cannot read this settings file: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        # PyYAML lets out what its own constructors raise, of a date that is none, say.
        raise ConfigError(namer, str(path), f"not a YAML file: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise ConfigError(namer, str(path), "the file must be a mapping of settings, as in configs/default.yaml")
    return values
