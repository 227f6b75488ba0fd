"""generate: continues prompts, one batch at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

from llmconv.argument_checks import OWN, checked, fitted, require_least
from llmconv.errors import UsageProblem
from llmconv.files.paths import Written, kind_of
from llmconv.generation.batches import OnPiece
from llmconv.generation.completions import Generation
from llmconv.generation.model import TextModel
from llmconv.generation.prompt_file import read_prompts
from llmconv.generation.prompt_run import BATCH_SIZE, NEW_TOKENS, PromptRun
from llmconv.generation.prompts import Prompt, PromptContent, prompts_of
from llmconv.generation.running_options import RunningOptions, opener
from llmconv.generation.sampling.settings import GenerationSettings, require_known
from llmconv.generation.streamers import require_streamer
from llmconv.generation.wording import Wording

Prompts = Annotated[str | Prompt | Sequence[PromptContent | Prompt] | None, OWN]
"""Validated by `prompts_of`."""


@checked
def generate(  # noqa: PLR0913 - one parameter per option of the command
    model: Any,
    prompts: Prompts = None,
    *,
    prompt_file: str | Path | None = None,
    prompt_field: str | None = None,
    output_file: Written | None = None,
    overwrite: bool = False,
    batch_size: int = BATCH_SIZE,
    num_return_sequences: int = 1,
    on_piece: OnPiece | None = None,
    streamer: Any = None,
    **options: Any,
) -> Generation:
    """Continues every prompt; in a batch each prompt gives the same text as alone.

    Args:
        model: a model folder with a tokenizer, and with graphs for `backend="onnx"`; anything else that
            `TextModel.open` accepts; or an open `TextModel`, whose backend is used.
        prompts: texts, chats as lists of messages, or `Prompt` objects, which may have embeddings; or a single one.
        prompt_file: a file of prompts in place of `prompts`, see `read_prompts`.
        prompt_field: field of its JSON objects that has the prompt.
        output_file: append the completions to this file, and skip those that it has, see `CompletionFile`.
        overwrite: begin the file again.
        batch_size: number of texts per batch.
        num_return_sequences: number of continuations per prompt: samples with different random numbers, or the best
            beams.
        on_piece: called with every piece of text; its index counts continuations.
        streamer: of transformers, for one prompt, or for several one by one.
        options: fields of `RunningOptions`, of `Wording` and of `GenerationSettings`; the last replace those of
            `generation_config.json`.

    Raises:
        InputRefused: no tokenizer, no graphs, or a prompt without tokens; or all prompts are too long. If only some
            are, their completions are empty and have `finish="too_long"`.
        UsageProblem: no prompt, an unknown backend, or an unknown or invalid option.
    """
    if streamer is not None:
        require_streamer(streamer, num_return_sequences)
    known = {*OF_RUNNING, *OF_WORDING}
    require_known((name for name in options.keys() - known if options[name] is not None), known)
    inputs = _prompts(prompts, prompt_file, prompt_field, output_file)
    given = {"batch_size": batch_size, "num_return_sequences": num_return_sequences, **options}
    return prepare(model, inputs, **given).run(cast(Path | None, output_file), overwrite, on_piece, streamer)


def prepare(
    model: Any,
    prompts: Sequence[Prompt],
    *,
    batch_size: int = BATCH_SIZE,
    num_return_sequences: int = 1,
    **options: Any,
) -> PromptRun:
    """Opens the model and encodes the prompts; as `generate`. Mistakes are reported before anything is loaded."""
    require_least(batch_size, 1, "batch_size")
    require_least(num_return_sequences, 1, "num_return_sequences")
    running = options_of(RunningOptions, options)
    wording = Wording(**options_of(Wording, options))
    settings = {name: value for name, value in options.items() if name not in {*OF_RUNNING, *OF_WORDING}}
    GenerationSettings().but(**settings)
    opened = opener(model, cast(RunningOptions, running))()
    chosen = settings_for(opened, wording, settings)
    tuned = {name: _named(running.get(name)) for name in ("adapter", "prefix_tuning", "decode", "tokenizer")}
    return PromptRun(opened, prompts, chosen, wording, batch_size, num_return_sequences, tuned)


def _named(value: Any) -> str:
    """A path as text, or the kind of an object; empty for None."""
    if value is None:
        return ""
    return str(value) if isinstance(value, str | Path) else kind_of(value)


OF_RUNNING = tuple(RunningOptions.__annotations__)
OF_WORDING = tuple(field.name for field in fields(Wording))


def options_of(kind: type[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are fields of `RunningOptions` or `Wording`, converted by annotations; raises UsageProblem."""
    hints = get_type_hints(kind)
    return {name: fitted(value, hints[name], name) for name, value in options.items() if name in hints}


def _prompts(prompts: Any, file: str | Path | None, field: str | None, output: str | Path | None) -> list[Prompt]:
    """The prompts of a call: given as values, or in a file."""
    if file is None:
        if field is not None:
            raise UsageProblem("`prompt_field` needs `prompt_file`", hint="give the file, or the texts alone")
        return prompts_of(prompts)
    if prompts is not None:
        raise UsageProblem("prompts are given both as arguments and in a file", hint="give only one of them")
    require_other_file(file, output)
    return read_prompts(file, field)


def require_other_file(file: str | Path, output: Any) -> None:
    """Raises UsageProblem if the completions would be written over the prompts; `output` None means no file."""
    if isinstance(output, str | Path) and Path(file).resolve() == Path(output).resolve():
        raise UsageProblem("`--output-file` is the same file as `--prompt-file`", hint="give another one")


def settings_for(model: TextModel, wording: Wording, options: Mapping[str, Any]) -> GenerationSettings:
    """The settings of a run: the model's, replaced by `options`, with the template's stop strings and a length."""
    settings = model.defaults.but(**options)
    if settings.max_new_tokens is None and settings.max_length is None:
        settings = settings.but(max_new_tokens=NEW_TOKENS)
    return settings.but(stop_strings=tuple(dict.fromkeys((*settings.stop_strings, *wording.stops))))
