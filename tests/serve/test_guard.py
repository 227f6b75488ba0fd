"""Who may ask: not pages of other sites, and nobody without the key."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from llmconv.errors import UsageProblem
from llmconv.serve.app import AccessRules
from tests.serve.conftest import Clients

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1:8000", "[::1]:8000", "192.168.1.5", "a.localhost"]
)
def test_ip_addresses_and_localhost_are_accepted(client: TestClient, host: str) -> None:
    assert client.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "", "[", "a b"])
def test_a_rebound_host_name_is_refused(client: TestClient, host: str) -> None:
    for path in ("/", "/health", "/v1/models"):
        response = client.get(path, headers={"Host": host})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "unknown_host")


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:9999", "file://"])
def test_a_page_of_another_site_may_not_post(client: TestClient, origin: str) -> None:
    response = client.post(CHAT, json=BODY, headers={"Origin": origin})
    assert (response.status_code, response.json()["error"]["code"]) == (403, "foreign_origin")


@pytest.mark.slow
def test_the_own_page_may_post(client: TestClient) -> None:
    headers = {"Origin": "http://127.0.0.1:8000", "Host": "127.0.0.1:8000"}
    assert client.post(CHAT, json=BODY, headers=headers).status_code == 200


@pytest.mark.parametrize("origin", ["foo", "https://a.example/page", "*"])
def test_an_invalid_origin_is_refused(origin: str) -> None:
    with pytest.raises(UsageProblem, match="is not an origin"):
        AccessRules(origins=[origin])


def test_hosts_and_origins_can_be_allowed(clients: Clients) -> None:
    client = clients(access=AccessRules(hosts=["llm.example"], origins=["https://chat.example"]))
    headers = {"Host": "llm.example", "Origin": "https://chat.example"}
    response = client.post(CHAT, json=BODY, headers=headers)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://chat.example"
    ask = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    assert client.options(CHAT, headers={**headers, **ask}).status_code == 200
    assert client.post(CHAT, json=BODY, headers={**headers, "Origin": "https://evil.example"}).status_code == 403


@pytest.mark.parametrize(
    "authorization", ["", "Bearer", "Bearer wrong", "Basic secret", "Bearer secret2", "Bearer sécret"]
)
def test_requests_without_the_key_are_refused(clients: Clients, authorization: str) -> None:
    client = clients(access=AccessRules(api_key="secret"))
    headers = {b"Authorization": authorization.encode()}
    for response in (client.post(CHAT, json=BODY, headers=headers), client.get("/v1/models", headers=headers)):
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"


def test_requests_with_the_key_are_answered_and_the_page_needs_none(clients: Clients) -> None:
    client = clients(access=AccessRules(api_key="secret"))
    assert client.post(CHAT, json=BODY, headers={"Authorization": "Bearer secret"}).status_code == 200
    assert client.get("/").status_code == client.get("/health").status_code == 200


def test_every_response_forbids_guessing_and_framing(client: TestClient) -> None:
    for path in ("/", "/health", "/absent"):
        headers = client.get(path).headers
        assert (headers["x-content-type-options"], headers["x-frame-options"]) == ("nosniff", "DENY")
