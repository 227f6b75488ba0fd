"""Parts of a TextModel: those of a model in memory, and the room in the context."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmconv.errors import InputRefused, UsageProblem
from llmconv.generation.runners import load_object
from llmconv.generation.sampling.settings import GenerationSettings
from llmconv.generation.torch_options import TorchOptions
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.runner import Runner
from llmconv.runtime.tokenizer import find_tokenizer


def parts_of_object(
    model: Any, tokenizer: Any, settings: SessionSettings | None, options: TorchOptions, **unused: Any
) -> dict[str, Any]:
    """The fields of a `TextModel` for a model of transformers in memory, on its device and in its dtype.

    Args:
        model: a torch module.
        tokenizer: an object or a folder.
        settings: the number of threads.
        options: device and dtype may be those that the model has.
        unused: options that only files have.

    Raises:
        InputRefused: the folder has no tokenizer.
        UsageProblem: no tokenizer, an option without effect, or not a causal language model of transformers.
    """
    own = {
        "device": str(getattr(model, "device", "")),
        "dtype": str(getattr(model, "dtype", "")).removeprefix("torch."),
    }
    given = {name: value for name, value in vars(options).items() if value != own.get(name)}
    if odd := next((name for name, value in {**given, **unused}.items() if value is not None), None):
        raise UsageProblem(f"`{odd}` has no effect on a model in memory", hint="load the model with it")
    if tokenizer is None:
        raise UsageProblem("a model in memory has no tokenizer", hint="give `tokenizer`, an object or a folder")
    runner = load_object(model, settings)
    return {
        "tokenizer": find_tokenizer(tokenizer, Path(), False),
        "runner": runner,
        "defaults": GenerationSettings.of_config(runner.model.generation_config.to_dict(), runner.config.to_dict()),
        "context_length": runner.context_length,
        "backend": "torch",
    }


def room_in(context: int | None, runner: Runner) -> int | None:
    """Tokens of prompt and new text together; a tuned prefix takes part of the model's context.

    Args:
        context: tokens that the model was made for; None if unknown.
        runner: has the number of virtual tokens, and the size of its cache.

    Raises:
        InputRefused: the prefix leaves no room.
    """
    lengths = [context - runner.virtual_tokens if context else None, runner.cache_capacity]
    length = min((length for length in lengths if length is not None), default=None)
    if length is not None and length < 1:
        raise InputRefused(
            f"a prefix of {runner.virtual_tokens} tokens leaves no room in the model's context of {context}",
            hint="is it the prefix of this model?",
        )
    return length
