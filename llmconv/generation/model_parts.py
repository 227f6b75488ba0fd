"""Parts of a TextModel: those of files, and those of a model in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llmconv.errors import InputRefused, UsageProblem
from llmconv.generation.genai import GenaiEngine
from llmconv.generation.model_files import ModelFiles
from llmconv.generation.positions import positions_of
from llmconv.generation.runners import load_genai, load_images, load_object, load_runner, refuse_prefix, refuse_stages
from llmconv.generation.sampling.settings import GenerationSettings
from llmconv.generation.torch_options import TorchOptions
from llmconv.runtime.context_length import context_length
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.prefix.runner import with_prefix
from llmconv.runtime.prefix.trained import Prefix
from llmconv.runtime.runner import Runner
from llmconv.runtime.stages.staged_runner import StageAddresses
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


def parts_of_files(
    files: ModelFiles,
    backend: str,
    settings: SessionSettings | None,
    options: TorchOptions,
    *,
    stages: StageAddresses | None,
    prefix: Prefix | None,
    trust_remote_code: bool,
) -> dict[str, Any]:
    """The fields of a `TextModel` for files, except for the tokenizer.

    Args:
        files: where they are.
        backend: `onnx`, `torch` or `genai`.
        settings: session settings of onnxruntime.
        options: adapter, device and dtype.
        stages: see `TextModel.open`.
        prefix: tuned prefix before every prompt.
        trust_remote_code: see `TextModel.open`.

    Raises:
        InputRefused, OutOfMemory, StageFailed, UnsupportedInput, UsageProblem: see `TextModel.open`.
    """
    engine: GenaiEngine | None = None
    runner: Any
    if backend == "genai":
        options.refuse()
        refuse_stages(stages, backend)
        refuse_prefix(prefix)
        engine = load_genai(files, settings)
        runner, length = engine.model, engine.context_length
    else:
        runner = load_runner(files, backend, settings, options, stages, trust_remote_code=trust_remote_code)
        runner = with_prefix(runner, prefix) if prefix else runner
        length = room_in(context_length(files.folder), runner)
    return {
        "runner": runner,
        "defaults": GenerationSettings.of(files.generation_config or files.folder),
        "context_length": length,
        "backend": backend,
        "positions": positions_of(files.folder),
        "folder": files.folder,
        "engine": engine,
        "images": load_images(files, backend, runner, settings),
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
