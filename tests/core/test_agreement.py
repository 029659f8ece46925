"""Whether index and segments agree, on a root where much does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier import agreement
from kvtier.index.memory import MemoryIndex
from kvtier.root import find_root, namespace_folders
from tests.core.test_capacity import BLOCKS, tiny, tokens_of


def test_folders_are_listed_once_for_each_look_however_many_sets_are_doubtful(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny(tmp_path, sets=8)
    for number in range(5):
        engine.save(tokens_of(number), BLOCKS)
    engine.close()
    listed: list[Path] = []

    def list_them(folder: Path) -> list[Path]:
        listed.append(folder)
        return namespace_folders(folder)

    monkeypatch.setattr(agreement, "namespace_folders", list_them)
    found = agreement.check_agreement(find_root(tmp_path), MemoryIndex(), wait=lambda seconds: None)
    assert found.n_disagreements == found.records == 25 and found.segments > 2
    assert {row.what for row in found.disagreements} == {"no segment set of the index"}
    assert len(listed) == 2
