"""A web server for a model folder on localhost: OpenAI's endpoints and a chat page."""

from __future__ import annotations

from llmconv.serve.server import ServerSettings, serve

__all__ = ["ServerSettings", "serve"]


def __dir__() -> list[str]:
    return __all__
