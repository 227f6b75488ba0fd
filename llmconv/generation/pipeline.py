"""pipeline: the results of `transformers.pipeline("text-generation", …)`, from the graphs or the eager model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from typing import Any, cast

from llmconv.argument_checks import checked, fitted, require_least
from llmconv.embedding import TextFeatures
from llmconv.errors import UsageProblem, listing
from llmconv.files.paths import kind_of, path_of
from llmconv.generation.generate import (
    BATCH_SIZE,
    Batches,
    RunningOptions,
    Wording,
    opener,
    options_of,
    require_count,
    several,
    warn_of_two_starts,
)
from llmconv.generation.model import TextModel
from llmconv.generation.prompts import EncodedPrompt, Prompt, prompt_names
from llmconv.generation.row import TextPiece, is_streamer, require_streamer
from llmconv.generation.runners import TorchOptions, is_model
from llmconv.generation.sampling import GenerationSettings
from llmconv.runtime.chat_templates import find_template
from llmconv.runtime.onnxruntime.session_file import SessionOptions, session_settings
from llmconv.runtime.onnxruntime.session_settings import SessionSettings, provider_name

TASK = "text-generation"
# called with the model and the keywords of `pipeline`; returns what is called with the inputs
Opener = Callable[..., Any]
_TASKS: dict[str, Opener] = {}
_MODELS: dict[str, Any] = {}


@checked
def register_task(name: str, opener: Any) -> None:
    """Adds a task to those of `pipeline`, or replaces it; in its name `_` is `-`.

    `opener` is called with the model and the keywords of `pipeline`, and returns what is called with the inputs. Raises
    UsageProblem if the name is empty, or `opener` cannot be called.
    """
    if not name.strip() or not callable(opener):
        raise UsageProblem("a task has a name and a function that opens it", hint="`register_task(NAME, FUNCTION)`")
    _TASKS[_spelled(name)] = opener


def supported_tasks() -> tuple[str, ...]:
    """The names of all tasks, sorted."""
    return tuple(sorted(_TASKS))


@checked
def check_task(name: str) -> str:
    """The name of a task, with `-` or `_`, as `supported_tasks` has it; UsageProblem has the closest as hint."""
    spelled = _spelled(name)
    if spelled not in _TASKS:
        near = get_close_matches(spelled, _TASKS, n=1)
        known = f"is `{near[0]}` meant?" if near else f"tasks are {listing(supported_tasks())}"
        raise UsageProblem(f"unsupported pipeline task `{name}`", hint=known)
    return spelled


def get_task(name: str) -> Opener:
    """The function that opens a model for a task, with `-` or `_` in its name; raises UsageProblem as `check_task`."""
    return _TASKS[check_task(name)]


@checked
def register_model(name: str, model: Any) -> None:
    """Gives a model a name for `pipeline`, before folders and the Hub are searched; UsageProblem if it is empty.

    `model` is what `pipeline` takes: a folder, a pair of graphs (prefill, decode), `ModelFiles`; None to forget it.
    """
    if not name.strip():
        raise UsageProblem("a model has a name", hint="`register_model(NAME, MODEL)`")
    if model is None:
        _MODELS.pop(name, None)
    else:
        _MODELS[name] = model


def _spelled(name: str) -> str:
    return name.strip().replace("_", "-")


# defaults of transformers' pipeline, below the call and `generation_config.json`
DEFAULTS: dict[str, Any] = {"max_new_tokens": 256, "do_sample": True, "temperature": 0.7}


@checked
def pipeline(  # noqa: PLR0913 - one parameter per option
    task: str = TASK,
    model: Any = None,
    *,
    tokenizer: Any = None,
    streamer: Any = None,
    backend: str | None = None,
    device: Any = None,
    dtype: Any = None,
    torch_dtype: Any = None,
    image_processor: Any = None,
    **options: Any,
) -> Any:
    """Opens a model, to be called like transformers' pipeline.

    Args:
        task: `text-generation` (also `text_generation`), which gives a `TextGeneration`; `embed`, `classify` or
            `rerank`, which give a `TextFeatures`; or one of `register_task`.
        model: a registered name, a model folder, a pair of graphs (prefill, decode), a name in the Hub's cache,
            `ModelFiles`, an open `TextModel`, or a model of transformers, which is run by torch.
        tokenizer: a tokenizer of transformers, or the folder of one; None for that of the model.
        streamer: of transformers; gets the tokens of every call, see `TextModel.stream`.
        backend: `onnx` (the graphs, the default), `torch` (the eager model) or `genai` (ONNX Runtime GenAI); `mslite`
            is the first, and `ms` the second.
        device: name, number or torch's object of a device; of graphs, the CPU or CUDA.
        dtype: `float32`, `float16` or `bfloat16`, for `torch`; of graphs, the type that they compute in.
        torch_dtype: another name of `dtype`.
        image_processor: of transformers, in place of that of the folder of a model that takes images.
        options: fields of `RunningOptions`, default options of every call, see `TextGeneration.__call__`, and keywords
            of other pipelines, see `own_keywords`.

    Raises:
        InputRefused: there is no tokenizer, or nothing to run.
        UsageProblem: another task, no model, or an unknown or invalid option.
    """
    name = check_task(task)
    if model is None:
        raise UsageProblem("no model given", hint=f'`pipeline("{name}", model=FOLDER)`')
    given = {"tokenizer": tokenizer, "streamer": streamer, "backend": backend, "device": device}
    given |= {"dtype": dtype, "torch_dtype": torch_dtype, "image_processor": image_processor}
    model = _MODELS.get(model, model) if isinstance(model, str) else model
    return get_task(name)(model, **{key: one for key, one in given.items() if one is not None}, **options)


def _text_generation(model: Any, **given: Any) -> TextGeneration:
    """`given` are the keywords of `pipeline`, without those that are None."""
    if given.keys() >= {"dtype", "torch_dtype"}:
        raise UsageProblem("`dtype` and `torch_dtype` are the same option", hint="give one of them")
    own = ("tokenizer", "backend", "device", "dtype", "torch_dtype", "image_processor")
    tokenizer, backend, device, dtype, torch_dtype, image_processor = (given.pop(name, None) for name in own)
    backend, device, options = own_keywords(backend, device, given)
    of_calls = {name: value for name, value in options.items() if name not in RunningOptions.__annotations__}
    require_options(of_calls)
    dtype = torch_dtype if dtype is None else dtype
    running = {**options_of(RunningOptions, options), "backend": backend, "tokenizer": tokenizer}
    opened = opener(model, cast(RunningOptions, placed(model, backend, device, dtype, running)))()
    require_dtype(opened, dtype)
    return TextGeneration(
        opened if image_processor is None else opened.with_image_processor(image_processor), **of_calls
    )


def _text_features(task: str, model: Any, **options: Any) -> TextFeatures:
    if unknown := sorted(options.keys() - SessionOptions.__annotations__.keys()):
        raise UsageProblem(f"`{unknown[0]}` is not an option of `{task}`", hint="it has those of `SessionOptions`")
    settings = session_settings(cast(SessionOptions, options_of(SessionOptions, options)))
    return TextFeatures(task, path_of(model, "model"), settings)


class TextGeneration:
    """Continues texts and chats by `model`; `options` are the defaults of every call, see `__call__`."""

    task = TASK

    def __init__(self, model: TextModel, **options: Any) -> None:
        require_options(options)
        self.model, self.tokenizer = model, model.tokenizer
        self._options = options

    def __repr__(self) -> str:
        return f"<TextGeneration of {self.model!r}>"

    def __call__(self, inputs: Any, **options: Any) -> list[Any]:
        """A list of dicts for one text or chat; for several inputs, a list of such lists.

        Args:
            inputs: a text, a chat (messages with `role` and `content`), a `Prompt` (which may have images), or a list
                of these.
            options: `return_full_text` (default True: `generated_text` begins with the prompt; for a chat it is the
                messages with the answer), `return_tensors` (`generated_token_ids`, prompt included, in place of text),
                `num_return_sequences`, `prefix`, `stop_sequence`, `template`, `add_special_tokens`, `batch_size`,
                `streamer` (inputs then run one by one); all others are fields of `GenerationSettings`.

        Raises:
            InputRefused: an input has no tokens, is too long, or is a chat without a template; or its images or
                embeddings cannot be used.
            UsageProblem: an unknown or invalid option, or an input that is neither a text nor a chat.
        """
        given = {**self._options, **options}
        streamer = given.get("streamer")
        try:
            return self._answers(inputs, given)
        except BaseException:
            if is_streamer(streamer):
                streamer.end()  # a thread may wait for it
            raise

    def _answers(self, inputs: Any, given: dict[str, Any]) -> list[Any]:
        require_options(given)
        shape = {name: given.pop(name) for name in KINDS if name in given}
        many = not (isinstance(inputs, str | Prompt) or _is_chat(inputs))
        prompts = [one if isinstance(one, Prompt) else Prompt(one) for one in _contents(inputs if many else [inputs])]
        names, chats = prompt_names(len(prompts)), [_is_chat(prompt.content) for prompt in prompts]
        stops = find_template(shape["template"]).stops if shape.get("template") and any(chats) else ()
        if stops and not all(chats):
            return [self._answers(prompt, {**given, **shape}) for prompt in prompts]  # texts do not end there
        encoded = [self._encode(*one, shape) for one in zip(prompts, names, strict=True)]
        warn_of_two_starts(self.model, prompts, encoded, Wording())
        settings = self._settings(given)
        settings = settings.but(stop_strings=tuple(dict.fromkeys((*settings.stop_strings, *stops))))
        texts = self._texts(prompts, encoded, names, settings, shape)
        records = [
            [self._record(prompt.content, one.ids, tokens, shape) for tokens in several]
            for prompt, one, several in zip(prompts, encoded, texts, strict=True)
        ]
        return records if many else records[0]

    def _settings(self, given: dict[str, Any]) -> GenerationSettings:
        """Settings in transformers' order: the call, `generation_config.json`, the pipeline's defaults."""
        stops = given.pop("stop_sequence", None)
        defaults = self.model.defaults
        unset = {name: value for name, value in DEFAULTS.items() if name not in defaults.explicit}
        if given.get("max_length") is not None or defaults.max_length is not None:
            unset.pop("max_new_tokens", None)
        settings = defaults.but(**unset).but(**given)
        return settings.but(stop_strings=stops) if stops else settings

    def _encode(self, prompt: Prompt, name: str, shape: Mapping[str, Any]) -> EncodedPrompt:
        if _is_chat(prompt.content):
            special = shape.get("add_special_tokens") is not False
            wording = Wording(template=shape.get("template") or "", add_special_tokens=special)
        else:
            special = shape.get("add_special_tokens") is not False
            wording = Wording(shape.get("prefix") or "", add_special_tokens=special)
        return wording.encode(self.model, prompt, name)

    def _texts(
        self,
        prompts: Sequence[Prompt],
        encoded: Sequence[EncodedPrompt],
        names: Sequence[str],
        settings: GenerationSettings,
        shape: Mapping[str, Any],
    ) -> list[list[list[int]]]:
        """For every prompt, the new tokens of each returned sequence; each sampled sequence has its own seed."""
        count, streamer = _count(shape, "num_return_sequences", 1), shape.get("streamer")
        require_count(count, settings)
        if streamer is not None:
            require_streamer(streamer, count, settings)
        ids = [one.ids for one in encoded]
        for name, tokens in zip(names, ids, strict=True):
            self.model.limit(name, len(tokens), settings)
        self.model.given_inputs(ids, [prompt.inputs for prompt in prompts])
        texts = several(prompts, encoded, count, settings)
        together = count if settings.num_beams > 1 else 1
        batches = Batches(self.model, settings, _count(shape, "batch_size", BATCH_SIZE), False, together, streamer)
        tokens_of: list[list[int]] = [[] for _ in texts]

        def keep(piece: TextPiece) -> None:
            if piece.token is not None:
                tokens_of[piece.index].append(piece.token)

        for _ in batches.run(texts, on_piece=keep):
            pass
        return [tokens_of[start : start + count] for start in range(0, len(texts), count)]

    def _record(self, content: Any, prompt: list[int], tokens: list[int], shape: Mapping[str, Any]) -> dict[str, Any]:
        if shape.get("return_tensors"):
            return {"generated_token_ids": [*prompt, *tokens]}
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=shape.get("skip_special_tokens", True))
        if shape.get("template") and _is_chat(content):  # an answer ends before the template's own stop strings
            stops = find_template(shape["template"]).stops
            text = text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]
        if not shape.get("return_full_text", True):
            return {"generated_text": text}
        if not _is_chat(content):
            return {"generated_text": content + text}
        messages = [dict(message) for message in content]
        if messages[-1]["role"] == "assistant":
            given = messages[-1]["content"]
            longer = given + text if isinstance(given, str) else [*given, {"type": "text", "text": text}]
            return {"generated_text": [*messages[:-1], {**messages[-1], "content": longer}]}
        return {"generated_text": [*messages, {"role": "assistant", "content": text}]}


# options that are not generation settings, and their types; None is the default
KINDS: dict[str, Any] = {
    **dict.fromkeys(("return_full_text", "return_tensors", "add_special_tokens", "skip_special_tokens"), bool),
    "num_return_sequences": int,
    "batch_size": int,
    "prefix": str,
    "template": str,
    "streamer": Any,
}


def require_options(given: Mapping[str, Any]) -> None:
    """Raises UsageProblem for unknown options, which would have no effect, and for invalid ones."""
    GenerationSettings().but(**{name: one for name, one in given.items() if name not in (*KINDS, "stop_sequence")})
    if (streamer := given.get("streamer")) is not None:
        require_streamer(streamer, 1)
    for name, kind in KINDS.items():
        if given.get(name) is not None:
            value = fitted(given[name], kind, name)
            if kind is int:
                require_least(value, 1, name)


def _count(shape: Mapping[str, Any], name: str, default: int) -> int:
    return default if shape.get(name) is None else int(shape[name])


def _is_chat(content: Any) -> bool:
    return isinstance(content, Sequence) and bool(content) and all(isinstance(part, Mapping) for part in content)


def _contents(inputs: Any) -> list[Any]:
    if isinstance(inputs, bytes | Mapping | set | frozenset):
        problem = f"the input is {kind_of(inputs)}"
        raise UsageProblem(problem, hint="give a text, a list of messages, or a list of either")
    contents = list(inputs) if isinstance(inputs, Iterable) else [inputs]
    for content in contents:
        given = content.content if isinstance(content, Prompt) else content
        if not isinstance(given, str) and not _is_chat(given):
            problem = "an input is neither a text nor a chat"
            raise UsageProblem(problem, hint="give a text, messages, or a list of either")
    return contents


register_task(TASK, _text_generation)
for _task in ("embed", "classify", "rerank"):
    register_task(_task, partial(_text_features, _task))


# their backends, and ours of the same kind: graphs, or the model itself
BACKENDS = {"mslite": "onnx", "ms": "torch", "mindspore": "torch"}
# keywords without an argument here, and the counterpart
INSTEAD = {
    "ge_config_path": "`session_config=FILE` gives options of onnxruntime; those of GE have no meaning there",
    "audio_processor": "models with sounds are exported without them: their text model alone",
    "model_type": "`model_type` is read from the model's `config.json`; leave it out",
    "model_name": "give the name as `model`, see `register_model`",
    "full_model_path": "give the graph as `model`",
    "prefill_model_path": "give the pair of graphs as `model`: `(PREFILL, DECODE)`",
    "increment_model_path": "give the pair of graphs as `model`: `(PREFILL, DECODE)`",
    "target": "`device` or `provider` selects where graphs run",
    "is_sample_acceleration": "`llmconv export --postprocess topk:K` makes graphs that return the likeliest "
    "tokens; they are used without an option",
}


def own_keywords(
    backend: str | None, device: Any, options: Mapping[str, Any]
) -> tuple[str | None, Any, dict[str, Any]]:
    """Backend, device and options of `pipeline` with the other pipelines' keywords replaced.

    `backend` is llmconv's, or one of `BACKENDS`; `device_id` is the number of the device, `infer_seq_length` the
    `max_length`, `rank_id` must be 0; `is_sample_acceleration=False` and None are left out. Raises UsageProblem for a
    keyword without a counterpart, or one that contradicts llmconv's own; the hint has the counterpart.
    """
    kept = {name: value for name, value in options.items() if name not in _TAKEN}
    given = {name: value for name, value in options.items() if name in _TAKEN and value is not None}
    for name in INSTEAD:
        if kept.get(name) not in (None, False):
            raise UsageProblem(f"`{name}` is not an argument of `pipeline`", hint=INSTEAD[name])
        kept.pop(name, None)
    if "rank_id" in given and _number(given, "rank_id"):
        hint = "leave it out; `llmconv export --stages N` divides the graphs, `stage_at` names other processes"
        raise UsageProblem(f"`rank_id` is {given['rank_id']}, and one process runs all graphs", hint=hint)
    if "device_id" in given:
        device, kept = _placed(_number(given, "device_id"), device, kept)
    if "infer_seq_length" in given:
        # the options with a length of prompt and text together of at most `length` tokens
        length = _number(given, "infer_seq_length")
        if kept.get("max_new_tokens") is not None:
            hint = "give one of them: `infer_seq_length` includes the prompt, as `max_length` does"
            raise UsageProblem("`infer_seq_length` and `max_new_tokens` both set the length", hint=hint)
        longest = kept.get("max_length")
        if longest is not None and fitted(longest, int, "max_length") > length:
            problem = f"`max_length` {longest} is more than `infer_seq_length` {length}"
            raise UsageProblem(problem, hint="give `max_length` alone")
        kept = {**kept, "max_length": length if longest is None else longest}
    return BACKENDS.get(backend or "", backend), device, kept


_TAKEN = ("rank_id", "device_id", "infer_seq_length")


def _number(given: Mapping[str, Any], name: str) -> int:
    number: int = fitted(given[name], int, name)
    return require_least(number, int(name == "infer_seq_length"), name)


def _placed(number: int, device: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The device with its number; a provider of onnxruntime that is CUDA's becomes one."""
    provider = options.get("provider")
    if provider is not None and (device is not None or str(provider).lower() not in ("cuda", "cpu")):
        problem = f"`device_id` and `provider` {provider} do not go together"
        raise UsageProblem(problem, hint="give the number as an option of the provider, in a file of `session_config`")
    kind = str(provider or device or "cuda").lower()
    if kind == "cpu":
        return device, options  # there is one
    if kind != "cuda":
        message = f"`device` {device} and `device_id` both name a device"
        raise UsageProblem(message, hint=f'give `device="cuda:{number}"`')
    return f"cuda:{number}", {name: value for name, value in options.items() if name != "provider"}


def placed(model: Any, backend: str | None, device: Any, dtype: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options that open a model on a device; `dtype` is passed on to torch alone.

    Both are as in transformers: a name, a number or torch's object. Raises UsageProblem if the runtime does not have
    the device, or a `provider` or `session` among the options contradicts it.
    """
    given = TorchOptions.of(None, device, dtype)
    if backend == "torch" or is_model(model) or isinstance(model, TextModel):
        return {**options, "device": given.device, "dtype": given.dtype}
    kind, _, number = (given.device or "cpu").partition(":")
    if kind == "cpu":
        return options
    if options.get("provider") or options.get("session") or options.get("session_config"):
        raise UsageProblem("`device` and the session settings both select a device", hint="leave out `device`")
    if kind != "cuda" or not (number or "0").isdigit():
        raise UsageProblem(f"graphs do not run on the device `{given.device}`", hint="give `cpu`, `cuda` or `cuda:1`")
    session = SessionSettings(provider=provider_name(kind), provider_options={"device_id": number or "0"})
    return {**options, "session": session}


def require_dtype(model: TextModel, dtype: Any) -> None:
    """Raises UsageProblem if open graphs compute in another dtype, which only an export changes.

    None and `auto` stand for any dtype; torch's model has the dtype already.
    """
    wanted = TorchOptions.of(None, None, dtype)
    if model.backend == "torch" or wanted.dtype is None:
        return
    wanted.require_dtype()
    found = str(getattr(model.runner, "dtype", "the type of their export"))
    if found != wanted.dtype:
        problem = f"the graphs compute in {found}, not in {wanted.dtype}"
        raise UsageProblem(problem, hint=f"`llmconv export MODEL --precision {wanted.dtype}`, or leave out `dtype`")
