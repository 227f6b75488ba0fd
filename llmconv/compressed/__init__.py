"""Folders of codes for vLLM, SGLang and transformers (compressed-tensors), and files for llama.cpp (GGUF)."""

from typing import TYPE_CHECKING

from llmconv.requirements import lazily

if TYPE_CHECKING:  # at run time each is loaded when it is first used
    from llmconv.compressed.folder import Quantized, quantize
    from llmconv.compressed.gguf import to_gguf
    from llmconv.compressed.importance import importance_matrix

__all__ = ["Quantized", "importance_matrix", "quantize", "to_gguf"]

__getattr__, __dir__ = lazily(__name__)
