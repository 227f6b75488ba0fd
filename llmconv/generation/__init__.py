"""Text generation, from the graphs or from the eager model."""

from __future__ import annotations

from llmconv.generation.completions import Completion, Generation, GenerationCost
from llmconv.generation.generate import Wording, generate
from llmconv.generation.loop import Conversation, SharedPrefix
from llmconv.generation.model import TextModel
from llmconv.generation.prompts import Prompt
from llmconv.generation.row import TextPiece
from llmconv.generation.runners import ModelFiles
from llmconv.generation.sampling import GenerationSettings
from llmconv.runtime.onnxruntime.session_settings import StageAddresses

__all__ = ["Completion", "Conversation", "Generation", "GenerationCost", "GenerationSettings", "ModelFiles", "Prompt"]
__all__ += ["SharedPrefix", "StageAddresses", "TextModel", "TextPiece", "Wording", "generate"]


def __dir__() -> list[str]:
    return __all__
