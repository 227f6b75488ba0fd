"""The chat page in a real browser."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from tests.chatting import CONTEXT
from tests.serve.process import Served, serving

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1000,800",
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver"),
]


@pytest.fixture(scope="module")
def served(chatting: Path) -> Iterator[Served]:
    """One server for all tests."""
    with serving(chatting) as server:
        yield server


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """A browser with a profile of its own, which notes what pages log."""
    options = Options()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


class Page:
    """The chat page, as a person sees it."""

    def __init__(self, browser: Chrome, address: str) -> None:
        self.browser = browser
        self.logged()  # of earlier pages
        browser.get(f"{address}/")
        self.until(lambda: self["model"].text == "tiny-chat")

    def __getitem__(self, name: str) -> WebElement:
        return self.browser.find_element(By.ID, name)

    def until(self, condition: Any, seconds: float = 30) -> None:
        """Waits until something is so."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self["log"].text
            time.sleep(0.05)

    def limit(self, tokens: int, temperature: float = 0) -> None:
        """Sets two options."""
        if self["details"].get_attribute("open") is None:
            self.browser.find_element(By.TAG_NAME, "summary").click()
        for name, value in (("limit", tokens), ("temperature", temperature)):
            self[name].clear()
            self[name].send_keys(str(value))

    def send(self, text: str) -> None:
        """Types a message and Enter."""
        self["text"].send_keys(text, Keys.ENTER)

    def texts(self) -> list[str]:
        """Every message, as it came."""
        every = "return [...document.querySelectorAll('#log article')].map(article => article.shown)"
        found: list[str] = self.browser.execute_script(every)
        return found

    def idle(self) -> bool:
        """Whether no answer is under way."""
        return not self["stop"].is_displayed()

    def logged(self) -> list[str]:
        """What the page logged: errors and violations of its policy."""
        entries: list[dict[str, str]] = self.browser.get_log("browser")  # type: ignore[no-untyped-call]
        return [entry["message"] for entry in entries]


@pytest.fixture
def page(browser: Chrome, served: Served) -> Page:
    """The page, just opened."""
    return Page(browser, served.address)


def answers(page: Page, text: str) -> list[str]:
    """What is shown once a message is answered."""
    page.send(text)
    page.until(lambda: page.idle() and len(page.texts()) % 2 == 0)
    return page.texts()


def test_a_message_is_answered_by_keyboard_alone(page: Page) -> None:
    assert page.browser.switch_to.active_element == page["text"]
    page.limit(12)
    page["text"].click()
    shown = answers(page, "Hello")
    assert shown[0] == "Hello"
    assert len(shown[1]) == 12
    assert "12 tokens" in page["log"].text
    assert page.browser.switch_to.active_element == page["text"]
    assert len(answers(page, "And?")) == 4
    assert page.logged() == []


def test_an_answer_streams_and_escape_stops_it(page: Page) -> None:
    page.limit(1900)
    page.send("Hello")
    page.until(lambda: len(page.texts()) == 2 and page.texts()[1])
    early = page.texts()[1]
    page.until(lambda: len(page.texts()[1]) > len(early))
    page["text"].send_keys(Keys.ESCAPE)
    page.until(page.idle)
    stopped = page.texts()[1]
    assert "stopped" in page["log"].text
    time.sleep(0.3)
    assert page.texts()[1] == stopped
    assert 0 < len(stopped) < 400


def test_the_stop_button_stops_and_the_place_is_free(page: Page) -> None:
    page.limit(1900)
    page.send("Hello")
    page.until(lambda: len(page.texts()) == 2 and page.texts()[1])
    page["stop"].click()
    page.until(page.idle)
    health = "return fetch('health').then(response => response.json())"
    page.until(lambda: page.browser.execute_script(health)["active"] == 0)


def test_new_chat_forgets_even_while_an_answer_grows(page: Page) -> None:
    page.limit(1900)
    page.send("Hello")
    page.until(lambda: len(page.texts()) == 2 and page.texts()[1])
    page["reset"].click()
    page.until(page.idle)
    assert page.texts() == []
    page.limit(8)
    first = answers(page, "Hello")
    page["reset"].click()
    assert answers(page, "Hello") == first


def test_what_is_written_is_text_never_markup(page: Page) -> None:
    page.limit(60, temperature=2)  # a random model of printable characters writes < and & by itself
    nasty = "<img src=x onerror=document.title='broken'><b>&amp;</b>"
    shown = answers(page, nasty)
    assert shown[0] == nasty
    assert page.browser.find_elements(By.CSS_SELECTOR, "#log b, #log img") == []
    assert page.browser.title == "tiny-chat"
    assert page.logged() == []


def test_the_policy_stops_what_would_get_in_all_the_same(page: Page) -> None:
    inject = """
        const script = document.createElement("script");
        script.textContent = "document.title = 'broken'";
        document.body.append(script);
        return fetch("https://example.com/").then(() => "sent", () => "refused");
    """
    assert page.browser.execute_script(inject) == "refused"
    assert page.browser.title == "tiny-chat"
    assert sum("Content Security Policy" in line for line in page.logged()) >= 2


def test_an_error_is_shown_and_the_message_comes_back(page: Page) -> None:
    page.limit(4000)
    page.send("Hello")
    page.until(lambda: page.browser.find_elements(By.CSS_SELECTOR, "#log > .error"))
    assert f"context is {CONTEXT} tokens" in page["log"].text
    assert page["text"].get_property("value") == "Hello"
    page.limit(4)
    page["text"].send_keys(Keys.ENTER)
    page.until(lambda: page.idle() and len(page.texts()) == 2)
    assert page.browser.find_elements(By.CSS_SELECTOR, "#log > .error") == []


def test_shift_enter_breaks_the_line(page: Page) -> None:
    page.limit(4)
    page["text"].send_keys("one", Keys.SHIFT, Keys.ENTER, Keys.NULL, "two")
    assert page.texts() == []
    assert answers(page, "")[0] == "one\ntwo"


def test_the_page_asks_for_the_key_where_one_is_wanted(browser: Chrome, chatting: Path) -> None:
    with serving(chatting, "--api-key", "secret") as locked:
        page = Page(browser, locked.address)
        assert not page["key"].is_displayed()
        page.send("Hello")
        page.until(lambda: page["key"].is_displayed())
        page["key"].send_keys("secret")
        page.limit(4)
        page["text"].send_keys(Keys.ENTER)
        page.until(lambda: page.idle() and len(page.texts()) == 2)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1000])
def test_the_page_fits_and_can_be_read(page: Page, scheme: str, width: int) -> None:
    emulate = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", emulate)
    size = {"width": width, "height": 700, "deviceScaleFactor": 1, "mobile": False}
    page.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    page.limit(200)
    answers(page, "word" * 60)
    wider = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.browser.execute_script(wider) == 0
    for selector in ("#log article.assistant .text", "#log article.user .text", "#log .note", "summary", "#model"):
        assert page.browser.execute_script(CONTRAST, selector) >= 4.5, selector
    page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


CONTRAST = """
    const luminance = color => {
      const [r, g, b] = color.match(/[\\d.]+/g).slice(0, 3).map(value => value / 255)
        .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const element = document.querySelector(arguments[0]);
    let behind = element;
    while (getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
    const pair = [getComputedStyle(element).color, getComputedStyle(behind).backgroundColor].map(luminance);
    return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
"""
"""The contrast of a text with what is behind it, as WCAG 2 computes it; 4.5 is its least for text."""
