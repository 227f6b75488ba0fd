"""The page: it has no external resources, and its policy allows no other scripts."""

from __future__ import annotations

import base64
import hashlib
import re

from starlette.testclient import TestClient


def test_the_policy_lets_only_the_own_script_and_style_run(client: TestClient) -> None:
    response = client.get("/")
    policy = dict(rule.strip().split(" ", 1) for rule in response.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"


def test_the_page_names_no_other_server(client: TestClient) -> None:
    addresses = set(re.findall(r"(?:https?:)?//[\w.]+", client.get("/").text))
    assert addresses == {"http://www.w3.org"}  # a namespace


def test_the_page_never_writes_markup(client: TestClient) -> None:
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|\son\w+=", client.get("/").text
    )
