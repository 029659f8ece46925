"""A root's own index and its maintenance, for commands that need no settings."""

from __future__ import annotations

import os
import socket
import uuid

from kvtier.errors import ConfigError, IndexUnavailable
from kvtier.index.base import Index
from kvtier.index.lmdb.index import LmdbIndex
from kvtier.maintenance.sweeper import Housekeeper
from kvtier.storage.root import Root
from kvtier.storage.root_owner import is_recognised, read_owner, this_node


def open_embedded(root: Root) -> LmdbIndex:
    """Open the index, and create it if there is none. Raises ConfigError for a root whose index is of another kind or
    node, IndexUnavailable."""
    if root.index_path is None:
        raise ConfigError("index.path", None, f"root {root.path} has no embedded index: there is nothing to rebuild")
    owner = read_owner(root.folder)
    if owner is None or not is_recognised(root.folder, owner, this_node()):
        fix = f"the index of this root is on node {owner.node if owner else '?'}: run this there"
        raise ConfigError("index.path", str(root.index_path), fix)
    index = LmdbIndex(str(root.index_path))
    try:
        index.bind(root.folder)
    except (ConfigError, IndexUnavailable):
        index.close()
        raise
    return index


def housekeeper(index: Index, root: Root) -> Housekeeper:
    return Housekeeper(index, root.folder, f"cli/{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}")
