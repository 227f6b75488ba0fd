"""What the server does with each field of a request: the parser refuses and ignores by this table, docs show it.

A field is refused where leaving it out would give another answer than its sender expects. Names without a row are
ignored, since clients send fields of their own to every server; the log has these names.

Sources: OpenAI's API reference; vLLM's page on its OpenAI-compatible server, llama.cpp's on its server, and SGLang's on
structured outputs, for the fields that are not OpenAI's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llmconv.serve.fields import ApiError, Fields

CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS = "chat", "completions", "responses", "embeddings"
BOTH, ALL = (CHAT, COMPLETIONS), (CHAT, COMPLETIONS, RESPONSES)  # those that generate
ENDPOINTS = (*ALL, EMBEDDINGS)
SUPPORTED, IGNORED, REFUSED = "supported", "ignored", "refused"


@dataclass(frozen=True)
class FieldRow:
    """A field: `note` says what it does, or what to use in its place; `neutral` values of refused ones do nothing."""

    name: str
    endpoints: tuple[str, ...]
    status: str
    note: str = ""
    neutral: tuple[Any, ...] = ()


def _rows(status: str, endpoints: tuple[str, ...], **notes: str) -> tuple[FieldRow, ...]:
    return tuple(FieldRow(name, endpoints, status, note) for name, note in notes.items())


TABLE = (
    *_rows(
        SUPPORTED, (CHAT,), messages="roles `system`, `developer`, `user`, `assistant` and `tool`; texts and images"
    ),
    *_rows(SUPPORTED, (COMPLETIONS,), prompt="a text, token ids, or a list of up to 128 of either"),
    *_rows(
        SUPPORTED,
        (RESPONSES,),
        input="a text, or messages, calls and their outputs",
        instructions="a system message before the input",
        max_output_tokens="at least 1",
        text="`format`: `text`, `json_object` or `json_schema`; `verbosity` is ignored",
        reasoning="`effort` goes to the chat template; `summary` is ignored",
        tool_choice="`auto`, `none`, `required`, or a function",
        tools="functions only",
        parallel_tool_calls="false ends the answer after its first call",
        top_logprobs="0 to 20, with `include`",
        include="`message.output_text.logprobs`; the others are ignored",
        stream="events as OpenAI's, in its order",
    ),
    *_rows(
        SUPPORTED,
        (EMBEDDINGS,),
        input="a text, token ids of the model's own tokenizer, or a list of up to 2048 of either",
        encoding_format="`float` or `base64`",
        dimensions="the first numbers of each embedding, scaled to length 1",
        prompt_name="the model's own prompt in front of each text; default: the folder's",
        truncate="true cuts what is too long at its end, as `llmconv embed` does; else it is refused",
    ),
    *_rows(SUPPORTED, ENDPOINTS, model="may be omitted; the model, an adapter's name, or `MODEL:ADAPTER`"),
    *_rows(SUPPORTED, ALL, temperature="0 to 2; above 0 it turns on sampling", top_p="0 to 1; turns on sampling"),
    *_rows(
        SUPPORTED,
        BOTH,
        top_k="0 for all tokens",
        min_p="0 to 1",
        repetition_penalty="as in transformers; counts prompt and answer",
        presence_penalty="-2 to 2, by OpenAI's formula; counts the answer only",
        frequency_penalty="-2 to 2, by OpenAI's formula; counts the answer only",
        logit_bias="token id (a text, as in JSON) to bias; up to 1024, cut to -100 and 100",
        seed="the same answers again; those of `n` differ",
        n="1 to 16",
        stop="up to 16 texts; texts of special tokens, too",
        stop_token_ids="up to 64 ids that end the answer as end tokens do",
        include_stop_str_in_output="the answer ends with its stop string",
        ignore_eos="only `stop`, `stop_token_ids` and the length end the answer",
        min_tokens="tokens before which nothing but the length ends the answer",
        skip_special_tokens="false leaves special tokens in the text",
        return_tokens_as_token_ids="tokens of log-probabilities are `token_id:ID`",
        max_tokens="chat: 1 or more; completions: 0 or more, 16 without it",
        stream="events in place of one answer",
        stream_options="`include_usage`, `continuous_usage_stats`",
        response_format="`text`, `json_object`, `json_schema`",
        guided_json="a schema",
        guided_regex="a regular expression",
        guided_choice="some texts",
        guided_grammar="GBNF or Lark",
        structured_outputs="the same by vLLM's newer names",
    ),
    *_rows(
        SUPPORTED,
        (CHAT,),
        max_completion_tokens="takes precedence over `max_tokens`",
        logprobs="true for those of the tokens of the answer",
        top_logprobs="0 to 20 likeliest tokens, with `logprobs`",
        tools="functions",
        tool_choice="`auto`, `none`, `required`, or a function",
        parallel_tool_calls="false ends the answer after its first call",
        reasoning_effort="goes to the chat template",
        reasoning="`effort` goes to the chat template, as `reasoning_effort` does",
        chat_template_kwargs="variables of the chat template",
        add_generation_prompt="false: the answer does not begin with the template's words for one",
        continue_final_message="whether the last message, the assistant's, is continued; true without it",
    ),
    *_rows(
        SUPPORTED,
        (COMPLETIONS,),
        logprobs="0 to 20 likeliest tokens of each place; with `echo` also of the prompt",
        echo="the answer begins with its prompt",
        add_special_tokens="false leaves out those that the tokenizer adds to a text, such as a start token",
        best_of="`n` to 16 answers, of which the likeliest per token are returned; not streamed",
    ),
    *(
        FieldRow(name, ALL, IGNORED)
        for name in (
            *("metadata", "moderation", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
            *("service_tier", "store", "user", "priority", "request_id", "spaces_between_special_tokens"),
        )
    ),
    *(FieldRow(name, (CHAT,), IGNORED) for name in ("modalities", "prediction", "verbosity", "include_reasoning")),
    FieldRow("stream_options", (RESPONSES,), IGNORED),
    FieldRow("truncation", (RESPONSES,), REFUSED, "give a shorter input", ("disabled",)),
    FieldRow(
        "previous_response_id", (RESPONSES,), REFUSED, "nothing is stored: send the whole conversation as `input`"
    ),
    FieldRow("conversation", (RESPONSES,), REFUSED, "nothing is stored: send the whole conversation as `input`"),
    FieldRow("background", (RESPONSES,), REFUSED, "give `stream`", (False,)),
    FieldRow("prompt", (RESPONSES,), REFUSED, "give `input` and `instructions`"),
    FieldRow("max_tool_calls", (RESPONSES,), REFUSED, "give `parallel_tool_calls`"),
    FieldRow("functions", (CHAT,), REFUSED, "use `tools`", ([],)),
    FieldRow("function_call", (CHAT,), REFUSED, "use `tools`", ("none", "auto")),
    FieldRow("audio", (CHAT,), REFUSED, "answers are texts", ({},)),
    FieldRow("web_search_options", (CHAT,), REFUSED, "the server fetches nothing", ({},)),
    FieldRow("response_format", (RESPONSES,), REFUSED, "give it as `text`: {`format`: …}", ({"type": "text"},)),
    FieldRow("max_tokens", (RESPONSES,), REFUSED, "use `max_output_tokens`"),
    FieldRow("max_completion_tokens", (RESPONSES,), REFUSED, "use `max_output_tokens`"),
    FieldRow("messages", (RESPONSES,), REFUSED, "give `input`"),
    FieldRow("reasoning_effort", (RESPONSES,), REFUSED, "use `reasoning`: {`effort`: …}"),
    FieldRow("max_output_tokens", (CHAT, COMPLETIONS), REFUSED, "use `max_tokens`"),
    FieldRow("input", (CHAT,), REFUSED, "give `messages`"),
    FieldRow("chat_template", (CHAT,), REFUSED, "start the server with `--template`"),
    FieldRow("documents", (CHAT,), REFUSED, "write them into a message", ([],)),
    FieldRow("add_special_tokens", (CHAT,), REFUSED, "the template writes them", (False,)),
    FieldRow("echo", (CHAT,), REFUSED, "the messages are known", (False,)),
    FieldRow("suffix", (COMPLETIONS,), REFUSED, "write the prompt with the model's own marks for infilling", ("",)),
    FieldRow("prompt_logprobs", BOTH, REFUSED, "use `echo` with `logprobs` of `/v1/completions`"),
    FieldRow("use_beam_search", BOTH, REFUSED, "`llmconv generate --num-beams`", (False,)),
    FieldRow("length_penalty", BOTH, REFUSED, "there is no beam search", (1, 1.0)),
    FieldRow("bad_words", BOTH, REFUSED, "use `logit_bias`", ([],)),
    FieldRow("allowed_token_ids", BOTH, REFUSED, "use `guided_choice` or `logit_bias`"),
    FieldRow("logits_processors", BOTH, REFUSED, "no code of a request runs", ([],)),
    FieldRow("truncate_prompt_tokens", BOTH, REFUSED, "give a shorter prompt"),
    FieldRow("truncate_prompt_tokens", (EMBEDDINGS,), REFUSED, "use `truncate`"),
    FieldRow("extra_body", BOTH, REFUSED, "give its fields next to the others", ({},)),
    FieldRow("grammar", BOTH, REFUSED, "use `guided_grammar`", ("",)),
    FieldRow("ebnf", BOTH, REFUSED, "use `guided_grammar`", ("",)),
    FieldRow("regex", BOTH, REFUSED, "use `guided_regex`", ("",)),
    FieldRow("json_schema", BOTH, REFUSED, "use `response_format`, or `guided_json`"),
    FieldRow("n_predict", BOTH, REFUSED, "use `max_tokens`", (-1,)),
    FieldRow("repeat_penalty", BOTH, REFUSED, "use `repetition_penalty`", (1, 1.0)),
    FieldRow("typical_p", BOTH, REFUSED, "use `top_p` or `min_p`", (1, 1.0)),
    FieldRow("mirostat", BOTH, REFUSED, "use `top_p` or `min_p`", (0,)),
    FieldRow("dry_multiplier", BOTH, REFUSED, "use `repetition_penalty`", (0, 0.0)),
    FieldRow("xtc_probability", BOTH, REFUSED, "use `min_p` and `temperature`", (0, 0.0)),
    FieldRow("enable_thinking", (CHAT,), REFUSED, "use `chat_template_kwargs`"),
)


def finish(fields: Fields, endpoint: str) -> tuple[str, ...]:
    """The names in a request that no row has; ApiError for what the table refuses, and fields of other endpoints."""
    for row in TABLE:
        if endpoint not in row.endpoints or row.status == SUPPORTED:
            continue
        value = fields.take(row.name, object)
        if row.status == REFUSED and value is not None and not any(_same(value, one) for one in row.neutral):
            problem = f"`{row.name}` is not supported: {row.note}"
            raise ApiError(problem, parameter=row.name, code="unsupported_parameter")
    for name in fields.left:
        if others := [one for row in TABLE if row.name == name and row.status == SUPPORTED for one in row.endpoints]:
            problem = f"`{name}` is a field of requests for {' and '.join(dict.fromkeys(others))}, not of this one"
            raise ApiError(problem, parameter=name, code="unsupported_parameter")
    return tuple(fields.left)


def _same(value: Any, neutral: Any) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
