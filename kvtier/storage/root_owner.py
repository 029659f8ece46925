"""Owner of a root and place of its index: `<root>/v2/owner.json`.

An index that lives on one node knows nothing of what others write or evict, so a root with such an index is one
node's alone. The first process writes the file, and later ones only if the machine was started again since:

    {"index_path": "index", "node": {"boot": "0c9f...", "host": "gpu-07", "machine": "5d1c..."}}

index_path: "index" for the one beside this file, which moves and is copied with the root; else absolute.

A node is recognised (`is_recognised`) under any host name, which changes with each pod:

1. by its boot id, which the kernel makes at each start: all containers of one host see the same one, and no other host;
2. else by its machine id: after a restart. Containers and machines of one image may have it in common on different
   hosts, but a local file system, in which the index stands beside the segments, is mounted on one of them at a time;
3. an index outside of the root (that is on a network file system) must also be there, or the host name the same: the
   path names another folder on another host, and in another container that does not mount it. After a restart it must
   be of the boot that the file names: another host of one image may have an index there, too, if it had the root once.

A root whose index all nodes reach belongs to none of them, and has an id by which that index knows it again:

    {"root_id": "9f2c..."}
"""

import json
import os
import socket
import stat
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from blake3 import blake3

from kvtier.errors import ConfigError
from kvtier.format.namespace import canonical_text
from kvtier.runtime.file_descriptors import NO_DESCRIPTOR, limit_hint
from kvtier.storage.atomic_files import create_once, read_small, replace_small
from kvtier.storage.filesystem import FULL, file_system_of

OWNER_FILE = "owner.json"
INSIDE = "index"
MACHINE_ID_FILE = Path("/etc/machine-id")
BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")
LOCAL_STATE = Path("/var/tmp")  # local to the node and kept over a reboot: for files that a network root must not hold

INDEX_STAMP = "boot-id"  # file in an embedded index's folder: its format, and the boot that it was made in


@dataclass(frozen=True, slots=True)
class Node:
    """machine: /etc/machine-id or one made up here once. host: its name. boot: the kernel's id of this start; "" in
    files of releases that did not write it, and where there is no /proc."""

    machine: str
    host: str
    boot: str = ""

    def __str__(self) -> str:
        return f"{self.host} ({self.machine})"


@dataclass(frozen=True, slots=True)
class Owner:
    """Content of owner.json. index_path: folder of the embedded index, None for another. node: None when all nodes
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
    """Return this machine's node. Raises ConfigError where it has no id and no place to keep one, or where this process
    may open no further file."""
    try:
        machine, boot = _id_in(MACHINE_ID_FILE), _id_in(BOOT_ID_FILE)
    except OSError as error:
        fix = f"this machine's id cannot be read: {error.strerror}{limit_hint(error)}"
        raise ConfigError("root", str(error.filename), fix) from None
    if not machine:
        path = private_folder() / "machine-id"
        try:
            machine = create_once(path, uuid.uuid4().hex.encode()).decode("ascii", "replace").strip()
        except OSError as error:
            raise ConfigError(
                "root", str(path), f"cannot keep an id of this node there: {error.strerror}; make it writable"
            ) from None
    return Node(machine, socket.gethostname(), boot)


def host_key() -> str:
    """Return a name of this machine for what was measured on it: all its pods have the same, whatever their host names.

    Machines of one image may share a machine id: what was measured on one of them is then used on all, until measured
    again. A container without the file has the boot id of its host.
    """
    with suppress(OSError):
        if known := _id_in(MACHINE_ID_FILE) or _id_in(BOOT_ID_FILE):
            return known
    return socket.gethostname()


def _id_in(path: Path) -> str:
    """Return the content of a file, "" where there is none. Raises OSError where this process may open no further file:
    an id that was made up instead would have the root refused once the file can be read again."""
    try:
        return path.read_bytes().decode("ascii").strip()
    except UnicodeDecodeError:
        return ""
    except OSError as error:
        if error.errno in NO_DESCRIPTOR:
            raise
        return ""


def is_recognised(folder: Path, theirs: Owner, node: Node | None) -> bool:
    """Return whether `folder` was claimed by the node that `node` is. The rule stands at the top of this module."""
    other = theirs.node
    if other is None or node is None:
        return other == node
    if not (other.machine == node.machine or (other.boot == node.boot and node.boot)):
        return False
    if _is_known_without_boot(folder, theirs, node):
        return True
    if theirs.index_path is None or not theirs.index_path.is_dir():
        return False
    is_of_theirs = other.boot in index_stamp(theirs.index_path).split()
    return is_of_theirs or not other.boot or other.boot == node.boot


def _is_known_without_boot(folder: Path, theirs: Owner, node: Node) -> bool:
    """Return whether rule 3 does not apply to this node, or its host name is the same."""
    is_inside = theirs.index_path in (None, folder / INSIDE)
    return is_inside or theirs.node is not None and (theirs.node.machine, theirs.node.host) == (node.machine, node.host)


def private_folder(user: int | None = None) -> Path:
    """Return a user's folder on the node's own disk, 0700. user: None for this one; another's only as root. Raises
    ConfigError when another user owns a folder of that name."""
    user = os.getuid() if user is None else user
    folder = LOCAL_STATE / f"kvtier-{user}"
    try:
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            os.chown(folder, user, -1, follow_symlinks=False)
        found = folder.lstat()
    except OSError as error:
        raise ConfigError("index.path", str(folder), f"cannot make this folder: {error}; set index.path") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user:
        raise ConfigError("index.path", str(folder), "this folder is another user's; set index.path to one of yours")
    if found.st_mode & 0o077:
        folder.chmod(0o700)  # made by hand, or under a lax umask
    return folder


def index_stamp(path: Path) -> str:
    """Return the stamp of the embedded index in `path`: format and boot; "" where there is none. Writes nothing."""
    try:
        return (path / INDEX_STAMP).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def default_index_path(root: Path, folder: Path) -> Path:
    """Return the path of the index: beside the segments in `folder` where processes of the node share memory maps of
    files, else on a local disk."""
    if not file_system_of(folder).is_network:
        return folder / INSIDE
    name = blake3(os.path.realpath(root).encode("utf-8", "surrogateescape")).hexdigest()[:16]
    # Root looks where the engines' user has it.
    user = os.stat(folder).st_uid if os.geteuid() == 0 and folder.exists() else None
    return private_folder(user) / "index" / name


def claim(folder: Path, mine: Owner) -> None:
    """Claim `folder` for this node, or check the claim that is there already. Raises ConfigError, OSError."""
    path = folder / OWNER_FILE
    theirs = _parse(path, create_once(path, mine.to_json(folder)))
    check_claim(folder, theirs, mine)
    assert theirs.node is not None and mine.node is not None
    has_new_index = mine.index_path is not None and theirs.index_path is None
    if has_new_index or theirs.node.boot != mine.node.boot:  # the next pod may be known by the boot alone
        try:
            replace_small(path, Owner(mine.node, mine.index_path or theirs.index_path).to_json(folder))
        except OSError as error:
            # A later start can write the boot id, and commands can evict until then. But where the boot id identifies
            # the node, owner.json must not keep the old one: the index will have the new one.
            if has_new_index or error.errno not in FULL or not _is_known_without_boot(folder, theirs, mine.node):
                raise


def check_claim(folder: Path, theirs: Owner, mine: Owner) -> None:
    """Raises ConfigError unless who says `mine` may use a folder of which owner.json says `theirs`. Writes nothing."""
    _check_node(folder, theirs, mine.node)
    if None not in (mine.index_path, theirs.index_path) and theirs.index_path != mine.index_path:
        fix = (
            f"the index of root {folder.parent} is in {theirs.index_path}; two indexes would not know of each other. "
            f"Set index.path to that, or, to move it, stop all engines on this root and remove {folder / OWNER_FILE}"
        )
        raise ConfigError("index.path", str(mine.index_path), fix)


def claim_shared(folder: Path, root_id: str = "") -> str:
    """Claim `folder` for all nodes, with that id or a new one, unless it is claimed already. Return the root's id.
    Raises ConfigError, OSError."""
    path = folder / OWNER_FILE
    mine = Owner(None, None, root_id or uuid.uuid4().hex)
    theirs = _parse(path, create_once(path, mine.to_json(folder)))
    check_shared(folder, theirs)
    return theirs.root_id


def check_shared(folder: Path, theirs: Owner) -> None:
    """Raises ConfigError for a folder whose owner.json says that one node has an index of its own for it."""
    if theirs.node is not None:
        path = folder / OWNER_FILE
        fix = (
            f"root {folder.parent} has an index of its own on node {theirs.node}. To share it through Redis, stop all "
            f"engines on it and remove {path}: the index in Redis is then made from the segments"
        )
        raise ConfigError("index.kind", "redis", fix)


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
    if not is_recognised(folder, theirs, node):
        fix = (
            f"it belongs to node {theirs.node}, and its index is there; this is {node}, of another machine id and "
            f"boot, or without that index. Give each node its own root, or all one index in Redis (index.kind: redis). "
            f"If that node is gone, or is this one under a new name, stop all engines on it and remove "
            f"{folder / OWNER_FILE}"
        )
        raise ConfigError("root", str(folder.parent), fix)


def read_owner(folder: Path) -> Owner | None:
    """Return the owner of `folder`; None while it is unclaimed. Raises ConfigError when the file is damaged."""
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
        of_node = values["node"]
        node = Node(str(of_node["machine"]), str(of_node["host"]), str(of_node.get("boot", "")))
        index_path = values["index_path"]
        if index_path is not None and index_path != INSIDE and not Path(index_path).is_absolute():
            raise ValueError
        if "\0" in (index_path or ""):
            raise ValueError
        if index_path == INSIDE and inside.is_symlink():
            fix = f"the index {inside} is a link out of the root; remove the link, or set index.path to where it leads"
            raise ConfigError("root", str(path.parent.parent), fix)
        return Owner(node, None if index_path is None else path.parent / index_path)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        fix = "this file is damaged; stop all engines on this root and remove it"
        raise ConfigError("root", str(path), fix) from None
