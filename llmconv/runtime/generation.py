"""generate: prompts in, text out, from the graphs or from the eager model."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.checkpoint import read_json
from llmconv.errors import InputRefused, UsageProblem, first_line
from llmconv.runtime.ort import OrtRunner, SessionSettings
from llmconv.runtime.own_code import TRUST, blaming, own_tokenizer, tokenizer_reference
from llmconv.runtime.runner import Runner, Step, default_positions
from llmconv.runtime.sampling import Sampling, pick_choice, pick_token
from llmconv.runtime.streaming import TextStream
from llmconv.tensors import Array

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json", "spiece.model")


@dataclass(frozen=True)
class Completion:
    """What one prompt gave.

    Attributes:
        prompt: as given.
        text: the new text, without the prompt.
        tokens: the new tokens, the end token left out.
        prompt_tokens: how many tokens the prompt has.
        finish: `eos` or `length`.
    """

    prompt: str
    text: str
    tokens: list[int]
    prompt_tokens: int
    finish: str


@dataclass(frozen=True)
class Generation:
    """All completions, in the order of the prompts, and how long they took.

    Attributes:
        prefill_seconds: for the prompts.
        decode_seconds: for the tokens after the first.
        prompt_tokens, new_tokens: over all prompts; `new_tokens` counts those that decode steps made.
    """

    completions: list[Completion]
    backend: str
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prompt_tokens: int = 0
    new_tokens: int = 0

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def rate(self) -> float:
        """New tokens per second of the decode steps."""
        return self.new_tokens / self.decode_seconds if self.decode_seconds else 0.0


@dataclass
class _Row:
    """One prompt while it grows."""

    ids: list[int]
    generator: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    finish: str = ""


def generate(
    folder: str | Path,
    prompts: Sequence[str],
    *,
    backend: str = "onnx",
    max_new_tokens: int = 64,
    sampling: Sampling | None = None,
    settings: SessionSettings | None = None,
    on_text: Callable[[int, str, bool], None] | None = None,
    trust_remote_code: bool = False,
) -> Generation:
    """Continues every prompt; a batch gives what its prompts give one by one.

    Args:
        folder: a model folder with a tokenizer, and with graphs for `backend="onnx"`.
        prompts: texts; batched with left padding.
        backend: `onnx` (the graphs) or `torch` (the eager model).
        max_new_tokens: at most so many per prompt.
        sampling: greedy when left out; every prompt has a random generator of its own, with the same seed.
        settings: of onnxruntime.
        on_text: called with the prompt's index, each piece of text as it becomes certain, and whether it is the last.
        trust_remote_code: run the folder's own code, of the tokenizer and, for `torch`, of the model.

    Raises:
        InputRefused: no tokenizer, no graphs, or an empty prompt.
        UsageProblem: no prompt, or an unknown backend.
    """
    if not prompts or max_new_tokens < 1:
        raise UsageProblem("nothing to generate", hint="give at least one prompt and one new token")
    folder = Path(folder)
    if not folder.is_dir():
        raise InputRefused(f"`{folder}` is no folder", hint="give the folder that `llmconv export` wrote to")
    tokenizer = load_tokenizer(folder, trust_remote_code)
    generator_seed = (sampling or Sampling()).seed
    rows = [_Row(encode_prompt(tokenizer, prompt), np.random.default_rng(generator_seed)) for prompt in prompts]
    runner = load_runner(folder, backend, settings, trust_remote_code)
    decode = _decoder(tokenizer)
    streams = [TextStream(decode) for _ in rows]

    def tell(index: int, token: int | None) -> None:
        piece = streams[index].close() if token is None else streams[index].push(token)
        if on_text:
            on_text(index, piece, token is None)

    timing = _run(runner, rows, max_new_tokens, sampling or Sampling(), end_tokens(folder), tell)
    completions = [
        Completion(prompt, decode(row.tokens), row.tokens, len(row.ids), row.finish)
        for prompt, row in zip(prompts, rows, strict=True)
    ]
    return Generation(completions, backend, **timing)


def _run(
    runner: Runner,
    rows: list[_Row],
    max_new_tokens: int,
    sampling: Sampling,
    ends: set[int],
    tell: Callable[[int, int | None], None],
) -> dict[str, Any]:
    """Prefill once, then one step per token until every row has ended."""
    ids, mask = pad_left([row.ids for row in rows])
    started = time.perf_counter()
    step = runner.prefill(ids, mask, default_positions(mask, ids.shape[1]))
    prefilled = time.perf_counter()
    _extend(rows, step, max_new_tokens, sampling, ends, tell)
    steps = 0
    while not all(row.finish for row in rows):
        steps += sum(not row.finish for row in rows)
        ids = np.array([[row.tokens[-1] if row.tokens else 0] for row in rows], dtype=np.int64)
        mask = np.concatenate([mask, np.ones_like(ids)], axis=1)
        step = runner.decode(ids, mask, default_positions(mask, 1), step.present)
        _extend(rows, step, max_new_tokens, sampling, ends, tell)
    return {
        "prefill_seconds": prefilled - started,
        "decode_seconds": time.perf_counter() - prefilled,
        "prompt_tokens": sum(len(row.ids) for row in rows),
        "new_tokens": steps,
    }


def _extend(
    rows: list[_Row],
    step: Step,
    max_new_tokens: int,
    sampling: Sampling,
    ends: set[int],
    tell: Callable[[int, int | None], None],
) -> None:
    """Gives every unfinished row its next token, from the step's last position."""
    for index, row in enumerate(rows):
        if row.finish:
            continue
        token = _next_token(step, index, sampling, row.generator)
        if token in ends:
            row.finish = "eos"
        else:
            row.tokens.append(token)
            tell(index, token)
            row.finish = "length" if len(row.tokens) == max_new_tokens else ""
        if row.finish:
            tell(index, None)


def _next_token(step: Step, row: int, sampling: Sampling, generator: np.random.Generator) -> int:
    if step.choices is None:
        return pick_token(step.logits[row, -1], sampling, generator)
    return pick_choice(step.choices.tokens[row, -1], step.choices.scores[row, -1], sampling, generator)


def pad_left(prompts: Sequence[Sequence[int]]) -> tuple[Array, Array]:
    """Ids and mask, both int64 [batch, longest prompt], with the padding (id 0) on the left."""
    longest = max(len(prompt) for prompt in prompts)
    ids = np.zeros((len(prompts), longest), dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    return ids, mask


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


def load_tokenizer(folder: Path, trust_remote_code: bool = False) -> Any:
    """The folder's tokenizer; its own code runs only if it is trusted.

    Raises:
        InputRefused: there is none, or transformers cannot read it.
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise InputRefused(
            f"`{folder}` has no tokenizer",
            hint="convert with `llmconv to-hf … --tokenizer PATH`, or copy tokenizer.json",
        )
    transformers = importlib.import_module("transformers")
    own = own_tokenizer(folder, trust_remote_code)
    try:
        with blaming(folder if own else None):
            return (own or transformers.AutoTokenizer).from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except (OSError, ValueError, KeyError, TypeError, ImportError, IndexError, AttributeError) as error:
        raise InputRefused(
            f"the tokenizer of `{folder}` cannot be read: {first_line(error)}",
            hint=TRUST
            if tokenizer_reference(folder)
            else "copy the tokenizer files of the original model into the folder",
        ) from error


def encode_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """Token ids of a prompt, with the special tokens that the tokenizer adds; an empty one becomes the start token.

    Raises:
        InputRefused: no token at all.
    """
    ids: list[int] = tokenizer(prompt)["input_ids"]
    if not ids and tokenizer.bos_token_id is not None:
        return [tokenizer.bos_token_id]
    if not ids:
        raise InputRefused("the prompt has no tokens", hint="give a prompt that is not empty")
    return ids


def end_tokens(folder: Path) -> set[int]:
    """`eos_token_id` of generation_config.json, else of config.json; it may be one number or several."""
    for name in ("generation_config.json", "config.json"):
        ends = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        if ends is not None:
            return set(ends) if isinstance(ends, list) else {int(ends)}
    return set()


def _decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    def decode(tokens: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    return decode
