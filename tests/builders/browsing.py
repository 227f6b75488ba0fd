"""A headless browser, and the chat page as a person sees it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.request import Request, urlopen

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement

from benchmarks import environments

ROOT = Path(__file__).parents[2]
NODE, PYTHON = (ROOT / environments.folder(name) for name in ("chromium", "chromedriver"))
INSTALLED = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
EXTRACT = "console.log(await (await import('@sparticuz/chromium')).default.executablePath())"
LISTENING = re.compile(r"DevTools listening on ws://([^/]+)/")
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
    pytest.mark.skipif(
        not (INSTALLED and DRIVER) and not all((home / "complete").exists() for home in (NODE, PYTHON)),
        reason="needs chromium and chromedriver, installed or in build/; `make clients` makes them",
    ),
]
"""Marks of a file of tests that look at pages."""


@contextmanager
def opened(profile: Path) -> Iterator[Chrome]:
    """A browser with a profile of its own, which notes what pages log."""
    program, driver_program = programs(profile)
    line = [program, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-port=0"]
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = next(match for text in process.stderr if (match := LISTENING.search(text)))
        Thread(target=process.stderr.read, daemon=True).start()  # or the browser blocks when the pipe is full
        request = Request(f"http://{found[1]}/json/new?about:blank", method="PUT")
        urlopen(request).close()  # a headless shell opens no page itself
        options = Options()
        options.debugger_address = found[1]
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = Chrome(options=options, service=Service(driver_program))
        try:
            driver.set_window_size(1000, 800)
            yield driver
        finally:
            driver.quit()
            process.kill()


def programs(place: Path) -> tuple[str, str]:
    """The browser and its driver: those that are installed, or those in build/.

    Args:
        place: a folder for the browser, which npm has compressed.
    """
    if INSTALLED and DRIVER:
        return INSTALLED, DRIVER
    variables = {**os.environ, "TMPDIR": str(place)}
    line = ["node", "--input-type=module", "-e", EXTRACT]
    done = subprocess.run(line, cwd=NODE, env=variables, stdout=subprocess.PIPE, text=True, check=True)
    (packed,) = PYTHON.glob("lib/python*/site-packages/chromedriver_py/chromedriver_linux64")
    driver = place / "chromedriver"
    shutil.copy(packed, driver)
    driver.chmod(0o755)
    return done.stdout.strip(), str(driver)


class Page:
    """The chat page, as a person sees it."""

    def __init__(self, browser: Chrome, address: str, model: str = "tiny-chat") -> None:
        self.browser = browser
        self.logged()  # of earlier pages
        browser.get(f"{address}/")
        browser.execute_script("sessionStorage.clear()")  # the tab keeps the chat of an earlier page
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
