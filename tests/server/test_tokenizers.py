"""Which tokenizer an engine says that it uses is read in the index: whatever stands there, none can be had is the
answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtier.admin.prompts import TOKENIZER_FILE, NoTokenizer, _tokenizer

pytest.importorskip("huggingface_hub")
pytest.importorskip("tokenizers")


@pytest.mark.parametrize("name", ["./models/of/mine", "a/b/c", "..", "a//b", "/nowhere", "no/such-model", "\0"])
def test_a_name_that_is_none(name: str) -> None:
    with pytest.raises(NoTokenizer):
        _tokenizer(name)


@pytest.mark.parametrize("content", [b"", b"\xff", b"[" * 200_000], ids=["nothing", "no text", "deep"])
def test_a_file_that_is_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / TOKENIZER_FILE).write_bytes(content)
    with pytest.raises(NoTokenizer, match="cannot be read"):
        _tokenizer(str(tmp_path))
