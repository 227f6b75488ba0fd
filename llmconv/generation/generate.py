"""`generate`: prompts, worded as the model continues them, run in batches; which runtime runs it, and how."""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast, get_type_hints

from llmconv.argument_checks import OWN, checked, fitted, require_least
from llmconv.checkpoint import read_json
from llmconv.errors import InputRefused, UsageProblem, short
from llmconv.files.paths import WEIGHT_SUFFIXES, Written, kind_of
from llmconv.files.sources import files_under
from llmconv.generation.completions import TOO_LONG, Completion, CompletionFile, Generation, GenerationCost, Meter
from llmconv.generation.loop import SharedPrefix
from llmconv.generation.model import TextModel
from llmconv.generation.prompts import (
    EncodedPrompt,
    Prompt,
    PromptContent,
    as_chat,
    prompt_names,
    prompts_of,
    read_prompts,
    shared_start,
    token_of,
    with_embeddings,
    with_prefix,
)
from llmconv.generation.row import TextPiece, require_streamer
from llmconv.generation.sampling import GenerationSettings, require_known, settings_fields, settings_line
from llmconv.progress import say, warn
from llmconv.runtime.onnxruntime.session_file import SessionOptions, session_settings
from llmconv.runtime.onnxruntime.session_settings import REMOTE_SILENCE, StageAddresses
from llmconv.runtime.runner import PromptEmbeddings
from llmconv.runtime.tokenizer import TOKENIZER, TooManyTokens, starts_twice, token_ids

if TYPE_CHECKING:
    from llmconv.generation.structured import Structure

MOST_CUT = 64  # a prompt that `src_length` cuts may be so many times as long as the context


@dataclass(frozen=True)
class Wording:
    """How prompts become the tokens that the model continues.

    Attributes:
        prompt_prefix: text before every prompt; the model runs it only once.
        template: chat template, see `templates`. If this, `system` or `chat` is given, a text becomes a chat of one
            message.
        system: system message of chats that have none.
        chat: treat a text as a user message, in the tokenizer's own template if `template` is empty.
        add_special_tokens: add the special tokens that the tokenizer adds, such as a start token.
        src_length: maximum number of prompt tokens; of a longer prompt the last ones are kept, and the special tokens
            at its start, as in PaddleNLP's predictor. None for no maximum.

    Raises:
        UsageProblem: a `src_length` of less than 1.
    """

    prompt_prefix: str = ""
    template: str = ""
    system: str = ""
    chat: bool = False
    add_special_tokens: bool = True
    src_length: int | None = None

    def __post_init__(self) -> None:
        if self.src_length is not None and self.src_length < 1:
            raise UsageProblem(f"`src_length` is {self.src_length}", hint="give at least 1")

    def encode(self, model: TextModel, prompt: Prompt, name: str = "the prompt") -> EncodedPrompt:
        """A prompt (`name` in messages) as the model takes it, without the tokens that are too many for `src_length`.

        Raises InputRefused if it has no tokens, there is no chat template, or its embeddings cannot be used;
        UsageProblem as `cut`, or if a prompt with embeddings is to be cut.
        """
        # refuses a field of the caller's own that has the name of an extra input of the model, which would be ignored
        if named := next((field for field in prompt.fields if field in model.runner.extra_inputs), ""):
            problem = f"{name} has a field `{named}`, which is an input of the model"
            raise InputRefused(problem, hint=f'write it as {{"prompt": "…", "inputs": {{"{named}": …}}}}')
        if prompt.images:
            encoded = self._with_images(model, prompt, name)
        elif prompt.embeddings is not None:
            ids = self._tokens(model, prompt.content)
            encoded = with_embeddings(prompt, ids, model.tokenizer, name)
            place = token_of(model.tokenizer, prompt.placeholder) if prompt.placeholder else None
            model.without_images([token for token in ids if token != place], name)
        else:
            return EncodedPrompt(model.without_images(self._tokens(model, prompt.content), name))
        if self.src_length is not None and len(encoded.ids) > self.src_length:
            raise UsageProblem(f"{name} has images or embeddings, and is not cut", hint="leave out `--src-length`")
        return encoded

    def _with_images(self, model: TextModel, prompt: Prompt, name: str) -> EncodedPrompt:
        if prompt.embeddings is not None:
            raise UsageProblem(f"{name} has both images and embeddings", hint="give one of them")
        content, encoder = with_prefix(prompt.content, self.prompt_prefix), model.require_images()
        if isinstance(content, str) and not self._chat_template:
            return encoder.encode(content, prompt.images, starts=self.add_special_tokens, most=model.longest_prompt)
        messages, template = as_chat(content, self.system), self._chat_template or TOKENIZER
        return model.encode_images(messages, prompt.images, template, add_special_tokens=self.add_special_tokens)

    def _tokens(self, model: TextModel, content: PromptContent) -> list[int]:
        content = with_prefix(content, self.prompt_prefix)
        special = self.add_special_tokens
        most = (1 if self.src_length is None else MOST_CUT) * model.longest_prompt  # see `TextModel.encode`
        if isinstance(content, str) and not self._chat_template:
            return model.encode(content, add_special_tokens=special, most=most)
        messages, template = as_chat(content, self.system), self._chat_template or TOKENIZER
        return model.encode_chat(messages, template, add_special_tokens=special, most=most)

    def cut(self, model: TextModel, tokens: list[int]) -> list[int]:
        """The tokens without those too many for `src_length`, after the special ones; UsageProblem without room."""
        if self.src_length is None or len(tokens) <= self.src_length:
            return tokens
        # number of tokens at the start that are the same
        second = token_ids(model.tokenizer, "")
        shorter = min(len(tokens), len(second))
        kept = next((at for at in range(shorter) if tokens[at] != second[at]), shorter)
        if kept >= self.src_length:
            problem = f"`src_length` is {self.src_length}, but a prompt begins with {kept} special token(s)"
            raise UsageProblem(problem, hint=f"give at least {kept + 1}")
        return [*tokens[:kept], *tokens[len(tokens) - self.src_length + kept :]]

    @property
    def _chat_template(self) -> str:
        """The template for texts; empty if they are not chats."""
        return self.template or (TOKENIZER if self.system or self.chat else "")

    def is_chat(self, prompt: Prompt) -> bool:
        return bool(self._chat_template) or not isinstance(prompt.content, str)

    @property
    def stops(self) -> tuple[str, ...]:
        if not self._chat_template:
            return ()
        from llmconv.runtime.chat_templates import find_template  # noqa: PLC0415 - a text needs none

        return find_template(self._chat_template).stops


@dataclass(frozen=True)
class PlannedText:
    """A text to generate: a prompt, and which of its continuations."""

    content: PromptContent  # the prompt as given, a text or a chat
    tokens: list[int]  # what the model continues
    # computes embeddings in place of those of some tokens; None for none
    embeddings: Callable[[], PromptEmbeddings] | None = None
    cut_tokens: int = 0  # number of tokens that were cut from the prompt
    sequence: int = 0  # which continuation of this prompt, from 0
    # number of its random generator among those of equal prompts; in a beam search, the rank of its beam
    sample: int = 0
    problem: InputRefused | None = None  # why the prompt is too long; None if it fits
    inputs: Mapping[str, Any] = field(default_factory=dict)  # values of the model's extra inputs by name
    continues: bool = False  # whether the new text is read behind that of the prompt, as it is not in a chat


def encode_all(
    model: TextModel, prompts: Sequence[Prompt], wording: Wording, settings: GenerationSettings, count: int = 1
) -> list[PlannedText]:
    """The texts to generate: `count` per prompt, in the order of the prompts; raises as `Wording.cut`.

    Equal prompts have random generators of different numbers, so that their samples differ; the number depends only on
    the equal prompts before it, not on other prompts or on the batches. Raises InputRefused if a prompt has no tokens,
    or all are too long.
    """
    whole, refused = [], dict[int, InputRefused]()
    for number, prompt in enumerate(prompts):
        try:
            whole.append(wording.encode(model, prompt, f"prompt {number + 1}"))
        except TooManyTokens as error:
            refused[number] = error
            whole.append(EncodedPrompt(error.ids))
    long = {*refused}
    warn_of_two_starts(model, prompts, whole, wording)
    cut = [one.ids if one.embeddings else wording.cut(model, one.ids) for one in whole]
    found = several(prompts, [replace(one, ids=ids) for one, ids in zip(whole, cut, strict=True)], count, settings)
    for number, (one, name) in enumerate(zip(cut, prompt_names(len(prompts)), strict=True)):
        try:
            model.limit(name, len(one), settings)
        except InputRefused as refusal:
            refused.setdefault(number, refusal)
    for at, text in enumerate(found):
        number = at // count
        found[at] = replace(
            text,
            cut_tokens=len(whole[number].ids) - len(text.tokens),
            problem=refused.get(number),
            continues=not wording.is_chat(prompts[number]),
        )
    model.given_inputs(cut, [{} if at in long else prompt.inputs for at, prompt in enumerate(prompts)])
    problems = [one.problem for one in found if one.problem]
    if problems and len(problems) == len(found):
        raise problems[0]
    return found


def warn_of_two_starts(
    model: TextModel, prompts: Sequence[Prompt], encoded: Sequence[EncodedPrompt], wording: Wording
) -> None:
    """Warns of prompts that begin with two start tokens, one of them the prompt's or the template's own."""
    twice = [one for one, made in zip(prompts, encoded, strict=True) if starts_twice(model.tokenizer, made.ids)]
    if not twice:
        return
    token, chats = model.tokenizer.bos_token, sum(map(wording.is_chat, twice))
    advice = (
        "its template writes one too many"
        if chats
        else ("the tokenizer adds one: take it out of the prompt, or give `--no-add-special-tokens`")
    )
    warn(f"{len(twice)} of {len(prompts)} prompts begin with `{token}` twice, and answers may be worse; {advice}")


def several(
    prompts: Sequence[Prompt], encoded: Sequence[EncodedPrompt], count: int, settings: GenerationSettings
) -> list[PlannedText]:
    """The texts to generate: `count` per prompt, each with the number of its sample, or rank in a beam search."""
    found, seen = [], Counter[tuple[str, ...]]()
    for prompt, one in zip(prompts, encoded, strict=True):
        key = (*map(str, one.ids), f"{prompt.images}{prompt.embeddings}{prompt.inputs or ''}")
        first = 0 if settings.num_beams > 1 else seen[key] * count
        seen[key] += 1
        given = prompt.content, one.ids, one.embeddings, 0
        found += [PlannedText(*given, at, first + at, inputs=prompt.inputs) for at in range(count)]
    return found


OnPiece = Callable[[TextPiece], object]


class TimedDecoder:
    """Decodes tokens to text, and adds up the seconds that it took."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode, self.seconds = decode, 0.0
        self.special_texts: Mapping[int, str] = getattr(decode, "special_texts", {})

    def __call__(self, tokens: Sequence[int]) -> str:
        started = time.perf_counter()
        text = self._decode(tokens)
        self.seconds += time.perf_counter() - started
        return text


@dataclass
class _GrowingText:
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    finish: str = ""

    def add(self, piece: TextPiece) -> None:
        self.text.append(piece.text)
        self.finish = piece.finish
        if piece.token is not None and piece.finish != "eos":
            self.tokens.append(piece.token)


@dataclass(frozen=True)
class Batches:
    """Runs texts in batches of at most `size`, fewer if the graphs are smaller."""

    model: TextModel
    settings: GenerationSettings
    size: int
    shares: bool = False  # the prompts have a common start, which is run only once
    together: int = 1  # texts that are not divided: the beams of a prompt
    streamer: object = None  # of transformers; texts then run one by one
    chat_ends: frozenset[int] | None = None  # tokens that end chats, where the settings are of texts among them

    def run(
        self, prompts: Sequence[PlannedText], skip: int = 0, on_piece: OnPiece | None = None
    ) -> Iterator[tuple[list[Completion], GenerationCost]]:
        """Yields completions and cost of each batch after `skip` texts; `on_piece` gets every piece of text."""
        ids = [prompt.tokens for prompt in prompts if not prompt.problem]
        shares = self.shares and len(ids) > 1 and not any(prompt.embeddings or prompt.inputs for prompt in prompts)
        shared = SharedPrefix(shared_start(ids), self.model.positions) if shares else None
        size = min(self.size, self.model.sequences or self.size)
        size = max(size // self.together, 1) * self.together
        size = 1 if self.streamer else size
        for start in range(skip, len(prompts), size):
            yield self._run_one(prompts[start : start + size], shared, on_piece or (lambda piece: None), start)

    def _run_one(
        self, prompts: Sequence[PlannedText], shared: SharedPrefix | None, on_piece: OnPiece, start: int
    ) -> tuple[list[Completion], GenerationCost]:
        """The texts from index `start` among all, by which `on_piece` knows them."""
        places = [at for at, prompt in enumerate(prompts) if not prompt.problem]
        fitting = [prompts[at] for at in places]
        growing = [_GrowingText(finish=TOO_LONG) for _ in prompts]
        for at in (at for at, prompt in enumerate(prompts) if prompt.problem):
            on_piece(TextPiece(start + at, "", None, TOO_LONG))
        meter = Meter([len(one.tokens) for one in fitting], at_once=self.settings.num_beams > 1)
        decode = TimedDecoder(self.model.decode)
        for piece in self._pieces(fitting, shared, decode):
            growing[places[piece.index]].add(piece)
            if piece.token is not None:
                meter.count(piece.index, guessed=piece.guessed)
            on_piece(replace(piece, index=start + places[piece.index]))
        cost = meter.stop(decode.seconds)
        seconds = dict(zip(places, cost.latencies, strict=True))
        made = []
        for at, (one, new) in enumerate(zip(prompts, growing, strict=True)):
            text, read, spent = "".join(new.text), len(one.tokens), seconds.get(at, 0.0)
            made.append(
                Completion(one.content, text, new.tokens, read, new.finish, one.sequence, one.cut_tokens, spent)
            )
        return made, cost

    def _pieces(
        self, prompts: Sequence[PlannedText], shared: SharedPrefix | None, decode: TimedDecoder
    ) -> Iterator[TextPiece]:
        if self.chat_ends is None:
            yield from self._stream(prompts, self.settings, shared, decode)
            return
        settings = self.settings, self.settings.but(eos_token_id=self.chat_ends)
        for is_chat, own in enumerate(settings):
            places = [at for at, one in enumerate(prompts) if is_chat != isinstance(one.content, str)]
            for piece in self._stream([prompts[at] for at in places], own, shared, decode):
                yield replace(piece, index=places[piece.index])

    def _stream(
        self,
        prompts: Sequence[PlannedText],
        settings: GenerationSettings,
        shared: SharedPrefix | None,
        decode: TimedDecoder,
    ) -> Iterator[TextPiece]:
        if not prompts:
            return iter(())
        ids, samples = [one.tokens for one in prompts], [one.sample for one in prompts]
        rows = [one.embeddings() if one.embeddings else None for one in prompts]
        given: dict[str, Any] = {"samples": samples, "decode": decode, "streamer": self.streamer}
        given["continues"] = [one.continues for one in prompts]
        if any(one.inputs for one in prompts):
            given["inputs"] = [one.inputs for one in prompts]
        return self.model.stream(ids, settings, shared, embeddings=rows, **given)


TUNED = ("adapter", "prefix_tuning", "decode", "tokenizer", "dtype")
BATCH_SIZE = 8
WORTH_PACKING = 512  # new tokens of all texts, from which on packing weights saves time
NEW_TOKENS = 64  # maximum number of new tokens, unless an option or `generation_config.json` gives another
# files whose size and time, like those of graphs and weights, tell whether an output file is of the same model
MODEL_FILES = {"config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"}


@dataclass
class PromptRun:
    """The prompts of one call, and their completions and costs so far.

    Raises InputRefused if a prompt has no tokens, or all are too long; UsageProblem for several equal greedy
    continuations of a prompt, or more than there are beams.
    """

    model: TextModel
    prompts: Sequence[Prompt]
    settings: GenerationSettings
    wording: Wording = field(default_factory=Wording)
    batch_size: int = BATCH_SIZE
    count: int = 1  # continuations per prompt
    # `adapter`, `prefix_tuning`, `decode`, `tokenizer` and `dtype`; a file is only continued with the same
    tuned: Mapping[str, str] = field(default_factory=dict)
    encoded: list[PlannedText] = field(init=False)  # the texts to generate: `count` per prompt
    encode_seconds: float = field(init=False)  # the time that encoding them took
    completions: list[Completion] = field(default_factory=list)
    costs: list[GenerationCost] = field(default_factory=list)
    skipped: int = 0  # number of texts that the file had before
    output: Path | None = None  # the file; None where completions are collected
    talks: bool = False  # print the settings, and the cost of each batch
    chat_ends: frozenset[int] | None = None  # see `Batches`

    def __post_init__(self) -> None:
        require_count(self.count, self.settings)
        started = time.perf_counter()
        self.encoded = encode_all(self.model, self.prompts, self.wording, self.settings, self.count)
        self.encode_seconds = time.perf_counter() - started

    @property
    def too_long(self) -> list[PlannedText]:
        """The prompts that are left out."""
        return [one for one in self.encoded if one.problem and one.sequence == 0]

    def run(
        self, output: Path | None = None, overwrite: bool = False, on_piece: OnPiece | None = None, streamer: Any = None
    ) -> Generation:
        """Runs all prompts, or those that the file of completions `output` does not have yet; None returns them.

        `overwrite` begins the file again; `on_piece` is called with every piece of text; with a `streamer` of
        transformers, texts run one by one. Raises as `CompletionFile`, and UsageProblem for `overwrite` without a file.
        """
        if output is None and overwrite:
            raise UsageProblem("`--overwrite` needs `--output-file`", hint="leave it out")
        if self.talks:
            batches = f", batches of {self.batch_size}" if len(self.encoded) > 1 else ""
            say(f"{settings_line(self.settings)}; {self.model.backend}{batches}")
            if cut := [one for one in self.encoded if one.cut_tokens and one.sequence == 0]:
                say(f"{len(cut)} of {len(self.prompts)} prompts cut to their last {self.wording.src_length} tokens")
        if self.too_long:
            first = str(self.too_long[0].problem)
            warn(f"{len(self.too_long)} of {len(self.prompts)} prompts are too long and left out: {first}")
        if output is None:
            self._run(self.completions.extend, on_piece, streamer)
        else:
            self._to_file(output, overwrite, on_piece, streamer)
        counts = {"num_return_sequences": self.count, "batch_size": self.batch_size}
        return Generation(
            self.completions,
            self.model.backend,
            self.costs,
            self.encode_seconds,
            {**settings_fields(self.settings), **asdict(self.wording), **counts},
            len(self.too_long),
            self.output,
            self.skipped,
        )

    def _to_file(self, path: Path, overwrite: bool, on_piece: OnPiece | None, streamer: Any) -> None:
        folder = self.model.folder.resolve()
        files = [path for path in sorted(folder.iterdir()) if path.is_file() and _is_of_model(path)]
        files += [path for one in self.tuned.values() if one and Path(one).exists() for path in files_under(Path(one))]
        state = {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in files}
        tokens = hashlib.sha256(repr([one.tokens for one in self.encoded]).encode()).hexdigest()  # also of the template
        model = {"model": str(folder), "files": state, "backend": self.model.backend, **self.tuned, "tokens": tokens}
        made_with = {**asdict(self.settings), **asdict(self.wording), "num_return_sequences": self.count, **model}
        added = ["sequence"] * (self.count > 1) + ["cut_tokens"] * (self.wording.src_length is not None)
        texts = [prompt for prompt in self.prompts for _ in range(self.count)]
        self.output = path
        with CompletionFile(path, texts, made_with, overwrite=overwrite, added=added) as file:
            self.skipped = file.done
            self._run(file.write, on_piece, streamer)

    def _run(self, take: Callable[[list[Completion]], object], on_piece: OnPiece | None, streamer: Any) -> None:
        together = self.count if self.settings.num_beams > 1 else 1
        shares = bool(self.wording.prompt_prefix)
        given = self.batch_size, shares, together, streamer, self.chat_ends
        batches = Batches(self.model, self.settings, *given)
        for completions, cost in batches.run(self.encoded, self.skipped, on_piece):
            take(completions)
            if not cost.prompts:
                continue
            self.costs.append(cost)
            if self.talks and len(self.encoded) > self.batch_size:
                say(f"batch {len(self.costs)}: {cost.summary()}")


def _is_of_model(file: Path) -> bool:
    """Whether a file is a graph, or has weights, also those of other exporters' graphs (`model.onnx_data`)."""
    return file.name in MODEL_FILES or file.suffix in WEIGHT_SUFFIXES or ".onnx" in file.name


def require_count(count: int, settings: GenerationSettings) -> None:
    """Raises UsageProblem if several continuations of a prompt are greedy, or more than there are beams."""
    if count < 1:
        raise UsageProblem(f"`num_return_sequences` is {count}", hint="give at least 1")
    if 1 < settings.num_beams < count:
        problem = f"a search with {settings.num_beams} beams has no {count} sequences"
        raise UsageProblem(problem, hint=f"give `--num-beams {count}` (`num_beams={count}`)")
    if count > 1 and settings.num_beams == 1 and settings.is_greedy:
        hint = "sample, for example with `--temperature 1` (`do_sample=True`), or give `--num-beams`"
        raise UsageProblem(f"{count} greedy sequences of a prompt would be the same", hint=hint)


class RunningOptions(SessionOptions, total=False):
    """Which runtime runs a model, and how: those of sessions, and these, with the names of the command line."""

    backend: str  # `onnx` (the graphs, the default), `torch` (the eager model) or `genai` (ONNX Runtime GenAI)
    decode: str | Path | None  # the decode graph, if the model is the prefill graph
    tokenizer: Any  # a tokenizer of transformers, or the folder of one; None for the model's own
    adapter: str | Path | None  # an adapter, for `torch`, see `TextModel.open`
    prefix_tuning: str | Path | None  # tuned prefix before every prompt, see `TextModel.open`
    device: Any  # torch's name of the device, for `torch`; None for the CPU
    dtype: Any  # `float32`, `float16` or `bfloat16`, for `torch`; None for that of the weights
    trust_remote_code: bool  # run the code in the folder: of the tokenizer and, for `torch`, of the model
    speculate: Any  # `lookup` (the default), `off`, or a smaller model, see `TextModel.open`
    form: str  # `auto` (the default), `mapped` or `file`, see `TextModel.open`
    stage_at: Sequence[str]  # addresses of stages in other processes, `[N=]HOST:PORT` or `ray`
    stage_timeout: float | None  # seconds without a heartbeat after which a stage is lost (default: 20)


# options that are passed to `TextModel.open` unchanged
PASSED_ON = (
    *("backend", "decode", "tokenizer", "adapter", "prefix_tuning", "device", "dtype", "trust_remote_code"),
    *("speculate", "form"),
)
OF_SESSION = ("provider", "session_config", "prepack", "packed_cache")  # options that only onnxruntime has


def opener(model: Any, options: RunningOptions) -> Callable[[], TextModel]:
    """A function that opens what `TextModel.open` accepts, or returns an open `TextModel`.

    The options, and files in them, are read at once (InputRefused). Raises UsageProblem for options that exclude each
    other, or that an open model does not take.
    """
    given: Mapping[str, Any] = options
    if isinstance(model, TextModel):
        for name, value in given.items():
            is_same = name == "backend" and value in ("onnx", model.backend)
            if value is not None and value is not False and value != () and not is_same:
                problem = f"`{name}` has no effect on an open model"
                raise UsageProblem(problem, hint="give it to `TextModel.open`, or give the folder")
        return lambda: model
    if given.get("backend") == "torch" and (odd := next((name for name in OF_SESSION if given.get(name)), "")):
        problem = f"`--{odd.replace('_', '-')}` is for onnxruntime, which `--backend torch` does not use"
        raise UsageProblem(problem, hint="leave it out and give `--device`; or leave out `--backend torch`")
    settings = session_settings(options)
    addresses, timeout = given.get("stage_at"), given.get("stage_timeout")
    if timeout is not None and not addresses:
        raise UsageProblem("`--stage-timeout` needs `--stage-at`", hint="leave it out")
    passed = {name: given[name] for name in PASSED_ON if given.get(name) is not None}
    if addresses:
        passed["stages"] = StageAddresses(addresses, REMOTE_SILENCE if timeout is None else timeout)
    return lambda: TextModel.open(model, settings=settings, **passed)


Prompts = Annotated[str | Prompt | Sequence[PromptContent | Prompt] | None, OWN]  # validated by `prompts_of`


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
    json_schema: Any = None,
    regex: str | None = None,
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
        json_schema: a JSON Schema, or a file with one, by which every text is valid JSON; of an open text model, too.
        regex: a regular expression that matches every text as a whole, in the syntax of Rust's crate `regex`.
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
    counts = {"batch_size": batch_size, "num_return_sequences": num_return_sequences}
    given = {**counts, "json_schema": json_schema, "regex": regex, **options}
    return prepare(model, inputs, **given).run(cast(Path | None, output_file), overwrite, on_piece, streamer)


def prepare(
    model: Any,
    prompts: Sequence[Prompt],
    *,
    batch_size: int = BATCH_SIZE,
    num_return_sequences: int = 1,
    json_schema: Any = None,
    regex: str | None = None,
    **options: Any,
) -> PromptRun:
    """Opens the model and encodes the prompts; as `generate`. Mistakes are reported before anything is loaded."""
    require_least(batch_size, 1, "batch_size")
    require_least(num_return_sequences, 1, "num_return_sequences")
    running = options_of(RunningOptions, options)
    wording = Wording(**options_of(Wording, options))
    settings = {name: value for name, value in options.items() if name not in {*OF_RUNNING, *OF_WORDING}}
    settings["structure"] = _structure(json_schema, regex)
    tokens = GenerationSettings().but(**settings).max_new_tokens or NEW_TOKENS
    if not isinstance(model, TextModel) and running.get("form") in (None, "auto"):
        # one graph of standard operators continues several rows that share a prefix; a short text pays for no copy
        is_short = len(prompts) * num_return_sequences * tokens < WORTH_PACKING
        running["form"] = "file" if wording.prompt_prefix and batch_size > 1 else "mapped" if is_short else "auto"
    opened = opener(model, cast(RunningOptions, running))()
    chosen = opened.defaults.but(**settings)
    chats = [wording.is_chat(prompt) for prompt in prompts]
    chat_ends = opened.chat_ends if any(chats) and settings.get("eos_token_id") is None else None
    if chat_ends is not None and all(chats):
        chosen, chat_ends = chosen.but(eos_token_id=chat_ends), None
    if chosen.max_new_tokens is None and chosen.max_length is None:
        chosen = chosen.but(max_new_tokens=NEW_TOKENS)
    chosen = chosen.but(stop_strings=tuple(dict.fromkeys((*chosen.stop_strings, *wording.stops))))
    # a path as text, or the kind of an object
    named = {name: running.get(name) or "" for name in TUNED}
    is_named = {name: name == "dtype" or isinstance(one, str | Path) for name, one in named.items()}
    tuned = {name: str(one) if is_named[name] else kind_of(one) for name, one in named.items()}
    given = opened, prompts, chosen, wording, batch_size, num_return_sequences, tuned
    return PromptRun(*given, chat_ends=chat_ends)


def _structure(json_schema: Any, regex: str | None) -> Structure | None:
    """The form of all texts; raises UsageProblem for two, or an invalid one; UnsupportedInput without llguidance."""
    if json_schema is None and regex is None:
        return None
    from llmconv.generation.structured import Structure, library  # noqa: PLC0415 - few texts have a structure

    if json_schema is not None and regex is not None:
        raise UsageProblem("`--json-schema` and `--regex` both set the form of the text", hint="give one of them")
    library()
    if regex is not None:
        return Structure.of_regex(regex, "--regex")
    if isinstance(json_schema, str | Path):
        if not Path(json_schema).is_file():
            problem = f"the JSON Schema `{short(json_schema, 200)}` does not exist"
            raise UsageProblem(problem, hint="give a path; in Python also the schema itself, as a dict")
        json_schema = read_json(Path(json_schema))
    return Structure.of_schema(json_schema, "--json-schema")


OF_RUNNING = tuple(RunningOptions.__annotations__)
OF_WORDING = tuple(field.name for field in fields(Wording))


def options_of(kind: type[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are fields of `RunningOptions` or `Wording`, converted by annotations; raises UsageProblem."""
    hints = get_type_hints(kind)
    return {name: fitted(value, hints[name], name) for name, value in options.items() if name in hints}


def _prompts(prompts: Any, file: str | Path | None, field: str | None, output: str | Path | None) -> list[Prompt]:
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
