"""EncodedPrompt: the tokens of a prompt, and the embeddings that take the places of some of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmconv.generation.own_embeddings import as_embeddings, placed, read_embeddings, token_of
from llmconv.generation.prompts import Prompt
from llmconv.runtime.placed_embeddings import PromptEmbeddings


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as a model takes it.

    Attributes:
        ids: its tokens.
        embeddings: reads or computes embeddings in place of those of some tokens, so that those of many prompts need
            not be in memory at a time; None for none.
    """

    ids: list[int]
    embeddings: Callable[[], PromptEmbeddings] | None = None


def with_embeddings(prompt: Prompt, ids: list[int], tokenizer: Any, name: str = "the prompt") -> EncodedPrompt:
    """A prompt with its own embeddings.

    Args:
        prompt: has embeddings.
        ids: tokens of its text.
        tokenizer: of transformers.
        name: of the prompt in messages.

    Raises:
        InputRefused: the embeddings cannot be read, or have no place in the prompt.
        UsageProblem: an array that is not embeddings.
    """
    token = token_of(tokenizer, prompt.placeholder) if prompt.placeholder else None
    tokens = placed(ids, rows_of(prompt.embeddings), token, name)[0]
    return EncodedPrompt(tokens, lambda: placed(ids, rows_of(prompt.embeddings), token, name)[1])


def rows_of(embeddings: Any) -> Any:
    """Embeddings, float32 [tokens, hidden], of an array or a file.

    Args:
        embeddings: an array, a torch tensor, or the path of a file.

    Raises:
        InputRefused: the file cannot be read.
        UsageProblem: an array of another form.
    """
    return read_embeddings(Path(embeddings)) if isinstance(embeddings, str | Path) else as_embeddings(embeddings)
