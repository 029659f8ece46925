"""The page as `kvtier serve` serves it: its own policy, its real answers, a token."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.rig import Engine

TOKEN = "a-token-that-only-looks"


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    engine = Engine(tmp_path / "kv")
    engine.save(list(range(64 * 5)), list(range(20)))
    engine.close()
    config = tmp_path / "kvtier.yaml"
    tokens = f"admin_token: another-token-that-changes, read_token: {TOKEN}"
    config.write_text(f"root: {tmp_path / 'kv'}\nserver: {{port: 0, {tokens}}}\n")
    command = [sys.executable, "-m", "kvtier.cli", "serve", str(config)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        said = process.stderr.readline()
        found = re.search(r"http://\S+", said)
        assert found is not None, said
        yield found[0]
    finally:
        process.terminate()
        process.wait(20)


def test_the_page_shows_a_real_root(browser: Any, address: str) -> None:
    faults: list[str] = []
    page = browser.new_page()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if "Content Security" in message.text else None)
    page.goto(f"{address}/ui")
    page.wait_for_selector("#sign-in:not([hidden])")
    page.fill("#token", TOKEN)
    page.keyboard.press("Enter")
    page.wait_for_selector("#figures:not([hidden])")
    text = " ".join(page.inner_text("body").split())
    assert "No engine reports." in text and "embedded index" in text and "· admin" not in text
    assert page.locator("#namespaces tbody tr").count() == 1
    assert "of 64.0 GiB" in text and "NaN" not in text and "undefined" not in text
    assert faults == []
    page.context.close()
