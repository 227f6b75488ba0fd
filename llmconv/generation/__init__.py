"""Prompts in, text out: from the graphs, or from the eager model."""

from __future__ import annotations

from llmconv.generation.conversation import Conversation
from llmconv.generation.generate import generate
from llmconv.generation.model import TextModel
from llmconv.generation.report import Completion, Cost, Generation
from llmconv.generation.row import Piece
from llmconv.generation.settings import GenerationSettings

__all__ = [
    "Completion",
    "Conversation",
    "Cost",
    "Generation",
    "GenerationSettings",
    "Piece",
    "TextModel",
    "generate",
]
