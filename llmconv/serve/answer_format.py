"""How the answers of one model are read: its dialect of calls, its reasoning, and the grammar that a request needs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from llmconv.errors import UnsupportedInput, UsageProblem
from llmconv.generation import TextModel
from llmconv.generation.structured import Structure, library, loosened
from llmconv.runtime.chat_templates import find_template, takes_tools
from llmconv.runtime.tokenizer import TOKENIZER, TokenDecoder
from llmconv.serve.answer_forms import schemas_with_options, with_short_ids
from llmconv.serve.answer_parser import AnswerParser, HarmonyParser, TextParser
from llmconv.serve.fields import ApiError
from llmconv.serve.openai_schema import CompletionRequest
from llmconv.serve.tool_dialects import (
    DIALECTS,
    HARMONY,
    HARMONY_TEXTS,
    HERMES,
    MARKS,
    Frame,
    Thoughts,
    detected,
    detected_thoughts,
)

TAIL = 16  # last tokens of a prompt in which reasoning may begin
FINAL = "<|channel|>final<|message|>"


@dataclass(frozen=True)
class AnswerPlan:
    """How one answer is generated and read; `parser` makes what takes it apart, None for plain text."""

    structure: Structure | None = None
    parser: Callable[[], AnswerParser] | None = None
    decode: TokenDecoder | None = None  # tokens to text with the marks of the dialect; None for the model's own


class AnswerFormat:
    """The dialect and the reasoning of a model, by its tokenizer and its chat template.

    `tool_parser` is a name in `DIALECTS`, empty for the one that the template tells; `reasons` says whether reasoning
    is taken apart. Raises UsageProblem for an unknown name.
    """

    def __init__(self, model: TextModel, template: str, tool_parser: str = "", reasons: bool = True) -> None:
        self._model, self._tokenizer, self._template, self._reasons = model, model.tokenizer, template, reasons
        tokenizer = model.tokenizer
        own = str(tokenizer.chat_template or "") if template == TOKENIZER else str(find_template(template).text)
        added = [str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values()]
        if tool_parser and tool_parser not in DIALECTS:
            raise UsageProblem(f"unknown tool parser `{tool_parser}`", hint=f"give one of {', '.join(DIALECTS)}")
        self.dialect = tool_parser or detected(own, added)
        is_harmony = self.dialect == HARMONY
        self.thoughts = None if is_harmony or not reasons else detected_thoughts(own, added)
        decode = TokenDecoder(tokenizer)
        self._special = {text: token for token, text in decode.special_texts.items()}
        marks = HARMONY_TEXTS if is_harmony else MARKS
        self._decode = TokenDecoder(tokenizer, frozenset(self._special[one] for one in marks if one in self._special))

    def variables(self, request: CompletionRequest) -> Mapping[str, Any]:
        """What the chat template is given; ApiError for tools where it takes none, or their calls cannot be read."""
        tools = request.tools
        if not tools.active:
            return request.variables
        if not takes_tools(self._tokenizer, self._template):
            problem = "the chat template of this model takes no tools: give the server a `--template` that does"
            raise ApiError(problem, parameter="tools")
        if not self.dialect and not tools.forced:
            problem = "it is not known how this model writes calls: start the server with `--tool-parser NAME`"
            raise ApiError(problem, parameter="tools")
        return {**request.variables, "tools": [dict(tool) for tool in tools.given]}

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """The messages as the template demands them."""
        return with_short_ids(messages) if self.dialect.startswith("mistral") else messages

    @property
    def id_of_call(self) -> Callable[[str], str]:
        """Makes the id of a call of random letters and digits."""
        return (lambda text: text[:9]) if self.dialect.startswith("mistral") else (lambda text: f"call_{text}")

    def plan(self, request: CompletionRequest, ids: Sequence[int]) -> AnswerPlan:
        """How the answer to a prompt of tokens `ids` is generated and read; ApiError for schemas that are refused."""
        if not request.is_chat:
            return AnswerPlan(request.structure)
        tools, thoughts, is_harmony = request.tools, self.thoughts, self.dialect == HARMONY
        tail = self._text(ids[-TAIL:]).rstrip() if thoughts else ""
        if thoughts and tail.endswith(thoughts.closing):  # as templates do without `enable_thinking`
            thoughts = None
        name = self.dialect if not tools.forced or (self.dialect and DIALECTS[self.dialect].frame) else HERMES
        opened = thoughts is not None and tail.endswith(thoughts.opening.strip())
        if not tools.active and not thoughts and not is_harmony:
            return AnswerPlan(request.structure)
        schemas = tools.schemas if tools.active else {}
        structure = request.structure
        if tools.forced:
            structure = self._forced(request, name)
        elif tools.active and tools.strict and not (structure or thoughts or is_harmony):
            return AnswerPlan(self._strict(request), self._parser(name, request, None, False), self._decode)
        if structure and is_harmony and not tools.forced:
            structure = structure.following(FINAL)
        elif structure and thoughts:
            structure = structure.following(thoughts.closing, "" if opened else thoughts.opening)
        if is_harmony:
            return AnswerPlan(structure, lambda: HarmonyParser(schemas, self._reasons), self._decode)
        return AnswerPlan(structure, self._parser(name, request, thoughts, opened), self._decode)

    @staticmethod
    def _parser(
        name: str, request: CompletionRequest, thoughts: Thoughts | None, opened: bool
    ) -> Callable[[], AnswerParser]:
        dialect, schemas = DIALECTS[name] if request.tools.active else None, request.tools.schemas
        return lambda: TextParser(thoughts, dialect, schemas, opened)

    def _strict(self, request: CompletionRequest) -> Structure | None:
        """The form of calls that the model may begin by itself: arguments of `strict` tools are valid.

        None where that is not possible: without llguidance, or if the dialect has marks that other text may have.
        """
        tools, dialect = request.tools, DIALECTS[self.dialect]
        mark = next(iter(dialect.markers), "")
        frame = dialect.frame
        if not frame or not mark or not f"{frame.opening}{frame.before_name}".startswith(mark) or not self._enforces:
            return None
        schemas = {
            name: schema if name in tools.strict else {"type": "object"} for name, schema in tools.schemas.items()
        }
        grammar = forced_grammar(frame, schemas_with_options(schemas), self._special, tools.several, mark)
        return Structure(grammar, "tools", after=mark, optional=True)

    @cached_property
    def _enforces(self) -> bool:
        """Whether this model takes structures."""
        try:
            return bool(self._model.backend != "genai" and library() and self._model.grammars.vocabulary)
        except UnsupportedInput:
            return False

    def _forced(self, request: CompletionRequest, name: str) -> Structure:
        """The form of calls that have to come.

        Of a tool that is not `strict` what cannot be enforced is left out of its schema.
        """
        tools, frame = request.tools, DIALECTS[name].frame
        assert frame
        several = tools.several and not tools.named

        def form(schemas: Mapping[str, Mapping[str, Any]]) -> Structure:
            grammar = forced_grammar(frame, schemas_with_options(schemas), self._special, several)
            return Structure(grammar, "tool_choice")

        loose = tools.forced.keys() - tools.strict
        if not loose or self._compiles(lambda: form(tools.forced)):
            return form(tools.forced)
        schemas = {one: loosened(schema) if one in loose else schema for one, schema in tools.forced.items()}
        if self._compiles(lambda: form(schemas)):
            return form(schemas)
        return form({one: {"type": "object"} if one in loose else schema for one, schema in tools.forced.items()})

    def _compiles(self, make: Callable[[], Structure]) -> bool:
        """Whether a form can be enforced; true also where another check refuses it later."""
        try:
            self._model.grammars.require(make(), self._model.defaults.eos_token_id)
        except (ApiError, UsageProblem):
            return False
        except UnsupportedInput:
            return True
        return True

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))


def forced_grammar(
    frame: Frame, tools: Mapping[str, Mapping[str, Any]], special: Mapping[str, int], several: bool, skip: str = ""
) -> str:
    """llguidance's grammar of an answer that consists of calls, each with arguments by the tool's schema.

    `special` are the ids of special tokens by their texts; `several` allows up to eight calls. The first characters
    `skip` of the answer are there already.
    """
    first = f"{frame.opening}{frame.before_name}"
    opening, before = (frame.opening, frame.before_name) if not skip else (first.removeprefix(skip), "")
    repeated = f" ({_literal(frame.between, special)} call){{0,7}}" if several and frame.several else ""
    rules = [f"start: {_literal(opening, special)} first{repeated} {_literal(frame.closing, special)}"]
    names = [
        f"{_literal(name, special)} {_literal(frame.after_name, special)} tool{at}" for at, name in enumerate(tools)
    ]
    rules.append(f"first: {_literal(before, special)} named")
    rules.append(f"call: {_literal(frame.before_name, special)} named" if repeated else "")
    rules.append(f"named: ({' | '.join(names)}) {_literal(frame.after_arguments, special)}")
    rules += [f"tool{at}: %json {json.dumps(schema)}" for at, schema in enumerate(tools.values())]
    return "\n".join(filter(None, rules)) + "\n"


def _literal(text: str, special: Mapping[str, int]) -> str:
    """A text in a grammar: special tokens by their ids, `#` as one or two digits."""
    names = "|".join(re.escape(one) for one in sorted(special, key=len, reverse=True) if one)
    parts = re.split(f"({names}|#)" if names else "(#)", text)
    made = [
        f"<[{special[one]}]>" if one in special else "/[0-9]{1,2}/" if one == "#" else json.dumps(one)
        for one in parts
        if one
    ]
    return " ".join(made)
