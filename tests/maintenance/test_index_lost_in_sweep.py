"""The index forgets everything while a sweep is under way. The sweep knows sets from before and finds no record of
theirs any more: it took them for empty, and unlinked segments full of records. Found by `tests.simulation`."""

from pathlib import Path

from kvtier.index.lmdb.index import LmdbIndex
from kvtier.index.memory import MemoryIndex
from kvtier.maintenance.sweeper import Sweeper
from tests.support.rig import saved_by_another

TOKENS, BLOCKS = list(range(1000, 1000 + 64 * 5)), list(range(20))


class Forgetful:
    """The root's index, until `forget`; a new, empty one from then on."""

    def __init__(self, index: LmdbIndex) -> None:
        self.index: LmdbIndex | MemoryIndex = index

    def forget(self) -> None:
        self.index = MemoryIndex()

    def __getattr__(self, name: str) -> object:
        return getattr(self.index, name)


def test_sets_that_a_lost_index_knew_keep_their_segments(tmp_path: Path) -> None:
    saved_by_another(tmp_path, TOKENS, BLOCKS)
    segments = sorted(tmp_path.glob("v2/*/*.kvseg"))
    index = Forgetful(LmdbIndex(str(tmp_path / "v2" / "index")))

    class ForgetsMeanwhile(Sweeper):
        def _next_closed(self, known: dict[int, object]) -> set[int]:  # type: ignore[override]
            index.forget()
            return set(known)

    ForgetsMeanwhile(index, tmp_path / "v2", "sweeper").sweep()  # type: ignore[arg-type]
    assert sorted(tmp_path.glob("v2/*/*.kvseg")) == segments and segments
    Sweeper(index, tmp_path / "v2", "sweeper").rebuild()  # type: ignore[arg-type]
    index.rebuilt(index.loss())  # type: ignore[operator]
    assert index.counts().chunks == 5  # type: ignore[operator]


def test_a_set_that_is_closed_early_keeps_the_records_of_its_segments(tmp_path: Path) -> None:
    """The set was found without records, and its files were truncated to nothing before the rebuild read them."""
    saved_by_another(tmp_path, TOKENS, BLOCKS)
    index = Forgetful(LmdbIndex(str(tmp_path / "v2" / "index")))
    (info,) = index.sets()  # type: ignore[operator]
    index.take_over = lambda set_id: index.forget()  # type: ignore[attr-defined]
    sweeper = Sweeper(index, tmp_path / "v2", "sweeper")  # type: ignore[arg-type]
    sweeper.close_early(info.set_id)
    sweeper.rebuild()
    assert index.counts().chunks == 5  # type: ignore[operator]
