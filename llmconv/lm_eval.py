"""EleutherAI's lm-evaluation-harness over exported graphs: scores as its own `--model hf` gives them.

`python -m llmconv.lm_eval --model llmconv --model_args pretrained=FOLDER --tasks …` is the harness's command with this
model added; `lm_eval.simple_evaluate(model=TextModelLM(FOLDER), …)` is the same in Python.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llmconv.errors import LlmconvError, UnsupportedInput, UsageProblem
from llmconv.generation import TextModel
from llmconv.runtime.onnxruntime.session_settings import SessionSettings
from llmconv.tensors import Array


def report(error: LlmconvError) -> int:
    """Prints an error and its hint, and returns the exit code."""
    print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
    return error.exit_code


try:
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
except ImportError as missing:
    NOT_INSTALLED = UsageProblem("lm-eval is not installed", hint="`pip install 'lm-eval>=0.4.13'`")
    if __name__ == "__main__":
        sys.exit(report(NOT_INSTALLED))
    raise NOT_INSTALLED from missing

NEW_TOKENS = 256  # maximum number of new tokens of a task that names none, as in the harness's other models
# A request: its texts, None for a window of a longer text, and the tokens of context and continuation
Scored = tuple[tuple[str, str] | None, list[int], list[int]]


@register_model("llmconv")
class TextModelLM(TemplateLM):  # type: ignore[misc]
    """A model of the harness that runs `TextModel`.

    Tokens, truncation, prefix token and settings are those of the harness's `hf` model, so the scores agree with it.

    Raises:
        UnsupportedInput: graphs that return the last logits or chosen tokens only.
        UsageProblem: an invalid option; and what `TextModel.open` raises.
    """

    def __init__(
        self,
        pretrained: str | Path | TextModel,  # a folder with graphs, or what else `TextModel.open` takes
        *,
        batch_size: int | str = 1,  # sequences per call; fewer where the graphs or the rotary frequencies need it
        max_length: int | None = None,  # that a sequence is cut to, from the left; None for the context of the model
        max_gen_toks: int = NEW_TOKENS,  # maximum number of new tokens of a task that names none
        add_bos_token: bool | None = None,  # whether the start token precedes every text, if not as the tokenizer does
        threads: int | None = None,  # of onnxruntime or torch
        device: str | None = None,  # of onnxruntime only `cpu`, which the harness gives by itself where it sees no GPU
        max_batch_size: int | None = None,  # the largest `batch_size`
        **options: Any,  # further ones of `TextModel.open`: `adapter`, `prefix_tuning`, `trust_remote_code`
    ) -> None:
        super().__init__()
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise UsageProblem(f"invalid batch_size {batch_size}", hint="give a number of sequences")
        if device not in (None, "cpu"):
            raise UsageProblem(f"`device` is {device}, and graphs run on the CPU", hint="give `--device cpu`")
        settings = SessionSettings(threads=threads) if threads else None
        if not isinstance(pretrained, TextModel):
            pretrained = TextModel.open(pretrained, settings=settings, **options)
        self.model: TextModel = pretrained
        self.tokenizer = self.model.tokenizer
        if self.tokenizer.eos_token_id is None:
            raise UnsupportedInput(
                "the tokenizer has no end token", hint="the harness needs one: add `eos_token` to tokenizer_config.json"
            )
        self.add_bos_token = add_bos_token
        self.max_gen_toks = max_gen_toks
        self.max_length = max_length or min(self.model.longest_prompt, int(self.tokenizer.model_max_length))
        self.batch_size = min(int(batch_size), self.model.sequences or int(batch_size), max_batch_size or 1 << 30)

    @property
    def eot_token_id(self) -> int:
        """The end token."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token that stands before a text without context."""
        start = self.tokenizer.bos_token_id
        return self.eot_token_id if start is None else int(start)

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's folder, for the harness's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a chat, by the tokenizer's template."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """The tokens of a text; None: with special tokens, unless the text begins with the start token."""
        given = self.add_bos_token if add_special_tokens is None else add_special_tokens
        if add_special_tokens is None and has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id)):
            given = False
        return list(self.tokenizer.encode(string, **({} if given is None else {"add_special_tokens": given})))

    def _loglikelihood_tokens(self, requests: Sequence[Scored], **_: Any) -> list[tuple[float, bool]]:
        """For each request the log-probability of its continuation, and whether that is the greedy one."""
        found: dict[int, tuple[float, bool]] = {}
        order = sorted(range(len(requests)), key=lambda index: -sum(len(part) for part in requests[index][1:]))
        while order:
            length = min(sum(len(part) for part in requests[order[0]][1:]), self.max_length)
            rows = order[: self.batch_size if self.model.runner.reads_in_parts(length) else 1]
            order = order[len(rows) :]
            inputs = [(requests[row][1] + requests[row][2])[-(self.max_length + 1) :][:-1] for row in rows]
            for row, tokens, logits in zip(rows, inputs, self._logits(inputs), strict=True):
                continuation = requests[row][2]
                # of the last tokens, after each logits [tokens, vocabulary] of the one before
                last = logits[: len(tokens)][-len(continuation) :].astype(np.float32)
                targets = np.asarray(continuation[-len(last) :])
                shifted = last - last.max(axis=-1, keepdims=True)
                scores = shifted[np.arange(len(last)), targets] - np.log(np.exp(shifted).sum(axis=-1))
                found[row] = float(scores.sum()), bool((last.argmax(axis=-1) == targets).all())
                if requests[row][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[row][0], found[row])
        return [found[row] for row in range(len(requests))]

    def _logits(self, rows: Sequence[Sequence[int]]) -> Array:
        """Logits [rows, longest row, vocabulary]; rows are padded at their end."""
        length = max(map(len, rows))
        mask = np.array([[1] * len(row) + [0] * (length - len(row)) for row in rows], dtype=np.int64)
        tokens = np.array([[*row, *[self.eot_token_id] * (length - len(row))] for row in rows], dtype=np.int64)
        step = self.model.runner.prefill(tokens, mask, self.model.positions(mask, length))
        if step.choices is not None or step.logits.shape[1] != length:
            problem = "the graphs return the last logits only, and a score needs those of every token"
            raise UnsupportedInput(problem, hint="export them again without `--last-logits` and `--postprocess`")
        return step.logits

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text, in windows of `max_length` tokens that do not overlap."""
        totals = []
        for (text,) in (request.args for request in requests):
            windows = utils.get_rolling_token_windows(
                token_list=self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            scores = self._loglikelihood_tokens([(None, *utils.make_disjoint_window(window)) for window in windows])
            totals.append(sum(score for score, _ in scores))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), totals[-1])
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The continuation of each text, without the stop string that ends it."""
        texts = []
        for context, given in (request.args for request in requests):
            wanted = normalize_gen_kwargs(dict(given), self.max_gen_toks)
            stops = wanted.pop("until", None) or []
            stops = [stops] if isinstance(stops, str) else list(stops)
            most = wanted.pop("max_gen_toks")
            if most >= self.max_length:
                raise UsageProblem(f"max_gen_toks is {most}, and max_length {self.max_length}", hint="give less")
            wanted = {name: value for name, value in wanted.items() if name != "temperature" or value}
            stop_strings = tuple(stop for stop in stops if stop)
            wanted |= {"stop_strings": stop_strings, "max_new_tokens": most}
            settings = self.model.defaults.but(**{"eos_token_id": self.model.chat_ends, **wanted})
            prompt = self.tok_encode(context)[-(self.max_length - most) :]
            pieces = list(self.model.stream([prompt], settings))
            tokens = [piece.token for piece in pieces if piece.token is not None]
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            end = self.tokenizer.decode([self.eot_token_id])
            texts.append(postprocess_generated_text(text, [*stops, end], None))
            self.cache_hook.add_partial("generate_until", (context, given), texts[-1])
        return texts


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except LlmconvError as error:
        sys.exit(report(error))
