"""The chat page: one HTML document without network dependencies, and its content security policy."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources

from starlette.responses import HTMLResponse

PARTS = {"style": ("page.css",), "script": ("markdown.js", "page.js")}
"""Empty elements of page.html, and the files whose content goes there."""


def page_response() -> HTMLResponse:
    """The page with its content security policy."""
    text, policy = _page()
    return HTMLResponse(text, headers={"Content-Security-Policy": policy, "Cache-Control": "no-cache"})


@functools.cache
def _page() -> tuple[str, str]:
    text = _part("page.html")
    for tag, names in PARTS.items():
        content = "\n".join(_part(name) for name in names)
        text = text.replace(f"<{tag}></{tag}>", f"<{tag}>\n{content}</{tag}>")
    return text, content_security_policy(text)


def _part(name: str) -> str:
    return resources.files("llmconv.serve").joinpath(name).read_text("utf-8")


def content_security_policy(html: str) -> str:
    """A policy that allows only the page's own script and style, by their hashes, and requests to the same server."""
    sources = {"script": "script-src", "style": "style-src"}
    rules = ["default-src 'none'", "connect-src 'self'", "img-src data:"]
    for tag, rule in sources.items():
        hashes = [_hash(content) for content in re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)]
        rules.append(f"{rule} {' '.join(hashes)}")
    return "; ".join([*rules, "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"])


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
