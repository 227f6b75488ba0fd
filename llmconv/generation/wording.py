"""Wording: how prompts become the tokens that the model continues."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llmconv.errors import InputRefused, UsageProblem
from llmconv.generation.chat_templates import TOKENIZER, find_template
from llmconv.generation.encoded_prompt import EncodedPrompt, token_of, with_embeddings
from llmconv.generation.model import TextModel
from llmconv.generation.prompts import Prompt, PromptContent, as_chat, with_prefix
from llmconv.generation.sampling import GenerationSettings
from llmconv.runtime.runner import PromptEmbeddings
from llmconv.runtime.tokenizer import TooManyTokens, token_ids

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
        known = () if model.engine else model.runner.extra_inputs
        if named := next((field for field in prompt.fields if field in known), ""):
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
        special, most = self.add_special_tokens, self._most(model)
        if isinstance(content, str) and not self._chat_template:
            return model.encode(content, add_special_tokens=special, most=most)
        messages, template = as_chat(content, self.system), self._chat_template or TOKENIZER
        return model.encode_chat(messages, template, add_special_tokens=special, most=most)

    def _most(self, model: TextModel) -> int:
        """Number of tokens that a prompt can have, see `TextModel.encode`; more if it is cut."""
        return (1 if self.src_length is None else MOST_CUT) * model.longest_prompt

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

    @property
    def stops(self) -> tuple[str, ...]:
        """Stop strings of the template."""
        return find_template(self._chat_template).stops if self._chat_template else ()


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


def encode_all(
    model: TextModel, prompts: Sequence[Prompt], wording: Wording, settings: GenerationSettings, count: int = 1
) -> list[PlannedText]:
    """The texts to generate: `count` per prompt, in the order of the prompts; raises as `Wording.cut`.

    Equal prompts have random generators of different numbers, so that their samples differ; the number depends only on
    the equal prompts before it, not on other prompts or on the batches. Raises InputRefused if a prompt has no tokens,
    or all are too long.
    """
    numbers = range(1, len(prompts) + 1)
    whole, refused = [], dict[int, InputRefused]()
    for number, one in zip(numbers, prompts, strict=True):
        try:
            whole.append(wording.encode(model, one, f"prompt {number}"))
        except TooManyTokens as error:
            refused[number - 1] = error
            whole.append(EncodedPrompt(error.ids))
    cut = [one.ids if one.embeddings else wording.cut(model, one.ids) for one in whole]
    found = several(prompts, [replace(one, ids=ids) for one, ids in zip(whole, cut, strict=True)], count, settings)
    for at, text in enumerate(found):
        number = at // count
        found[at] = replace(
            text,
            cut_tokens=len(whole[number].ids) - len(text.tokens),
            problem=refused.get(number)
            or _length_problem(model, number + 1 if len(prompts) > 1 else 0, text.tokens, settings),
        )
    model.given_inputs(cut, [{} if at in refused else prompt.inputs for at, prompt in enumerate(prompts)])
    problems = [one.problem for one in found if one.problem]
    if problems and len(problems) == len(found):
        raise problems[0]
    return found


def several(
    prompts: Sequence[Prompt], encoded: Sequence[EncodedPrompt], count: int, settings: GenerationSettings
) -> list[PlannedText]:
    """The texts to generate: `count` per prompt, each with the number of its sample, or rank in a beam search."""
    found, seen = [], Counter[tuple[str, ...]]()
    for prompt, (ids, embeddings) in zip(prompts, ((one.ids, one.embeddings) for one in encoded), strict=True):
        key = (*map(str, ids), f"{prompt.images}{prompt.embeddings}{prompt.inputs or ''}")
        first = 0 if settings.num_beams > 1 else seen[key] * count
        seen[key] += 1
        for at in range(count):
            found.append(PlannedText(prompt.content, ids, embeddings, 0, at, first + at, inputs=prompt.inputs))
    return found


def _length_problem(
    model: TextModel, number: int, tokens: list[int], settings: GenerationSettings
) -> InputRefused | None:
    """The error of a prompt that is too long."""
    try:
        model.limit(f"prompt {number}" if number else "the prompt", len(tokens), settings)
    except InputRefused as refusal:
        return refusal
    return None
