"""A root's own index, for commands that also work without the engines' settings."""

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

from kvtier.cli.progress import progress
from kvtier.config.index import IndexSettings
from kvtier.errors import ConfigError, IndexUnavailable
from kvtier.index.base import Index, new_owner
from kvtier.index.lmdb.index import LmdbIndex, is_of_this_boot
from kvtier.index.memory import MemoryIndex
from kvtier.index.open import closed_on_fault
from kvtier.maintenance.sweeper import Sweeper
from kvtier.storage.root import Root
from kvtier.storage.root_owner import is_recognised, read_owner, this_node


def open_embedded(root: Root, settings: IndexSettings) -> LmdbIndex:
    """Open the index, and create it if there is none. Raises ConfigError for a root whose index is of another kind or
    node, IndexUnavailable."""
    if root.index_path is None:
        raise ConfigError("index.path", None, f"root {root.path} has no embedded index: there is nothing to rebuild")
    owner = read_owner(root.folder)
    if owner is None or not is_recognised(root.folder, owner, this_node()):
        fix = f"the index of this root is on node {owner.node if owner else '?'}: run this there"
        raise ConfigError("index.path", str(root.index_path), fix)
    index = LmdbIndex(str(root.index_path), settings.map_bytes, settings.timeout_s)
    with closed_on_fault(index):
        index.bind(root.folder)
    return index


def sweeper(index: Index, root: Root) -> Sweeper:
    return Sweeper(index, root.folder, new_owner("cli/"))


@contextmanager
def readable_index(root: Root, settings: IndexSettings) -> Iterator[Index]:
    """Yield the root's index; if there is none here or it is empty, one in memory, made from the record headers."""
    embedded = _embedded_index(root, settings)
    if not isinstance(embedded, str):
        with closing(embedded):
            yield embedded
        return
    print(f"{embedded}; reading the headers of all records instead", file=sys.stderr)
    memory = MemoryIndex()
    with progress("reading headers", "segments") as show:
        sweeper(memory, root).rebuild(show)
    yield memory


def _embedded_index(root: Root, settings: IndexSettings) -> Index | str:
    """Return the root's own index, or the reason if it is not here, cannot be opened or is empty."""
    why = "no index of this root here"
    if root.index_path is None or not is_of_this_boot(root.index_path):  # one of another boot would be emptied
        return why
    try:
        index = open_embedded(root, settings)
    except (ConfigError, IndexUnavailable, OSError) as fault:
        return str(fault)
    try:
        if not index.was_reset:
            index.counts()
            return index
    except IndexUnavailable as fault:
        why = str(fault)
    index.close()
    return why
