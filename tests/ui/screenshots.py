"""Screenshots of the README: `python -m tests.ui.screenshots [FOLDER]`, server/screenshots by default.

Their figures are invented.
"""

import sys
from pathlib import Path
from typing import Any

from tests.ui.conftest import CHROMIUM
from tests.ui.double import Service, served
from tests.ui.overview import busy, history

WIDTH, HEIGHT = 1400, 1075


def take(browser: Any, folder: Path) -> list[Path]:
    found = []
    with served(Service(busy(), history())) as service:
        for scheme in ("light", "dark"):
            size = {"width": WIDTH, "height": HEIGHT}
            context = browser.new_context(color_scheme=scheme, viewport=size, timezone_id="UTC")
            page = context.new_page()
            page.goto(service.url)
            page.wait_for_selector("#workers tbody tr")
            page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
            found.append(folder / f"dashboard-{scheme}.png")
            page.screenshot(path=found[-1])
            context.close()
    return found


if __name__ == "__main__":
    from playwright.sync_api import sync_playwright

    target = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parents[2] / "server" / "screenshots")
    target.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        for path in take(playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"]), target):
            print(path)
