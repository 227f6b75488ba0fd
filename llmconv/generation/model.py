"""TextModel: a tokenizer, and the graphs or the eager model that continue its tokens."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmconv.argument_checks import checked
from llmconv.errors import InputRefused, UsageProblem
from llmconv.files.paths import kind_of
from llmconv.files.sources import fetching, local_path
from llmconv.generation.chat.reused_cache import PrefixCache
from llmconv.generation.chat.templates import TOKENIZER, encode_chat, has_start, render_chat
from llmconv.generation.encoded_prompt import EncodedPrompt
from llmconv.generation.engine import LoopEngine
from llmconv.generation.genai import GenaiEngine
from llmconv.generation.images import ImageEncoder, with_images
from llmconv.generation.model_files import ModelFiles
from llmconv.generation.own_embeddings import require_size
from llmconv.generation.positions import PositionRule, positions_of
from llmconv.generation.prompts import token_lists
from llmconv.generation.row import Row, TextPiece
from llmconv.generation.runners import load_genai, load_images, load_runner, refuse_prefix, refuse_stages, with_lora
from llmconv.generation.sampling.settings import GenerationSettings, require_settings
from llmconv.generation.torch_options import TorchOptions
from llmconv.runtime.context_length import context_length, has_window
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.runtime.placed_embeddings import PromptEmbeddings
from llmconv.runtime.prefix.runner import PrefixedRunner, with_prefix
from llmconv.runtime.prefix.trained import open_prefix
from llmconv.runtime.runner import TOKENS_ONLY, Runner, default_positions
from llmconv.runtime.stages.staged_runner import StageAddresses
from llmconv.runtime.tokenizer import TokenDecoder, encode_prompt, load_tokenizer, require_text


@dataclass(frozen=True)
class TextModel:
    """A model that continues texts.

    Attributes:
        tokenizer: a tokenizer of transformers.
        runner: the graphs or the eager model.
        defaults: the settings in `generation_config.json`.
        context_length: tokens that the model was made for, prompt and new text together; None if unknown.
        backend: `onnx`, `torch` or `genai`.
        positions: the model's rule for position ids.
        folder: has the configuration.
        engine: picks the tokens; None for llmconv's own loop over `runner`.
        images: prepares prompts with images; None for a model that takes none.
        origin: the model that this one shares its graphs with, see `with_adapter`.
    """

    tokenizer: Any
    runner: Runner
    defaults: GenerationSettings
    context_length: int | None = None
    backend: str = "onnx"
    positions: PositionRule = default_positions
    folder: Path = Path()
    engine: GenaiEngine | None = None
    images: ImageEncoder | None = None
    origin: TextModel | None = None

    @classmethod
    @checked
    def open(  # noqa: PLR0913 - one parameter per option of the commands
        cls,
        model: Any,
        *,
        backend: str = "onnx",
        settings: SessionSettings | None = None,
        adapter: str | Path | None = None,
        prefix_tuning: str | Path | None = None,
        trust_remote_code: bool = False,
        device: str | None = None,
        dtype: str | None = None,
        stages: StageAddresses | None = None,
    ) -> TextModel:
        """Opens a folder, a graph, a pair of graphs (prefill, decode), a name in the Hub's cache, or `ModelFiles`.

        Args:
            model: what to open. Files behind a URI are downloaded, and removed when nothing holds the model any more.
            backend: `onnx` (the graphs), `torch` (the eager model, the only use of torch) or `genai` (the graphs in
                ONNX Runtime GenAI, an optional package).
            settings: session settings of onnxruntime; `torch` takes the number of threads from them.
            adapter: for `torch`: a PEFT adapter folder, which PEFT applies, or an adapter of another program, which is
                merged in memory as `merge-lora` would. For graphs of `export --lora-inputs`: a LoRA adapter, or a file
                of `llmconv onnx-adapter`.
            prefix_tuning: tuned prefix before every prompt: a PEFT adapter folder of prefix tuning, or of prompt tuning
                where the model takes embeddings (`torch`), or PaddleNLP's `pre_caches.npy`.
            trust_remote_code: run the code in the folder: of the tokenizer and, for `torch`, of the model.
            device: torch's name of the device, for `torch`; None for the CPU.
            dtype: `float32`, `float16` or `bfloat16`, for `torch`; None for that of the weights.
            stages: where stages of `export --stages` run that do not run here.

        Raises:
            InputRefused: the folder has no tokenizer, or neither graphs nor weights; or a prefix of another model.
            OutOfMemory: the device has too little memory.
            StageFailed: no stage answers at an address, or it serves another model or export.
            UnsupportedInput: a prefix for a model that caches more than keys and values.
            UsageProblem: an unknown backend, device or dtype, or what only `torch` takes for the graphs.
        """
        options = TorchOptions(adapter, device, dtype)
        with fetching() as fetched:
            files = ModelFiles.find(model)
            prefix = None if prefix_tuning is None else open_prefix(local_path(prefix_tuning))
            tokenizer = load_tokenizer(files.tokenizer or files.folder, trust_remote_code)
            if backend == "genai":
                options.refuse()
                refuse_stages(stages, backend)
                refuse_prefix(prefix)
                engine = load_genai(files, settings)
                runner, length = engine.model, engine.context_length
            else:
                engine = None
                rest = {"trust_remote_code": trust_remote_code}
                runner = load_runner(files, backend, settings, options, stages, **rest)
                runner = with_prefix(runner, prefix) if prefix else runner
                length = _room(context_length(files.folder), runner)
            defaults = GenerationSettings.of(files.generation_config or files.folder)
            rule = positions_of(files.folder)
            images = load_images(files, backend, runner, settings)
            opened = cls(tokenizer, runner, defaults, length, backend, rule, files.folder, engine, images)
            fetched.keep_for(opened)
        return opened

    def with_adapter(self, adapter: str | Path) -> TextModel:
        """This model with a LoRA adapter in place of any that it has; both share graphs and weights.

        Args:
            adapter: see `open`; for graphs of `export --lora-inputs`, and none with `prefix_tuning`.

        Raises:
            InputRefused: not an adapter, one for other modules than the graphs have inputs for, or of another model.
            UnsupportedInput: another kind of adapter.
            UsageProblem: the graphs have no inputs for factors, or the model has a tuned prefix.
        """
        if isinstance(self.runner, PrefixedRunner):
            raise UsageProblem(
                "the model has a tuned prefix", hint="give `adapter` and `prefix_tuning` to `TextModel.open` together"
            )
        return replace(self, runner=with_lora(self.runner, self.folder, adapter), origin=self)

    @property
    def decode(self) -> TokenDecoder:
        """Tokens to text, without special tokens."""
        return TokenDecoder(self.tokenizer)

    @property
    def sequences(self) -> int | None:
        """Maximum number of prompts in a batch; None for any number.

        One if a tuned prefix precedes the padding of a batch, and a window counts both.
        """
        if self.engine:
            return self.engine.sequences
        return 1 if self.runner.virtual_tokens and has_window(self.folder) else self.runner.max_batch_size

    @property
    def _engine(self) -> GenaiEngine | LoopEngine:
        return self.engine or LoopEngine(self.runner, self.positions, self.folder)

    def __repr__(self) -> str:
        context = f", context {self.context_length:,}" if self.context_length else ""
        return f"<{type(self).__name__} {self.folder}: {self.backend}{context}>"

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, with the special tokens that the tokenizer adds; an empty text becomes the start token.

        Raises:
            InputRefused: the text has no tokens.
            UsageProblem: it is not a string.
        """
        if not isinstance(text, str):
            raise UsageProblem(
                f"`text` is {kind_of(text)}, not a string", hint="give one `str`; for a chat use `encode_chat`"
            )
        return encode_prompt(self.tokenizer, text, self.defaults.bos_token_id)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], template: str = TOKENIZER) -> list[int]:
        """Tokens of a chat, up to where the answer begins; if the last message is the assistant's, it is continued.

        Args:
            messages: `role` and `content` each, in order.
            template: `tokenizer` for the tokenizer's own, or one of `templates.TEMPLATES`.

        Raises:
            InputRefused: the tokenizer has no chat template, or the template fails on the messages.
            UsageProblem: an unknown template.
        """
        return encode_chat(self.tokenizer, messages, template)

    def require_images(self) -> ImageEncoder:
        """What prepares prompts with images.

        Raises:
            UsageProblem: the model takes no images.
        """
        if self.images is None:
            raise UsageProblem(
                f"`{self.folder}` takes no images with the backend `{self.backend}`",
                hint="docs/multimodal.md lists the families whose vision tower is exported as vision.onnx",
            )
        return self.images

    def encode_images(
        self, messages: Sequence[Mapping[str, Any]], images: Sequence[Any], template: str = TOKENIZER
    ) -> EncodedPrompt:
        """A chat with images; as `encode_chat`.

        Args:
            messages: see there; with a part of type `image` for each image, or none.
            images: paths, bytes of files, or images of Pillow.
            template: see there.

        Raises:
            InputRefused: see there, or an image is refused.
            UsageProblem: the model takes no images, or an unknown template.
        """
        encoder = self.require_images()
        if template == TOKENIZER:
            text = render_chat(self.tokenizer, with_images(messages, len(images)), template)
        else:  # these templates take texts only
            text = render_chat(self.tokenizer, messages, template)
        require_text(text)
        return encoder.encode(text, images, starts=not has_start(self.tokenizer, text, template))

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        settings: GenerationSettings | None = None,
        cache: PrefixCache | None = None,
        most: int = 0,
        embeddings: Sequence[PromptEmbeddings | None] = (),
    ) -> Generator[TextPiece]:
        """Continues every prompt, token by token; one `next()` runs at most one step of the model.

        Args:
            prompts: token ids. They form one batch, in which each prompt gives the same text as alone.
            settings: how to continue them; default: `defaults`.
            cache: tokens that have run before: a `Conversation` for a single prompt, which also keeps this turn when
                the stream ends; or a `SharedPrefix`.
            most: maximum number of prompt tokens per step; 0 for all. Each step but the last then yields an empty
                piece.
            embeddings: of each prompt, in place of those of some tokens; empty for none. Such prompts do not use
                `cache`.

        Raises:
            InputRefused: a prompt is longer than the context, or embeddings have another size.
            UsageProblem: prompts that are not tokens, or settings that the graphs cannot serve.
        """
        prompts = token_lists(prompts)
        settings = self.defaults if settings is None else require_settings(settings)
        limits = self.limits(prompts, settings)
        if len(prompts) > 1 == self.sequences and self.runner.virtual_tokens:
            raise UsageProblem(
                "in a batch, padding would shift the window of this model's attention away from the tuned prefix",
                hint="give one prompt at a time",
            )
        placed = [one for one in embeddings if one is not None]
        for one in placed:
            require_size(self.embedding_size, one.rows, TOKENS_ONLY)
        if settings.num_beams > 1:
            if placed:
                raise UsageProblem("a beam search takes tokens only", hint="give `--num-beams 1`")
            return self._search(prompts, limits, settings)
        if not placed:
            return self._engine.grow(prompts, limits, settings, self.decode, cache, most)
        return self._engine.grow(prompts, limits, settings, self.decode, None, most, embeddings)

    @property
    def embedding_size(self) -> int | None:
        """Size of the embeddings that prompts may contain; None if they consist of tokens only."""
        return None if self.engine else self.runner.embedding_size

    def _search(
        self, prompts: Sequence[Sequence[int]], limits: Sequence[int], settings: GenerationSettings
    ) -> Generator[TextPiece]:
        """Beam search: the pieces of a text come when all of it is known."""
        for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
            row = Row(index, prompt, limit, settings, self.decode)
            yield from _pieces(row, self._engine.beams(prompt, limit, settings, 1)[0])

    def search(self, prompt: Sequence[int], settings: GenerationSettings, count: int) -> list[list[int]]:
        """The new tokens of the `count` best beams of one prompt, best first.

        Args:
            prompt: token ids.
            settings: `num_beams` is at least `count`.
            count: number of continuations.

        Raises:
            InputRefused: the prompt is longer than the context.
            UsageProblem: there are fewer beams, or transformers does not accept the settings.
        """
        limit = self.limits([prompt], settings)[0]
        rows = (Row(0, prompt, limit, settings, self.decode) for _ in range(count))
        found = zip(rows, self._engine.beams(prompt, limit, settings, count), strict=True)
        return [[piece.token for piece in _pieces(*one) if piece.token is not None] for one in found]

    def limits(self, prompts: Sequence[Sequence[int]], settings: GenerationSettings) -> list[int]:
        """Maximum number of new tokens of each prompt, by the settings and by the room in the context.

        Raises:
            InputRefused: a prompt is empty, or too long for the context.
        """
        names = ["the prompt"] if len(prompts) == 1 else [f"prompt {at}" for at in range(1, len(prompts) + 1)]
        return [self._limit(name, len(prompt), settings) for name, prompt in zip(names, prompts, strict=True)]

    def _limit(self, name: str, prompt_tokens: int, settings: GenerationSettings) -> int:
        wanted = settings.new_tokens(prompt_tokens)
        if prompt_tokens == 0:
            raise InputRefused(f"{name} has no tokens", hint="give a prompt that is not empty")
        if wanted == 0:
            raise InputRefused(
                f"{name} has {prompt_tokens} tokens, but max_length is {settings.max_length}",
                hint="give a larger `--max-length`, or `--max-new-tokens`, which does not count the prompt",
            )
        if self.context_length is None:
            return wanted
        if prompt_tokens > self.context_length:
            raise InputRefused(
                f"{name} has {prompt_tokens} tokens, but the model's context is {self.context_length}",
                hint="shorten the prompt, or export with a larger --max-seq-len if the graphs set the limit",
            )
        return min(wanted, self.context_length - prompt_tokens + (not self._engine.runs_last_token))


def _room(context: int | None, runner: Runner) -> int | None:
    """Tokens of prompt and new text together; a tuned prefix takes part of the model's context."""
    lengths = [context - runner.virtual_tokens if context else None, runner.cache_capacity]
    length = min((length for length in lengths if length is not None), default=None)
    if length is not None and length < 1:
        raise InputRefused(
            f"a prefix of {runner.virtual_tokens} tokens leaves no room in the model's context of {context}",
            hint="is it the prefix of this model?",
        )
    return length


def _pieces(row: Row, tokens: Sequence[int]) -> Iterator[TextPiece]:
    """The pieces of a row whose tokens are all known, up to a stop string."""
    for token in tokens:
        piece = row.push(token)
        yield piece
        if piece.finish:
            break
    if not row.finish or not tokens:
        row.finish = "length"
        yield TextPiece(row.index, row.rest(), None, row.finish)


def open_model(
    model: Any,
    backend: str,
    session: SessionSettings | None,
    *,
    trust_remote_code: bool,
    prefix_tuning: str | Path | None = None,
    **options: Any,
) -> TextModel:
    """An open model as it is, or what `TextModel.open` opens.

    Args:
        model: an open `TextModel`, or what `TextModel.open` accepts.
        backend: `onnx`, `torch` or `genai`, unless the model is open.
        session: session settings of onnxruntime.
        trust_remote_code: run the code in the folder.
        prefix_tuning: tuned prefix before every prompt.
        options: fields of `TorchOptions`.

    Raises:
        InputRefused: the folder has no tokenizer, or neither graphs nor weights.
        UsageProblem: an unknown backend or option, or settings or options for a model that is open.
    """
    if not isinstance(model, TextModel):
        return TextModel.open(
            model,
            backend=backend,
            settings=session,
            prefix_tuning=prefix_tuning,
            trust_remote_code=trust_remote_code,
            **options,
        )
    if model.backend != "torch":
        TorchOptions(**options).refuse()
    for name, value in {"session": session, "prefix_tuning": prefix_tuning, **options}.items():
        if value is not None:
            raise UsageProblem(
                f"`{name}` has no effect on an open model", hint="give it to `TextModel.open`, or give the folder"
            )
    return model
