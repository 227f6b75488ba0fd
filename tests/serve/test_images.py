"""Images in chats: `data:` URLs only, the answer is that of the model, and everything else is refused by name."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from llmconv.export import export
from llmconv.generation import Prompt, TextModel, generate
from tests.builders.seeing import save_picture, save_seeing

CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    """A LLaVA with its graphs, open."""
    folder = save_seeing(tmp_path_factory.mktemp("seeing") / "llava")
    export(folder)
    return TextModel.open(folder)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two images."""
    home = tmp_path_factory.mktemp("pictures")
    return [save_picture(home / "a.png"), save_picture(home / "b.png", seed=1)]


def part(content: bytes, kind: str = "image/png") -> dict[str, Any]:
    url = f"data:{kind};base64,{base64.b64encode(content).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def message(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*parts, {"type": "text", "text": "Look"}]}


def ask(client: TestClient, *parts: Any) -> Any:
    return client.post(CHAT, json={"messages": [message(*parts)], "max_tokens": 6, "temperature": 0})


@pytest.mark.slow
def test_answers_are_those_of_generate_and_never_of_another_image(
    clients: Callable[..., TestClient], seeing: TextModel, pictures: list[Path]
) -> None:
    client = clients(served=seeing)
    assert client.get("/health").json()["images"]
    for path in [*pictures, pictures[0]]:
        answer = ask(client, part(path.read_bytes())).json()
        found = generate(
            seeing, Prompt("Look", images=(path,)), template="tokenizer", max_new_tokens=6, do_sample=False
        )
        assert answer["choices"][0]["message"]["content"] == found.completions[0].text
        assert answer["usage"]["prompt_tokens"] == found.completions[0].prompt_tokens


BAD: dict[str, Any] = {
    "a web address": {"type": "image_url", "image_url": {"url": "https://example.com/a.png"}},
    "a file": {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
    "no object": {"type": "image_url", "image_url": "data:image/png;base64,AAAA"},
    "no base64": {"type": "image_url", "image_url": {"url": "data:image/png;base64,@@"}},
    "a text": {"type": "image_url", "image_url": {"url": "data:text/html;base64,AAAA"}},
    "no image": part(b"hello"),
    "an unknown detail": {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "x"}},
}


@pytest.mark.slow
def test_a_placeholder_without_an_image_is_refused(clients: Callable[..., TestClient], seeing: TextModel) -> None:
    question = [{"role": "user", "content": "What is ~?"}]
    answer = clients(served=seeing).post(CHAT, json={"messages": question})
    assert answer.status_code == 400 and "no image" in answer.json()["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_other_images_are_refused(clients: Callable[..., TestClient], seeing: TextModel, bad: Any) -> None:
    answer = ask(clients(served=seeing), bad)
    assert answer.status_code == 400, answer.text


@pytest.mark.slow
def test_too_many_images_are_refused(
    clients: Callable[..., TestClient], seeing: TextModel, pictures: list[Path]
) -> None:
    answer = ask(clients(served=seeing), *[part(pictures[0].read_bytes())] * 9)
    assert (answer.status_code, "at most 8" in answer.text) == (400, True)


@pytest.mark.slow
def test_a_text_model_refuses_images(client: TestClient, pictures: list[Path]) -> None:
    answer = ask(client, part(pictures[0].read_bytes()))
    assert (answer.status_code, "takes no images" in answer.text) == (400, True)
    assert client.get("/health").json()["images"] is False
