"""generate: prompts in, completions out, a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from llmconv.errors import UsageProblem
from llmconv.generation.model import TextModel
from llmconv.generation.report import Completion, Cost, Generation, Meter
from llmconv.generation.row import Piece
from llmconv.generation.settings import GenerationSettings
from llmconv.runtime.ort import SessionSettings

BATCH_SIZE = 8
NEW_TOKENS = 64
"""Where neither an option nor `generation_config.json` says how many."""

OnPiece = Callable[[Piece], object]


@dataclass(frozen=True)
class Prompt:
    """A text or a chat, and its tokens."""

    content: Any
    ids: list[int]


@dataclass
class _Growing:
    tokens: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    finish: str = ""


def generate(
    model: Any,
    prompts: Sequence[str],
    *,
    backend: str = "onnx",
    batch_size: int = BATCH_SIZE,
    session: SessionSettings | None = None,
    on_piece: OnPiece | None = None,
    trust_remote_code: bool = False,
    **options: Any,
) -> Generation:
    """Continues every prompt; a batch gives what its prompts give one by one.

    Args:
        model: a model folder with a tokenizer, and with graphs for `backend="onnx"`; or see `TextModel.open`.
        prompts: texts.
        backend: `onnx` (the graphs) or `torch` (the eager model).
        batch_size: prompts that run side by side.
        session: settings of onnxruntime.
        on_piece: called with every token.
        trust_remote_code: run the folder's own code, of the tokenizer and, for `torch`, of the model.
        options: fields of `GenerationSettings`, over those of `generation_config.json`.

    Raises:
        InputRefused: no tokenizer, no graphs, or a prompt without tokens or longer than the context.
        UsageProblem: no prompt, an unknown backend, or an option that cannot be.
    """
    if not prompts or batch_size < 1:
        raise UsageProblem("nothing to generate", hint="give at least one prompt, and batches of at least one")
    settings = GenerationSettings().but(**options)  # refuses before anything is loaded
    opened = TextModel.open(model, backend=backend, settings=session, trust_remote_code=trust_remote_code)
    settings = with_length(opened.defaults.but(**options))
    encoded = [Prompt(prompt, opened.encode(prompt)) for prompt in prompts]
    done = list(run_batches(opened, encoded, settings, batch_size, on_piece))
    completions = [completion for batch, _ in done for completion in batch]
    return Generation(completions, opened.backend, [cost for _, cost in done])


def with_length(settings: GenerationSettings) -> GenerationSettings:
    """The settings, with a number of new tokens where they say nothing about it."""
    unsaid = settings.max_new_tokens is None and settings.max_length is None
    return settings.but(max_new_tokens=NEW_TOKENS) if unsaid else settings


def run_batches(
    model: TextModel,
    prompts: Sequence[Prompt],
    settings: GenerationSettings,
    batch_size: int = BATCH_SIZE,
    on_piece: OnPiece | None = None,
) -> Iterator[tuple[list[Completion], Cost]]:
    """Runs `batch_size` prompts at a time and gives what each batch gave and cost."""
    for start in range(0, len(prompts), batch_size):
        yield _run_batch(model, prompts[start : start + batch_size], settings, start, on_piece)


def _run_batch(
    model: TextModel, prompts: Sequence[Prompt], settings: GenerationSettings, start: int, on_piece: OnPiece | None
) -> tuple[list[Completion], Cost]:
    meter = Meter([len(prompt.ids) for prompt in prompts])
    growing = [_Growing() for _ in prompts]
    for piece in model.stream([prompt.ids for prompt in prompts], settings):
        one = growing[piece.index]
        one.text.append(piece.text)
        one.finish = piece.finish
        if piece.token is not None:
            meter.count()
            if piece.finish != "eos":
                one.tokens.append(piece.token)
        if on_piece:
            on_piece(Piece(start + piece.index, piece.text, piece.token, piece.finish))
    cost = meter.stop()
    completions = [
        Completion(prompt.content, "".join(one.text), one.tokens, len(prompt.ids), one.finish)
        for prompt, one in zip(prompts, growing, strict=True)
    ]
    return completions, cost
