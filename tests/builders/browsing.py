"""A headless browser, and the chat page as a person sees it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

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

BROWSER = [
    pytest.mark.slow,
    pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs chromium and chromedriver"),
]
"""Marks of a file of tests that look at pages."""


@contextmanager
def opened(profile: Path) -> Iterator[Chrome]:
    """A browser with a profile of its own, which notes what pages log."""
    options = Options()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


class Page:
    """The chat page, as a person sees it."""

    def __init__(self, browser: Chrome, address: str, model: str = "tiny-chat") -> None:
        self.browser = browser
        self.logged()  # of earlier pages
        browser.get(f"{address}/")
        self.until(lambda: self["model"].text == model)

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
