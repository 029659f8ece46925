"""The dashboard in headless Chromium: what it shows of an overview, and what when there is none."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.ui.double import UI, Raw, Service, served
from tests.ui.overview import busy, history, idle
from tests.ui.screenshots import take

PROBES = (Path(__file__).parent / "probes.js").read_text()
NOON = datetime(2026, 11, 23, 12)


@pytest.fixture
def service() -> Iterator[Service]:
    with served(Service(busy(), history())) as found:
        yield found


class Opened:
    """A page of the dashboard whose time stands still until `wait`. faults: what the browser complained of."""

    def __init__(self, browser: Any, service: Service, **context: Any) -> None:
        self.context = browser.new_context(timezone_id="UTC", **context)
        self.page = self.context.new_page()
        self.faults: list[str] = []
        self.urls: list[str] = []
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", self._console)
        self.page.on("request", lambda request: self.urls.append(request.url))
        self.page.clock.install(time=NOON)
        self.page.clock.pause_at(NOON + timedelta(hours=1))  # else time goes on as it does outside
        self.page.goto(service.url)

    def _console(self, message: Any) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.faults.append(message.text)

    def wait(self, seconds: float) -> None:
        self.page.clock.run_for(int(seconds * 1000))

    def text(self, selector: str) -> str:
        return " ".join(self.page.inner_text(selector).split())

    def probe(self, name: str, argument: object = None) -> Any:
        """What one of probes.js finds. Its scripts come from the test, so the page's policy does not hold for them."""
        return self.page.evaluate(f"(argument) => ({PROBES}).{name}(argument)", argument)

    def shows_figures(self) -> Opened:
        self.page.wait_for_selector("#figures:not([hidden])", timeout=60_000)
        return self


@pytest.fixture
def opened(browser: Any, service: Service) -> Iterator[Opened]:
    found = Opened(browser, service).shows_figures()
    yield found
    found.context.close()
    assert found.faults == []


@pytest.fixture(scope="module")
def shared(browser: Any) -> Iterator[Opened]:
    """One page for the tests that change nothing that another one looks at: opening one takes seconds."""
    with served(Service(busy(), history())) as service:
        found = Opened(browser, service).shows_figures()
        yield found
        found.context.close()
    assert found.faults == []


def test_it_shows_what_the_service_knows(shared: Opened) -> None:
    overview = busy()
    tiles = shared.text("#tiles")
    assert f"Hit ratio {overview.rates.hit_ratio or 0:.1%}".replace("%", " %") in tiles
    assert "62.1 GB/s 34.0 % of the ceiling from files" in tiles and "85.5 % 17.1 TiB of 20.0 TiB" in tiles
    tiers = shared.text("#tiers")
    assert "GPU memory (hbm) 12.0 GiB of 20.0 GiB (60.0 %)" in tiers and "922 GiB pinned" in tiers
    assert "evicts above 95.0 % down to 85.0 %" in tiers
    assert shared.page.locator("#workers tbody tr").count() == 5
    skipped, errors = shared.page.locator("#workers tbody tr:nth-child(3) td").all_inner_texts()[-3:-1]
    assert (skipped, errors) == ("3,612", "2"), "without the chunks that others had saved"
    assert shared.page.locator("#prefixes tbody tr").count() == 9 and "pinned" in shared.text("#prefixes tbody")
    assert "search 4,120 3.9 TiB of 4.0 TiB" in shared.text("#tenants")
    assert "Lookup in the index 45,600 1.40 ms 4.13 ms 4.93 ms" in shared.text("#latencies")
    assert "ceiling of the storage 148 GB/s" in shared.page.text_content("#throughput svg.chart")
    assert "/mnt/lustre/kvtier · redis index · version 0.1.0" in shared.text("#deployment")
    assert shared.page.locator("#notices .notice").count() == 0


def test_it_stays_live_and_keeps_its_history(opened: Opened, service: Service) -> None:
    line = "#hits path.line"
    before = opened.page.get_attribute(line, "d")
    changed = busy().model_copy(update={"at_s": busy().at_s + 5, "workers": busy().workers[:2]})
    service.answers["overview"] = changed
    opened.wait(5)
    opened.page.wait_for_function("() => document.querySelectorAll('#workers tbody tr').length === 2")
    assert opened.page.get_attribute(line, "d") != before
    assert service.asked.count("/api/v1/history") == 1 and service.asked.count("/api/v1/overview") == 2
    opened.page.click("#pause")
    opened.wait(60)
    assert service.asked.count("/api/v1/overview") == 2 and opened.text("#live-text") == "paused"


def test_nothing_is_asked_of_others(shared: Opened) -> None:
    own = shared.page.url.removesuffix("ui/")
    assert [url for url in shared.urls if not url.startswith(own)] == []
    for path in UI.iterdir():
        hosts = set(re.findall(r"https?://[\w.-]+", path.read_text())) - {"http://www.w3.org"}
        assert not hosts, path.name
        assert " style=" not in path.read_text() and "innerHTML" not in path.read_text(), path.name


EVIL = "\"'><img src=x onerror=alert(1)>"


def with_texts(value: Any, text: str) -> Any:
    """Every text in it replaced, but for the tiers' names, which no stranger chooses."""
    if isinstance(value, dict):
        return {key: below if key == "tier" else with_texts(below, text) for key, below in value.items()}
    if isinstance(value, list):
        return [with_texts(below, text) for below in value]
    return text if isinstance(value, str) else value


def test_text_from_the_index_is_text(browser: Any) -> None:
    overview = busy().model_dump(mode="json")
    unreadable = overview["namespaces"][0] | {"is_readable": False}
    overview["namespaces"].append(unreadable)
    with served(Service(Raw(with_texts(overview, EVIL)), history())) as service:
        found = Opened(browser, service).shows_figures()
        for place in ("#workers", "#namespaces", "#tenants", "#prefixes", "#deployment"):
            assert EVIL[:12] in found.text(place), place
        assert found.page.locator("img").count() == 0 and found.faults == []
        found.context.close()


def test_long_names_do_not_make_the_page_scroll_sideways(browser: Any) -> None:
    overview = with_texts(busy().model_dump(mode="json"), "n" * 200)
    with served(Service(Raw(overview), history())) as service:
        found = Opened(browser, service, viewport={"width": 390, "height": 800}).shows_figures()
        assert found.page.evaluate("() => document.documentElement.scrollWidth") <= 390
        assert found.probe("outside") == []
        found.context.close()


# --- for everybody ---


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("overview", [busy(), idle()], ids=["busy", "idle"])
def test_all_text_has_enough_contrast(browser: Any, scheme: str, overview: Any) -> None:
    with served(Service(overview, history(0 if not overview.workers else 50))) as service:
        found = Opened(browser, service, color_scheme=scheme).shows_figures()
        rows = found.probe("contrasts")
        found.context.close()
    assert len(rows) > 40
    assert [row for row in rows if row[1] < (3 if row[2] else 4.5)] == []


def test_the_colours_can_be_chosen(opened: Opened) -> None:
    def page_colour() -> str:
        return str(opened.page.evaluate("() => getComputedStyle(document.body).backgroundColor"))

    colours = {}
    for _ in range(3):
        colours[opened.text("#theme")] = page_colour()
        opened.page.click("#theme")
    assert colours["Auto"] == colours["Light"] != colours["Dark"]
    opened.page.click("#theme")
    opened.page.reload()
    opened.shows_figures()
    assert opened.text("#theme") == "Light"


@pytest.mark.parametrize("width", [320, 390, 768, 1024])
def test_no_width_makes_the_page_scroll_sideways(browser: Any, service: Service, width: int) -> None:
    found = Opened(browser, service, viewport={"width": width, "height": 800}).shows_figures()
    assert found.page.evaluate("() => document.documentElement.scrollWidth") <= width
    assert found.probe("outside") == []
    found.context.close()


def test_all_of_it_works_by_keyboard(shared: Opened) -> None:
    shared.page.evaluate("() => { document.activeElement.blur(); document.querySelector('.skip').focus(); }")
    seen = [shared.probe("focused")]
    for _ in range(24):
        shared.page.keyboard.press("Tab")
        seen.append(shared.probe("focused"))
    assert seen[:3] == ["skip", "pause", "theme"]
    assert {name.split(" from ")[0] for name in seen if " from " in name} == {
        "Throughput",
        "Hit ratio",
        "Time to first token saved",
        "Eviction",
    }
    assert any(name.startswith("copy ") for name in seen)


def test_arrows_move_a_charts_cursor(shared: Opened) -> None:
    chart = shared.page.locator("#hits svg.chart")
    chart.focus()
    latest = shared.text("#hits .legend")
    shared.page.keyboard.press("Home")
    first = history().points[0]
    assert f"{first.hit_ratio:.1%}".replace("%", " %") in shared.text("#hits .legend") != latest
    assert chart.get_attribute("aria-valuenow") == "0" and ":" in (chart.get_attribute("aria-valuetext") or "")
    shared.page.keyboard.press("ArrowRight")
    assert chart.get_attribute("aria-valuenow") == "1"
    shared.page.keyboard.press("Escape")
    assert shared.text("#hits .legend") == latest


def test_each_control_and_picture_has_a_name(shared: Opened) -> None:
    assert shared.probe("nameless") == []


# --- when there is nothing to show, or nobody to ask ---


def test_an_empty_root_is_said_to_be_empty(browser: Any) -> None:
    with served(Service(idle(), history(0))) as service:
        found = Opened(browser, service).shows_figures()
        notices = found.text("#notices")
        assert "The index is being rebuilt." in notices and "No engine reports." in notices
        for place, text in (
            ("workers", "No engine reports"),
            ("prefixes", "No prefix"),
            ("tenants", "Nothing is stored"),
        ):
            assert text in found.text(f"#{place}") and not found.page.is_visible(f"#{place} table")
        assert "no ceiling" in found.text("#throughput") and "Nothing has been seen yet." in found.text("#hits")
        assert "NaN" not in found.text("main") and "undefined" not in found.text("main")
        assert found.faults == []
        found.context.close()


def test_a_token_is_asked_for_and_kept_in_the_tab_only(browser: Any) -> None:
    with served(Service(busy(), history(), token="the-right-one")) as service:
        found = Opened(browser, service)
        found.page.wait_for_selector("#sign-in:not([hidden])")
        assert not found.page.is_visible("#figures") and found.text("#token-fault") == ""
        found.page.fill("#token", "a wrong one")
        found.page.keyboard.press("Enter")
        found.page.wait_for_function("() => document.querySelector('#token-fault').textContent !== ''")
        assert found.page.evaluate("() => sessionStorage.length") == 0
        found.page.fill("#token", "the-right-one")
        found.page.keyboard.press("Enter")
        found.shows_figures()
        assert found.probe("stored") == [["the-right-one"], [], ""]
        found.page.reload()
        found.shows_figures()
        assert "gpu-01" in found.page.content()
        found.page.click("#sign-out")
        found.page.wait_for_selector("#sign-in:not([hidden])")
        assert not found.page.is_visible("#figures") and found.text("#token-fault") == ""
        assert found.probe("stored")[0] == [] and "gpu-01" not in found.page.content()
        assert found.faults == []
        found.context.close()


def test_a_token_that_no_header_can_have_is_a_wrong_one(browser: Any) -> None:
    """It was kept, and the page said that the service does not answer, even when it was loaded anew."""
    with served(Service(busy(), history(), token="the-right-one")) as service:
        found = Opened(browser, service)
        found.page.wait_for_selector("#sign-in:not([hidden])")
        found.page.fill("#token", "schl\u00fcssel-\u20ac")
        found.page.keyboard.press("Enter")
        found.page.wait_for_function("() => document.querySelector('#token-fault').textContent !== ''")
        assert found.probe("stored")[0] == [] and found.page.locator(".notice").count() == 0
        found.page.reload()
        found.page.wait_for_selector("#sign-in:not([hidden])")
        found.context.close()


def test_who_may_not_look_without_a_token_is_not_asked_for_one(browser: Any, service: Service) -> None:
    """As behind a proxy that changes the name: the service has no tokens, and none would help."""
    service.answers["overview"] = (403, "this request comes from another site's page")
    found = Opened(browser, service)
    found.page.wait_for_selector(".notice.bad")
    assert "another site's page" in found.text("#notices") and not found.page.is_visible("#sign-in")
    found.context.close()


def test_an_answer_that_the_page_cannot_show_is_said_and_asked_for_again(opened: Opened, service: Service) -> None:
    good = service.answers["overview"]
    service.answers["overview"] = Raw({"at_s": 1})
    opened.wait(5)
    opened.page.wait_for_selector(".notice.bad")
    assert "cannot show" in opened.text("#notices") and opened.text("#live-text") == "no answer"
    service.answers["overview"] = good
    opened.wait(5)
    opened.page.wait_for_function("() => document.querySelectorAll('.notice').length === 0")
    assert len(opened.faults) == 1 and "TypeError" in opened.faults.pop()


def test_figures_stay_while_the_index_is_down_and_are_called_old(opened: Opened, service: Service) -> None:
    good = service.answers["overview"]
    service.answers["overview"] = (503, "the index does not answer")
    opened.wait(5)
    opened.page.wait_for_selector(".notice.bad")
    assert "The index does not answer." in opened.text("#notices") and "The figures are those of" in opened.text(
        "#notices"
    )
    assert opened.text("#live-text") == "no answer" and opened.page.locator("#workers tbody tr").count() == 5
    service.answers["overview"] = good
    opened.page.click(".notice.bad button")
    opened.page.wait_for_function("() => document.querySelectorAll('.notice').length === 0")
    assert opened.text("#live-text").startswith("live")


def test_a_service_that_fails_from_the_start_is_asked_again_less_and_less(browser: Any, service: Service) -> None:
    good = service.answers["overview"]
    service.answers["overview"] = (500, "something broke")
    found = Opened(browser, service)
    found.page.wait_for_selector(".notice.bad")
    assert "No figures. something broke." in found.text("#notices")
    for turn, asked in enumerate((2, 2, 3)):
        is_next = service.asked.count("/api/v1/overview") < asked
        service.answers["overview"] = (500, f"fault {turn}")
        found.wait(5)
        if is_next:  # it sets the next time as it shows the answer
            found.page.locator("#notices", has_text=f"fault {turn}").wait_for()
        assert service.asked.count("/api/v1/overview") == asked
    service.answers["overview"] = good
    found.wait(20)
    found.shows_figures()
    found.context.close()


# --- its parts ---

FORMATTED = {
    "size(0)": "0 bytes",
    "size(1536)": "1.5 KiB",
    "size(2 ** 40)": "1.0 TiB",
    "size(null)": "–",
    "rate(0)": "0 MB/s",
    "rate(51.4e9)": "51.4 GB/s",
    "rate(999)": "999 B/s",
    "seconds(0.0013)": "1.30 ms",
    "seconds(41300)": "11.5 h",
    "seconds(0)": "0 s",
    "percent(0.704)": "70.4 %",
    "percent(undefined)": "–",
    "count(12040)": "12,040",
    "ago(3)": "3 s ago",
    "ago(null)": "never",
    "axis([0, 2.5e9, 5e9], rateParts).join()": "0 GB/s,2.5 GB/s,5.0 GB/s",
    "axis([0, 0.5, 1], percentParts).join()": "0 %,50 %,100 %",
}


POINTS = "[[0, 1], [5, null], [10, 2], [15, 3], [60, 4]].map(([at_s, v]) => ({ at_s, v }))"
DRAWN = {
    "ticks(148)": [0, 50, 100, 150],
    "ticks(1)": [0, 0.25, 0.5, 0.75, 1],
    f"runs({POINTS}, 'v', 15)": [[[0, 1]], [[10, 2], [15, 3]], [[60, 4]]],
}


def test_numbers_as_text_and_axes(browser: Any, service: Service) -> None:
    context = browser.new_context(bypass_csp=True)
    page = context.new_page()
    page.goto(service.url)
    for module, cases in (("format", FORMATTED), ("charts", DRAWN)):
        for expression, expected in cases.items():
            found = page.evaluate(f"(argument) => ({PROBES}).evaluated(argument)", [module, expression])
            assert found == expected, expression
    context.close()


def test_screenshots_are_taken(browser: Any, tmp_path: Path) -> None:
    light, dark = take(browser, tmp_path)
    assert light.read_bytes()[:4] == dark.read_bytes()[:4] == b"\x89PNG" and light.read_bytes() != dark.read_bytes()
