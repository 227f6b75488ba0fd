"""Markdown on the chat page: text of a model becomes elements, but never raw HTML."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import Chrome

from tests.builders.browsing import BROWSER, Page, opened
from tests.builders.server_process import serving

pytestmark = BROWSER

SHOW = """
    const place = document.createElement("div");
    place.className = "tried";
    document.getElementById("log").append(place);
    for (const text of arguments) showMarkdown(place, text);
    return place.innerHTML;
"""


@pytest.fixture(scope="module")
def page(chatting: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """The page, open."""
    with serving(chatting) as server, opened(tmp_path_factory.mktemp("profile")) as driver:
        yield Page(driver, server.address)


def shown(browser: Chrome, *texts: str) -> str:
    """The elements for the last of several texts, each of which replaces the one before."""
    html: str = browser.execute_script(SHOW, *texts)
    return html


LINK = 'target="_blank" rel="noopener noreferrer nofollow"'

CASES = {
    "paragraphs": ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
    "headings": ("# A\n### B #", "<h3>A</h3><h5>B</h5>"),
    "rule": ("a\n\n---", "<p>a</p><hr>"),
    "emphasis": (
        "**a** *b* __c__ _d_ ~~e~~",
        "<p><strong>a</strong> <em>b</em> <strong>c</strong> <em>d</em> <del>e</del></p>",
    ),
    "nested emphasis": ("**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"),
    "both at once": ("***a***", "<p><strong><em>a</em></strong></p>"),
    "names with underscores": ("snake_case_name 2 * 3 * 4", "<p>snake_case_name 2 * 3 * 4</p>"),
    "unbalanced": ("**a *b `c ~~d [e](f", "<p>**a *b `c ~~d [e](f</p>"),
    "escapes": (r"\*a\* \`b\`", "<p>*a* `b`</p>"),
    "code": ("`a < b` ``c ` d``", "<p><code>a &lt; b</code> <code>c ` d</code></p>"),
    "bullets": ("* a\n- b", "<ul><li>a</li><li>b</li></ul>"),
    "numbers": ("3. a\n4. b", '<ol start="3"><li>a</li><li>b</li></ol>'),
    "nested lists": ("1. a\n   - b\n2. c", "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>"),
    "tasks": ("- [ ] a\n- [x] b", "<ul><li>☐ a</li><li>☑ b</li></ul>"),
    "quotes": ("> a\n> b\n\nc", "<blockquote><p>a\nb</p></blockquote><p>c</p>"),
    "address": (
        "see https://a.org/b.",
        f'<p>see <a href="https://a.org/b" {LINK} title="https://a.org/b">https://a.org/b</a>.</p>',
    ),
    "link": ("[x *y*](https://a.org)", f'<p><a href="https://a.org" {LINK} title="https://a.org">x <em>y</em></a></p>'),
    "table": (
        "| a | b |\n|---|--:|\n| 1 | **2** |\n\nend",
        '<div class="table" tabindex="0"><table><tr><th>a</th><th class="right">b</th></tr>'
        '<tr><td>1</td><td class="right"><strong>2</strong></td></tr></table></div><p>end</p>',
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_markdown_becomes_elements(page: Page, case: str) -> None:
    text, expected = CASES[case]
    assert shown(page.browser, text) == expected


@pytest.mark.parametrize("text", ["```py\na  <b>\n```", "```py\na  <b>", "~~~~ py\na  <b>\n~~~~"])
def test_code_blocks_keep_their_text_also_before_they_are_closed(page: Page, text: str) -> None:
    html = shown(page.browser, text)
    assert "<code>a  &lt;b&gt;</code>" in html
    assert "<span>py</span>" in html


HOSTILE = [
    "<img src=x onerror=alert(1)><script>alert(1)</script>",
    "[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1)) [c](data:text/html,x) [d]( javascript:alert(1))",
    "[a](java\tscript:alert(1)) [a](&#106;avascript:alert(1)) [a](\x01javascript:alert(1)) [a](vbscript:x)",
    "![x](javascript:alert(1)) ![x](data:image/svg+xml,<svg onload=alert(1)>)",
    '[a](https://a.org/"onmouseover="alert(1)) [<img src=x onerror=alert(1)>](https://a.org)',
    "<javascript:alert(1)> <https://a.org/<script>alert(1)</script>>",
    "```<script>alert(1)</script>\n</code></pre><script>alert(1)</script>\n```",
    "```` ``` <b> ````\n`` ` `` ``` ` <i>`",
    "| <b>x</b> |\n|---|\n| <img src=x onerror=alert(1)> |",
    "# <svg onload=alert(1)>\n> <iframe src=javascript:alert(1)>\n- <a href=javascript:alert(1)>x</a>",
    "**[a](javascript:alert(1))** *`<b>`* ~~<i>~~ [[a](https://a.org)](javascript:alert(1))",
]

FOREIGN = """
    const tags = "P H3 H4 H5 H6 HR UL OL LI BLOCKQUOTE DIV SPAN BUTTON PRE CODE TABLE TR TH TD A STRONG EM DEL";
    const allowed = new Set(tags.split(" "));
    const attributes = new Set("class start href target rel title type tabindex aria-label".split(" "));
    return [...document.querySelectorAll("#log .tried *")].filter(e =>
      !allowed.has(e.tagName) || e.getAttributeNames().some(name => !attributes.has(name))
      || (e.href && !/^(https?|mailto):/.test(e.href))).map(e => e.outerHTML);
"""


@pytest.mark.parametrize("text", HOSTILE)
def test_html_in_an_answer_is_not_markup(page: Page, text: str) -> None:
    shown(page.browser, text)
    assert page.browser.execute_script(FOREIGN) == []
    assert page.logged() == []


@pytest.mark.parametrize(
    "text",
    [
        *("*" * 20_000, "[" * 20_000, "`" * 20_000, "> " * 10_000, "- " * 10_000, "# " + "#" * 20_000 + "x"),
        *("*a **b " * 4_000, "[a](" * 5_000, "`a ``b " * 4_000, "|a" * 5_000 + "\n" + "|-" * 5_000),
        *("_a *b ~~c [d](e " * 2_000, " " * 20_000 + "-x", "```\n" * 5_000, "> - 1. " * 3_000, "https://" * 4_000),
    ],
    ids=range(15),
)
def test_no_text_blocks_the_page(page: Page, text: str) -> None:
    start = time.monotonic()
    shown(page.browser, text)
    assert time.monotonic() - start < 10


def test_blocks_that_are_shown_stay_while_others_come(page: Page) -> None:
    stays = """
        const place = document.createElement("div");
        showMarkdown(place, "one\\n\\ntw");
        const first = place.firstChild;
        showMarkdown(place, "one\\n\\ntwo **x**");
        return first === place.firstChild && place.children.length === 2 ? place.innerHTML : "";
    """
    assert page.browser.execute_script(stays) == "<p>one</p><p>two <strong>x</strong></p>"


def test_an_answer_can_be_shown_as_plain_text(page: Page) -> None:
    page.browser.execute_script("const m = article('assistant', 'Model'); m.shown = '**a**  b'; paint(m);")
    seen = "return document.querySelector('article.assistant .text').innerHTML"
    assert page.browser.execute_script(seen) == "<p><strong>a</strong>  b</p>"
    page.browser.execute_script("document.getElementById('markdown').click()")
    assert page.browser.execute_script(seen) == "**a**  b"
