"""How many new tokens a prompt may get, by the settings and by the room in the context."""

from __future__ import annotations

from llmconv.errors import InputRefused
from llmconv.generation.sampling.settings import GenerationSettings


def limit_of(name: str, prompt_tokens: int, settings: GenerationSettings, context: int | None, room: int | None) -> int:
    """Maximum number of new tokens of a prompt.

    Args:
        name: of the prompt, for messages.
        prompt_tokens: its number of tokens.
        settings: limit the length.
        context: maximum number of tokens of a prompt; None for no limit.
        room: maximum number of tokens of a prompt and its new text; None for no limit.

    Raises:
        InputRefused: the prompt is empty, or too long for the context.
    """
    wanted = settings.new_tokens(prompt_tokens)
    if prompt_tokens == 0:
        raise InputRefused(f"{name} has no tokens", hint="give a prompt that is not empty")
    if wanted == 0:
        raise InputRefused(
            f"{name} has {prompt_tokens} tokens, but max_length is {settings.max_length}",
            hint="give a larger `--max-length`, or `--max-new-tokens`, which does not count the prompt",
        )
    if context is not None and prompt_tokens > context:
        raise InputRefused(
            f"{name} has {prompt_tokens} tokens, but the model's context is {context}",
            hint="shorten the prompt, or export with a larger --max-seq-len if the graphs set the limit",
        )
    return wanted if room is None else min(wanted, room - prompt_tokens)
