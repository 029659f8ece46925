"""benchmarks/scale.py with a few chunks: it finds all of them, in both kinds of index, and says what was asked."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import scale


def test_keys_are_those_that_were_published() -> None:
    published = [record.key for _, records in scale.records(600) for record in records]
    assert published == list(scale.keys_of(600)) and len(set(published)) == 600
    asked = scale.prompts(600)
    assert len(asked) == scale.RUNS and all(len(set(keys)) == scale.PROMPT_CHUNKS for keys in asked)
    assert {key for keys in asked for key in keys} <= set(published)


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="no redis-server")
def test_the_whole_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.json"
    assert scale.main(["--chunks", "1500", "--redis", "--folder", str(tmp_path), "--out", str(out)]) == 0
    systems = json.loads(out.read_text())["systems"]
    assert list(systems) == ["embedded, 1,000", "redis, 1,000", "embedded, 1,500", "redis, 1,500"]
    for name, found in systems.items():
        assert f"{found['chunks']:,}" == name.split(", ")[1]
        assert 0 < found["lookup"]["p50"] <= found["lookup"]["p99"] and found["ceiling"]["p50"] > 0
        assert min(found["publish_s"], found["first_lookup_s"], found["list_sets_s"]) > 0
        assert found.get("file_bytes", 0) + found.get("server_bytes", 0) > 100 * found["chunks"]
    assert "bytes a chunk" in capsys.readouterr().out
