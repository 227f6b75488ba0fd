"""`generate`: texts from a model folder, and the options of which runtime runs it, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

from llmconv.argument_checks import OWN, checked, fitted, require_least
from llmconv.errors import UsageProblem
from llmconv.files.paths import Written, kind_of
from llmconv.generation.completions import Generation
from llmconv.generation.model import TextModel
from llmconv.generation.prompt_run import BATCH_SIZE, NEW_TOKENS, OnPiece, PromptRun
from llmconv.generation.prompts import Prompt, PromptContent, prompts_of, read_prompts
from llmconv.generation.row import require_streamer
from llmconv.generation.sampling import GenerationSettings, require_known
from llmconv.generation.wording import Wording
from llmconv.runtime.onnxruntime.session_file import SessionOptions, session_settings
from llmconv.runtime.stages.staged_runner import StageAddresses


class RunningOptions(SessionOptions, total=False):
    """Which runtime runs a model, and how: those of sessions, and these, with the names of the command line.

    Attributes:
        backend: `onnx` (the graphs, the default), `torch` (the eager model) or `genai` (ONNX Runtime GenAI).
        decode: the decode graph, if the model is the prefill graph.
        tokenizer: a tokenizer of transformers, or the folder of one; None for the model's own.
        adapter: an adapter, for `torch`, see `TextModel.open`.
        prefix_tuning: tuned prefix before every prompt, see `TextModel.open`.
        device: torch's name of the device, for `torch`; None for the CPU.
        dtype: `float32`, `float16` or `bfloat16`, for `torch`; None for that of the weights.
        trust_remote_code: run the code in the folder: of the tokenizer and, for `torch`, of the model.
        stage_at: addresses of stages in other processes, `[N=]HOST:PORT` or `ray`.
        stage_timeout: seconds without a heartbeat after which a stage is lost (default: 20).
    """

    backend: str
    decode: str | Path | None
    tokenizer: Any
    adapter: str | Path | None
    prefix_tuning: str | Path | None
    device: Any
    dtype: Any
    trust_remote_code: bool
    stage_at: Sequence[str]
    stage_timeout: float | None


PASSED_ON = ("backend", "decode", "tokenizer", "adapter", "prefix_tuning", "device", "dtype", "trust_remote_code")
"""Options that are passed to `TextModel.open` unchanged."""

OF_SESSION = ("session", "provider", "session_config", "prepack", "packed_cache")
"""Options that only onnxruntime has."""


def opener(model: Any, options: RunningOptions) -> Callable[[], TextModel]:
    """A function that opens what `TextModel.open` accepts, or returns an open `TextModel`.

    The options, and files in them, are read at once (InputRefused). Raises UsageProblem for options that exclude each
    other, or that an open model does not take.
    """
    given: Mapping[str, Any] = options
    if isinstance(model, TextModel):
        _refuse_for_open(model, given)
        return lambda: model
    if given.get("backend") == "torch":
        _refuse_session(given)
    settings, stages = session_settings(options), _stages(given)
    passed = {name: given[name] for name in PASSED_ON if given.get(name) is not None}
    return lambda: TextModel.open(model, settings=settings, stages=stages, **passed)


def _stages(given: Mapping[str, Any]) -> StageAddresses | None:
    addresses, timeout = given.get("stage_at"), given.get("stage_timeout")
    if not addresses:
        if timeout is not None:
            raise UsageProblem("`--stage-timeout` needs `--stage-at`", hint="leave it out")
        return None
    return StageAddresses(addresses) if timeout is None else StageAddresses(addresses, timeout)


def _refuse_session(given: Mapping[str, Any]) -> None:
    """Refuses options of onnxruntime, which the eager model does not use."""
    odd = next((name for name in OF_SESSION[1:] if given.get(name)), None)
    if odd:
        raise UsageProblem(
            f"`--{odd.replace('_', '-')}` is for onnxruntime, which `--backend torch` does not use",
            hint="leave it out and give `--device`; or leave out `--backend torch`",
        )


def _refuse_for_open(model: TextModel, given: Mapping[str, Any]) -> None:
    """Refuses options of opening, for a model that is open."""
    for name, value in given.items():
        is_same = name == "backend" and value in ("onnx", model.backend)
        if value is not None and value is not False and value != () and not is_same:
            raise UsageProblem(
                f"`{name}` has no effect on an open model", hint="give it to `TextModel.open`, or give the folder"
            )


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
