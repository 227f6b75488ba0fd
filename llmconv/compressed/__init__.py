"""Hugging Face folders of quantized weights, in the form of compressed-tensors, for vLLM, SGLang and transformers."""

from typing import TYPE_CHECKING

from llmconv.requirements import lazily

if TYPE_CHECKING:  # at run time each is loaded when it is first used
    from llmconv.compressed.folder import Quantized, quantize
    from llmconv.compressed.importance import importance_matrix

__all__ = ["Quantized", "importance_matrix", "quantize"]

__getattr__, __dir__ = lazily(__name__)
