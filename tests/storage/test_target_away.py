"""A striped file system of which one target is away: what a root's small files do not say is no verdict on the root."""

import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, TierUnavailable
from kvtier.eviction.evictor import Evictor
from kvtier.eviction.limits import Need
from kvtier.index.base import SetInfo
from kvtier.index.lmdb.index import LmdbIndex
from kvtier.maintenance.scrub import stats, verify
from kvtier.maintenance.sweeper import Sweeper
from kvtier.plan import SaveOutcome
from kvtier.storage import atomic_files, segments
from kvtier.storage import root as root_module
from kvtier.storage.filesystem import FileSystem, Visibility
from kvtier.storage.root import NAMESPACE_FILE, find_root, open_again, open_namespace, open_root
from kvtier.storage.root_owner import OWNER_FILE
from kvtier.storage.segments import segment_name
from tests.eviction.test_capacity import BLOCKS as BLOCKS_OF_FIVE
from tests.eviction.test_capacity import tiny, tokens_of
from tests.support.rig import Engine, geometry, namespace, settings

TOKENS, BLOCKS = list(range(64 * 3)), list(range(12))
Away = Callable[..., None]


@pytest.fixture
def target_away(monkeypatch: pytest.MonkeyPatch) -> Away:
    """Has small files of these names fail to open, as where the target that they lie on is away."""

    def take_away(*names: str, number: int = errno.ESHUTDOWN) -> None:
        opened = atomic_files.open_plain

        def open_plain(path: str | Path, folder: int | None = None) -> int:
            if Path(path).name in names:
                raise OSError(number, os.strerror(number), str(path))
            return opened(path, folder)

        monkeypatch.setattr(atomic_files, "open_plain", open_plain)

    return take_away


def failing(stat: Callable[..., os.stat_result], path: str | Path, **options: object) -> os.stat_result:
    if os.path.basename(path) == "v2":
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
    return stat(path, **options)


@pytest.mark.parametrize("number", [errno.ESHUTDOWN, errno.EIO, errno.ETIMEDOUT])
def test_an_engine_goes_on_while_the_roots_own_files_cannot_be_read(
    tmp_path: Path, target_away: Away, number: int
) -> None:
    engine = Engine(tmp_path)
    target_away(OWNER_FILE, NAMESPACE_FILE, number=number)
    make_folder = engine.store._keeper._plan.make_folder
    make_folder(engine.namespace)
    engine.store._keeper.allocators.forget(engine.store._keeper.allocators.set_ids())
    assert {done.outcome for done in engine.save(TOKENS, BLOCKS)} == {SaveOutcome.SAVED}, "in a new set"
    assert engine.load(TOKENS, range(100, 112))[1][0].failed_blocks == frozenset()


def test_a_namespace_that_was_never_opened_is_not_taken_unread(tmp_path: Path, target_away: Away) -> None:
    root, space = open_root(settings(tmp_path)), namespace(geometry())
    open_namespace(root, space)
    target_away(NAMESPACE_FILE)
    with pytest.raises(ConfigError, match="namespace.json"):
        open_namespace(root, space)


def test_a_definite_answer_still_stops_it(tmp_path: Path, target_away: Away) -> None:
    given = settings(tmp_path)
    root = open_root(given)
    target_away(OWNER_FILE, number=errno.EACCES)
    with pytest.raises(TierUnavailable, match="cannot be used any more"):
        open_again(given, root)


def test_a_root_whose_folder_does_not_answer_is_not_called_unusable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = settings(tmp_path)
    root = open_root(given)

    def away(*args: object) -> bool:
        raise OSError(errno.EIO, "Input/output error", str(root.folder))

    monkeypatch.setattr(root_module, "_is_folder", away)
    with pytest.raises(TierUnavailable, match="does not answer, and is asked again: .*Input/output error"):
        open_again(given, root)


def test_a_start_during_a_restart_of_the_metadata_server_names_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on Lustre: mkdir says EEXIST, and the lstat after it fails. The log said "not writable: File exists"."""
    given = settings(tmp_path)
    open_root(given)
    for name in ("lstat", "stat"):
        monkeypatch.setattr(os, name, partial(failing, getattr(os, name)))
    with pytest.raises(ConfigError, match="does not answer: Input/output error.*start this again") as told:
        open_root(given)
    assert "File exists" not in str(told.value)


@pytest.fixture
def half_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[LmdbIndex, list[SetInfo], Path]:
    """An index, its sets, and a file of the oldest, of which neither status nor content can be read, as on Lustre
    while the file's OST is down."""
    engine = tiny(tmp_path, sets=8)
    for number in range(6):
        engine.save(tokens_of(number), BLOCKS_OF_FIVE)
    engine.close()
    index = LmdbIndex(str(tmp_path / "v2" / "index"))
    sets = [info for info in index.sets() if index.members(info.set_id)]
    (path,) = tmp_path.glob(f"v2/*/{segment_name(sets[0].set_id, 0)}")
    ask, read = os.lstat, segments._read_page

    def lstat(asked: Path) -> os.stat_result:
        if asked == path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return ask(asked)

    def read_page(fd: int, offset: int) -> bytes:
        if os.path.samestat(os.fstat(fd), path.stat()):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return read(fd, offset)

    monkeypatch.setattr(os, "lstat", lstat)
    monkeypatch.setattr(segments, "_read_page", read_page)
    monkeypatch.setattr(FileSystem, "visibility", Visibility.COHERENT)
    return index, sets, path


def test_sets_are_evicted_although_the_status_of_a_file_cannot_be_read(
    tmp_path: Path, half_away: tuple[LmdbIndex, list[SetInfo], Path]
) -> None:
    """No set was evicted, and so nothing saved in a full root, until the target was back."""
    index, sets, path = half_away
    evictor = Evictor(index, tmp_path / "v2", "me")
    need = Need(sets[0].n_bytes, sets[0].namespace)
    taken_bytes = index.counts().n_bytes
    evictor.make_room(need, taken_bytes)
    assert evictor.make_room(need, taken_bytes) is not None
    assert not path.exists() and {info.set_id for info in index.sets()}.isdisjoint({sets[0].set_id})


def test_a_sweep_and_verify_go_on_although_the_status_of_a_file_cannot_be_read(
    tmp_path: Path, half_away: tuple[LmdbIndex, list[SetInfo], Path]
) -> None:
    index, sets, path = half_away
    sweeper = Sweeper(index, tmp_path / "v2", "me")
    sweeper.sweep()
    assert sweeper.swept_s() and {info.set_id for info in sets} <= {info.set_id for info in index.sets()}
    root = find_root(tmp_path)
    assert {finding.segment for finding in verify(root, index).bad} == {path.name}
    found = stats(root, index)  # it counted the set as 0 bytes without a word
    assert found.n_bytes < index.counts().n_bytes
    assert len(found.unreadable) == 1 and "the files of 1 segment set cannot be read" in found.unreadable[0]


def test_a_sweep_leaves_a_set_with_an_unreadable_status_to_a_later_one(
    tmp_path: Path, half_away: tuple[LmdbIndex, list[SetInfo], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a local file system, and where the index has lost the set's records: it was measured as smaller, and a
    set without records was removed with its files."""
    index, sets, path = half_away
    monkeypatch.setattr(FileSystem, "visibility", Visibility.LOCAL)
    n_bytes = index.counts().n_bytes
    Sweeper(index, tmp_path / "v2", "me").sweep()
    assert index.counts().n_bytes == n_bytes
    for key, place in index.members(sets[0].set_id):
        index.retract(key, place)
    Sweeper(index, tmp_path / "v2", "me").sweep()
    assert path.exists() and sets[0].set_id in {info.set_id for info in index.sets()}
