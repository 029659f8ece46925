"""The page as `kvtier serve` serves it: its own policy, its real answers, a token."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.process import running, write_config
from tests.server.serving import ADMIN, READER, fill


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    filled = fill(tmp_path / "kv")
    config = write_config(tmp_path, filled.path, admin_token=ADMIN, read_token=READER)
    with running(config) as served:
        yield served.address


def test_the_page_shows_a_real_root(browser: Any, address: str) -> None:
    faults: list[str] = []
    page = browser.new_page()
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda message: faults.append(message.text) if "Content Security" in message.text else None)
    page.goto(f"{address}/ui")
    page.wait_for_selector("#sign-in:not([hidden])")
    page.fill("#token", READER)
    page.keyboard.press("Enter")
    page.wait_for_selector("#figures:not([hidden])")
    text = " ".join(page.inner_text("body").split())
    assert "No engine reports." in text and "embedded index" in text and "· admin" not in text
    assert page.locator("#namespaces tbody tr").count() == 1
    assert "of 64.0 MiB" in text and "NaN" not in text and "undefined" not in text
    assert faults == []
    page.context.close()
