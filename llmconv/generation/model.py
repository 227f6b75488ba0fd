"""TextModel: a tokenizer, and the graphs or the eager model that continue its tokens."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmconv.errors import InputRefused, UsageProblem
from llmconv.generation.context import context_length
from llmconv.generation.conversation import Conversation
from llmconv.generation.loop import Batch, grow
from llmconv.generation.row import Piece, Row
from llmconv.generation.settings import GenerationSettings
from llmconv.generation.tokenizer import Decoder, encode_prompt, load_tokenizer
from llmconv.runtime.ort import OrtRunner, SessionSettings
from llmconv.runtime.runner import Runner


@dataclass(frozen=True)
class TextModel:
    """A model that continues texts.

    Attributes:
        tokenizer: of transformers.
        runner: the graphs or the eager model.
        defaults: what `generation_config.json` says.
        context_length: tokens that the model was made for, prompt and text together; None where nothing says so.
        backend: `onnx` or `torch`.
    """

    tokenizer: Any
    runner: Runner
    defaults: GenerationSettings
    context_length: int | None
    backend: str

    @classmethod
    def open(
        cls,
        model: Any,
        *,
        backend: str = "onnx",
        settings: SessionSettings | None = None,
        adapter: str | Path | None = None,
        trust_remote_code: bool = False,
    ) -> TextModel:
        """Opens a folder, a pair of graph files, a name of the hub cache, or `ModelFiles`.

        Args:
            model: what to open.
            backend: `onnx` (the graphs) or `torch` (the eager model, its only use of torch).
            settings: of onnxruntime.
            adapter: a folder of PEFT, for `torch`.
            trust_remote_code: run the folder's own code, of the tokenizer and, for `torch`, of the model.

        Raises:
            InputRefused: no tokenizer, or nothing that runs.
            UsageProblem: an unknown backend.
        """
        folder = Path(model)
        if not folder.is_dir():
            raise InputRefused(f"`{folder}` is no folder", hint="give the folder that `llmconv export` wrote to")
        tokenizer = load_tokenizer(folder, trust_remote_code)
        runner = load_runner(folder, backend, settings, trust_remote_code)
        return cls(tokenizer, runner, GenerationSettings.of(folder), context_length(folder), backend)

    @property
    def decode(self) -> Decoder:
        """Tokens to text, special tokens left out."""
        return Decoder(self.tokenizer)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, with the special tokens that the tokenizer adds.

        Raises:
            InputRefused: no token at all.
        """
        return encode_prompt(self.tokenizer, text)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], template: str = "tokenizer") -> list[int]:
        """Tokens of a chat, up to where the answer begins.

        Args:
            messages: `role` and `content` each, in order.
            template: `tokenizer` for the tokenizer's own.

        Raises:
            InputRefused: the tokenizer has no chat template.
        """
        ids: list[int] = self.tokenizer.apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=True
        )["input_ids"]
        return ids

    def stream(
        self,
        prompts: Sequence[Sequence[int]],
        settings: GenerationSettings | None = None,
        cache: Conversation | None = None,
    ) -> Iterator[Piece]:
        """Continues every prompt, token by token; one `next()` runs at most one step of the model.

        Args:
            prompts: tokens; all of them make one batch, in which each gets what it gets alone.
            settings: `defaults` when left out.
            cache: for a single prompt: what earlier turns ran; it holds this one, too, when the stream ends.

        Raises:
            InputRefused: a prompt is longer than the context.
        """
        settings = settings or self.defaults
        rows = [Row(i, ids, self._limit(len(ids), settings), settings, self.decode) for i, ids in enumerate(prompts)]
        yield from (Piece(row.index, "", None, row.finish) for row in rows if row.finish)
        batch = Batch(self.runner, rows)
        if not batch.rows:
            return
        past = cache.past(prompts[0]) if cache else None
        try:
            yield from grow(batch, past)
        finally:
            if cache and batch.cache:
                cache.keep(rows[0].ids[: batch.cache.length].tolist(), batch.cache)

    def _limit(self, prompt_tokens: int, settings: GenerationSettings) -> int:
        """How many tokens may follow a prompt: the last of them is never run.

        Raises:
            InputRefused: the prompt alone is too long.
        """
        wanted = settings.new_tokens(prompt_tokens)
        if self.context_length is None:
            return wanted
        if prompt_tokens > self.context_length:
            raise InputRefused(
                f"the prompt has {prompt_tokens} tokens, the model is for {self.context_length}",
                hint="shorten the prompt",
            )
        return min(wanted, self.context_length - prompt_tokens + 1)


def load_runner(
    folder: Path, backend: str, settings: SessionSettings | None = None, trust_remote_code: bool = False
) -> Runner:
    """The graphs, or the eager model (only then is torch imported).

    Raises:
        InputRefused: the folder has no graphs.
        UsageProblem: an unknown backend.
    """
    if backend == "onnx":
        return OrtRunner.from_folder(folder, settings)
    if backend != "torch":
        raise UsageProblem(f"backend `{backend}` is unknown", hint="give `onnx` or `torch`")
    code = folder if trust_remote_code else None
    runner: Runner = importlib.import_module("llmconv.runtime.eager").EagerRunner(folder, code=code)
    return runner
