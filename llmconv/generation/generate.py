"""generate: continues prompts, one batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from llmconv.argument_checks import OWN, checked, require_least
from llmconv.errors import UsageProblem
from llmconv.generation.chat.reused_cache import SharedPrefix
from llmconv.generation.chat.templates import TOKENIZER, find_template
from llmconv.generation.completions import Completion, Generation, GenerationCost, Meter
from llmconv.generation.encoded_prompt import EncodedPrompt, with_embeddings
from llmconv.generation.model import TextModel, open_model
from llmconv.generation.prompts import Prompt, PromptContent, as_chat, prompts_of, shared_start, with_prefix
from llmconv.generation.row import TextPiece
from llmconv.generation.sampling.settings import GenerationSettings
from llmconv.runtime.onnxruntime.session_settings import SessionSettings

BATCH_SIZE = 8
NEW_TOKENS = 64
"""Maximum number of new tokens, unless an option or `generation_config.json` gives another."""

OnPiece = Callable[[TextPiece], object]
Prompts = Annotated[str | Prompt | Sequence[PromptContent | Prompt], OWN]
"""Validated by `prompts_of`."""


@dataclass(frozen=True)
class Wording:
    """How prompts become the texts that the model continues.

    Attributes:
        prompt_prefix: text before every prompt; the model runs it only once.
        template: chat template, see `templates`. If this or `system` is given, a text becomes a chat of one message.
        system: system message of chats that have none.
    """

    prompt_prefix: str = ""
    template: str = ""
    system: str = ""

    def encode(self, model: TextModel, prompt: Prompt, name: str = "the prompt") -> EncodedPrompt:
        """A prompt as the model takes it.

        Args:
            model: its tokenizer is used.
            prompt: a text or a chat, with embeddings or without.
            name: of the prompt in messages.

        Raises:
            InputRefused: the prompt has no tokens, there is no chat template, or its embeddings cannot be used.
        """
        if prompt.images:
            return self._with_images(model, prompt, name)
        ids = self._tokens(model, prompt.content)
        if prompt.embeddings is None:
            return EncodedPrompt(ids)
        return with_embeddings(prompt, ids, model.tokenizer, name)

    def _with_images(self, model: TextModel, prompt: Prompt, name: str) -> EncodedPrompt:
        if prompt.embeddings is not None:
            raise UsageProblem(f"{name} has both images and embeddings", hint="give one of them")
        content, encoder = with_prefix(prompt.content, self.prompt_prefix), model.require_images()
        if isinstance(content, str) and not self._chat_template:
            return encoder.encode(content, prompt.images, starts=True)
        return model.encode_images(as_chat(content, self.system), prompt.images, self._chat_template or TOKENIZER)

    def _tokens(self, model: TextModel, content: PromptContent) -> list[int]:
        content = with_prefix(content, self.prompt_prefix)
        if isinstance(content, str) and not self._chat_template:
            return model.encode(content)
        return model.encode_chat(as_chat(content, self.system), self._chat_template or TOKENIZER)

    @property
    def _chat_template(self) -> str:
        """The template for texts; empty if they are not chats."""
        return self.template or (TOKENIZER if self.system else "")

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings of the template."""
        return find_template(self._chat_template).stops if self._chat_template else ()


@dataclass
class _GrowingText:
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    finish: str = ""


@checked
def generate(  # noqa: PLR0913 - one parameter per option of the command
    model: Any,
    prompts: Prompts,
    *,
    backend: str = "onnx",
    batch_size: int = BATCH_SIZE,
    wording: Wording | None = None,
    session: SessionSettings | None = None,
    on_piece: OnPiece | None = None,
    adapter: str | Path | None = None,
    prefix_tuning: str | Path | None = None,
    trust_remote_code: bool = False,
    device: str | None = None,
    dtype: str | None = None,
    **options: Any,
) -> Generation:
    """Continues every prompt; in a batch each prompt gives the same text as alone.

    Args:
        model: a model folder with a tokenizer, and with graphs for `backend="onnx"`; anything else that
            `TextModel.open` accepts; or an open `TextModel`, whose backend is used.
        prompts: texts, chats as lists of messages, or `Prompt` objects, which may have embeddings; or a single one.
        backend: `onnx` (the graphs), `torch` (the eager model) or `genai` (ONNX Runtime GenAI).
        batch_size: number of prompts per batch.
        wording: chat template and prefix of all prompts.
        session: session settings of onnxruntime.
        on_piece: called with every piece of text.
        adapter: see `TextModel.open`.
        prefix_tuning: tuned prefix before every prompt, see `TextModel.open`.
        trust_remote_code: run the code in the folder: of the tokenizer and, for `torch`, of the model.
        device: torch's name of the device, for `torch`; None for the CPU.
        dtype: `float32`, `float16` or `bfloat16`, for `torch`; None for that of the weights.
        options: fields of `GenerationSettings`; they replace those of `generation_config.json`.

    Raises:
        InputRefused: no tokenizer, no graphs, or a prompt without tokens or longer than the context.
        UsageProblem: no prompt, an unknown backend, or an unknown or invalid option.
    """
    contents = prompts_of(prompts)
    require_least(batch_size, 1, "batch_size")
    GenerationSettings().but(**options)  # reports mistakes before anything is loaded
    tuned: dict[str, Any] = {"adapter": adapter, "prefix_tuning": prefix_tuning, "device": device, "dtype": dtype}
    opened = open_model(model, backend, session, trust_remote_code=trust_remote_code, **tuned)
    wording = wording or Wording()
    settings = settings_for(opened, wording, options)
    done = list(run_batches(opened, contents, settings, wording=wording, batch_size=batch_size, on_piece=on_piece))
    completions = [completion for batch, _ in done for completion in batch]
    return Generation(completions, opened.backend, [cost for _, cost in done])


def settings_for(model: TextModel, wording: Wording, options: dict[str, Any]) -> GenerationSettings:
    """The settings of a run: the model's, replaced by `options`, with the template's stop strings and a length.

    Args:
        model: its defaults are used.
        wording: names the options in messages.
        options: fields of `GenerationSettings`.
    """
    settings = model.defaults.but(**options)
    if settings.max_new_tokens is None and settings.max_length is None:
        settings = settings.but(max_new_tokens=NEW_TOKENS)
    return settings.but(stop_strings=tuple(dict.fromkeys((*settings.stop_strings, *wording.stops))))


def run_batches(
    model: TextModel,
    prompts: Sequence[Prompt],
    settings: GenerationSettings,
    *,
    wording: Wording | None = None,
    batch_size: int = BATCH_SIZE,
    skip: int = 0,
    on_piece: OnPiece | None = None,
) -> Iterator[tuple[list[Completion], GenerationCost]]:
    """Runs the prompts in batches; yields the completions and the cost of each batch.

    Args:
        model: continues the prompts.
        prompts: texts and chats, with embeddings or without.
        settings: how tokens are picked.
        wording: chat template and prefix of all prompts.
        batch_size: prompts per batch; fewer if the graphs are smaller.
        skip: number of prompts at the start that are finished already.
        on_piece: called with every piece of text.

    Raises:
        InputRefused: a prompt has no tokens or is longer than the context; raised before anything runs.
    """
    wording = wording or Wording()
    encoded = [wording.encode(model, prompt, f"prompt {at}") for at, prompt in enumerate(prompts, start=1)]
    ids = [one.ids for one in encoded]
    model.limits(ids, settings)
    shares = wording.prompt_prefix and len(ids) > 1 and not any(one.embeddings for one in encoded)
    shared = SharedPrefix(shared_start(ids), model.positions) if shares else None
    size = min(batch_size, model.sequences or batch_size)
    for start in range(skip, len(prompts), size):
        part = slice(start, start + size)
        yield _run_batch(model, prompts[part], encoded[part], settings, shared, _numbered(on_piece, start))


def _numbered(on_piece: OnPiece | None, start: int) -> OnPiece | None:
    """`on_piece`, with the index of the prompt among all prompts, not in its batch."""
    if on_piece is None or start == 0:
        return on_piece
    return lambda piece: on_piece(TextPiece(start + piece.index, piece.text, piece.token, piece.finish))


def _run_batch(
    model: TextModel,
    prompts: Sequence[Prompt],
    encoded: Sequence[EncodedPrompt],
    settings: GenerationSettings,
    shared: SharedPrefix | None,
    on_piece: OnPiece | None,
) -> tuple[list[Completion], GenerationCost]:
    ids = [one.ids for one in encoded]
    embeddings = [one.embeddings() if one.embeddings else None for one in encoded]
    meter = Meter([len(one) for one in ids], at_once=settings.num_beams > 1)
    growing = [_GrowingText() for _ in prompts]
    for piece in model.stream(ids, settings, shared, embeddings=embeddings):
        one = growing[piece.index]
        one.text.append(piece.text)
        one.finish = piece.finish
        if piece.token is not None:
            meter.count()
            one.tokens += [piece.token] * (piece.finish != "eos")
        if on_piece:
            on_piece(piece)
    cost = meter.stop()
    completions = [
        Completion(prompt.content, "".join(one.text), one.tokens, len(tokens), one.finish)
        for prompt, tokens, one in zip(prompts, ids, growing, strict=True)
    ]
    return completions, cost
