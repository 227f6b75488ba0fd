"""What a request wants an answer to be: structured text, or calls of tools; and the messages that belong to calls.

Sources: OpenAI's API reference, "Create chat completion" (`response_format`, `tools`, `tool_choice`); vLLM's page on
structured outputs (`structured_outputs`, and `guided_json` and the like before it) and `chat_template_kwargs`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from llmconv.errors import LlmconvError
from llmconv.generation.structured import Structure, with_options
from llmconv.serve.fields import ApiError, Fields, checked_text

MAX_TOOLS = 128
NO_PARAMETERS = {"properties": {}, "additionalProperties": False}
AUTO, NONE, REQUIRED = "auto", "none", "required"
ALLOWED = "allowed_tools"  # type of a choice among some of the tools
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
# vLLM's names of the kinds of structured output, below `structured_outputs` or after `guided_`
KINDS: dict[str, tuple[Any, Callable[[Any, str], Structure]]] = {
    "json": (str | dict | bool, Structure.of_schema),
    "regex": (str, Structure.of_regex),
    "choice": (list, Structure.of_choices),
    "grammar": (str, Structure.of_grammar),
}
# parameters of transformers' `apply_chat_template` that are no variables of a template
RESERVED = frozenset(
    [
        *("conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
        *(
            "return_dict",
            "return_assistant_tokens_mask",
            "sanitize_control_tokens",
            "tokenizer_kwargs",
            "processor_kwargs",
            "self",
        ),
    ]
)


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request.

    Attributes:
        given: the tools as they were given, for the chat template.
        schemas: the JSON Schema of the arguments of each tool that may be called, by name.
        choice: `auto`, `none` or `required`.
        named: the tool to call; empty where none is named.
        several: whether an answer may have several calls.
        strict: names of the tools whose arguments have to be valid in every call.
    """

    given: tuple[Mapping[str, Any], ...] = ()
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    choice: str = AUTO
    named: str = ""
    several: bool = True
    strict: frozenset[str] = frozenset()

    @property
    def active(self) -> bool:
        """Whether an answer may have calls."""
        return bool(self.given) and self.choice != NONE

    @property
    def forced(self) -> Mapping[str, Mapping[str, Any]]:
        """The tools of which one has to be called; empty where none has to."""
        if self.named:
            return {self.named: self.schemas[self.named]}
        return self.schemas if self.choice == REQUIRED else {}


def made(make: Callable[[], Any], parameter: str) -> Any:
    """What `make` returns; its errors are errors of the field `parameter`."""
    try:
        return make()
    except LlmconvError as error:
        raise ApiError(f"{error.message} ({error.hint})", parameter=parameter) from None


def structure_of(fields: Fields) -> Structure | None:
    """The form that a request wants its text to have, by whichever field; ApiError for several, or an invalid one."""
    found: list[tuple[str, Structure]] = []
    if wanted := fields.take("response_format", dict):
        structure = _response_format(wanted)
        found += [("response_format", structure)] if structure else []
    for name, (kind, make) in KINDS.items():
        value = fields.take(f"guided_{name}", kind)
        if value is not None:
            found.append((f"guided_{name}", _structure(make, value, f"guided_{name}")))
    given = fields.take("structured_outputs", dict)
    inner = Fields(given or {}, "structured_outputs.")
    for name, (kind, make) in KINDS.items():
        value = inner.take(name, kind)
        if value is not None:
            place = f"structured_outputs.{name}"
            found.append((place, _structure(make, value, place)))
    if inner.flag("json_object"):
        place = "structured_outputs.json_object"
        found.append((place, _structure(Structure.of_schema, {"type": "object"}, place)))
    inner.nothing_else()
    if len(found) > 1:
        names = " and ".join(f"`{name}`" for name, _ in found)
        raise ApiError(f"{names} both set the form of the text: give one of them", parameter=found[1][0])
    return found[0][1] if found else None


def _structure(make: Callable[[Any, str], Structure], value: Any, name: str) -> Structure:
    structure: Structure = made(lambda: make(value, name), name)
    return structure


def _response_format(wanted: dict[str, Any]) -> Structure | None:
    kind = wanted.get("type")
    if kind == "text":
        return None
    if kind == "json_object":  # with a schema as llama.cpp's server, Together and Fireworks take it
        given = wanted.get("schema")
        return _structure(Structure.of_schema, {"type": "object"} if given is None else given, "response_format.schema")
    given = wanted.get("json_schema")
    if kind != "json_schema" or not isinstance(given, dict) or not isinstance(given.get("schema"), dict):
        problem = (
            "`response_format` must have the type `text`, `json_object`, or `json_schema` with `json_schema.schema`"
        )
        raise ApiError(problem, parameter="response_format")
    return _structure(Structure.of_schema, given["schema"], "response_format.json_schema.schema")


def tools_of(fields: Fields) -> ToolUse:
    """The tools of a request; ApiError for invalid ones."""
    given, choice = fields.take("tools", list) or [], fields.take("tool_choice", str | dict)
    several = fields.take("parallel_tool_calls", bool)
    if len(given) > MAX_TOOLS:
        raise ApiError(f"a request has at most {MAX_TOOLS} tools", parameter="tools")
    schemas: dict[str, Mapping[str, Any]] = {}
    strict: set[str] = set()
    for at, tool in enumerate(given):
        function = _function(tool, f"tools[{at}]")
        if function["name"] in schemas:
            raise ApiError(f"the tool `{function['name']}` comes twice", parameter=f"tools[{at}].function.name")
        schema = {"type": "object", **(function.get("parameters") or NO_PARAMETERS)}
        if schema["type"] != "object":
            where = f"tools[{at}].function.parameters"
            raise ApiError(f"`{where}.type` must be 'object': arguments have names", parameter=where)
        schemas[function["name"]] = schema
        strict |= {function["name"]} if function.get("strict") is True else set()
    if isinstance(choice, dict) and choice.get("type") == ALLOWED:
        choice, schemas = _allowed(choice.get(ALLOWED), schemas)
    wanted, named = _choice(choice, schemas)
    return ToolUse(tuple(given), schemas, wanted, named, several is not False, frozenset(strict & schemas.keys()))


def _allowed(given: Any, schemas: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The choice, and the schemas of the tools that may be called; the chat template has the others, too."""
    mode, tools = (given.get("mode"), given.get("tools")) if isinstance(given, dict) else (None, None)
    functions = [
        one.get("function") if isinstance(one, dict) else None for one in (tools if isinstance(tools, list) else ())
    ]
    names = [one.get("name") if isinstance(one, dict) else None for one in functions]
    if mode not in (AUTO, REQUIRED) or not names or not all(isinstance(one, str) and one in schemas for one in names):
        problem = f"`tool_choice.{ALLOWED}` must have the mode 'auto' or 'required', and names of some of `tools`"
        raise ApiError(problem, parameter="tool_choice")
    return mode, {name: schemas[name] for name in schemas if name in names}


def _function(tool: Any, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    if not isinstance(function, dict):
        raise ApiError(f"`{where}` must be of type 'function', with an object `function`", parameter=where)
    if not isinstance(function.get("name"), str) or not NAME.fullmatch(function["name"]):
        problem = f"`{where}.function.name` must be a name of letters, digits, `_`, `-`, `.`, `:` and `/`"
        raise ApiError(problem, parameter=f"{where}.function.name")
    if not isinstance(function.get("parameters") or {}, dict):
        raise ApiError(f"`{where}.function.parameters` must be an object", parameter=f"{where}.function.parameters")
    checked_text(json.dumps(tool, ensure_ascii=False), where)
    return function


def _choice(choice: str | dict[str, Any] | None, schemas: Mapping[str, Any]) -> tuple[str, str]:
    """The word, and the name of the tool that it stands for, if any."""
    if choice is None:
        return AUTO, ""
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) and choice.get("type") == "function" else None
        if not isinstance(name, str) or name not in schemas:
            problem = '`tool_choice` must name one of `tools`, as {"type": "function", "function": {"name": …}}'
            raise ApiError(problem, parameter="tool_choice")
        return REQUIRED, name
    if choice not in (AUTO, NONE, REQUIRED):
        problem = "`tool_choice` must be 'auto', 'none', 'required', or an object that names a function"
        raise ApiError(problem, parameter="tool_choice")
    if choice == REQUIRED and not schemas:
        raise ApiError("`tool_choice` is 'required', but there are no `tools`", parameter="tool_choice")
    return choice, ""


def schemas_with_options(schemas: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The schemas of arguments as llguidance takes them; ApiError for what it cannot enforce."""
    return {
        name: made(partial(with_options, schema, f"parameters of {name}"), "tools") for name, schema in schemas.items()
    }


def template_fields(fields: Fields) -> Mapping[str, Any]:
    """The variables that a request gives the chat template; ApiError for names that are not free."""
    given: dict[str, Any] = fields.take("chat_template_kwargs", dict) or {}
    for name in given:
        if name in RESERVED or name.startswith("_") or not name.isidentifier():
            where = f"chat_template_kwargs.{name[:80]}"
            raise ApiError(f"`{where}` is no variable of a chat template", parameter=where)
    checked_text(json.dumps(given, ensure_ascii=False), "chat_template_kwargs")
    reasoning = Fields(fields.take("reasoning", dict) or {}, "reasoning.")
    effort = fields.take("reasoning_effort", str) or reasoning.take("effort", str)
    return given if effort is None else {"reasoning_effort": effort, **given}


def calls_of(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The checked calls of a message of the assistant; arguments are the JSON text, or the object if it is valid."""
    given = message.get("tool_calls") or []
    if message.get("function_call"):
        problem = f"`{where}.function_call` is not supported: use `tool_calls`"
        raise ApiError(problem, parameter=f"{where}.function_call")
    if not isinstance(given, list) or (given and message.get("role") != "assistant"):
        problem = f"`{where}.tool_calls` must be a list of calls, in a message of the assistant"
        raise ApiError(problem, parameter=f"{where}.tool_calls")
    return [_call(call, f"{where}.tool_calls[{at}]") for at, call in enumerate(given)]


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ApiError(f"`{where}` must have a `function` with name and arguments", parameter=where)
    given = function.get("arguments", "{}")
    try:
        arguments = json.loads(given or "{}") if isinstance(given, str) else given
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        place = f"{where}.function.arguments"
        raise ApiError(f"`{place}` must be the JSON text of an object", parameter=place)
    checked_text(json.dumps([arguments, function["name"]], ensure_ascii=False), where)
    identity = call.get("id")
    checked = checked_text(identity, where) if isinstance(identity, str) else ""
    return {"id": checked, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def tool_answer(message: Mapping[str, Any], where: str, before: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """`tool_call_id` and name of a message of a tool; ApiError unless a message before it has a call of that id."""
    identity = message.get("tool_call_id")
    if not isinstance(identity, str):
        problem = f"`{where}.tool_call_id` must be the id of a call"
        raise ApiError(problem, parameter=f"{where}.tool_call_id")
    calls = (call for earlier in reversed(before) for call in earlier.get("tool_calls", ()))
    name = next((call["function"]["name"] for call in calls if call["id"] == identity), None)
    if name is None:
        problem = f"`{where}.tool_call_id` is the id of no call in the messages before it"
        raise ApiError(problem, parameter=f"{where}.tool_call_id")
    return {"tool_call_id": identity, "name": name}


SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")


def with_short_ids(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with ids of calls as Mistral's templates demand: nine letters or digits."""

    def short(identity: str) -> str:
        return identity if SHORT_ID.fullmatch(identity) else hashlib.sha256(identity.encode()).hexdigest()[:9]

    changed = []
    for message in messages:
        made = dict(message)
        if "tool_call_id" in made:
            made["tool_call_id"] = short(made["tool_call_id"])
        if "tool_calls" in made:
            made["tool_calls"] = [{**call, "id": short(call["id"])} for call in made["tool_calls"]]
        changed.append(made)
    return changed
