"""The root folder of the file-system tier: opening it, and finding every fault of it before the engine starts (I8).

    <root>/v2/owner.json                        kvtier.storage.root_owner
    <root>/v2/notes/                            kvtier.eviction.pins_backup
    <root>/v2/index/                            the embedded index, where the root's file system is local
    <root>/v2/<namespace id>/namespace.json     the canonical JSON that the id is the hash of
    <root>/v2/<namespace id>/model.json         the name of the model, which is only shown
    <root>/v2/<namespace id>/*.kvseg            kvtier.format.record

Folders are 0700 and files 0600: KV tells what was said. The root's path may go through links; within it none is
followed.
"""

import errno
import json
import logging
import os
import re
import stat
import uuid
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

from kvtier.config.settings import Settings
from kvtier.config.types import unreadable_name
from kvtier.errors import ConfigError, Corrupt, TierUnavailable
from kvtier.format.geometry import PAGE_BYTES
from kvtier.format.namespace import Namespace
from kvtier.format.record import FORMAT_VERSION
from kvtier.runtime.file_descriptors import NO_DESCRIPTOR, close_file, limit_hint
from kvtier.runtime.units import exact
from kvtier.storage.atomic_files import SMALL_FILE_BYTES_MAX, create_once, read_small
from kvtier.storage.filesystem import FULL, FreeSpace, file_system_of, mounted_at
from kvtier.storage.root_owner import Node, Owner, claim, claim_shared, default_index_path, read_owner, this_node
from kvtier.storage.safe_open import NOT_ANSWERING, folder_within, hand_over, open_plain
from kvtier.storage.segments import KEPT_OPEN, SUFFIX

log = logging.getLogger("kvtier")

NAMESPACE_FILE = "namespace.json"
MODEL_FILE = "model.json"
MODEL_CHARS_MAX = 200
NOTES_FOLDER = "notes"

MACHINE_ROOT = Path("/")
CAPACITY_SHARE = 0.8  # capacity of a root that is given alone, fraction of the space that is free or its segments'
CAPACITY_UNIT = 1 << 30  # that capacity is rounded down to a multiple of this, bytes
_NAMESPACE_FOLDER = re.compile(r"[0-9a-f]{32}")
_VERSION_FOLDER = re.compile(r"v(\d+)")
# Names of temporary files: _try_to_write, segments.direct_io_works, atomic_files.
_LEFTOVER = re.compile(r"\.(write-test-[0-9a-f]{32}|direct-io-probe-[0-9a-f-]+|[^/]+\.json\.[0-9a-f]{32})")


@dataclass(frozen=True, slots=True)
class Root:
    """An opened root. folder: `<root>/v2`; index_path: folder of the embedded index, None for one in memory or in
    Redis. root_id: of a root with an index in Redis, else "". device, inode: of `folder`, when it was opened. node: who
    opened it."""

    path: Path
    folder: Path
    index_path: Path | None
    root_id: str = ""
    device: int = field(default=0, compare=False)
    inode: int = field(default=0, compare=False)
    node: Node | None = field(default=None, compare=False)


def open_root(settings: Settings, again: Root | None = None, *, needs_room: bool = True) -> Root:
    """Create the root, or check that it can be written, and claim it for this node. Raises ConfigError.

    again: the root as this process opened it before; if it has no claim any more, the earlier one is written again.
    needs_room: refuse a disk without room for a segment set. Commands that evict open a full root without it.
    """
    path = settings.root
    folder = path / f"v{FORMAT_VERSION}"
    try:
        check_mount(settings)
        _make_root(path)
        check_versions(path)
        _make_folder(folder)
        try:
            _try_to_write(folder)
        except OSError as error:
            if needs_room or error.errno not in FULL:  # without an inode no file can be made
                raise
        if needs_room:
            check_space(path, settings.rank_set_bytes_max)
        return _claim(settings, folder, again)
    except OSError as error:
        raise _config_error(path, error, settings.rank_set_bytes_max) from None


def _claim(settings: Settings, folder: Path, again: Root | None) -> Root:
    """Raises ConfigError, OSError."""
    path, found = settings.root, os.stat(folder)
    if settings.index.kind == "redis":
        root_id = claim_shared(folder, again.root_id if again else "")
        return Root(path, folder, None, root_id, found.st_dev, found.st_ino)
    index_path = None
    if settings.index.kind == "embedded":
        index_path = settings.index.path or default_index_path(path, folder)
    node = again.node if again and again.node else this_node()  # its name may change while an engine runs
    claim(folder, Owner(node, index_path))
    return Root(path, folder, index_path, "", found.st_dev, found.st_ino, node)


def open_again(settings: Settings, root: Root) -> None:
    """Check a root that was opened long ago, before a file is created in it. Waits for the file system without a limit.

    A missing root is created again, with all checks of a start, and a root without an owner is claimed again. But no
    file is created if the root's file system is not mounted any more, because it would fill another disk.

    Raises TierUnavailable in that case, if a start would be refused, if the root is another one by now, or if its
    folder cannot be examined. An owner.json that does not answer is ignored: one target of a striped file system may be
    away while the others answer."""
    try:
        check_mount(settings)
        is_gone = not _is_folder(root.folder)
        place = os.stat(nearest(root.path) if is_gone else root.folder)
    except (ConfigError, OSError) as fault:
        raise _unusable(root, fault) from fault
    # After a remount of the same file system the device number may differ, but the folder's inode does not.
    if place.st_dev != root.device and (is_gone or place.st_ino != root.inode):
        what = "gone, and so is" if is_gone else "another one by now, not on"
        fix = "mount that again, or start this engine anew"
        raise TierUnavailable(f"the root {root.path} is {what} the file system that it was on; {fix}")
    try:
        found = open_root(settings, root) if is_gone else _claim(settings, root.folder, root)
    except (ConfigError, OSError) as fault:
        if not is_gone and isinstance(fault, OSError) and fault.errno in NOT_ANSWERING:
            return  # the folder is the same, and at the start it was claimed by this process
        raise _unusable(root, fault) from fault
    if found != root:
        raise TierUnavailable(f"the root {root.path} is another one by now; start this engine anew")
    if is_gone:
        log.warning("the root %s was gone; it was made anew, and is empty", root.path)


def _unusable(root: Root, fault: ConfigError | OSError) -> TierUnavailable:
    if isinstance(fault, OSError) and fault.errno in NOT_ANSWERING:
        return TierUnavailable(f"the root {root.path} does not answer, and is asked again: {fault}")
    return TierUnavailable(f"the root cannot be used any more: {fault}")


def is_in_place(root: Root) -> bool:
    """Return True if the folder at the root's path is the root that was opened, or its replacement, and not the mount
    point of a file system that is away. A shared root is recognised by its id. Any other is recognised by its device or
    its folder's inode; a folder hidden by a mount of the same disk has these too."""
    try:
        if root.root_id:
            owner = read_owner(root.folder)
            return owner is not None and owner.root_id == root.root_id
        place = os.stat(root.folder)
    except (ConfigError, OSError):
        return False
    return place.st_dev == root.device or place.st_ino == root.inode


def find_root(path: Path) -> Root:
    """Find an existing root, to look at it. Writes nothing. Raises ConfigError when there is none at `path`."""
    folder = path.absolute() / f"v{FORMAT_VERSION}"  # what the owner says of the index is within it
    if fix := unreadable_name(path):
        raise ConfigError("root", str(path), fix)
    try:
        if not path.is_dir():
            fix = (
                "there is no such folder; name the one that `root` of the engines' settings says: their first start "
                "makes it"
            )
            raise ConfigError("root", str(path), fix)
        check_versions(path)
        if not _is_folder(folder):
            if os.path.lexists(folder):
                raise _config_error(path, NotADirectoryError(errno.ENOTDIR, "not a folder", str(folder)), 0)
            raise ConfigError(
                "root",
                str(path),
                f"not a root of kvtier: it has no folder {folder.name}; name the one that `root` of the engines' "
                "settings says: their first start fills it",
            )
        owner = read_owner(folder)
    except OSError as error:
        fix = squash_hint(error) or "; make it readable for this user"
        raise ConfigError("root", str(path), f"cannot be read: {error.strerror}{fix}") from None
    return Root(path.absolute(), folder, owner.index_path if owner else None, owner.root_id if owner else "")


def is_read_only(root: Root) -> bool:
    """Return whether the root is mounted read-only here. Raises OSError."""
    return bool(os.statvfs(root.folder).f_flag & os.ST_RDONLY)


def check_space(path: Path, needed_bytes: int) -> None:
    """Raises ConfigError unless the disk of the root at `path` has `needed_bytes` (on disk), free or in segments. Where
    there is no root yet, that is the disk on which it would be made.

    Segments count, because they can be evicted: a tier that has filled its disk must be able to start again. A disk
    without a free inode has no room, whatever is on it: a start creates files of its own.
    """
    space = FreeSpace.of(os.statvfs(nearest(path)))
    has_bytes = space.n_bytes >= needed_bytes or space.n_bytes + segments_bytes(path) >= needed_bytes
    if space.n_files == 0 or not has_bytes:
        raise _full(path, needed_bytes)


def check_reserve(path: Path, reserve_bytes: int, needed_bytes: int) -> None:
    """Raises ConfigError where the disk of the root at `path` is too small for what is left free for others
    (capacity.reserve_bytes) and `needed_bytes`."""
    disk = os.statvfs(nearest(path))
    total_bytes = disk.f_blocks * disk.f_frsize
    if reserve_bytes and reserve_bytes + needed_bytes > total_bytes:
        fix = (
            f"the root's disk has {exact(total_bytes)} in all, so no segment set ({exact(needed_bytes)}) could ever be "
            "made: lower it"
        )
        raise ConfigError("capacity.reserve_bytes", reserve_bytes, fix)


def check_mount(settings: Settings) -> None:
    """Raises ConfigError for a root on the machine's root file system where a mount is required; OSError where
    that cannot be determined. Where a file system is not mounted, its mount point is an empty folder, and
    writing there would fill the machine's own disk."""
    if not settings.require_mount:
        return
    place = nearest(settings.root)
    if os.stat(place).st_dev == os.stat(MACHINE_ROOT).st_dev or file_system_of(place).mount_point == "/":
        fix = (
            f"nothing is mounted there: {place} is on the machine's root file system, and require_mount is true; "
            "mount the file system that is meant, or set require_mount to false"
        )
        raise ConfigError("root", str(settings.root), fix)


def open_namespace(root: Root, namespace: Namespace, again: bool = False, model: str = "") -> Path:
    """Create or verify the folder of `namespace`, and return it. Raises ConfigError.

    again: this process did so before; a storage that does not answer now is no reason to refuse it. model: the name
    under which this engine serves the model; the folder keeps that of the first engine.
    """
    folder = root.folder / namespace.id.hex()
    try:
        _make_folder(folder)
        create_once(folder / NAMESPACE_FILE, namespace.canonical_json().encode())
    except OSError as error:
        if again and error.errno in NOT_ANSWERING:
            return folder
        raise _config_error(folder, error, PAGE_BYTES) from None
    read_namespace(folder)
    if model:
        with suppress(OSError):  # it is only shown
            create_once(folder / MODEL_FILE, json.dumps(model[:MODEL_CHARS_MAX]).encode())
    return folder


def model_name(folder: Path) -> str:
    """Return the name of the model whose KV a namespace's folder holds; "" where none can be read."""
    try:
        with folder_within(folder) as opened, open(open_plain(Path(MODEL_FILE), opened), "rb") as file:
            name = json.loads(file.read(SMALL_FILE_BYTES_MAX))  # an empty one is not waited for
    except (OSError, Corrupt, ValueError, RecursionError):
        return ""
    is_name = isinstance(name, str) and len(name) <= MODEL_CHARS_MAX and name.isprintable()
    return name if is_name else ""


def namespace_folders(folder: Path) -> list[Path]:
    """Return the folders of all namespaces in `<root>/v2`, also of those whose namespace.json is gone."""
    return sorted(path for path in folder.iterdir() if _NAMESPACE_FOLDER.fullmatch(path.name) and _is_folder(path))


def remove_leftovers(folder: Path, before_s: float) -> None:
    """Remove temporary files of processes that died, if they were last written before `before_s`. `folder`:
    `<root>/v2`. Files that cannot be removed stay."""
    for place in (folder.parent, folder, folder / NOTES_FOLDER, *namespace_folders(folder)):
        with suppress(OSError):
            for entry in os.scandir(place):
                with suppress(OSError):  # EBUSY: an NFS file that a process of this node has open
                    if _is_leftover(entry, before_s):
                        os.unlink(entry.path)


def _is_leftover(entry: os.DirEntry[str], before_s: float) -> bool:
    """Return True if no process can need the file any more.

    A node removes a removed segment that it has open (KEPT_OPEN) at the last close, so one that is left belongs to a
    node that crashed. Its ctime is the time of the removal, and no read takes as long as the grace time. If it were
    open somewhere, its reader would get ESTALE or go on, but never other bytes."""
    if not (_LEFTOVER.fullmatch(entry.name) or KEPT_OPEN.fullmatch(entry.name)):
        return False
    found = entry.stat(follow_symlinks=False)
    return max(found.st_mtime, found.st_ctime) < before_s


def read_namespace(folder: Path) -> Namespace:
    """Read `folder`'s namespace.json and verify it against the folder's name. Raises ConfigError."""
    path = folder / NAMESPACE_FILE
    try:
        with folder_within(folder) as opened:
            text = read_small(Path(NAMESPACE_FILE), opened).decode("ascii")
        namespace = Namespace.from_json(text)
        if namespace.id.hex() != folder.name:
            raise Corrupt(f"it describes namespace {namespace.id.hex()}")
    except OSError as error:
        fix = squash_hint(error) or "; make it readable for this user"
        raise ConfigError("root", str(path), f"cannot be read: {error.strerror}{fix}") from None
    except (Corrupt, UnicodeDecodeError) as fault:
        fix = (
            f"contradicts the name of its folder ({fault}), so the model of its KV is unknown; stop all engines "
            f"on this root and remove {folder}: it is a cache and will be filled again"
        )
        raise ConfigError("root", str(path), fix) from None
    return namespace


def check_namespace(root: Root, own: Namespace, namespace_id: bytes) -> None:
    """Check that a worker with namespace `own` may move KV of the namespace that its scheduler names.

    If they differ in more than the epoch, one of the two processes was started with other settings or weights, and its
    bytes would be misread. Positions are not compared: models complete the workers' copy of that configuration while
    they are built. Raises TierUnavailable.
    """
    if namespace_id == own.id:
        return
    try:
        found = read_namespace(root.folder / namespace_id.hex())
    except ConfigError as fault:
        raise TierUnavailable(f"namespace {namespace_id.hex()}: {fault}") from fault
    names = (field.name for field in fields(Namespace) if field.name not in ("epoch", "positions"))
    differing = [name for name in names if getattr(found, name) != getattr(own, name)]
    if differing:
        what = "; ".join(f"{name}: {getattr(found, name)}, here {getattr(own, name)}" for name in differing)
        fix = "give all processes of an engine the same kvtier settings, environment and weights"
        raise TierUnavailable(f"namespace {namespace_id.hex()} is of another {what}; {fix}")


def _make_root(path: Path) -> None:
    """Raises OSError; NotADirectoryError also when a file has the name. Raises ConfigError as `nearest`."""
    nearest(path)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(path)) from None


def _make_folder(path: Path) -> None:
    """Make a folder within the root. Raises OSError; NotADirectoryError also when a file or a link has the name."""
    try:
        path.mkdir(mode=0o700)
        hand_over(path)
    except FileExistsError:
        pass
    except OSError:
        if not os.path.lexists(path):  # NFS may refuse mkdir before it reports that the folder exists
            raise
    if not _is_folder(path):
        raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(path))


def _is_folder(path: Path) -> bool:
    """Return True for a folder, False for a link to one."""
    try:
        return stat.S_ISDIR(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def check_versions(path: Path) -> None:
    """Log folders of older formats. Raises ConfigError for one of a newer format."""
    versions = [int(match[1]) for entry in os.listdir(path) if (match := _VERSION_FOLDER.fullmatch(entry))]
    newest = max(versions, default=0)
    if newest > FORMAT_VERSION:
        fix = (
            f"holds {path / f'v{newest}'}, written by a newer kvtier (format {newest}; this one writes format "
            f"{FORMAT_VERSION}): upgrade kvtier, or choose another root"
        )
        raise ConfigError("root", str(path), fix)
    for version in sorted(version for version in versions if version < FORMAT_VERSION):
        older = path / f"v{version}"
        log.warning("%s has an older format and is not used: remove it to free its space", older)


def _try_to_write(folder: Path) -> None:
    """Raises OSError unless a file can be made, written and removed; a full disk is left to check_space."""
    path = folder / f".write-test-{uuid.uuid4().hex}"
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        error.filename = str(folder)  # users do not know the random name above
        raise
    try:
        os.write(descriptor, bytes(PAGE_BYTES))
        _flush(descriptor, folder)
    except OSError as error:
        if error.errno not in FULL:
            error.filename = str(folder)
            raise
    finally:
        close_file(descriptor)
        path.unlink()


def _flush(descriptor: int, folder: Path) -> None:
    """Flush a file. Raises OSError; ConfigError where the file system cannot do so, which other nodes rely on."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        fix = f"fsync is refused there ({file_system_of(folder)}: {error.strerror}); choose a root that can flush files"
        raise ConfigError("root", str(folder.parent), fix) from None


def nearest(path: Path) -> Path:
    """Return `path`, or the nearest existing folder above it. Raises ConfigError for a link to nothing in between."""
    for folder in (path, *path.parents):
        if folder.exists():
            break
        if folder.is_symlink():
            fix = f"{folder} is a link to {folder.readlink()}, which is not there; make that folder, or mount its disk"
            raise ConfigError("root", str(path), fix)
    return folder


def segments_bytes(path: Path) -> int:
    """Return the bytes that the segments of all namespaces take on disk. One that is removed during the call counts as
    0."""
    total = 0
    for segment in path.glob(f"v{FORMAT_VERSION}/*/*{SUFFIX}"):
        try:
            total += segment.lstat().st_blocks * 512
        except FileNotFoundError:
            continue
    return total


def with_default_capacity(settings: Settings, *, needs_room: bool = True) -> Settings:
    """Return the settings of a root that is given alone, as by KVTIER_ROOT: where capacity_bytes is not set, it is
    `default_capacity`. needs_room: refuse a disk without room for any segment; else its capacity is 0. Raises
    ConfigError, OSError."""
    if "capacity_bytes" in settings.model_fields_set:
        return settings
    capacity_bytes = default_capacity(settings.root)
    if needs_room and not capacity_bytes:
        raise _full(settings.root, settings.segment_bytes)
    return settings.model_copy(update={"capacity_bytes": capacity_bytes})


def default_capacity(root: Path) -> int:
    """Return CAPACITY_SHARE of what the root's file system has free and the root's segments take, in bytes.

    Segments count as free: otherwise the capacity would shrink with each start. Raises OSError.
    """
    free_bytes = FreeSpace.of(os.statvfs(nearest(root))).n_bytes
    capacity_bytes = int(CAPACITY_SHARE * (free_bytes + segments_bytes(root)))
    return capacity_bytes // CAPACITY_UNIT * CAPACITY_UNIT or capacity_bytes


def _full(path: Path, needed_bytes: int) -> ConfigError:
    disk = os.statvfs(nearest(path))
    space = FreeSpace.of(disk)
    found = file_system_of(path)
    if not disk.f_blocks and found.is_network:  # as MooseFS answers while its servers are away
        fix = (
            f"its storage ({found}) says that it has no space at all: its servers are away, or it does not tell what "
            "is free; start them, or choose another root"
        )
    elif not disk.f_blocks:
        fix = f"no files can be made there ({found.kind} has no room for any); choose another root"
    elif space.n_files == 0:
        free = exact(space.n_bytes)
        fix = f"its file system has no free inodes ({free} are free; df -i); remove files, or choose another root"
    elif space.n_bytes >= needed_bytes:
        fix = f"{space.why_full(needed_bytes)}; make room there, or choose another root"
    else:
        fix = (
            f"its disk is full: {exact(space.n_bytes)} are free, {exact(needed_bytes)} are needed; free some space, "
            "lower segment_bytes, or choose another root"
        )
    return ConfigError("root", str(path), fix)


def squash_hint(error: OSError) -> str:
    """Return what to do where a server refuses root, "" elsewhere: root_squash of NFS and Lustre maps it to a user who
    may do nothing."""
    if error.errno not in (errno.EACCES, errno.EPERM):
        return ""
    if os.geteuid():
        return "; run this as the engines' user, who must own the folder"
    return (
        "; root is refused, so the server maps it to another user (root_squash): make the folder on the server, chown "
        "it to the engines' user, and run this and the engines as that user"
    )


def unwritable(root: Path, place: Path) -> ConfigError:
    """Return the refusal of `place`, the root or a folder in or above it, to which this user may not write."""
    fix = "make it writable for this user"
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        fix = "mount it for writing"
    elif place.is_relative_to(root) and os.geteuid() not in (0, os.stat(place).st_uid):  # such folders are 0700
        fix = "run this as the engines' user, who must own the folder,"
    return ConfigError("root", str(root), f"not writable: {place}; {fix} or choose another root")


def _config_error(path: Path, error: OSError, needed_bytes: int) -> ConfigError:
    if error.errno in FULL:
        return _full(path, needed_bytes)
    if isinstance(error, NotADirectoryError):
        place = error.filename if os.path.lexists(error.filename) else nearest(Path(error.filename))
        what = "a link, and none is followed within a root" if os.path.islink(place) else "a file, not a folder"
        fix = f"{place} is {what}; choose another root"
    elif error.errno in NOT_ANSWERING:
        fix = (
            f"its storage does not answer: {error.strerror} ({error.filename}); mend the file system "
            f"({mounted_at(os.path.abspath(path))}), then start this again"
        )
    elif error.errno in NO_DESCRIPTOR:
        fix = f"{error.strerror}{limit_hint(error)}"
    else:
        how = "mount it for writing" if error.errno == errno.EROFS else "make it writable for this user"
        fix = f"not writable: {error.strerror} ({error.filename}); {how} or choose another root{squash_hint(error)}"
    return ConfigError("root", str(path), fix)
