"""What prompts are called in messages."""

from __future__ import annotations


def prompt_names(count: int) -> list[str]:
    """The names of prompts in messages."""
    return ["the prompt"] if count == 1 else [f"prompt {at}" for at in range(1, count + 1)]
