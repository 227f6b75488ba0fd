"""`/v1/embeddings`: the requests, and a folder of `export --task embed` that answers them.

Sources: OpenAI's API reference, "Create embeddings"; Text Embeddings Inference's API for `prompt_name` and `truncate`.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from llmconv.embedding import Embedder
from llmconv.errors import LlmconvError, UsageProblem
from llmconv.serve.field_table import EMBEDDINGS, finish
from llmconv.serve.fields import ApiError, Fields, checked_text
from llmconv.tensors import Array

MAX_INPUTS = 2048
BATCH = 8  # texts of one step; texts of similar length share it
FORMATS = ("float", "base64")


@dataclass(frozen=True)
class EmbeddingRequest:
    """The inputs, each a text or token ids, and the form of their embeddings."""

    model: str | None
    inputs: tuple[str | tuple[int, ...], ...]
    is_base64: bool
    dimensions: int | None  # how many numbers of each embedding are wanted; None for all
    prompt_name: str | None  # the model's prompt in front of each text; None for its default
    truncate: bool  # whether what is too long is cut at its end
    unknown: tuple[str, ...] = ()  # names of fields that have no effect


def embedding_request(content: Any) -> EmbeddingRequest:
    """Parses the body of `/v1/embeddings`; raises ApiError for missing, invalid and unsupported fields."""
    fields = Fields(content)
    inputs = _inputs(fields.take("input", str | list))
    form = fields.take("encoding_format", str) or "float"
    if form not in FORMATS:
        raise ApiError("`encoding_format` must be 'float' or 'base64'", parameter="encoding_format")
    model, dimensions = fields.take("model", str), fields.number("dimensions", int, 1)
    prompt, truncate = fields.take("prompt_name", str), fields.flag("truncate")
    unknown = finish(fields, EMBEDDINGS)
    return EmbeddingRequest(model, inputs, form == "base64", dimensions, prompt, truncate, unknown)


def _inputs(given: str | list[Any] | None) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(given, str) or (given and all(map(_is_token, given))):
        return (_input(given, "input"),)
    if not given or len(given) > MAX_INPUTS:
        problem = f"`input` must be a text, token ids, or a list of one to {MAX_INPUTS} of either"
        raise ApiError(problem, parameter="input")
    return tuple(_input(one, f"input[{at}]") for at, one in enumerate(given))


def _input(given: Any, where: str) -> str | tuple[int, ...]:
    if isinstance(given, str) and given:
        return checked_text(given, where)
    if isinstance(given, list) and given and all(map(_is_token, given)):
        return tuple(given)
    raise ApiError(f"`{where}` must be a text or a list of token ids, not empty", parameter=where)


def _is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class ServedEmbedder:
    """An embedding model with its public name. Raises UsageProblem for a classifier or a reranker."""

    def __init__(self, embedder: Embedder, name: str) -> None:
        if embedder.role != "embed":
            problem = f"the folder was exported with `--task {embedder.role}`, and the server has no endpoint for it"
            raise UsageProblem(problem, hint="`llmconv embed FOLDER` runs it")
        self.embedder, self.name = embedder, name

    @property
    def context_length(self) -> int:
        return self.embedder.most

    def rows(self, request: EmbeddingRequest) -> list[list[int]]:
        """The token ids of every input, those of a text as sentence-transformers makes them, given ones as they are.

        Raises ApiError for an input that is too long and is not to be cut, or has no tokens or unknown ones.
        """
        made: list[list[int]] = []
        for at, one in enumerate(request.inputs):
            where = f"input[{at}]" if len(request.inputs) > 1 else "input"
            if isinstance(one, str):
                try:
                    ids = self.embedder.tokens([one], request.prompt_name, cuts=request.truncate)[0]
                except LlmconvError as error:
                    parameter = "prompt_name" if isinstance(error, UsageProblem) else where
                    raise ApiError(f"{error.message} ({error.hint})", parameter=parameter) from None
            else:
                ids = self._known(one, where)
                ids = self.embedder.cut(ids) if request.truncate else ids
            if len(ids) > self.embedder.most:
                problem = f"`{where}` has more than the {self.embedder.most} tokens that the model takes: shorten it, "
                problem += "or give `truncate`: true"
                raise ApiError(problem, parameter=where, code="context_length_exceeded")
            made.append(ids)
        return made

    def _known(self, ids: Sequence[int], where: str) -> list[int]:
        most = self.embedder.vocabulary
        if not all(0 <= token < most for token in ids):
            problem = f"`{where}` has a token id outside the model's vocabulary of {most}: token ids are those of its "
            raise ApiError(f"{problem}own tokenizer, so send texts", parameter=where)
        if missing := self.embedder.around - {*ids}:
            names = ", ".join(f"`{name}`" for name in self.embedder.names(sorted(missing)))
            problem = (
                f"`{where}` has token ids without {names}, which the model's own tokenizer adds to every text: they "
            )
            problem += "seem to be another tokenizer's, so send texts (LangChain: `check_embedding_ctx_length=False`)"
            raise ApiError(problem, parameter=where)
        return list(ids)

    def steps(self, rows: Sequence[Sequence[int]]) -> Iterator[EmbeddedRows]:
        """The embeddings, some rows of similar length in each step."""
        order = sorted(range(len(rows)), key=lambda at: len(rows[at]))
        for start in range(0, len(order), BATCH):
            places = order[start : start + BATCH]
            yield EmbeddedRows(places, self.embedder.run([rows[at] for at in places]))


@dataclass(frozen=True)
class EmbeddedRows:
    """Embeddings of some inputs: `places` are their numbers, `values` float32 [inputs, features]."""

    places: Sequence[int]
    values: Array


@dataclass
class EmbeddingReply:
    """Builds the response to one request."""

    request: EmbeddingRequest
    model: str
    rows: Sequence[Sequence[int]]
    found: dict[int, Array] = field(default_factory=dict)

    def add(self, some: EmbeddedRows) -> None:
        """Takes a step; raises ApiError for more dimensions than the model has."""
        values, wanted = some.values, self.request.dimensions
        if wanted is not None:
            if wanted > values.shape[1]:
                problem = f"`dimensions` is {wanted}, but embeddings of this model have {values.shape[1]}"
                raise ApiError(problem, parameter="dimensions")
            values = values[:, :wanted]
            values = values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-12)
        self.found.update(zip(some.places, values.astype("<f4"), strict=True))

    @property
    def prompt_tokens(self) -> int:
        return sum(map(len, self.rows))

    def whole(self) -> Mapping[str, Any]:
        """The complete response."""
        count = self.prompt_tokens
        every = [self.found[at] for at in range(len(self.rows))]
        shown = [base64.b64encode(row.tobytes()).decode() if self.request.is_base64 else row.tolist() for row in every]
        data = [{"object": "embedding", "index": at, "embedding": one} for at, one in enumerate(shown)]
        return {
            "object": "list",
            "data": data,
            "model": self.model,
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }
