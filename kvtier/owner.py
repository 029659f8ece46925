"""Whom a root belongs to, and where its index lies: `<root>/v1/owner.json`.

An index that lives on one node knows nothing of what others write or evict, so a root with such an index is one
node's alone. The file is written once, by whoever comes first:

    {"index_path": "index", "node": {"host": "gpu-07", "machine": "5d1c..."}}

index_path: "index" for the one beside this file, which moves and is copied with the root; else absolute.

A root whose index all nodes reach belongs to none of them, and has an id by which that index knows it again:

    {"root_id": "9f2c..."}
"""

from __future__ import annotations

import json
import os
import socket
import stat
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from blake3 import blake3

from kvtier.errors import ConfigError
from kvtier.identity import canonical_text
from kvtier.io.filesystem import file_system_of
from kvtier.once import create_once, read_small, replace_small

OWNER_FILE = "owner.json"
INSIDE = "index"
MACHINE_ID_FILE = Path("/etc/machine-id")
LOCAL_STATE = Path("/var/tmp")
"""Local to the node and kept over a reboot: for what must not lie under a network root."""


@dataclass(frozen=True, slots=True)
class Node:
    """machine: /etc/machine-id or one made up here once; host: its name (containers may share a machine id)."""

    machine: str
    host: str

    def __str__(self) -> str:
        return f"{self.host} ({self.machine})"


@dataclass(frozen=True, slots=True)
class Owner:
    """What owner.json says. index_path: folder of the embedded index, None for another. node: None when all nodes
    share the root; then it has a root_id."""

    node: Node | None
    index_path: Path | None
    root_id: str = ""

    def to_json(self, folder: Path) -> bytes:
        if self.node is None:
            return canonical_text({"root_id": self.root_id}).encode()
        is_inside = self.index_path == folder / INSIDE
        path = None if self.index_path is None else INSIDE if is_inside else str(self.index_path)
        return canonical_text({"node": asdict(self.node), "index_path": path}).encode()


def this_node() -> Node:
    """Raises ConfigError when there is neither a machine id nor a place to keep one."""
    try:
        machine = MACHINE_ID_FILE.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        machine = ""
    if not machine:
        path = private_folder() / "machine-id"
        try:
            machine = create_once(path, uuid.uuid4().hex.encode()).decode("ascii", "replace").strip()
        except OSError as error:
            raise ConfigError(
                "root", str(path), f"cannot keep an id of this node there: {error.strerror}; make it writable"
            ) from None
    return Node(machine, socket.gethostname())


def private_folder() -> Path:
    """This user's folder on the node's own disk, 0700. Raises ConfigError when somebody else has taken its name."""
    folder = LOCAL_STATE / f"kvtier-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError("index.path", str(folder), f"cannot make this folder: {error}; set index.path") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError("index.path", str(folder), "this folder is another user's; set index.path to one of yours")
    if found.st_mode & 0o077:
        folder.chmod(0o700)  # somebody made it by hand, or under a lax umask
    return folder


def default_index_path(root: Path, folder: Path) -> Path:
    """Beside the segments in `folder` where processes of the node share memory maps of files, else on a local disk."""
    if not file_system_of(folder).is_network:
        return folder / INSIDE
    name = blake3(os.path.realpath(root).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return private_folder() / "index" / name


def claim(folder: Path, mine: Owner) -> None:
    """Takes `folder` for this node, or agrees with the process of this node that did. Raises ConfigError, OSError."""
    path = folder / OWNER_FILE
    theirs = _parse(path, create_once(path, mine.to_json(folder)))
    _check_node(folder, theirs, mine.node)
    if mine.index_path is None or theirs.index_path == mine.index_path:
        return
    if theirs.index_path is not None:
        fix = (
            f"the index of root {folder.parent} lies in {theirs.index_path}; two would not know of each other. Set "
            f"index.path to that, or, to move it, stop all engines on this root and remove {path}"
        )
        raise ConfigError("index.path", str(mine.index_path), fix)
    replace_small(path, mine.to_json(folder))


def claim_shared(folder: Path, root_id: str = "") -> str:
    """Takes `folder` for all nodes, with that id or a new one, or agrees with whoever did; the root's id. Raises
    ConfigError, OSError."""
    path = folder / OWNER_FILE
    mine = Owner(None, None, root_id or uuid.uuid4().hex)
    theirs = _parse(path, create_once(path, mine.to_json(folder)))
    if theirs.node is not None:
        fix = (
            f"root {folder.parent} has an index of its own on node {theirs.node}. To share it through Redis, stop all "
            f"engines on it and remove {path}: the index in Redis is then made from the segments"
        )
        raise ConfigError("index.kind", "redis", fix)
    return theirs.root_id


def check_node(folder: Path) -> None:
    """Raises ConfigError when `folder` is claimed, and by another node than this one, or its claim is damaged."""
    theirs = read_owner(folder)
    if theirs is not None:
        _check_node(folder, theirs, this_node())


def _check_node(folder: Path, theirs: Owner, node: Node | None) -> None:
    if theirs.node is None:
        fix = (
            f"its index is in Redis: give the settings that say which (index.kind: redis, and index.url), to a command "
            f"as their file. Only to give it an index of this node for good: stop all engines on all nodes, and remove "
            f"{folder / OWNER_FILE}"
        )
        raise ConfigError("root", str(folder.parent), fix)
    if theirs.node != node:
        fix = (
            f"it belongs to node {theirs.node}, and its index lies there; this is {node}. Give each node its own "
            f"root. If that node is gone, or is this one under a new name, stop all engines on it and remove "
            f"{folder / OWNER_FILE}"
        )
        raise ConfigError("root", str(folder.parent), fix)


def read_owner(folder: Path) -> Owner | None:
    """Who `folder` belongs to; None when nobody has claimed it. Raises ConfigError when the file is damaged."""
    path = folder / OWNER_FILE
    try:
        return _parse(path, read_small(path))
    except FileNotFoundError:
        return None


def _parse(path: Path, content: bytes) -> Owner:
    inside = path.parent / INSIDE
    try:
        values = json.loads(content)
        if "root_id" in values:
            return Owner(None, None, str(values["root_id"]))
        node = Node(str(values["node"]["machine"]), str(values["node"]["host"]))
        index_path = values["index_path"]
        if index_path is not None and index_path != INSIDE and not Path(index_path).is_absolute():
            raise ValueError
        if "\0" in (index_path or ""):
            raise ValueError
        if index_path == INSIDE and inside.is_symlink():
            fix = f"the index {inside} is a link out of the root; remove the link, or set index.path to where it leads"
            raise ConfigError("root", str(path.parent.parent), fix)
        return Owner(node, None if index_path is None else path.parent / index_path)
    except (ValueError, KeyError, TypeError, RecursionError):
        fix = "this file is damaged; stop all engines on this root and remove it"
        raise ConfigError("root", str(path), fix) from None
