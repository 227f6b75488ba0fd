"""A tiny Llama behind the app, in memory."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from llmconv.generation import TextModel
from llmconv.serve.app import AccessRules, make_app
from llmconv.serve.scheduler import Scheduler
from llmconv.serve.served_model import ServedModel


@pytest.fixture
def plain(chatting: Path, tmp_path: Path) -> Path:
    """The same without a chat template."""
    folder = tmp_path / "plain"
    shutil.copytree(chatting, folder, ignore=shutil.ignore_patterns("chat_template*"))
    return folder


@pytest.fixture(scope="session")
def model(chatting: Path) -> TextModel:
    """The tiny model, opened."""
    return TextModel.open(chatting)


Clients = Callable[..., TestClient]


@pytest.fixture
def clients(model: TextModel) -> Iterator[Clients]:
    """`clients(active=…, waiting=…, access=…)` is a client of an app of its own, with the host `localhost`."""
    opened: list[TestClient] = []

    def client(
        active: int = 2, waiting: int = 4, access: AccessRules | None = None, served: TextModel | None = None
    ) -> TestClient:
        service = ServedModel(served or model, "tiny-chat", max_new_tokens=64)
        app = make_app(service, Scheduler(active, waiting), access)
        made = TestClient(app, base_url="http://localhost", raise_server_exceptions=False)
        opened.append(made.__enter__())
        return made

    yield client
    for made in opened:
        made.__exit__(None, None, None)


@pytest.fixture
def client(clients: Clients) -> TestClient:
    """A client of an app with two places."""
    return clients()
