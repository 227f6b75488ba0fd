"""The chat page in a real browser."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.builders.browsing import BROWSER, Page, opened
from tests.builders.chatting import CONTEXT
from tests.builders.server_process import Served, serving

pytestmark = BROWSER


@pytest.fixture(scope="module")
def served(chatting: Path) -> Iterator[Served]:
    """One server for all tests."""
    with serving(chatting) as server:
        yield server


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """One browser for all tests."""
    with opened(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


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


def test_new_chat_clears_even_while_an_answer_streams(page: Page) -> None:
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


def test_messages_are_text_never_markup(page: Page) -> None:
    page.limit(60, temperature=2)  # a random model of printable characters writes < and & by itself
    nasty = "<img src=x onerror=document.title='broken'><b>&amp;</b>"
    shown = answers(page, nasty)
    assert shown[0] == nasty
    assert page.browser.find_elements(By.CSS_SELECTOR, "#log b, #log img") == []
    assert page.browser.title == "tiny-chat"
    assert page.logged() == []


def test_the_policy_blocks_injected_scripts(page: Page) -> None:
    inject = """
        const script = document.createElement("script");
        script.textContent = "document.title = 'broken'";
        document.body.append(script);
        return fetch("https://example.com/").then(() => "sent", () => "refused");
    """
    assert page.browser.execute_script(inject) == "refused"
    assert page.browser.title == "tiny-chat"
    assert sum("Content Security Policy" in line for line in page.logged()) >= 2


def test_an_error_is_shown_and_the_message_is_restored(page: Page) -> None:
    page.limit(4000)
    page.send("Hello")
    page.until(lambda: page.browser.find_elements(By.CSS_SELECTOR, "#log > .error"))
    assert f"context is {CONTEXT} tokens" in page["log"].text
    assert page["text"].get_property("value") == "Hello"
    page.limit(4)
    page["text"].send_keys(Keys.ENTER)
    page.until(lambda: page.idle() and len(page.texts()) == 2)
    assert page.browser.find_elements(By.CSS_SELECTOR, "#log > .error") == []


@pytest.mark.parametrize(
    ("place", "value", "name"), [("top-p", "1.5", "top_p"), ("top-k", "-2", "top_k"), ("seed", "0.5", "seed")]
)
def test_options_of_sampling_reach_the_server(place: str, value: str, name: str, page: Page) -> None:
    page.limit(4)
    page[place].send_keys(value)
    page.send("Hello")
    page.until(lambda: page.browser.find_elements(By.CSS_SELECTOR, "#log > .error"))
    assert name in page["log"].text


def test_every_option_has_a_label(page: Page) -> None:
    unnamed = "return [...document.querySelectorAll('input, select')].filter(e => !e.labels.length).map(e => e.id)"
    assert page.browser.execute_script(unnamed) == []
    page.limit(4)
    assert "Max tokens" in page["details"].text and "Top-p" in page["details"].text


def test_a_model_without_a_template_continues_texts(browser: Chrome, chatting: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(chatting, plain, ignore=shutil.ignore_patterns("chat_template*"))
    with serving(plain) as server:
        page = Page(browser, server.address, "plain")
        page.until(lambda: page["send"].text == "Continue")
        assert "no chat template" in page["log"].text
        page.limit(5)
        assert not page["mode"].is_enabled() and not page["system"].is_displayed()
        (first,) = continued(page, " Once *upon* a time ")
        page.browser.find_element(By.CLASS_NAME, "go").click()
        page.until(lambda: page.idle() and len(page.texts()) == 2)
        assert len(first) == len(page.texts()[1]) == 5
        shown = page.browser.find_elements(By.CSS_SELECTOR, "#log .text")[1].get_property("textContent")
        assert shown == " Once *upon* a time " + "".join(page.texts())
        assert page.logged() == []


def continued(page: Page, text: str) -> list[str]:
    """What the model adds to a text."""
    page.send(text)
    page.until(lambda: page.idle() and page.texts() and page.browser.find_elements(By.CLASS_NAME, "note"))
    return page.texts()


def test_a_model_that_chats_can_continue_a_text_as_well(page: Page) -> None:
    page.limit(6)
    page["mode"].send_keys("Continue")
    assert len(continued(page, "Hello")[0]) == 6


def test_shift_enter_breaks_the_line(page: Page) -> None:
    page.limit(4)
    page["text"].send_keys("one", Keys.SHIFT, Keys.ENTER, Keys.NULL, "two")
    assert page.texts() == []
    assert answers(page, "")[0] == "one\ntwo"


def test_the_page_asks_for_the_key_if_one_is_needed(browser: Chrome, chatting: Path) -> None:
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


def test_a_reload_keeps_the_chat_and_a_new_chat_forgets_it(page: Page) -> None:
    page.limit(12)
    shown = answers(page, "Hello **there**")
    note = page.browser.find_element(By.CLASS_NAME, "note").text
    page.browser.refresh()
    page.until(lambda: len(page.texts()) == 2)
    assert page.texts() == shown
    assert page.browser.find_element(By.CLASS_NAME, "note").text == note and "tokens/s" in note
    page.limit(12)
    assert len(answers(page, "And?")) == 4
    page["reset"].click()
    page.browser.refresh()
    page.until(lambda: page["model"].text == "tiny-chat")
    assert page.texts() == []
    assert page.logged() == []


def test_empty_options_show_what_the_server_takes(browser: Chrome, chatting: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(chatting, tmp_path / "sampling"))
    (folder / "generation_config.json").write_text('{"temperature": 0.3, "top_p": 0.8, "max_new_tokens": 9}')

    def shown() -> list[str]:
        return [str(view[name].get_property("placeholder")) for name in ("temperature", "top-p", "top-k", "limit")]

    with serving(folder) as server:
        view = Page(browser, server.address, "sampling")
        assert shown() == ["0", "0.8", "50", "9"]  # without `do_sample` it is greedy
        view.browser.find_element(By.TAG_NAME, "summary").click()
        view["top-p"].send_keys("0.5")
        assert shown()[0] == "0.3"
        view["mode"].send_keys("Continue")
        assert shown()[3] == "64"
        assert view.logged() == []
