"""TextModel: a tokenizer, and the graphs or the eager model that continue its tokens."""

from __future__ import annotations

import importlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from llmconv.argument_checks import checked
from llmconv.errors import InputRefused, UsageProblem
from llmconv.files.paths import kind_of
from llmconv.files.sources import fetching
from llmconv.generation.chat.conversation import PrefixCache
from llmconv.generation.chat.templates import TOKENIZER, encode_chat
from llmconv.generation.loop import Batch, grow
from llmconv.generation.model_files import ModelFiles
from llmconv.generation.past import PositionRule
from llmconv.generation.positions import positions_of
from llmconv.generation.prompts import token_lists
from llmconv.generation.row import Row, TextPiece
from llmconv.generation.sampling.settings import GenerationSettings, require_settings
from llmconv.runtime.context import context_length
from llmconv.runtime.onnxruntime.runner import OrtRunner, SessionSettings
from llmconv.runtime.runner import Runner, default_positions
from llmconv.runtime.tokenizer import Decoder, encode_prompt, load_tokenizer

TORCH_PARTS = "llmconv.generation.sampling.logits_processors"
"""Imported by name, and only where it is needed: it brings torch."""


@dataclass(frozen=True)
class TextModel:
    """A model that continues texts.

    Attributes:
        tokenizer: of transformers.
        runner: the graphs or the eager model.
        defaults: what `generation_config.json` says.
        context_length: tokens that the model was made for, prompt and text together; None where nothing says so.
        backend: `onnx`, `torch` or `genai`.
        positions: rule of the position ids.
        folder: where the configuration lies.
    """

    tokenizer: Any
    runner: Runner
    defaults: GenerationSettings
    context_length: int | None = None
    backend: str = "onnx"
    positions: PositionRule = default_positions
    folder: Path = Path()

    @classmethod
    @checked
    def open(
        cls,
        model: Any,
        *,
        backend: str = "onnx",
        settings: SessionSettings | None = None,
        adapter: str | Path | None = None,
        trust_remote_code: bool = False,
    ) -> TextModel:
        """Opens a folder, a graph, a pair of graphs (prompts, steps), a name in the hub's cache, or `ModelFiles`.

        Args:
            model: what to open.
            backend: `onnx` (the graphs), `torch` (the eager model, its only use of torch) or `genai` (the graphs in
                ONNX Runtime GenAI, an optional package).
            settings: of onnxruntime; `torch` takes the number of threads from it.
            adapter: a folder of PEFT, for `torch`.
            trust_remote_code: run the folder's own code, of the tokenizer and, for `torch`, of the model.

        What a URI names is fetched, and removed when nothing holds the model any more.

        Raises:
            InputRefused: no tokenizer, or nothing that runs.
            UsageProblem: an unknown backend, or an adapter for the graphs.
        """
        with fetching() as fetched:
            opened = cls._open(model, backend, settings, adapter, trust_remote_code)
            fetched.keep_for(opened)
        return opened

    @classmethod
    def _open(
        cls,
        model: Any,
        backend: str,
        settings: SessionSettings | None,
        adapter: str | Path | None,
        trust_remote_code: bool,
    ) -> TextModel:
        files = ModelFiles.find(model)
        tokenizer = load_tokenizer(files.tokenizer or files.folder, trust_remote_code)
        if backend == "genai":
            return _open_genai(files, tokenizer, settings, adapter)
        runner = load_runner(files, backend, settings, adapter=adapter, trust_remote_code=trust_remote_code)
        lengths = [context_length(files.folder), getattr(runner, "slots", None)]
        return cls(
            tokenizer,
            runner,
            GenerationSettings.of(files.generation_config or files.folder),
            min((length for length in lengths if length), default=None),
            backend,
            positions_of(files.folder),
            files.folder,
        )

    @property
    def decode(self) -> Decoder:
        """Tokens to text, special tokens left out."""
        return Decoder(self.tokenizer)

    @property
    def sequences(self) -> int | None:
        """The most prompts of a batch; None for any number."""
        found: int | None = getattr(self.runner, "sequences", None)
        return found

    def __repr__(self) -> str:
        context = f", context {self.context_length:,}" if self.context_length else ""
        return f"<{type(self).__name__} {self.folder}: {self.backend}{context}>"

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, with the special tokens that the tokenizer adds; an empty one is the start token.

        Raises:
            InputRefused: no token at all.
            UsageProblem: it is not a text.
        """
        if not isinstance(text, str):
            raise UsageProblem(f"`text` is {kind_of(text)}, not a text", hint="give one `str`; a chat to `encode_chat`")
        return encode_prompt(self.tokenizer, text, self.defaults.bos_token_id)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], template: str = TOKENIZER) -> list[int]:
        """Tokens of a chat, up to where the answer begins; a last message of the assistant is gone on with.

        Args:
            messages: `role` and `content` each, in order.
            template: `tokenizer` for the tokenizer's own, or one of `templates.TEMPLATES`.

        Raises:
            InputRefused: the tokenizer has no chat template, or it refuses the messages.
            UsageProblem: an unknown template.
        """
        return encode_chat(self.tokenizer, messages, template)

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        settings: GenerationSettings | None = None,
        cache: PrefixCache | None = None,
        most: int = 0,
    ) -> Generator[TextPiece]:
        """Continues every prompt, token by token; one `next()` runs at most one step of the model.

        Args:
            prompts: tokens; all of them make one batch, in which each gets what it gets alone.
            settings: `defaults` when left out.
            cache: what was run before: a `Conversation` for a single prompt, which holds this turn, too, when the
                stream ends; or a `SharedPrefix`.
            most: prompt tokens of a step; 0 for all at once. Each step but the last then gives an empty piece.

        Raises:
            InputRefused: a prompt is longer than the context.
            UsageProblem: prompts that are not tokens, or settings that the graphs cannot serve.
        """
        prompts = token_lists(prompts)
        settings = self.defaults if settings is None else require_settings(settings)
        limits = self.limits(prompts, settings)
        if settings.num_beams > 1:
            return self._search(prompts, limits, settings)
        return self._grow(prompts, limits, settings, cache, most)

    def _grow(
        self,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        settings: GenerationSettings,
        cache: PrefixCache | None,
        most: int,
    ) -> Generator[TextPiece]:
        """Greedy search or sampling."""
        rows = [self._row(index, *given, settings) for index, given in enumerate(zip(prompts, limits, strict=True))]
        yield from (TextPiece(row.index, "", None, row.finish) for row in rows if row.finish)
        batch = Batch(self.runner, rows, self.positions)
        if not batch.rows:
            return
        is_whole = False
        try:
            past = cache.past([row.prompt for row in batch.rows], self.runner) if cache else None
            for piece in grow(batch, past, most):
                is_whole = True
                yield piece
                is_whole = False
            is_whole = True
        finally:  # a step that broke off may have left half of itself in the cache
            if cache and len(rows) == 1:
                cache.keep(*((rows[0].ids[: batch.past.tokens], batch.past.cache) if is_whole and batch.past else ()))

    def _search(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[int], settings: GenerationSettings
    ) -> Generator[TextPiece]:
        """With beams: a text is there when all of it is."""
        for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            row = Row(index, prompt, limit, settings, self.decode)
            yield from _grown(row, self._beams(prompt, limit, settings, 1)[0])

    def search(self, prompt: Sequence[int], settings: GenerationSettings, count: int) -> list[list[int]]:
        """The new tokens of the `count` best continuations that a search with beams finds, best first.

        Raises:
            InputRefused: the prompt is longer than the context.
            UsageProblem: there are fewer beams, or transformers refuses the settings.
        """
        limit = self.limits([prompt], settings)[0]
        rows = (Row(0, prompt, limit, settings, self.decode) for _ in range(count))
        found = zip(rows, self._beams(prompt, limit, settings, count), strict=True)
        return [[piece.token for piece in _grown(*one) if piece.token is not None] for one in found]

    def _beams(
        self, prompt: Sequence[int], limit: int, settings: GenerationSettings, count: int
    ) -> Sequence[list[int]]:
        if not limit:
            return [[]] * count
        parts = importlib.import_module(TORCH_PARTS)
        model = parts.GraphModel(self.runner, self.positions, self._vocabulary())
        found: list[list[int]] = parts.search(model, prompt, limit, settings, count)
        return found

    def _row(self, index: int, prompt: Sequence[int], limit: int, settings: GenerationSettings) -> Row:
        processor = None
        if settings.needs_processors:
            processor = importlib.import_module(TORCH_PARTS).processor(settings, len(prompt), limit)
        return Row(index, prompt, limit, settings, self.decode, processor)

    def limits(self, prompts: Sequence[Sequence[int]], settings: GenerationSettings) -> list[int]:
        """How many tokens may follow each prompt: as the settings say, and as the context has room.

        Raises:
            InputRefused: a prompt alone is too long for the context, or empty.
        """
        names = ["the prompt"] if len(prompts) == 1 else [f"prompt {at}" for at in range(1, len(prompts) + 1)]
        return [self._limit(name, len(prompt), settings) for name, prompt in zip(names, prompts, strict=True)]

    def _limit(self, name: str, prompt_tokens: int, settings: GenerationSettings) -> int:
        wanted = settings.new_tokens(prompt_tokens)
        if prompt_tokens == 0:
            raise InputRefused(f"{name} has no tokens", hint="give a prompt that is not empty")
        if wanted == 0:
            raise InputRefused(
                f"{name} has {prompt_tokens} tokens, and max_length is {settings.max_length}",
                hint="give a larger `--max-length`, or `--max-new-tokens`, which does not count the prompt",
            )
        if self.context_length is None:
            return wanted
        if prompt_tokens > self.context_length:
            raise InputRefused(
                f"{name} has {prompt_tokens} tokens, and the model's context is {self.context_length}",
                hint="shorten the prompt, or export with a larger --max-seq-len where the graphs are what is short",
            )
        return min(wanted, self.context_length - prompt_tokens + 1)  # the last token is never run

    def _vocabulary(self) -> int:
        """Size of the logits."""
        source = importlib.import_module("transformers").AutoConfig
        config = source.from_pretrained(self.folder, local_files_only=True, trust_remote_code=False)
        return int(config.get_text_config(decoder=True).vocab_size)


def _grown(row: Row, tokens: Sequence[int]) -> Iterator[TextPiece]:
    """The pieces of a row whose tokens are all known, up to a stop string."""
    for token in tokens:
        piece = row.push(token)
        yield piece
        if piece.finish:
            break
    if not row.finish or not tokens:
        row.finish = "length"
        yield TextPiece(row.index, row.rest(), None, row.finish)


def _open_genai(
    files: ModelFiles, tokenizer: Any, settings: SessionSettings | None, adapter: str | Path | None
) -> TextModel:
    """A folder for ONNX Runtime GenAI, an optional package."""
    _refuse_adapter(adapter)
    if files.prefill:
        raise UsageProblem("GenAI opens folders, no single graphs", hint="give the folder with genai_config.json")
    model: TextModel = importlib.import_module("llmconv.generation.genai").GenaiModel.load(
        files.folder,
        settings,
        tokenizer=tokenizer,
        defaults=GenerationSettings.of(files.generation_config or files.folder),
        context_length=context_length(files.folder),
    )
    return model


def _refuse_adapter(adapter: str | Path | None) -> None:
    if adapter is not None:
        raise UsageProblem(
            "graphs take no adapter", hint="give `--backend torch`, or merge it: `llmconv merge-lora BASE ADAPTER`"
        )


def _refuse_session(settings: SessionSettings | None) -> None:
    """Settings of onnxruntime, which runs nothing of the eager model."""
    odd = [field.name for field in fields(SessionSettings) if field.name != "threads"]
    odd = [name for name in odd if settings and getattr(settings, name) != getattr(SessionSettings(), name)]
    if odd:
        raise UsageProblem(
            f"`{odd[0]}` is a setting of onnxruntime, which `backend` torch does without",
            hint="leave it out, the eager model runs on the CPU; or leave out `backend`",
        )


def load_runner(
    files: ModelFiles,
    backend: str,
    settings: SessionSettings | None = None,
    *,
    adapter: str | Path | None = None,
    trust_remote_code: bool = False,
) -> Runner:
    """The graphs, or the eager model (only then is torch imported).

    Raises:
        InputRefused: the folder has no graphs, or transformers cannot load it.
        UsageProblem: an unknown backend, or an adapter for the graphs.
    """
    if backend == "onnx":
        _refuse_adapter(adapter)
        if files.prefill:
            return OrtRunner.from_files(files.prefill, files.decode, settings)
        return OrtRunner.from_folder(files.folder, settings)
    if backend != "torch":
        raise UsageProblem(f"backend `{backend}` is unknown", hint="give `onnx`, `torch` or `genai`")
    _refuse_session(settings)
    runner: Runner = importlib.import_module("llmconv.runtime.eager.torch_runner").TorchRunner(
        files.folder,
        code=files.folder if trust_remote_code else None,
        adapter=Path(adapter) if adapter else None,
        threads=settings.threads if settings else 0,
    )
    return runner
