"""The benchmark of stripes runs, and leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

from benchmarks.stripes import write_rate


def test_records_are_written_and_removed(tmp_path: Path) -> None:
    assert write_rate(tmp_path, stripes=4, threads=2, slab_bytes=4096, n_bytes=64 * 9 * 4096) > 0
    assert not list(tmp_path.iterdir())
